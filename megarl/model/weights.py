"""HF checkpoints <-> the shards of a Megatron model, streamed tensor by tensor.

Loading reads only the slices a rank holds. Exporting gathers one parameter at a time, so no
rank ever holds more than its shard and one full tensor.
"""

import json
import logging
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from safetensors import safe_open
from torch import Tensor

from megarl.bridge.boxes import Box
from megarl.bridge.layout import trainer_layout
from megarl.errors import CheckpointError
from megarl.model import families
from megarl.model.build import ModelSpec
from megarl.model.layout import Piece, Rule, fill, pieces
from megarl.ops.pack import Box as PackBox
from megarl.parallel import Mesh

logger = logging.getLogger(__name__)


class SafetensorsFolder:
    """The tensors of an HF folder, readable by slice. Use as a context manager."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        index = self.folder / "model.safetensors.index.json"
        single = self.folder / "model.safetensors"
        self._stack = ExitStack()
        self._open_files: dict[str, Any] = {}
        if index.is_file():
            self._file_of: dict[str, str] = json.loads(index.read_text())["weight_map"]
        elif single.is_file():
            self._file_of = dict.fromkeys(self._file(single.name).keys(), single.name)
        else:
            raise CheckpointError(f"{folder}: neither {index.name} nor {single.name} is there")

    def __enter__(self) -> "SafetensorsFolder":
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _file(self, name: str) -> Any:
        if name not in self._open_files:
            path = self.folder / name
            if not path.is_file():
                raise CheckpointError(f"{self.folder}: the index names {name}, which is not there")
            self._open_files[name] = self._stack.enter_context(safe_open(path, framework="pt"))
        return self._open_files[name]

    def names(self) -> set[str]:
        return set(self._file_of)

    def _slice(self, name: str) -> Any:
        if name not in self._file_of:
            raise CheckpointError(f"{self.folder}: tensor {name} is missing")
        return self._file(self._file_of[name]).get_slice(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def read(self, piece: Piece) -> Tensor:
        """The slice of the file that `piece` names, on the CPU."""
        stop = piece.hf_start + piece.length
        source = self._slice(piece.hf_name)
        return source[piece.hf_start : stop] if piece.dim == 0 else source[:, piece.hf_start : stop]


@dataclass(frozen=True)
class _LocalParameter:
    chunk: int
    name: str
    rule: Rule
    ep_rank: int
    """Of the ranks that hold it; 0 for what is no expert's."""


def _local_parameters(
    chunks: list[GPTModel], spec: ModelSpec, mesh: Mesh, ep_rank: int
) -> list[_LocalParameter]:
    """The parameters of this stage on expert-parallel rank `ep_rank`, in their own order."""
    found = []
    expert_offset = (spec.transformer.num_moe_experts or 0) // mesh.parallel.ep * ep_rank
    for i, chunk in enumerate(chunks):
        vp_stage = i if len(chunks) > 1 else None
        offset = get_transformer_layer_offset(spec.transformer, vp_stage=vp_stage)
        for name, _ in chunk.named_parameters():
            rule = families.rule_for(spec.family, name, offset, expert_offset)
            if spec.tied_embeddings and rule.hf_names == (families.HEAD,):
                # The last stage's copy of a tied embedding.
                rule = Rule("vocab", (families.EMBEDDING,))
            found.append(_LocalParameter(i, name, rule, ep_rank if rule.is_expert else 0))
    return found


def _tp_of(rule: Rule, mesh: Mesh) -> tuple[int, int]:
    """Ranks that share the parameter's split, and this rank's place among them."""
    if rule.is_expert:
        return mesh.parallel.expert_tp, mesh.expert_place.etp
    return mesh.parallel.tp, mesh.place.tp


def _pieces_of(
    rule: Rule, shapes: dict[str, tuple[int, ...]], spec: ModelSpec, tp: int, tp_rank: int
) -> list[Piece]:
    dim = 1 if rule.split == "columns" else 0
    sizes = tuple(shapes[name][dim] for name in rule.hf_names)
    return pieces(rule, sizes, spec.sizes, tp, tp_rank)


