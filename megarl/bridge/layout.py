"""Layouts of the trainer, from its family's table, and of the servers, from what they say.

The trainer's is a pure function of config.json, the parallelism and the size of the world, so
it is known for any number of ranks without one of them running. The servers' is what each
worker found when it traced its engine's own loader, see megarl/bridge/engines.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from megarl.bridge.boxes import Box, Boxes, Held, Holders, Layout, Tensor2D, tensor_2d
from megarl.config.schema import ParallelConfig
from megarl.model import families
from megarl.model.layout import Rule, Sizes, chunk_of_layer, pieces


class Model(NamedTuple):
    """An HF model as the bridge sees it."""

    tensors: dict[str, Tensor2D]
    layout: Layout


def hf_tensors(hf_config: dict[str, Any], itemsize: int) -> dict[str, Tensor2D]:
    """Name -> size of every tensor of a checkpoint.

    Args:
      itemsize: bytes an element of what has the model's dtype.
    """
    return {
        name: tensor_2d(shape, 4 if families.stored_dtype(name, "") == "float32" else itemsize)
        for name, shape in families.hf_shapes(hf_config).items()
    }


def stage_of_layer(layer: int, num_layers: int, parallel: ParallelConfig) -> int:
    """Pipeline stage of a layer; with virtual stages they go round, as Megatron's do."""
    chunks = parallel.pp * (parallel.vpp or 1)
    return chunk_of_layer(layer, num_layers, chunks) % parallel.pp


def trainer_layout(hf_config: dict[str, Any], parallel: ParallelConfig, world_size: int) -> Layout:
    """Which ranks of the trainer hold which boxes of which HF tensors.

    Raises:
      ValueError: heads or a tensor do not divide by tp or expert tp, or experts by ep; or there
        are fewer layers than model chunks.
    """
    _check_divides(hf_config, parallel)
    return _TrainerLayout(hf_config, parallel, world_size).layout()


def _check_divides(c: dict[str, Any], parallel: ParallelConfig) -> None:
    heads, experts, layers = (
        c["num_attention_heads"],
        families.num_experts(c),
        c["num_hidden_layers"],
    )
    if heads % parallel.tp:
        raise ValueError(f"num_attention_heads: {heads} do not divide by tp {parallel.tp}")
    if experts % parallel.ep:
        raise ValueError(f"{experts} experts do not divide by ep {parallel.ep}")
    if layers < parallel.pp * (parallel.vpp or 1):
        raise ValueError(f"{layers} layers are fewer than pp {parallel.pp} * vpp {parallel.vpp}")


