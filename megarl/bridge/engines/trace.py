"""Which parts of which HF tensors a worker's own loader copies and where to, found by watching it.

The engine's `load_weights` is run on tensors without data, over a model without data; each
view of an HF tensor that an op reads, mostly a `copy_`, is a part that this worker needs. So
nothing is written down about any engine or architecture: what it can load, it can be asked
about. Where a part is copied into a parameter as it is, row by row, the place is kept too, see
landing.py. Imports torch only.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_MOST_BOXES = 1024
"""Of one view; a tensor that is taken in more and smaller pieces is sent whole."""

Part = tuple[int, int, int, int]
"""Rows [row, row_end) and columns [column, column_end) of a tensor seen in two dimensions, the
last one being the columns; a vector is one row."""


class Destination(NamedTuple):
    """Where a part of an HF tensor goes, elements of a row side by side as in the part."""

    part: Part
    parameter: str
    """Its name in the model; of a buffer too."""
    offset: int
    """Elements from the parameter's first to the part's first."""
    row_stride: int
    """Elements from row to row."""


class Parameter(NamedTuple):
    """A parameter or buffer as it was loaded into."""

    dtype: str
    """Torch's name of it."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    aliases: tuple[tuple[str, int], ...]
    """Other names of the same memory, and bytes from this one's first to theirs."""


@dataclass(frozen=True)
class Trace:
    """What a loader did with HF tensors."""

    parts: dict[str, list[Part]]
    """HF name -> parts that it read, which do not overlap; nothing of other tensors."""
    destinations: dict[str, list[Destination]] = field(default_factory=dict)
    """HF name -> where its parts go. Not there: what was computed with instead of copied, or
    copied to what is no parameter, or not by rows, or written over later."""
    parameters: dict[str, Parameter] = field(default_factory=dict)
    """Those that are destinations."""
    tensors: dict[str, list[str]] = field(default_factory=dict)
    """Module -> attributes that are tensors, see `tensor_attributes`."""


class ReadTrace(TorchDispatchMode):
    """Records the tensors that are read; copies between tensors without data are not made."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[Tensor] = []
        self.copies: list[tuple[Tensor, Tensor]] = []
        """(to, from), in their order; other writes are (to, to)."""
        self.computed: list[Tensor] = []
        """Reads by other ops."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func._schema.name == "aten::copy_":
            self.reads.append(args[1])
            self.copies.append((args[0], args[1]))
            return args[0]
        result = func(*args, **kwargs)
        made = {_storage(x) for x in _tensors(result)}
        # A view reads nothing: what is read of it, a later op will say.
        given = [x for x in _tensors((args, kwargs)) if _storage(x) not in made]
        self.reads.extend(given)
        self.computed.extend(given)
        written = [
            x
            for x, said in zip(args, func._schema.arguments, strict=False)
            if said.alias_info is not None and said.alias_info.is_write
        ]
        self.copies.extend((x, x) for x in _tensors(written))
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
    given, trace = _watch(load_weights, tensors)
    return _parts(given, trace)


def trace_loading(
    model: torch.nn.Module,
    tensors: Iterable[tuple[str, list[int], str]],
    load_weights: Callable[[Iterable[tuple[str, Tensor]]], Any] | None = None,
) -> Trace:
    """What a model on the meta device does with tensors, and with which of its parameters.

    Args:
      tensors: as of `needed_parts`.
      load_weights: the model's own if None.
    """
    load: Any = load_weights or model.load_weights
    given, trace = _watch(load, tensors)
    parts = _parts(given, trace)
    destinations = _destinations(model, given, trace)
    used = {d.parameter for found in destinations.values() for d in found}
    return Trace(parts, destinations, _parameters(model, used), tensor_attributes(model))


def tensor_attributes(model: torch.nn.Module) -> dict[str, list[str]]:
    """Module -> names of its attributes that are tensors, or hold some in a list or dict."""
    found = {}
    for name, module in model.named_modules(remove_duplicate=False):
        groups = (module._parameters, module._buffers, vars(module))
        names = {key for group in groups for key, value in group.items() if _holds_tensor(value)}
        if names := names - {"_parameters", "_buffers"}:
            found[name] = sorted(names)
    return found


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return any(isinstance(x, Tensor) for x in value)
    return isinstance(value, Tensor)


