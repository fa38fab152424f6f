"""Between the rollout head on rank 0 and the trainer on all ranks.

Rank 0 alone talks to the servers. What the other ranks need of an episode reaches them
through `scatter_batch`; what the servers need of the weights passes rank 0's sender.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megarl.actor.micro_batch import Batch
from megarl.actor.scatter import scatter_batch
from megarl.actor.stand_by import from_rank_0, standing_by
from megarl.config.run import GRPOConfig
from megarl.config.schema import TrainEngineConfig
from megarl.parallel import Mesh
from megarl.rollout.api import AcceptFn, Row
from megarl.rollout.remote import RemoteVLLMEngine, RowStream
from megarl.rollout.workflows import WorkflowLike
from megarl.rollout_head import Evaluation, RolloutHead


@contextlib.contextmanager
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
    """What rank 0's pool does for all ranks: batches and evaluations.

    While rank 0 waits for episodes the others stand by, see `megarl.actor.stand_by`.

    Args:
      refit: the present weights into all servers; collective.
    """

    def __init__(
        self,
        config: GRPOConfig,
        head: RolloutHead | None,
        mesh: Mesh,
        refit: Callable[[], object],
    ) -> None:
        self.config, self.head, self.mesh = config, head, mesh
        self._refit = refit
        self.num_batches = 0
        """Batches handed out; a run that goes on sets it."""

    def prepare_batch(self) -> tuple[Batch, dict[str, float]]:
        """This replica's rows of the next batch, and the pool's counts (rank 0 only).

        Waits on rank 0 for the batch's episodes; the other ranks wait for rank 0.
        """
        batch: Batch | None = None
        stats: dict[str, float] = {}
        head = self.head
        with self._standing_by():
            if head is not None:
                is_dynamic = self.config.dynamic_bs
                batch = head.engine.prepare_batch(
                    head.prompts,
                    head.workflow,
                    head.should_accept,
                    dynamic_bs=is_dynamic,
                    fewest=self.config.fewest_prompts if is_dynamic else 1,
                )
                stats = head.export_stats()
        seed = self.config.seed + self.num_batches
        self.num_batches += 1
        minibatches = self.config.actor.ppo_n_minibatches
        return scatter_batch(batch, self.mesh, n_minibatches=minibatches, seed=seed), stats

    def evaluate(self) -> Evaluation | None:
        """The held-out rows under the servers' present weights; None on other ranks than 0."""
        with self._standing_by():
            return self.head.evaluate() if self.head is not None else None

    def agreed(self, yes: bool) -> bool:
        """Rank 0's answer, for what its clock decides."""
        agreed: bool = from_rank_0(yes, self.mesh)
        return agreed

    def _standing_by(self) -> contextlib.AbstractContextManager[None]:
        engine = self.head.engine if self.head is not None else None
        return standing_by(engine, self.mesh, self._refit)


class _OutOfRows(Exception):
    """Rank 0's pool wants rows that other ranks hold."""


class _SharedRows(RowStream):
    """Rows that each replica's head has read of its own dataloader, on rank 0."""

    def __init__(self, batch_size: int) -> None:
        self.dataloader, self.batch_size = None, batch_size
        self._gathered: deque[list[Row]] = deque()

    def add(self, rows: list[Row]) -> None:
        self._gathered.append(rows)

    def __next__(self) -> list[Row]:
        if not self._gathered:
            raise _OutOfRows
        return self._gathered.popleft()


