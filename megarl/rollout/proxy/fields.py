"""A JSON object read field by field: what is wrong is a 400 that names the field."""

import math
from collections.abc import Iterable
from typing import Any

from megarl.rollout.proxy.errors import ProxyError, bad_request


class Fields:
    """One object of a request. A null field is a missing one.

    Args:
      body: what should be an object.
      where: its place in the request, such as `messages[2]`; empty at the top.

    Raises:
      ProxyError: 400, it is not an object. Every method: 400, the field has another type.
    """

    def __init__(self, body: Any, where: str = "") -> None:
        if not isinstance(body, dict):
            raise bad_request(where or "body", f"expected an object, got {_name(body)}")
        self._values: dict[str, Any] = {k: v for k, v in body.items() if v is not None}
        self.where = where

    def path(self, name: str) -> str:
        return f"{self.where}.{name}" if self.where else name

    def only(self, known: Iterable[str]) -> None:
        """400 for a field that is not `known`."""
        known = set(known)
        for name in self._values:
            if name not in known:
                raise bad_request(self.path(name)[:200], "this server does not know it")

    def refuse(self, name: str, harmless: Iterable[Any], why: str) -> None:
        """400 unless the field is missing or one of `harmless`."""
        if name in self._values and not any(self._values[name] == value for value in harmless):
            raise bad_request(self.path(name), why)

    def has(self, name: str) -> bool:
        return name in self._values

    def any(self, name: str) -> Any:
        return self._values.get(name)

    def text(self, name: str, default: str | None = None) -> str:
        """A string that can be encoded. Required if there is no default."""
        value = self._values.get(name, default)
        if not isinstance(value, str):
            raise bad_request(self.path(name), f"expected a string, got {_name(value)}")
        return clean(value, self.path(name))

    def number(self, name: str, low: float, high: float) -> float | None:
        value = self._values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise bad_request(self.path(name), f"expected a number, got {_name(value)}")
        if not (math.isfinite(value) and low <= value <= high):
            raise bad_request(self.path(name), f"must be in [{low:g}, {high:g}]")
        return float(value)

    def integer(self, name: str, low: int, high: int) -> int | None:
        value = self._values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise bad_request(self.path(name), f"expected an integer, got {_name(value)}")
        if not low <= value <= high:
            raise bad_request(self.path(name), f"must be in [{low}, {high}]")
        return value

    def flag(self, name: str) -> bool:
        """False where it is missing."""
        value = self._values.get(name, False)
        if not isinstance(value, bool):
            raise bad_request(self.path(name), f"expected true or false, got {_name(value)}")
        return value

    def items(self, name: str) -> list[Any]:
        """A list, empty where it is missing."""
        value = self._values.get(name, [])
        if not isinstance(value, list):
            raise bad_request(self.path(name), f"expected a list, got {_name(value)}")
        return value

    def objects(self, name: str) -> list["Fields"]:
        """A list of objects, empty where it is missing."""
        return [Fields(item, f"{self.path(name)}[{i}]") for i, item in enumerate(self.items(name))]

    def object(self, name: str) -> "Fields":
        """An object, empty where it is missing."""
        return Fields(self._values.get(name, {}), self.path(name))

    def strings(self, name: str, most: int) -> list[str]:
        """A string or a list of up to `most`; empty where it is missing."""
        value = self._values.get(name, [])
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, list) or not all(isinstance(v, str) and v for v in values):
            raise bad_request(self.path(name), "expected a string, or a list of them, none empty")
        if len(values) > most:
            raise bad_request(self.path(name), f"at most {most}, got {len(values)}")
        return [clean(v, self.path(name)) for v in values]


def clean(text: str, where: str) -> str:
    """`text`, unless it holds half a surrogate pair, which no tokenizer can encode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ProxyError(400, f"{where}: not valid Unicode", param=where) from None
    return text


def _name(value: Any) -> str:
    return "nothing" if value is None else type(value).__name__
