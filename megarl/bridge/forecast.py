"""What a push of weights will cost, before a rank or a server is started.

The trainer's layout is exact. The servers' is taken to be what vLLM's loader makes of it: every
matrix cut evenly over tp, KV heads copied where there are fewer than workers, the projections
down to latents whole; experts cut evenly too, or divided among workers. The real one is what the
workers say when they are asked, see bridge/engines/trace.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from megarl.bridge.boxes import Box, Boxes, Held, Holders, Layout
from megarl.bridge.layout import hf_tensors, trainer_layout
from megarl.bridge.plan import Ints, make_plan
from megarl.config.schema import ParallelConfig, RolloutParallelConfig
from megarl.model import families
from megarl.model.layout import Rule


@dataclass(frozen=True)
class Load:
    """Bytes a rank in one push."""

    least: int
    mean: float
    most: int

    @classmethod
    def of(cls, num_bytes: Ints) -> "Load":
        return cls(int(num_bytes.min()), float(num_bytes.mean()), int(num_bytes.max()))


@dataclass(frozen=True)
class Forecast:
    """A push of one version of the weights."""

    parameters: int
    model_bytes: int
    trainer_ranks: int
    workers: int
    out_of_trainer: Load
    into_worker: Load
    into_worker_from_trainer: Load
    passed_on_by_worker: Load
    optimal_into_worker: float
    """What a worker needs, on average: no plan brings less."""
    transfers: int
    rounds: int
    buffer_bytes: int
    """On a rank: two rounds are in memory."""

    def sharded_s(self, link_bytes_per_s: float) -> float:
        """The busiest rank's bytes, in or out, at the speed of its link."""
        busiest = max(
            self.out_of_trainer.most, self.into_worker.most, self.passed_on_by_worker.most
        )
        return busiest / link_bytes_per_s

    def broadcast_s(self, link_bytes_per_s: float) -> float:
        """All tensors through rank 0's link, as the gathered broadcast sends them."""
        return self.model_bytes / link_bytes_per_s


def forecast(
    hf_config: dict[str, Any],
    parallel: ParallelConfig,
    world_size: int,
    servers: RolloutParallelConfig,
    *,
    itemsize: int,
    bucket_bytes: int,
    server_ep: int = 1,
) -> Forecast:
    """The plan's numbers.

    Args:
      hf_config: config.json of the model.
      itemsize: bytes a parameter on the wire.
      server_ep: see servers_layout.

    Raises:
      ValueError: a tensor does not divide by the trainer's tp, or the servers by `server_ep`.
    """
    tensors = hf_tensors(hf_config, itemsize)
    needed = servers_layout(hf_config, servers, server_ep)
    plan = make_plan(
        tensors,
        trainer_layout(hf_config, parallel, world_size),
        needed,
        num_sources=world_size,
        num_workers=servers.world_size,
        bucket_bytes=bucket_bytes,
    )
    wanted = np.zeros(servers.world_size, dtype=np.int64)
    for name, held in needed.items():
        for box, ranks in zip(held.boxes, held.holders, strict=True):
            wanted[list(ranks)] += box.elements * tensors[name].itemsize
    model_bytes = sum(t.num_bytes for t in tensors.values())
    return Forecast(
        parameters=sum(t.rows * t.columns for t in tensors.values()),
        model_bytes=model_bytes,
        trainer_ranks=world_size,
        workers=servers.world_size,
        out_of_trainer=Load.of(plan.bytes_out_of_sources()),
        into_worker=Load.of(plan.bytes_into_workers()),
        into_worker_from_trainer=Load.of(plan.bytes_into_entries()),
        passed_on_by_worker=Load.of(plan.bytes_out_of_workers()),
        optimal_into_worker=float(wanted.mean()),
        transfers=len(plan),
        rounds=plan.num_rounds,
        buffer_bytes=2 * bucket_bytes,
    )


