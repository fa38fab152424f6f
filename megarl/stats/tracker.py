"""Statistics of a step: recorded anywhere, exported once, exact over ranks.

An average is kept as a sum and a count, and both are summed over ranks, so it is the average
over all elements whatever each rank held. Times are the slowest rank's.
"""

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")
Reduce = Literal["avg", "sum", "min", "max"]


class StatsTracker:
    """Collects until `export`. Not shared between threads."""

    def __init__(self) -> None:
        self._scopes: list[str] = []
        self._masks: dict[str, Tensor] = {}
        self._sums: dict[str, float] = {}
        self._counts: dict[str, float] = {}
        self._lowest: dict[str, float] = {}
        self._highest: dict[str, float] = {}

    # ------------------------------------------------------------------ recording

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Keys recorded inside begin with `name/`."""
        self._scopes.append(name)
        try:
            yield
        finally:
            self._scopes.pop()

    def scope_func_wrapper(self, name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """A decorator: the whole function is inside `scope(name)`."""

        def decorate(function: Callable[P, R]) -> Callable[P, R]:
            @functools.wraps(function)
            def scoped(*args: P.args, **kwargs: P.kwargs) -> R:
                with self.scope(name):
                    return function(*args, **kwargs)

            return scoped

        return decorate

    def _key(self, name: str) -> str:
        return "/".join([*self._scopes, name])

    def scalar(self, **values: float) -> None:
        """Average of the values given under one key."""
        for name, value in values.items():
            key = self._key(name)
            self._sums[key] = self._sums.get(key, 0.0) + float(value)
            self._counts[key] = self._counts.get(key, 0.0) + 1.0

    def denominator(self, **masks: Tensor) -> None:
        """Bool masks that `stat` names; each is also recorded as its number of True."""
        for name, mask in masks.items():
            if mask.dtype != torch.bool:
                raise ValueError(f"denominator {name} must be bool, got {mask.dtype}")
            key = self._key(name)
            self._masks[key] = mask
            self._sums[key] = self._sums.get(key, 0.0) + float(mask.sum())

    def stat(self, denominator: str, reduce: Reduce | None = None, **tensors: Tensor) -> None:
        """Statistics of the elements where the mask `denominator` is True.

        One of average, sum, min, max; all of avg, min and max (as `KEY/avg`, ...) if None.

        Raises:
          ValueError: there is no such mask in this scope, or its shape differs.
        """
        mask = self._masks.get(self._key(denominator))
        if mask is None:
            raise ValueError(f"no denominator {self._key(denominator)!r} was recorded")
        for name, tensor in tensors.items():
            if tensor.shape != mask.shape:
                raise ValueError(
                    f"{name} {tuple(tensor.shape)} and its denominator {denominator} "
                    f"{tuple(mask.shape)} differ"
                )
            key, chosen = self._key(name), tensor[mask].double()
            wanted = [reduce] if reduce else ["avg", "min", "max"]
            for kind in wanted:
                self._add(key if reduce else f"{key}/{kind}", kind, chosen)

    def _add(self, key: str, kind: str, chosen: Tensor) -> None:
        if kind in ("avg", "sum"):
            self._sums[key] = self._sums.get(key, 0.0) + float(chosen.sum())
        if kind == "avg":
            self._counts[key] = self._counts.get(key, 0.0) + chosen.numel()
        if kind == "min" and chosen.numel():
            self._lowest[key] = min(self._lowest.get(key, float("inf")), float(chosen.min()))
        if kind == "max" and chosen.numel():
            self._highest[key] = max(self._highest.get(key, -float("inf")), float(chosen.max()))

    @contextmanager
    def record_timing(self, name: str) -> Iterator[None]:
        """Seconds inside, summed under `time/NAME` (outside of all scopes)."""
        start = time.perf_counter()
        try:
            yield
        finally:
            key = f"time/{name}"
            self._highest[key] = self._highest.get(key, 0.0) + time.perf_counter() - start

    # ------------------------------------------------------------------ export

    def export(self, group: dist.ProcessGroup | None = None) -> dict[str, float]:
        """Everything recorded since the last export, reduced over `group` (a gloo group).

        A rank without a key adds nothing to it. Averages of nothing are left out.
        """
        parts = [self._sums, self._counts, self._lowest, self._highest]
        if group is not None and dist.get_world_size(group) > 1:
            gathered: list[list[dict[str, float]]] = [parts] * dist.get_world_size(group)
            dist.all_gather_object(gathered, parts, group=group)
        else:
            gathered = [parts]
        sums, counts = _merge(gathered, 0, sum), _merge(gathered, 1, sum)
        out = {}
        for key, total in sums.items():
            if key not in counts:
                out[key] = total
            elif counts[key]:
                out[key] = total / counts[key]
        out |= _merge(gathered, 2, min) | _merge(gathered, 3, max)
        self.__init__()  # type: ignore[misc]
        return out


def _merge(
    gathered: list[list[dict[str, float]]], part: int, combine: Callable[[list[float]], float]
) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for parts in gathered:
        for key, value in parts[part].items():
            values.setdefault(key, []).append(value)
    return {key: combine(found) for key, found in values.items()}


_default = StatsTracker()
scope = _default.scope
scope_func_wrapper = _default.scope_func_wrapper
scalar = _default.scalar
denominator = _default.denominator
stat = _default.stat
record_timing = _default.record_timing
export = _default.export
