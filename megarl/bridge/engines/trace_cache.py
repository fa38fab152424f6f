"""Traces of loaders on disk: a server that starts again need not make its model a second time.

One file a trace, in $XDG_CACHE_HOME/megarl/traces or ~/.cache/megarl/traces, named after all that
the trace depends on. Its first line is a digest of the rest, so a file that was damaged is never
taken for a trace. Imports no engine.
"""

import dataclasses
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl.bridge.engines import trace as trace_module
from megarl.bridge.engines.trace import Destination, Parameter, Trace

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TraceKey:
    """All that decides what a loader does with tensors."""

    engine: str
    engine_version: str
    hf_config: dict[str, Any]
    """config.json."""
    dtype: str
    """Of the model in the engine."""
    tp: int
    pp: int
    ep: int
    rank: int
    """Of the server's workers."""
    tensors: Sequence[tuple[str, Sequence[int], str]]
    """HF name, shape and dtype, as the loader is asked."""
    options: dict[str, Any] = field(default_factory=dict)
    """What else the engine was started with that changes its layout, such as quantisation."""

    def digest(self) -> str:
        """Hexadecimal; of the code that traces, too.

        Raises:
          TypeError: something in it is not JSON.
        """
        code = hashlib.sha256(Path(trace_module.__file__).read_bytes()).hexdigest()
        text = json.dumps([dataclasses.asdict(self), code], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def cached_trace(key: TraceKey, make: Callable[[], Trace], folder: Path | None = None) -> Trace:
    """The trace of `key`, made and kept if no whole one is there.

    Args:
      folder: None is the one of the module's first lines.
    """
    path = (folder or _folder()) / f"{key.digest()}.json"
    found = _read(path)
    if found is None:
        found = make()
        _write(path, found)
    return found


def _folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "megarl" / "traces"


def _read(path: Path) -> Trace | None:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.warning("%s cannot be read (%s): the loader is traced again", path, error)
        return None
    said, _, body = data.partition(b"\n")
    if hashlib.sha256(body).hexdigest().encode() != said:
        logger.warning("%s is damaged: the loader is traced again", path)
        return None
    return _decode(json.loads(body))


def _write(path: Path, found: Trace) -> None:
    """Whole or not at all. A folder that cannot be written costs time, nothing else."""
    body = json.dumps(dataclasses.asdict(found)).encode()
    data = hashlib.sha256(body).hexdigest().encode() + b"\n" + body
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=path.name, suffix=".part", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        logger.warning("%s cannot be written (%s): the next server traces again", path, error)


def _decode(body: dict[str, Any]) -> Trace:
    def part(numbers: list[int]) -> tuple[int, int, int, int]:
        row, row_end, column, column_end = numbers
        return row, row_end, column, column_end

    return Trace(
        parts={name: [part(p) for p in parts] for name, parts in body["parts"].items()},
        destinations={
            name: [Destination(part(first), *rest) for first, *rest in found]
            for name, found in body["destinations"].items()
        },
        parameters={
            name: Parameter(
                dtype, tuple(shape), tuple(stride), tuple((other, n) for other, n in aliases)
            )
            for name, (dtype, shape, stride, aliases) in body["parameters"].items()
        },
        tensors=body["tensors"],
    )