def named_tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by every name that they have."""
    return {
        **dict(model.named_buffers(remove_duplicate=False)),
        **dict(model.named_parameters(remove_duplicate=False)),
    }


def _watch(
    load_weights: Callable[[Iterable[tuple[str, Tensor]]], Any],
    tensors: Iterable[tuple[str, list[int], str]],
) -> tuple[list[tuple[str, Tensor]], ReadTrace]:
    """The tensors that the loader was given, and what became of them."""
    given: list[tuple[str, Tensor]] = []

    def stream() -> Iterator[tuple[str, Tensor]]:
        for name, shape, dtype in tensors:
            given.append((name, torch.empty(shape, dtype=getattr(torch, dtype), device="meta")))
            yield given[-1]

    trace = ReadTrace()
    with torch.no_grad(), trace:
        load_weights(stream())
    return given, trace


def _parts(given: list[tuple[str, Tensor]], trace: ReadTrace) -> dict[str, list[Part]]:
    owners = {_storage(tensor): (name, tensor) for name, tensor in given}
    found: dict[str, set[Part]] = {}
    for view in trace.reads:
        if owner := owners.get(_storage(view)):
            found.setdefault(owner[0], set()).update(parts_of(view, owner[1]))
    return {name: _apart(found[name], tensor) for name, tensor in given if name in found}


# ---------------------------------------------------------------- where parts go


def _parameters(model: torch.nn.Module, used: set[str]) -> dict[str, Parameter]:
    named = named_tensors(model)
    of_storage: dict[int, list[str]] = {}
    for name, tensor in named.items():
        of_storage.setdefault(_storage(tensor), []).append(name)
    made = {}
    for name in sorted(used):
        tensor = named[name]
        start = _start_bytes(tensor)
        aliases = tuple(
            (other, _start_bytes(named[other]) - start)
            for other in sorted(of_storage[_storage(tensor)])
            if other != name
        )
        dtype = str(tensor.dtype).removeprefix("torch.")
        made[name] = Parameter(dtype, tuple(tensor.shape), tensor.stride(), aliases)
    return made


def _start_bytes(tensor: Tensor) -> int:
    return int(tensor.storage_offset()) * tensor.itemsize


def _destinations(
    model: torch.nn.Module, given: list[tuple[str, Tensor]], trace: ReadTrace
) -> dict[str, list[Destination]]:
    owners = {_storage(tensor): (name, tensor) for name, tensor in given}
    # Of several names the first.
    named = reversed(named_tensors(model).items())
    parameters = {_storage(tensor): (name, tensor) for name, tensor in named}
    spoilt = {owners[_storage(view)][0] for view in trace.computed if _storage(view) in owners}
    found: dict[str, list[Destination]] = {}
    # Elements of a parameter's memory, the last write first: nobody may write over what landed.
    written: dict[int, list[tuple[int, int]]] = {}
    for to, source in reversed(trace.copies):
        span = _span(to)
        later = written.setdefault(_storage(to), [])
        is_overwritten = any(a < span[1] and span[0] < b for a, b in later)
        owner = owners.get(_storage(source))
        if owner is not None:
            name, parameter = parameters.get(_storage(to), (None, to))
            rows = None if name is None or is_overwritten else _rows(to, source, owner[1])
            if name is None or rows is None:
                spoilt.add(owner[0])
            else:
                first = int(parameter.storage_offset())
                found.setdefault(owner[0], []).extend(
                    Destination(part, name, start - first, stride) for part, start, stride in rows
                )
        later.append(span)
    return {name: found[name][::-1] for name in found if name not in spoilt}


def _span(view: Tensor) -> tuple[int, int]:
    """From its first element in memory to one past its last."""
    start = int(view.storage_offset())
    steps = zip(view.shape, view.stride(), strict=True)
    return start, start + 1 + sum((size - 1) * stride for size, stride in steps)


def _rows(to: Tensor, source: Tensor, owner: Tensor) -> list[tuple[Part, int, int]] | None:
    """(part, its first element's place in memory, elements from row to row) that a copy writes."""
    if to.shape != source.shape and (to.numel() != 1 or source.numel() != 1):
        return None
    if to.numel() == 0:
        return []
    columns = owner.shape[-1] if owner.ndim else 1
    dims = [
        (n, s, t) for n, s, t in zip(to.shape, source.stride(), to.stride(), strict=False) if n > 1
    ]
    merged: list[tuple[int, int, int]] = []  # size, strides in the HF tensor and in memory
    for size, stride, place in dims if to.numel() > 1 else []:
        last = merged[-1] if merged else (0, 0, 0)
        if merged and last[1] == size * stride and last[2] == size * place:
            merged[-1] = (last[0] * size, stride, place)
        else:
            merged.append((size, stride, place))
    return _rows_of(merged, int(source.storage_offset()), int(to.storage_offset()), columns)


def _rows_of(
    dims: list[tuple[int, int, int]], start: int, place: int, columns: int
) -> list[tuple[Part, int, int]] | None:
    row, column = divmod(start, columns)
    if not dims:
        return [((row, row + 1, column, column + 1), place, 1)]
    size, stride, step = dims[0]
    if len(dims) == 1:
        if stride == 1 and step == 1 and column + size <= columns:
            return [((row, row + 1, column, column + size), place, size)]
        if stride == 1 and step == 1 and column == 0 and size % columns == 0:
            return [((row, row + size // columns, 0, columns), place, columns)]
        if stride == 1 and step == 1:
            return None
        if stride == columns:
            return [((row, row + size, column, column + 1), place, step)]
    if len(dims) == 2 and stride == columns and dims[1][1:] == (1, 1):
        width = dims[1][0]
        if column + width > columns:
            return None
        return [((row, row + size, column, column + width), place, step)]
    made: list[tuple[Part, int, int]] = []
    for i in range(size):
        found = _rows_of(dims[1:], start + i * stride, place + i * step, columns)
        if found is None or len(made) > _MOST_BOXES:
            return None
        made += found
    return made


# ---------------------------------------------------------------- parts


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
