"""New weights from every rank of the trainer into every server: which way, and the push."""

import time
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from megarl import platform
from megarl.actor.engine import MegatronEngine
from megarl.bridge.disk import DiskSender
from megarl.bridge.push import Members, Pusher, ServerPool, Together, WeightSender, ask_all
from megarl.bridge.sender import BroadcastSender
from megarl.bridge.sharded import ShardedSender
from megarl.config.schema import WeightUpdateConfig
from megarl.model.weights import LocalTensors
from megarl.rollout_head import RolloutHead
from megarl.stats import trace


def make_pusher(
    update: WeightUpdateConfig,
    servers: ServerPool | None,
    engine: MegatronEngine,
    *,
    folder: Path | None = None,
) -> Pusher:
    """This rank's, not connected yet. Collective.

    Args:
      servers: on rank 0, healthy; None on the others.
      folder: of mode disk, as trainer and servers see it.

    Raises:
      WeightUpdateError: mode auto, and a server does not answer.
    """
    together, members = Together(engine.mesh.cpu_group), Members(servers)
    mode = update.mode
    if mode == "auto":
        found = together("say what they can", lambda: best_mode(servers, update.timeout_s))
        mode = together.from_rank_0(found)
    sender: WeightSender
    if mode == "disk":
        assert folder is not None, "mode disk needs a folder"
        sender = DiskSender(members, together, folder=folder, timeout_s=update.timeout_s)
    elif mode == "sharded":
        sender = ShardedSender(
            members,
            LocalTensors(engine.chunks, engine.spec, engine.mesh),
            together,
            bucket_bytes=update.bucket_bytes,
            timeout_s=update.timeout_s,
            device=platform.device(),
            overlap=update.overlap,
        )
    else:
        sender = BroadcastSender(
            members,
            together,
            bucket_bytes=update.bucket_bytes,
            timeout_s=update.timeout_s,
            device=platform.device(),
        )
    return Pusher(members, sender, together, pause=update.pause, timeout_s=update.timeout_s)


def push_weights(
    engine: MegatronEngine, head: RolloutHead | None, pusher: Pusher, *, version: int
) -> dict[str, float]:
    """The engine's weights into every server, as `version`. Collective over the world.

    Returns:
      `bridge/bytes_sent` by all ranks, `bridge/pause_s`; of a sharded push also
      `bridge/bytes_optimal`: what the servers need, each byte once.
    """
    if head is not None:
        head.engine.pause()
    pushed = pusher.push(engine.export, version)
    ended_s = time.monotonic()
    trace.span("push", trace.WEIGHTS, ended_s - pushed.total_s, ended_s, version=version)
    trace.span("paused", trace.PAUSES, ended_s - pushed.pause_s, ended_s, version=version)
    if head is not None:
        head.engine.set_version(version)
        head.engine.resume()
    engine.version = version
    num_bytes = torch.tensor([pushed.num_bytes])
    dist.all_reduce(num_bytes, group=engine.mesh.cpu_group)
    stats = {"bridge/bytes_sent": float(num_bytes), "bridge/pause_s": pushed.pause_s}
    if isinstance(pusher.sender, ShardedSender):
        stats["bridge/bytes_optimal"] = float(pusher.sender.plan.bytes_needed())
    return stats


def best_mode(
    servers: ServerPool | None, timeout_s: float
) -> Literal["sharded", "broadcast"] | None:
    """What every server can do; None on other ranks than 0."""
    if servers is None:
        return None
    clients = servers.clients
    have_agents = ask_all(
        servers, clients, "say what they can", lambda c: c.has_agent(timeout_s), timeout_s
    )
    return "sharded" if all(have_agents) else "broadcast"