def _dtype_of(name: str, spec: ModelSpec) -> torch.dtype:
    """Of an HF tensor as this model holds it."""
    dtype = str(spec.transformer.params_dtype).removeprefix("torch.")
    found: torch.dtype = getattr(torch, families.stored_dtype(name, dtype))
    return found


def load_hf(chunks: list[GPTModel], spec: ModelSpec, mesh: Mesh, folder: str | Path) -> None:
    """Fill this rank's parameters from an HF folder, casting to the model's dtype.

    Raises:
      CheckpointError: a tensor is missing or its shape is not what config.json says, or the
        folder holds codes with scales in place of weights.
    """
    shapes = families.hf_shapes(spec.hf_config)
    with SafetensorsFolder(folder) as source:
        names = source.names()
        if scaled := [name for name in names if name.endswith("_scale_inv")]:
            raise CheckpointError(f"{folder}: {min(scaled)}: quantised weights cannot be trained")
        left_out = [name for name in names if families.is_untrained(spec.hf_config, name)]
        if left_out and mesh.rank == 0:
            logger.warning(
                "%s: %d tensors of multi-token prediction are neither trained nor exported",
                folder,
                len(left_out),
            )
        for parameter in _local_parameters(chunks, spec, mesh, mesh.expert_place.ep):
            for name in parameter.rule.hf_names:
                if source.shape(name) != shapes[name]:
                    raise CheckpointError(
                        f"{folder}: {name} is {source.shape(name)}, config.json says {shapes[name]}"
                    )
            parts = _pieces_of(parameter.rule, shapes, spec, *_tp_of(parameter.rule, mesh))
            fill(chunks[parameter.chunk].get_parameter(parameter.name), parts, source.read)


class HFExport:
    """Full HF tensors of a sharded model, one at a time, on world rank 0.

    Iterating is collective over the world. Rank 0 gets (hf_name, tensor) pairs, the others
    nothing. Where a parameter has several copies, the first holders give theirs.
    """

    def __init__(self, chunks: list[GPTModel], spec: ModelSpec, mesh: Mesh) -> None:
        self.chunks, self.spec, self.mesh = chunks, spec, mesh
        self.shapes = families.hf_shapes(spec.hf_config)
        mine = []
        for ep_rank in range(mesh.parallel.ep):
            for parameter in _local_parameters(chunks, spec, mesh, ep_rank):
                is_tied_copy = spec.tied_embeddings and parameter.name == "output_layer.weight"
                if not is_tied_copy and (parameter.rule.is_expert or ep_rank == 0):
                    mine.append(parameter)
        stages: list[list[_LocalParameter] | None] = [None] * mesh.parallel.pp
        dist.all_gather_object(stages, mine, group=mesh.pp_group)
        self.plan = [(stage, p) for stage, found in enumerate(stages) for p in found or []]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        rank = self.mesh.rank
        for stage, parameter in self.plan:
            root = self._root(stage, parameter)
            tensors: dict[str, Tensor] = {}
            if self._holds(stage, parameter):
                tensors = self._gather(parameter)
                if rank == root != 0:
                    for tensor in tensors.values():
                        dist.send(tensor, dst=0)
            elif rank == 0:
                tensors = self._receive(root, parameter)
            if rank == 0:
                yield from tensors.items()

    def _holds(self, stage: int, parameter: _LocalParameter) -> bool:
        """Whether this rank is one of the first holders."""
        place, expert = self.mesh.place, self.mesh.expert_place
        if place.pp != stage:
            return False
        if parameter.rule.is_expert:
            return expert.edp == 0 and expert.ep == parameter.ep_rank
        return place.dp == 0 and place.cp == 0

    def _root(self, stage: int, parameter: _LocalParameter) -> int:
        """World rank of the first holder, which has the gathered tensor."""
        parallel, world_size = self.mesh.parallel, self.mesh.world_size
        first_of_stage = stage * world_size // parallel.pp
        return first_of_stage + parameter.ep_rank * parallel.expert_tp

    @torch.no_grad()
    def _gather(self, parameter: _LocalParameter) -> dict[str, Tensor]:
        """Full tensors on the root, nothing on the other holders."""
        local = self.chunks[parameter.chunk].get_parameter(parameter.name).detach()
        rule = parameter.rule
        tp, tp_rank = _tp_of(rule, self.mesh)
        if rule.split == "replicated":
            return {rule.hf_names[0]: local} if tp_rank == 0 else {}
        shards = [torch.empty_like(local) for _ in range(tp)] if tp_rank == 0 else None
        if tp > 1:
            group = self.mesh.etp_group if rule.is_expert else self.mesh.tp_group
            dist.gather(local.contiguous(), shards, group=group, group_dst=0)
        else:
            shards = [local]
        if shards is None:
            return {}
        full = {name: local.new_empty(self.shapes[name]) for name in rule.hf_names}
        for tp_rank, shard in enumerate(shards):
            for piece in _pieces_of(rule, self.shapes, self.spec, tp, tp_rank):
                target = full[piece.hf_name].narrow(piece.dim, piece.hf_start, piece.length)
                target.copy_(shard.narrow(piece.dim, piece.local_start, piece.length))
        return full

    def _receive(self, source: int, parameter: _LocalParameter) -> dict[str, Tensor]:
        tensors = {}
        for name in parameter.rule.hf_names:
            tensor = torch.empty(
                self.shapes[name],
                dtype=_dtype_of(name, self.spec),
                device=self.mesh.device,
            )
            dist.recv(tensor, src=source)
            tensors[name] = tensor
        return tensors


