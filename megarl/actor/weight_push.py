"""New weights from every rank of the trainer into every server: which way, and the push."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from megarl import platform
from megarl.actor.engine import MegatronEngine
from megarl.bridge.sender import PushStats, WeightSender
from megarl.bridge.sharded import ShardedSender
from megarl.config.schema import WeightUpdateConfig
from megarl.model.weights import LocalTensors
from megarl.rollout_head import RolloutHead


class ExportOnly:
    """The sender of a rank whose weights pass rank 0's: it takes part in the export."""

    def connect(self) -> None:
        pass

    def push(self, weights: Iterable[tuple[str, Tensor]], version: int) -> PushStats:
        for _ in weights:
            raise AssertionError("only rank 0 is given tensors")
        return PushStats(0, 0.0, 0.0)

    def close(self) -> None:
        pass


def make_sender(
    update: WeightUpdateConfig, head: RolloutHead | None, engine: MegatronEngine
) -> WeightSender:
    """This rank's sender, not connected yet. Every rank has one."""
    if update.mode == "sharded":
        return ShardedSender(
            head.engine if head is not None else None,
            LocalTensors(engine.chunks, engine.spec, engine.mesh),
            cpu_group=engine.mesh.cpu_group,
            bucket_bytes=update.bucket_bytes,
            pause=update.pause,
            timeout_s=update.timeout_s,
            device=platform.device(),
        )
    return head.make_sender() if head is not None else ExportOnly()


def push_weights(
    engine: MegatronEngine, head: RolloutHead | None, sender: WeightSender, *, version: int
) -> dict[str, float]:
    """The engine's weights into every server, as `version`. Collective over the world.

    Returns:
      `bridge/bytes_sent` by all ranks, `bridge/pause_s`; of a sharded push also
      `bridge/bytes_optimal`: what the servers need, each byte once.
    """
    if head is not None:
        head.engine.pause()
    pushed = sender.push(engine.export, version)
    if head is not None:
        head.engine.set_version(version)
        head.engine.resume()
    engine.version = version
    num_bytes = torch.tensor([pushed.num_bytes])
    dist.all_reduce(num_bytes, group=engine.mesh.cpu_group)
    stats = {"bridge/bytes_sent": float(num_bytes), "bridge/pause_s": pushed.pause_s}
    if isinstance(sender, ShardedSender):
        stats["bridge/bytes_optimal"] = float(sender.plan.bytes_needed())
    return stats