class ScriptCoordinator:
    """AReaL's DistRolloutCoordinator: the episodes of a script's rank 0 for all its ranks.

    A dataloader gives a step's rows on rank 0 alone (whose batch_size is then B, the rollout
    engine's consumer_batch_size), or each data-parallel rank has one of its own share of the
    data, with B / dp rows a batch. Every method is collective over the world: while rank 0 waits
    for episodes the others stand by, see `megarl.actor.stand_by`.

    Args:
      rollout_engine: initialised; only that of rank 0 acts.
      train_engine: has been given its process group.
    """

    def __init__(self, rollout_engine: RemoteVLLMEngine, train_engine: "TrainRank") -> None:
        self.rollout, self.mesh = rollout_engine, train_engine.mesh
        self._refit = train_engine.refit
        self._n_minibatches = getattr(train_engine.config, "ppo_n_minibatches", 1)
        self._seed = train_engine.seed
        self._num_batches = 0
        self._shared: _SharedRows | None = None
        self._own: RowStream | None = None

    def prepare_batch(
        self,
        dataloader: Any,
        granularity: int = 1,
        workflow: WorkflowLike | None = None,
        should_accept_fn: AcceptFn | str | None = None,
        *,
        workflow_kwargs: Mapping[str, Any] | None = None,
        group_size: int = 1,
        dynamic_bs: bool = False,
    ) -> Batch:
        """This replica's rows of the next batch of B accepted episodes.

        Args:
          granularity: rows that stand next to each other and stay on one replica.
          workflow, should_accept_fn, workflow_kwargs, group_size: see RemoteVLLMEngine.submit.
          dynamic_bs: the batch is what was accepted of B episodes, and at least one episode for
            every minibatch of every replica.

        Raises:
          ValueError: no workflow, or a batch size that is neither B nor B / dp.
        """
        fewest = self.mesh.dp * self._n_minibatches if dynamic_bs else 1
        prepare = partial(
            self.rollout.prepare_batch,
            workflow=_needed(workflow),
            should_accept_fn=should_accept_fn,
            workflow_kwargs=workflow_kwargs,
            group_size=group_size,
            dynamic_bs=dynamic_bs,
            fewest=fewest,
        )
        batch: Batch | None = None
        if self._is_share(dataloader.batch_size):
            batch = self._prepare_from_shares(dataloader, prepare)
        else:
            with self._standing_by():
                if self.rollout.is_head:
                    batch = prepare(dataloader)
        return self._scatter(batch, granularity)

    def rollout_batch(
        self,
        data: list[Row],
        granularity: int = 1,
        workflow: WorkflowLike | None = None,
        should_accept_fn: AcceptFn | str | None = None,
        *,
        workflow_kwargs: Mapping[str, Any] | None = None,
        group_size: int = 1,
    ) -> Batch:
        """This replica's rows of the episodes of `data`, generated now.

        Args:
          data: B / dp rows, the share of this data-parallel rank; any other number is the
            whole batch, and rank 0's is taken.
          granularity, workflow, should_accept_fn, workflow_kwargs, group_size: see prepare_batch.
        """
        workflow = _needed(workflow)
        rows = self._gather(data) if self._is_share(len(data)) else data
        batch: Batch | None = None
        with self._standing_by():
            if self.rollout.is_head:
                batch = self.rollout.rollout_batch(
                    rows,
                    workflow,
                    should_accept_fn,
                    workflow_kwargs=workflow_kwargs,
                    group_size=group_size,
                )
        return self._scatter(batch, granularity)

    def _standing_by(self) -> contextlib.AbstractContextManager[None]:
        engine = self.rollout.engine if self.rollout.is_head else None
        return standing_by(engine, self.mesh, self._refit)

    def _scatter(self, batch: Batch | None, granularity: int) -> Batch:
        seed = self._seed + self._num_batches
        self._num_batches += 1
        return scatter_batch(
            batch,
            self.mesh,
            n_minibatches=self._n_minibatches,
            seed=seed,
            granularity=granularity,
        )

    def _is_share(self, num_rows: int) -> bool:
        batch_size = self.rollout.config.consumer_batch_size
        return self.mesh.dp > 1 and num_rows * self.mesh.dp == batch_size

    def _prepare_from_shares(
        self, dataloader: Any, prepare: Callable[[RowStream], Batch]
    ) -> Batch | None:
        """Rank 0 asks for rows as often as its pool runs out of them."""
        if self._own is None or self._own.dataloader is not dataloader:
            self._own = RowStream(dataloader)
            self._shared = _SharedRows(self._own.batch_size * self.mesh.dp)
        assert self._shared is not None
        batch: Batch | None = None
        while batch is None:
            with self._standing_by(), contextlib.suppress(_OutOfRows):
                if self.rollout.is_head:
                    batch = prepare(self._shared)
            if not self._of_rank_0(batch is None):
                break
            self._shared.add(self._gather(next(self._own)))
        return batch

    def _of_rank_0(self, value: bool) -> bool:
        """Rank 0's value, on all ranks."""
        shared = torch.tensor([value])
        dist.broadcast(shared, 0, group=self.mesh.cpu_group)
        return bool(shared)

    def _gather(self, rows: list[Row]) -> list[Row]:
        """The rows of all replicas' heads in their order, on rank 0; others get their own."""
        mesh = self.mesh
        parts: list[Any] | None = [None] * mesh.world_size if mesh.rank == 0 else None
        mine = rows if mesh.rank == mesh.replica_ranks[0] else None
        dist.gather_object(mine, parts, dst=0, group=mesh.cpu_group)
        if parts is None:
            return rows
        return [row for part in parts if part is not None for row in part]


class TrainRank(Protocol):
    """What the coordinator needs of a script's actor."""

    @property
    def mesh(self) -> Mesh: ...
    @property
    def config(self) -> TrainEngineConfig: ...
    @property
    def seed(self) -> int: ...
    def refit(self) -> None: ...


def _needed(workflow: WorkflowLike | None) -> WorkflowLike:
    if workflow is None:
        raise ValueError("workflow: an instance, a class or its name is needed")
    return workflow


def total_steps(config: GRPOConfig, head: RolloutHead | None, mesh: Mesh) -> int:
    """Training steps of the run; rank 0 knows the dataset's length."""
    steps = torch.zeros(1, dtype=torch.int64)
    if head is not None:
        epochs = config.total_train_epochs * head.prompts.steps_per_epoch
        steps[0] = config.total_train_steps or epochs
    dist.broadcast(steps, 0, group=mesh.cpu_group)
    return int(steps)
