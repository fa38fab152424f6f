"""New weights straight into the parameters that serve, one launch a round.

Where an engine computes with a parameter as its loader filled it, the loader, its scratch tensors
and its reload machinery can be left out: the trace says which bytes of the parameter a box of an
HF tensor is. Many do not: the trap is a copy in another form that was made after loading, which
would keep its old weights. So all of a plan lands in place or none of it, and only if

    1  the engine is not vLLM on a CPU, whose linear layers, experts and tied heads compute with
       packed copies that no attribute shows (vLLM 0.32);
    2  the loader copies every needed part row by row into a parameter and into nothing else;
    3  that parameter is in the serving model with the dtype, shape, strides and aliases that it
       was loaded with, and the bridge's dtype is its own, or float32 and bfloat16;
    4  its module is not quantised: `quant_method`, if it has one, is an Unquantized...Method;
    5  it is no `kv_b_proj`: attention layers of vLLM and SGLang multiply its two halves into other
       matrices (W_UK and W_UV, w_kc and w_vc) after loading;
    6  no module beside or below its own has a tensor that it did not have when it was made, KV
       caches aside: that may be such a copy;
    7  in a first push through the engine's own loader its bytes became those that were received.
       Kernels that want rows in another order (w13 of experts) are found so.

Imports torch only.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megarl.bridge.boxes import Box
from megarl.bridge.engines.trace import Destination, Trace, named_tensors, tensor_attributes
from megarl.bridge.rounds import Item
from megarl.bridge.transport import Arrived, Incoming
from megarl.bridge.wire import digest_on_device
from megarl.ops.pack import Box as PackBox
from megarl.ops.pack import PackTable

_NOT_WEIGHTS = {"kv_cache"}
_CASTS = {("float32", "bfloat16"), ("bfloat16", "float32")}


class _Target(NamedTuple):
    """A run of bytes of a bucket, and the elements of a parameter that they are."""

    name: str
    """HF."""
    start: int
    """In the bucket."""
    num_bytes: int
    view: Tensor
    """[rows, columns]."""
    dtype: torch.dtype
    """In the bucket."""


class Landing:
    """A plan's boxes in the parameters of a model that serves.

        landing = Landing(trace, model, incoming, named, engine="sglang")
        # The first push, through the engine's loader:
        for arrived in rounds: landing.watch(arrived), load it
        landing.prove()
        # Every other one:
        if landing.is_ready():
            for arrived in rounds: landing.land(arrived)

    `refusals` says why it cannot be, tensor by tensor; then none of these does anything.

    Args:
      trace: of the engine's loader, for this worker.
      model: the one that serves.
      named: HF name -> torch's name of the dtype in the plan, and shape.
      engine: vllm or sglang.
    """

    def __init__(
        self,
        trace: Trace,
        model: torch.nn.Module,
        incoming: Incoming,
        named: Mapping[str, tuple[str, Sequence[int]]],
        *,
        engine: str,
    ) -> None:
        self._trace, self._model, self._incoming = trace, model, incoming
        self._dtypes = {name: dtype for name, (dtype, _) in named.items()}
        self._engine = engine
        self._rounds: list[list[_Target]] = []
        self._tables: list[list[PackTable]] = []
        self._pointers: dict[str, int] = {}
        self._received: dict[int, Tensor] = {}
        self._is_proven = False
        self.refusals = {**self._not_covered(), **self._find_refusals()}
        """HF name -> why it cannot land in place; empty if all can."""
        if not self.refusals:
            self._make_tables()

    def watch(self, arrived: Arrived) -> None:
        """Remember what came, in a push that goes through the engine's loader."""
        if self.refusals:
            return
        targets = self._rounds[arrived.ordinal]
        self._received[arrived.ordinal] = torch.stack(
            [
                digest_on_device(
                    arrived.bucket[t.start : t.start + t.num_bytes].view(t.dtype).to(t.view.dtype)
                )
                for t in targets
            ]
        )

    def prove(self) -> None:
        """Compare it with what the loader made of it. One that differs goes to `refusals`."""
        if self.refusals or not self._is_current():
            return
        assert len(self._received) == len(self._rounds), "prove() before all rounds were watched"
        for ordinal, targets in enumerate(self._rounds):
            there = torch.stack([digest_on_device(target.view) for target in targets])
            differ = (there != self._received[ordinal]).tolist()
            for target, is_other in zip(targets, differ, strict=True):
                if is_other:
                    self.refusals[target.name] = "the engine holds other bytes than were loaded"
        self._received = {}
        self._is_proven = not self.refusals

    def is_ready(self) -> bool:
        """Whether `land` may be used for a push; what is against it goes to `refusals`."""
        if self._is_proven:
            self.refusals.update(self._find_refusals())
        return self._is_proven and not self.refusals and self._is_current()

    def land(self, arrived: Arrived) -> None:
        """Write a round into the model.

        A push that fails after this leaves new and old weights side by side.
        """
        assert self._is_proven, "land() before prove()"
        for table in self._tables[arrived.ordinal]:
            table.unpack(arrived.bucket)

    def _is_current(self) -> bool:
        """The parameters are still where they were."""
        live = named_tensors(self._model)
        return all(
            name in live and live[name].data_ptr() == pointer
            for name, pointer in self._pointers.items()
        )

    # ------------------------------------------------------------------ whether

    def _find_refusals(self) -> dict[str, str]:
        names = {item.name for round_ in self._incoming.rounds for item in round_.items()}
        if self._engine == "vllm" and self._incoming.device.type == "cpu":
            return dict.fromkeys(names, "vLLM computes with packed copies on a CPU")
        live, grown = named_tensors(self._model), self._grown()
        shared: dict[int, set[str]] = {}
        for name, tensor in live.items():
            shared.setdefault(tensor.untyped_storage()._cdata, set()).add(name)
        modules = dict(self._model.named_modules(remove_duplicate=False))
        found = {}
        for name in sorted(names):
            reason = None if name in self._trace.destinations else "its loader does not just copy"
            for destination in self._trace.destinations.get(name, []):
                reason = (
                    reason
                    or self._changed(destination.parameter, live, shared)
                    or _derived(destination.parameter, modules, grown)
                    or self._other_dtype(name, destination.parameter)
                )
            if reason:
                found[name] = reason
        return found

    def _not_covered(self) -> dict[str, str]:
        return {
            item.name: f"{item.box} is not whole rows of what is copied"
            for round_ in self._incoming.rounds
            for item in round_.items()
            if not self._covers(item)
        }

    def _changed(
        self, name: str, live: Mapping[str, Tensor], shared: Mapping[int, set[str]]
    ) -> str | None:
        """How a parameter is another than the loader filled."""
        was, now = self._trace.parameters[name], live.get(name)
        if now is None or now.layout != torch.strided or now.device != self._incoming.device:
            return f"{name} is not in the model, or not on {self._incoming.device}"
        dtype = str(now.dtype).removeprefix("torch.")
        if (dtype, tuple(now.shape), now.stride()) != (was.dtype, was.shape, was.stride):
            return (
                f"{name} is {dtype} {tuple(now.shape)} with strides {now.stride()}, and was "
                f"loaded as {was.dtype} {was.shape} with strides {was.stride}"
            )
        aliases = shared[now.untyped_storage()._cdata] - {name}
        apart = [live[a].data_ptr() - now.data_ptr() for a in sorted(aliases)]
        if list(zip(sorted(aliases), apart, strict=True)) != list(was.aliases):
            return (
                f"{name} shares its memory with {sorted(aliases)}, and was loaded when it did "
                f"with {[other for other, _ in was.aliases]}"
            )
        return None

    def _other_dtype(self, name: str, parameter: str) -> str | None:
        wire, there = self._dtypes[name], self._trace.parameters[parameter].dtype
        if wire != there and (wire, there) not in _CASTS:
            return f"it comes as {wire}, and {parameter} is {there}"
        return None

    def _grown(self) -> dict[str, str]:
        """Module -> a tensor below it that was not there when the model was made."""
        found: dict[str, str] = {}
        for module, names in tensor_attributes(self._model).items():
            if new := set(names) - set(self._trace.tensors.get(module, [])) - _NOT_WEIGHTS:
                found.setdefault(module.rpartition(".")[0], f"{module}.{min(new)}")
        return found

    def _covers(self, item: Item) -> bool:
        """Whether all of a box goes somewhere, in runs of its bytes."""
        box, end = item.box, 0
        commons = [box.meet(Box(*d.part)) for d in self._trace.destinations.get(item.name, [])]
        for common in sorted(c for c in commons if c is not None):
            if common[2:] != box[2:] and box.row_end - box.row > 1:
                return False
            start = _element_of(box, common)
            if start > end:
                return False
            end = max(end, start + common.elements)
        return end == box.elements

    # ------------------------------------------------------------------ where

    def _make_tables(self) -> None:
        live = {name: tensor.detach() for name, tensor in named_tensors(self._model).items()}
        for round_ in self._incoming.rounds:
            targets = [t for item in round_.items() for t in self._targets(item, live)]
            self._rounds.append(targets)
            self._tables.append([_table(some) for some in _disjoint(targets)])

    def _targets(self, item: Item, live: Mapping[str, Tensor]) -> Iterator[_Target]:
        dtype: torch.dtype = getattr(torch, self._dtypes[item.name])
        for d in self._trace.destinations[item.name]:
            common = item.box.meet(Box(*d.part))
            if common is None:
                continue
            parameter = live[d.parameter]
            self._pointers[d.parameter] = parameter.data_ptr()
            yield _Target(
                item.name,
                item.start + _element_of(item.box, common) * dtype.itemsize,
                common.elements * dtype.itemsize,
                _part(parameter, d, common),
                dtype,
            )