def servers_layout(
    hf_config: dict[str, Any], servers: RolloutParallelConfig, ep: int = 1
) -> Layout:
    """Boxes that `servers.dp` servers of `tp * pp` workers will need, as this module assumes.

    Args:
      ep: workers of a stage that a layer's experts are divided among, each on one of them; 1
        cuts every expert over tp. With `vllm serve --enable-expert-parallel` it is tp, or tp
        times --data-parallel-size: then that many of `servers.dp` share one set of experts.

    Raises:
      ValueError: `ep` is not a multiple of tp, or the servers do not divide into such sets.
    """
    if ep > 1 and (ep % servers.tp or servers.dp % (ep // servers.tp)):
        raise ValueError(
            f"experts on {ep} workers: {servers.dp} servers of tp {servers.tp} have no such sets"
        )
    return _ServersLayout(hf_config, servers, ep).layout()


class _ServersLayout:
    def __init__(self, c: dict[str, Any], servers: RolloutParallelConfig, ep: int) -> None:
        self._config, self._servers, self._ep = c, servers, ep
        self._shapes = families.hf_shapes(c)
        self._boxes: dict[tuple[Any, ...], Boxes] = {}
        self._holders: dict[tuple[Any, ...], Holders] = {}

    def layout(self) -> Layout:
        stage_of = _stages(self._config["num_hidden_layers"], self._servers.pp)
        layout = {}
        for layer, expert, rule in families.rules(self._config):
            if layer is not None:
                stage = stage_of[layer]
            else:
                stage = 0 if rule.hf_names == (families.EMBEDDING,) else self._servers.pp - 1
            place = self._place_of(expert) if expert is not None and self._ep > 1 else None
            for name, parts in zip(rule.hf_names, self._parts(rule), strict=True):
                boxes = self._cut(rule, self._shapes[name], parts)
                layout[name] = Held(boxes, self._ranks(stage, len(boxes), place))
        return layout

    def _place_of(self, expert: int) -> int:
        """The one of `ep` workers that has it: as many each, or one more for the first of them."""
        count, over = divmod(families.num_experts(self._config), self._ep)
        in_larger = (count + 1) * over
        if expert < in_larger:
            return expert // (count + 1)
        return over + (expert - in_larger) // count

    def _parts(self, rule: Rule) -> list[int]:
        """Into how many boxes each of the rule's tensors is cut."""
        tp = self._servers.tp
        if rule.split == "replicated" or (rule.is_expert and self._ep > 1):
            return [1 for _ in rule.hf_names]
        if self._ep > tp > 1 and "shared_experts" in rule.hf_names[0]:
            # Tokens are then divided over tp before the experts, and each worker needs them whole.
            return [1 for _ in rule.hf_names]
        if rule.split == "qkv":
            heads = self._config["num_attention_heads"]
            kv = min(tp, self._config.get("num_key_value_heads", heads))
            return [tp, kv, kv]
        return [tp for _ in rule.hf_names]

    def _cut(self, rule: Rule, shape: tuple[int, ...], parts: int) -> Boxes:
        dim = 1 if rule.split == "columns" else 0
        key = (shape, dim, parts, rule.split == "vocab")
        if key not in self._boxes:
            # A vocabulary is padded before it is cut, and the padding is nobody's need.
            unit = _VOCAB_UNIT if rule.split == "vocab" else 1
            size = -(-shape[dim] // unit) * unit
            self._boxes[key] = tuple(_even(shape, dim, parts, size))
        return self._boxes[key]

    def _ranks(self, stage: int, parts: int, place: int | None) -> Holders:
        """Workers of each box; with a place, the one box is on that worker of each set of ep."""
        key = (stage, parts, place)
        if key not in self._holders:
            found: list[list[int]] = [[] for _ in range(parts)]
            tp, workers = self._servers.tp, self._servers.tp * self._servers.pp
            for server in range(self._servers.dp):
                for t in range(tp):
                    rank = server * workers + stage * tp + t
                    if place is None:
                        found[t * parts // tp].append(rank)
                    elif (server * tp + t) % self._ep == place:
                        found[0].append(rank)
            self._holders[key] = tuple(tuple(ranks) for ranks in found)
        return self._holders[key]


def _stages(num_layers: int, pp: int) -> list[int]:
    """Stage of each layer: as many each, and the rest to stages before the last, from its end."""
    each, rest = divmod(num_layers, pp)
    depths = [each] * pp
    for stage in range(pp - 1 - rest, pp - 1):
        depths[stage] += 1
    return [stage for stage, depth in enumerate(depths) for _ in range(depth)]


_VOCAB_UNIT = 64
"""vLLM pads a vocabulary to a multiple of it."""


def _even(shape: tuple[int, ...], dim: int, parts: int, size: int) -> Iterator[Box]:
    """Dimension `dim`, padded to `size`, in equal parts, without the padding."""
    for k in range(parts):
        start, stop = (min(shape[dim], size * edge // parts) for edge in (k, k + 1))
        if len(shape) == 1:
            yield Box(0, 1, start, stop)
        elif dim == 0:
            yield Box(start, stop, 0, shape[1])
        else:
            yield Box(0, shape[0], start, stop)
