"""Statistics of a step: recorded anywhere, exported once, exact over ranks.

An average is kept as a sum and a count, and both are summed over ranks, so it is the average
over all elements whatever each rank held. Seconds are the slowest rank's.
"""

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.stats import trace

P = ParamSpec("P")
R = TypeVar("R")
Reduce = Literal["avg", "sum", "min", "max"]


@dataclass
class _Value:
    """One key. `count` is used by averages only; "time" adds up here, is a max over ranks."""

    kind: Literal["avg", "sum", "min", "max", "time"]
    value: float
    count: float = 0.0

    def add(self, other: "_Value") -> None:
        """Take in another value of this rank."""
        if self.kind in ("min", "max"):
            self.value = (min if self.kind == "min" else max)(self.value, other.value)
        else:
            self.value += other.value
            self.count += other.count

    def merge(self, other: "_Value") -> None:
        """Take in another rank's value."""
        if self.kind == "time":
            self.value = max(self.value, other.value)
        else:
            self.add(other)


class StatsTracker:
    """Collects until `export`. Not shared between threads."""

    def __init__(self) -> None:
        self._scopes: list[str] = []
        self._masks: dict[str, Tensor] = {}
        self._values: dict[str, _Value] = {}

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

    def scalar(self, **values: float) -> None:
        """Average of the values given under one key."""
        for name, value in values.items():
            self._record(self._key(name), _Value("avg", float(value), 1.0))

    def denominator(self, **masks: Tensor) -> None:
        """Bool masks that `stat` names; each is also recorded as its number of True."""
        for name, mask in masks.items():
            if mask.dtype != torch.bool:
                raise ValueError(f"denominator {name} must be bool, got {mask.dtype}")
            key = self._key(name)
            self._masks[key] = mask
            self._record(key, _Value("sum", float(mask.sum())))

    def stat(self, denominator: str, reduce: Reduce | None = None, **tensors: Tensor) -> None:
        """Statistics of the elements where the mask `denominator` is True.

        One of average, sum, min, max; all of avg, min and max (as `KEY/avg`, ...) if None.
        The mask is the latest of that name in this scope.

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
            chosen = tensor[mask].double()
            key = self._key(name)
            if reduce is not None:
                self._record_elements(key, reduce, chosen)
            else:
                for kind in ("avg", "min", "max"):
                    self._record_elements(f"{key}/{kind}", kind, chosen)

    @contextmanager
    def record_timing(self, name: str) -> Iterator[None]:
        """Seconds inside, summed under `timeperf/NAME` (outside of all scopes)."""
        start = time.perf_counter()
        try:
            with trace.phase(name):
                yield
        finally:
            self._record(f"timeperf/{name}", _Value("time", time.perf_counter() - start))

    def _key(self, name: str) -> str:
        return "/".join([*self._scopes, name])

    def _record_elements(self, key: str, kind: Reduce, chosen: Tensor) -> None:
        if kind in ("avg", "sum"):
            self._record(key, _Value(kind, float(chosen.sum()), float(chosen.numel())))
        elif chosen.numel():
            extreme = chosen.min() if kind == "min" else chosen.max()
            self._record(key, _Value(kind, float(extreme)))

    def _record(self, key: str, new: _Value) -> None:
        held = self._values.setdefault(key, new)
        if held.kind != new.kind:
            raise ValueError(f"{key} was recorded as {held.kind} before, now as {new.kind}")
        if held is not new:
            held.add(new)

    # ------------------------------------------------------------------ export

    def export(self, reduce_group: dist.ProcessGroup | None = None) -> dict[str, float]:
        """Everything recorded since the last export, in the order of its keys; then clear.

        Args:
          reduce_group: reduce over its ranks, which all must call; a gloo group. None is this
            rank alone.

        Returns:
          The same on every rank. A rank without a key adds nothing to it; an average over
          no elements at all is left out.

        Raises:
          ValueError: ranks recorded a key as different kinds.
        """
        gathered = [self._values]
        if reduce_group is not None:
            gathered = [{}] * dist.get_world_size(reduce_group)
            dist.all_gather_object(gathered, self._values, group=reduce_group)
        merged: dict[str, _Value] = {}
        for key, value in (item for values in gathered for item in values.items()):
            held = merged.setdefault(key, value)
            if held.kind != value.kind:
                raise ValueError(f"{key} is {held.kind} on one rank and {value.kind} on another")
            if held is not value:
                held.merge(value)
        self._values, self._masks = {}, {}
        return {
            key: value.value / value.count if value.kind == "avg" else value.value
            for key, value in sorted(merged.items())
            if value.kind != "avg" or value.count
        }


_default = StatsTracker()
"""For scripts, through the functions below."""
scope = _default.scope
scope_func_wrapper = _default.scope_func_wrapper
scalar = _default.scalar
denominator = _default.denominator
stat = _default.stat
record_timing = _default.record_timing
export = _default.export
