"""What a push of weights will cost, before a rank or a server is started.

The trainer's layout is exact. The servers' is taken to be tensor parallelism as vLLM has it by
default: every matrix and every expert cut evenly, KV heads copied where there are fewer than
workers; the real one is what the workers say when they are asked, see bridge/engines/trace.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from megarl.bridge.boxes import Box, Boxes, Held, Holders, Layout
from megarl.bridge.layout import hf_tensors, stage_of_layer, trainer_layout
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
) -> Forecast:
    """The plan's numbers.

    Args:
      hf_config: config.json of the model.
      itemsize: bytes a parameter on the wire.

    Raises:
      ValueError: a tensor does not divide by the trainer's tp.
    """
    tensors = hf_tensors(hf_config, itemsize)
    needed = servers_layout(hf_config, servers)
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
        parameters=model_bytes // itemsize,
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


def servers_layout(hf_config: dict[str, Any], servers: RolloutParallelConfig) -> Layout:
    """Boxes that `servers.dp` servers of `tp * pp` workers will need, as this module assumes."""
    shapes = families.hf_shapes(hf_config)
    last = servers.pp - 1
    layers = hf_config["num_hidden_layers"]
    boxes: dict[tuple[tuple[int, ...], int, int], Boxes] = {}
    holders: dict[tuple[int, int], Holders] = {}
    stages = ParallelConfig(pp=servers.pp)
    layout = {}
    for layer, _, rule in families.rules(hf_config):
        if layer is not None:
            stage = stage_of_layer(layer, layers, stages)
        else:
            stage = 0 if rule.hf_names == (families.EMBEDDING,) else last
        for name, parts in zip(rule.hf_names, _parts(rule, hf_config, servers.tp), strict=True):
            shape, dim = shapes[name], 1 if rule.split == "columns" else 0
            key = (shape, dim, parts)
            boxes.setdefault(key, tuple(_even(shape, dim, parts)))
            holders.setdefault((stage, parts), _holders(servers, stage, parts))
            layout[name] = Held(boxes[key], holders[stage, parts])
    return layout


def _parts(rule: Rule, hf_config: dict[str, Any], tp: int) -> list[int]:
    """Into how many boxes each of the rule's tensors is cut."""
    if rule.split == "replicated":
        return [1]
    if rule.split == "qkv":
        heads = hf_config["num_attention_heads"]
        kv = min(tp, hf_config.get("num_key_value_heads", heads))
        return [tp, kv, kv]
    return [tp for _ in rule.hf_names]


def _even(shape: tuple[int, ...], dim: int, parts: int) -> Iterator[Box]:
    size = shape[dim]
    for k in range(parts):
        start, stop = size * k // parts, size * (k + 1) // parts
        if len(shape) == 1:
            yield Box(0, 1, start, stop)
        elif dim == 0:
            yield Box(start, stop, 0, shape[1])
        else:
            yield Box(0, shape[0], start, stop)


def _holders(servers: RolloutParallelConfig, stage: int, parts: int) -> Holders:
    size = servers.tp * servers.pp
    return tuple(
        tuple(
            server * size + stage * servers.tp + t
            for server in range(servers.dp)
            for t in range(servers.tp)
            if t * parts // servers.tp == part
        )
        for part in range(parts)
    )