class LocalTensors:
    """This rank's part of the HF tensors, by box; see megarl.bridge.sharded.LocalWeights."""

    def __init__(self, chunks: list[GPTModel], spec: ModelSpec, mesh: Mesh) -> None:
        self.layout = trainer_layout(spec.hf_config, mesh.parallel, mesh.world_size)
        shapes = families.hf_shapes(spec.hf_config)
        self._dtypes = {name: _dtype_of(name, spec) for name in shapes}
        self.named = {
            name: (str(self._dtypes[name]).removeprefix("torch."), list(shape))
            for name, shape in shapes.items()
        }
        self._held: dict[str, list[tuple[Tensor, Piece]]] = {}
        for parameter in _local_parameters(chunks, spec, mesh, mesh.expert_place.ep):
            local = chunks[parameter.chunk].get_parameter(parameter.name)
            for piece in _pieces_of(parameter.rule, shapes, spec, *_tp_of(parameter.rule, mesh)):
                self._held.setdefault(piece.hf_name, []).append((local, piece))
        for held in self._held.values():
            held.sort(key=lambda each: each[1].hf_start)

    def sources(self, name: str, box: Box) -> list[PackBox]:
        """Parts of parameters that make up a box, in the order of its rows.

        Several where the trainer has other tensors' rows between those of the box, as between
        the queries of two KV groups. They are cast to the HF tensor's dtype where a parameter
        has another. What of the box is not on this rank is in none.
        """
        found = []
        for local, piece in self._held.get(name, []):
            # A vector is one row, cut along its columns.
            by_columns = local.ndim == 1 or piece.dim == 1
            first, last = (box.column, box.column_end) if by_columns else (box.row, box.row_end)
            begin = max(first, piece.hf_start)
            length = min(last, piece.hf_start + piece.length) - begin
            if length <= 0:
                continue
            start = piece.local_start + begin - piece.hf_start
            rows, columns = (box.row, box.row_end), (start, start + length)
            if not by_columns:
                rows, columns = columns, (box.column, box.column_end)
            found.append(PackBox(local, rows=rows, columns=columns, dtype=self._dtypes[name]))
        # Columns from two places would lie one behind the other, not side by side.
        assert len(found) < 2 or box.row_end - box.row == 1 or not by_columns, f"{name} {box}"
        return found