def _derived(
    parameter: str, modules: Mapping[str, torch.nn.Module], grown: Mapping[str, str]
) -> str | None:
    """Why the engine may compute with something made of a parameter instead of with it."""
    owner = parameter.rpartition(".")[0]
    if owner.rpartition(".")[2] == "kv_b_proj":
        return f"attention computes with matrices made of {parameter}"
    method = type(getattr(modules[owner], "quant_method", None)).__name__
    if method != "NoneType" and not method.startswith("Unquantized"):
        return f"{owner} is quantised by {method}"
    for module, tensor in grown.items():
        if module == "" or owner == module or owner.startswith(f"{module}."):
            return f"{tensor}, which was made after loading, may be made of {parameter}"
    return None


def _element_of(box: Box, part: Box) -> int:
    """Elements of a box before the first of a part of it, row after row."""
    return (part.row - box.row) * (box.column_end - box.column) + part.column - box.column


def _part(parameter: Tensor, d: Destination, part: Box) -> Tensor:
    first = d.offset + (part.row - d.part[0]) * d.row_stride + part.column - d.part[2]
    shape = (part.row_end - part.row, part.column_end - part.column)
    # Of one row the stride is never used, and may lead out of the parameter.
    strides = (d.row_stride if shape[0] > 1 else shape[1], 1)
    return parameter.as_strided(shape, strides, parameter.storage_offset() + first)


def _disjoint(targets: Sequence[_Target]) -> list[list[_Target]]:
    """Several lists where the same bytes go to several places, as of a matrix used twice."""
    made: list[list[_Target]] = []
    ends: list[int] = []
    for target in sorted(targets, key=lambda t: t.start):
        k = next((k for k, end in enumerate(ends) if end <= target.start), len(made))
        if k == len(made):
            made.append([])
            ends.append(0)
        made[k].append(target)
        ends[k] = target.start + target.num_bytes
    return made


def _table(targets: Sequence[_Target]) -> PackTable:
    boxes = [PackBox(target.view, dtype=target.dtype) for target in targets]
    return PackTable(boxes, offsets=[target.start for target in targets], is_dense=True)
