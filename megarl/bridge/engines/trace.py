"""Which parts of which HF tensors a worker's own loader copies, found by watching it.

The engine's `load_weights` is run on tensors without data, over a model without data; each
view of an HF tensor that an op reads, mostly a `copy_`, is a part that this worker needs. So
nothing is written down about any engine or architecture: what it can load, it can be asked
about. Imports torch only.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_MOST_BOXES = 1024
"""Of one view; a tensor that is taken in more and smaller pieces is sent whole."""

Part = tuple[int, int, int, int]
"""Rows [row, row_end) and columns [column, column_end) of a tensor seen in two dimensions, the
last one being the columns; a vector is one row."""


class ReadTrace(TorchDispatchMode):
    """Records the tensors that are read; copies between tensors without data are not made."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func._schema.name == "aten::copy_":
            self.reads.append(args[1])
            return args[0]
        result = func(*args, **kwargs)
        made = {_storage(x) for x in _tensors(result)}
        # A view reads nothing: what is read of it, a later op will say.
        given = [x for x in _tensors((args, kwargs)) if _storage(x) not in made]
        self.reads.extend(given)
        return result


def needed_parts(
    load_weights: Callable[[Iterable[tuple[str, Tensor]]], Any],
    tensors: Iterable[tuple[str, list[int], str]],
) -> dict[str, list[Part]]:
    """What a loader takes of each tensor, in the order of their rows; whole if it cannot be told.

    Args:
      load_weights: of a model on the meta device.
      tensors: (HF name, shape, torch's name of the dtype).

    Returns:
      HF name -> parts that do not overlap; a tensor that the loader did not touch is left out.
    """
    given: list[tuple[str, Tensor]] = []

    def stream() -> Iterator[tuple[str, Tensor]]:
        for name, shape, dtype in tensors:
            given.append((name, torch.empty(shape, dtype=getattr(torch, dtype), device="meta")))
            yield given[-1]

    trace = ReadTrace()
    with torch.no_grad(), trace:
        load_weights(stream())
    owners = {_storage(tensor): (name, tensor) for name, tensor in given}
    found: dict[str, set[Part]] = {}
    for view in trace.reads:
        if owner := owners.get(_storage(view)):
            found.setdefault(owner[0], set()).update(parts_of(view, owner[1]))
    return {name: _apart(found[name], tensor) for name, tensor in given if name in found}


def parts_of(view: Tensor, owner: Tensor) -> list[Part]:
    """The elements of a view of a contiguous tensor; all of the tensor's if they are no boxes."""
    columns = owner.shape[-1] if owner.ndim else 1
    everything = [(0, owner.numel() // max(1, columns), 0, columns)]
    dims = sorted((n, s) for n, s in zip(view.shape, view.stride(), strict=True) if n > 1 and s)
    dims = sorted(dims, key=lambda d: -d[1])
    merged: list[tuple[int, int]] = []
    for size, stride in dims:
        if merged and merged[-1][1] == size * stride:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    if 0 in view.shape:
        return []
    return _boxes(merged, int(view.storage_offset()), columns) or everything


def _boxes(dims: list[tuple[int, int]], start: int, columns: int) -> list[Part] | None:
    """Dimensions (size, stride), widest first, from element `start` on; None if no boxes."""
    row, column = divmod(start, columns)
    inner = dims[-1][0] if dims and dims[-1][1] == 1 else 1
    outer = dims[:-1] if inner > 1 else dims
    if not outer and column + inner <= columns:
        return [(row, row + 1, column, column + inner)]
    if not outer and column == 0 and inner % columns == 0:
        return [(row, row + inner // columns, 0, columns)]
    if len(outer) == 1 and outer[0][1] == columns and column + inner <= columns:
        return [(row, row + outer[0][0], column, column + inner)]
    if not outer or outer[0][0] > _MOST_BOXES:
        return None
    size, stride = outer[0]
    made: list[Part] = []
    for i in range(size):
        part = _boxes(dims[1:], start + i * stride, columns)
        if part is None or len(made) > _MOST_BOXES:
            return None
        made += part
    return made


def _apart(parts: set[Part], owner: Tensor) -> list[Part]:
    """Parts none of which holds another; all of the tensor if two overlap otherwise."""
    largest_first = sorted(parts, key=lambda p: (-(p[1] - p[0]) * (p[3] - p[2]), p))
    kept: list[Part] = []
    for part in largest_first:
        overlapping = [k for k in kept if _overlap(k, part)]
        if any(_contains(k, part) for k in overlapping):
            continue
        if overlapping:
            columns = owner.shape[-1] if owner.ndim else 1
            return [(0, owner.numel() // columns, 0, columns)]
        kept.append(part)
    return sorted(kept)


def _overlap(a: Part, b: Part) -> bool:
    return a[0] < b[1] and b[0] < a[1] and a[2] < b[3] and b[2] < a[3]


def _contains(outer: Part, inner: Part) -> bool:
    return (
        outer[0] <= inner[0]
        and inner[1] <= outer[1]
        and outer[2] <= inner[2]
        and inner[3] <= outer[3]
    )


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]
