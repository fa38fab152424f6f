"""Between the rollout head on rank 0 and the trainer on all ranks.

Rank 0 alone talks to the servers. What the other ranks need of an episode reaches them
through `scatter_batch`; what the servers need of the weights passes rank 0's sender.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from megarl.actor.micro_batch import Batch
from megarl.actor.scatter import scatter_batch
from megarl.config.run import GRPOConfig
from megarl.parallel import Mesh
from megarl.rollout_head import RolloutHead


@contextmanager
def open_rollout(
    config: GRPOConfig, addresses: list[str], run_dir: Path, mesh: Mesh
) -> Iterator[RolloutHead | None]:
    """The head on rank 0, None elsewhere; closed at the end whatever happens."""
    if mesh.rank != 0:
        yield None
        return
    head = RolloutHead(config, addresses, run_dir)
    try:
        head.start()
        yield head
    finally:
        head.close()


class DistRolloutCoordinator:
    """prepare_batch for all ranks: rank 0 collects, every replica gets its share."""

    def __init__(self, config: GRPOConfig, head: RolloutHead | None, mesh: Mesh) -> None:
        self.config, self.head, self.mesh = config, head, mesh
        self.num_batches = 0
        """Batches handed out; a run that goes on sets it."""

    def prepare_batch(self) -> tuple[Batch, dict[str, float]]:
        """This replica's rows of the next batch, and the pool's counts (rank 0 only).

        Waits on rank 0 for the batch's episodes; the other ranks wait for rank 0.
        """
        batch: Batch | None = None
        stats: dict[str, float] = {}
        if self.head is not None:
            head = self.head
            batch = head.engine.prepare_batch(head.prompts, head.workflow, head.should_accept)
            stats = self.head.engine.export_stats()
        seed = self.config.seed + self.num_batches
        self.num_batches += 1
        minibatches = self.config.actor.ppo_n_minibatches
        return scatter_batch(batch, self.mesh, n_minibatches=minibatches, seed=seed), stats


def total_steps(config: GRPOConfig, head: RolloutHead | None, mesh: Mesh) -> int:
    """Training steps of the run; rank 0 knows the dataset's length."""
    steps = torch.zeros(1, dtype=torch.int64)
    if head is not None:
        epochs = config.total_train_epochs * head.prompts.steps_per_epoch
        steps[0] = config.total_train_steps or epochs
    dist.broadcast(steps, 0, group=mesh.cpu_group)
    return int(steps)