class _TrainerLayout:
    def __init__(self, c: dict[str, Any], parallel: ParallelConfig, world_size: int) -> None:
        self._config, self._parallel, self._world_size = c, parallel, world_size
        self._shapes = families.hf_shapes(c)
        heads = c["num_attention_heads"]
        self._sizes = Sizes(
            num_heads=heads,
            num_kv_heads=c.get("num_key_value_heads", heads),
            head_dim=c.get("head_dim") or c["hidden_size"] // heads,
        )
        self._boxes: dict[tuple[Any, ...], list[Boxes]] = {}
        self._holders: dict[tuple[Any, ...], Holders] = {}

    def layout(self) -> Layout:
        held = {}
        tied = self._config.get("tie_word_embeddings", False)
        for layer, expert, rule in families.rules(self._config):
            stages = self._stages(layer, rule, tied)
            for name, boxes in zip(rule.hf_names, self._cut(rule), strict=True):
                held[name] = Held(boxes, self._ranks(stages, expert, rule, len(boxes)))
        return held

    def _stages(self, layer: int | None, rule: Rule, tied: bool) -> tuple[int, ...]:
        last = self._parallel.pp - 1
        if layer is not None:
            stage = stage_of_layer(layer, self._config["num_hidden_layers"], self._parallel)
            return (stage,)
        if rule.hf_names == (families.EMBEDDING,):
            return (0, last) if tied and last else (0,)  # the last stage's head is a copy
        return (last,)

    def _cut(self, rule: Rule) -> list[Boxes]:
        """The boxes of each of the rule's tensors, in the order of tp ranks."""
        tp = self._parallel.expert_tp if rule.is_expert else self._parallel.tp
        shapes = tuple(self._shapes[name] for name in rule.hf_names)
        key = (rule.split, shapes, tp)
        if key not in self._boxes:
            sizes = tuple(shape[1 if rule.split == "columns" else 0] for shape in shapes)
            made: list[list[Box]] = [[] for _ in shapes]
            for rank in range(1 if rule.split == "replicated" else tp):
                parts = pieces(rule, sizes, self._sizes, tp, rank)
                for i, (name, shape) in enumerate(zip(rule.hf_names, shapes, strict=True)):
                    mine = [p for p in parts if p.hf_name == name]
                    # A rank without a row of a padded vocabulary keeps its place.
                    start = mine[0].hf_start if mine else 0
                    stop = mine[-1].hf_start + mine[-1].length if mine else 0
                    assert stop - start == sum(p.length for p in mine), "one run a rank"
                    made[i].append(_box_of(shape, mine[0].dim if mine else 0, start, stop))
            self._boxes[key] = [tuple(boxes) for boxes in made]
        return self._boxes[key]

    def _ranks(
        self, stages: tuple[int, ...], expert: int | None, rule: Rule, num_boxes: int
    ) -> Holders:
        """Of each box, the ranks of these stages that hold it."""
        ep_rank = None
        if expert is not None:
            per_rank = families.num_experts(self._config) // self._parallel.ep
            ep_rank = expert // per_rank
        key = (stages, ep_rank, rule.split == "replicated")
        if key not in self._holders:
            found: list[list[int]] = [[] for _ in range(num_boxes)]
            for stage in stages:
                for box, rank in self._ranks_of_stage(stage, ep_rank):
                    found[0 if rule.split == "replicated" else box].append(rank)
            self._holders[key] = tuple(tuple(sorted(ranks)) for ranks in found)
        return self._holders[key]

    def _ranks_of_stage(self, stage: int, ep_rank: int | None) -> Iterator[tuple[int, int]]:
        """(place in tp or expert tp, rank) of all that hold a parameter of this stage.

        The order of ranks is that of megarl/parallel.py: tp, cp, dp, pp, the first adjacent;
        of experts: expert tp, ep, copies, pp.
        """
        parallel = self._parallel
        in_stage = self._world_size // parallel.pp
        for i in range(in_stage):
            if ep_rank is None:
                yield i % parallel.tp, stage * in_stage + i
            elif i // parallel.expert_tp % parallel.ep == ep_rank:
                yield i % parallel.expert_tp, stage * in_stage + i


def _box_of(shape: Sequence[int], dim: int, start: int, stop: int) -> Box:
    """[start, stop) of dimension `dim` of a tensor of one or two dimensions."""
    if len(shape) == 1:
        return Box(0, 1, start, stop)
    return Box(start, stop, 0, shape[1]) if dim == 0 else Box(0, shape[0], start, stop)


def workers_layout(needs: Sequence[Mapping[str, Iterable[Box]]]) -> Layout:
    """What all workers need together: `needs[rank]` are the boxes of each tensor.

    Ranks that need the same share one object, which is read once.
    """
    ranks_of: dict[int, list[int]] = {}
    for rank, tensors in enumerate(needs):
        ranks_of.setdefault(id(tensors), []).append(rank)
    holders: dict[str, dict[Box, list[int]]] = {}
    for ranks_with in ranks_of.values():
        for name, boxes in needs[ranks_with[0]].items():
            of_tensor = holders.setdefault(name, {})
            for box in boxes:
                of_tensor.setdefault(box, []).extend(ranks_with)
    # One object for what is the same: the planner works each out once.
    known: dict[Any, Any] = {}
    layout = {}
    for name, of_tensor in holders.items():
        ordered = sorted(of_tensor)
        boxes = tuple(ordered)
        ranks = tuple(tuple(sorted(of_tensor[box])) for box in ordered)
        layout[name] = Held(known.setdefault(boxes, boxes), known.setdefault((ranks,), ranks))
    return layout
