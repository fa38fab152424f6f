"""The rollout engine as a training script makes it: from its config section alone.

Every rank of an SPMD script has one, and rank 0's acts: it talks to the servers whose
addresses are in the environment. On the other ranks what controls the servers does nothing,
and what would give episodes is an error: they get theirs through the actor.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from megarl.config.schema import InferenceEngineConfig
from megarl.errors import EngineError
from megarl.rollout import restarts
from megarl.rollout.api import NO_VERSION, AcceptFn, ModelRequest, ModelResponse, Row
from megarl.rollout.backends import make_client
from megarl.rollout.client import PauseMode
from megarl.rollout.engine import RemoteInferenceEngine
from megarl.rollout.finished import as_batch
from megarl.rollout.membership import named_servers
from megarl.rollout.server_state import State
from megarl.rollout.workflows import ResolvedWorkflows, WorkflowLike, resolve_accept_fn
from megarl.trajectory import Trajectory

NO_WEIGHTS = "MEGARL_SERVERS_WITHOUT_WEIGHTS"
"""Set by a launcher whose servers wait for the first push with random weights."""
_CONTROL_TIMEOUT_S = 120.0


class RowStream:
    """The batches of a dataloader without end: it begins again when it is exhausted.

    Args:
      dataloader: an iterable of lists of rows with a `batch_size`, such as torch's DataLoader
        with `collate_fn=lambda rows: rows`.

    Raises:
      ValueError: it has no batch_size.
    """

    def __init__(self, dataloader: Any) -> None:
        batch_size = getattr(dataloader, "batch_size", None)
        if not batch_size:
            raise ValueError(f"a dataloader needs a batch_size, {dataloader!r} has {batch_size}")
        self.dataloader, self.batch_size = dataloader, int(batch_size)
        self._batches = iter(dataloader)

    def __next__(self) -> list[Row]:
        """The next list of rows. ValueError if the dataloader is empty."""
        for _ in range(2):
            for batch in self._batches:
                return list(batch)
            self._batches = iter(self.dataloader)
        raise ValueError("the dataloader gives no batch")


class RemoteVLLMEngine:
    """vLLM servers behind `megarl.rollout.engine.RemoteInferenceEngine`, made from a config.

    Args:
      config: section `rollout` of a run.
      rank: of this process; None is the environment's RANK, 0 without one.
    """

    def __init__(self, config: InferenceEngineConfig, *, rank: int | None = None) -> None:
        self.config = config
        self.rank = int(os.environ.get("RANK", "0")) if rank is None else rank
        self._engine: RemoteInferenceEngine | None = None
        self._stream: RowStream | None = None
        self._version = 0
        self._pushed: int | None = None
        """What the servers call their weights; None if they have none."""
        self._is_paused = False
        self._workflows = ResolvedWorkflows()

    @property
    def is_head(self) -> bool:
        """Whether this rank's engine acts."""
        return self.rank == 0

    @property
    def engine(self) -> RemoteInferenceEngine:
        """What acts. RuntimeError on other ranks than 0, before `initialize`, and at the end."""
        if not self.is_head:
            raise RuntimeError(
                f"rank {self.rank} has no servers: only rank 0 runs episodes, the others get "
                "theirs through actor.prepare_batch or actor.rollout_batch"
            )
        if self._engine is None:
            raise RuntimeError("rollout.initialize() comes first")
        return self._engine

    # ------------------------------------------------------------------ begin and end

    def initialize(
        self,
        engine_id: str | None = None,
        addr: str | Sequence[str] | None = None,
        train_data_parallel_size: int | None = None,
    ) -> None:
        """Wait for every server, then start the loop.

        Args:
          engine_id: not read.
          addr: servers, `HOST:PORT` each; None is what the environment says.
          train_data_parallel_size: not read: rank 0 runs the episodes of all replicas.

        Raises:
          EngineError: no server is named, or one does not become healthy.
        """
        if not self.is_head or self._engine is not None:
            return
        config = self.config
        clients = [
            make_client(
                config.backend,
                address,
                request_timeout_s=config.request_timeout_s,
                retries=config.request_retries,
            )
            for address in _addresses(addr, config)
        ]
        engine = RemoteInferenceEngine(
            config,
            clients,
            batch_size=config.consumer_batch_size or 1,
            comeback_s=restarts.comeback_s(config.setup_timeout_s),
        )
        engine.initialize()
        self._engine = engine
        try:
            engine.run(self._start(engine), timeout_s=config.setup_timeout_s + 60)
            engine.start_health_watch()
        except BaseException:
            self.destroy()
            raise
        if self._pushed is None:
            engine.pause()

    async def _start(self, engine: RemoteInferenceEngine) -> None:
        await engine.fleet.wait_healthy(self.config.setup_timeout_s)
        clients = engine.clients
        versions = [await client.weight_version() for client in clients]
        if NO_VERSION not in versions:  # an earlier engine of this run has pushed them
            self._pushed = max(versions)
        elif os.environ.get(NO_WEIGHTS) != "1":
            for client in clients:  # what they loaded has no version yet
                await client.set_version(self._version)
            self._pushed = self._version

    def destroy(self) -> None:
        """End all episodes and the loop. The servers go on."""
        engine, self._engine, self._pushed = self._engine, None, None
        if engine is not None:
            try:
                engine.cancel_episodes()
            finally:
                engine.destroy()

    # ------------------------------------------------------------------ versions and pauses

    def get_version(self) -> int:
        return self._version

    def set_version(self, version: int) -> None:
        """What the servers hold is `version`: more episodes may start, tokens carry it.

        A script that goes on calls it before its first episode: there the pool begins, and what
        it makes is no older than `max_head_offpolicyness` versions at its step.
        """
        self._version = version
        if self.is_head:
            if self._pushed not in (None, version):
                self.engine.run(self._name_weights(version), _CONTROL_TIMEOUT_S)
            self.engine.set_version(version)

    async def _name_weights(self, version: int) -> None:
        """Of the servers that have some; one that fails is dead. EngineError: none is left."""
        fleet = self.engine.fleet
        ready = [client for client in fleet.clients if fleet.state_of(client) is State.READY]
        await self.engine.ask_each(ready, lambda client: client.set_version(version))
        self._pushed = version

    def on_pushed(self, version: int) -> None:
        """The actor has brought weights: where they were the first, episodes may start now."""
        was_waiting, self._pushed = self._pushed is None, version
        if was_waiting and not self._is_paused:
            self.engine.resume()

    def pause(self) -> None:
        """Start no more episodes; those that run go on."""
        self._is_paused = True
        if self.is_head:
            self.engine.pause()

    def resume(self) -> None:
        """Episodes may start, unless the servers still wait for their first weights."""
        self._is_paused = False
        if self.is_head and self._pushed is not None:
            self.engine.resume()

    def pause_generation(self, mode: PauseMode = "abort") -> None:
        """Stop every server."""
        if self.is_head:
            self.engine.pause_generation(mode)

    def continue_generation(self) -> None:
        if self.is_head:
            self.engine.continue_generation()

    def export_stats(self) -> dict[str, float]:
        """Counts of episodes since the start; empty on other ranks than 0."""
        return self.engine.export_stats() if self.is_head else {}

    # ------------------------------------------------------------------ episodes

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """One response; for a caller on a loop of its own, and cancelled with it.

        Raises:
          ValueError: the prompt leaves no room for a token.
          EngineError: no server is left, or the one that was asked refused.
        """
        return await self.engine.from_another_loop(self.engine.agenerate(req))

    def submit(
        self,
        data: Row,
        workflow: WorkflowLike,
        should_accept_fn: AcceptFn | str | None = None,
        *,
        workflow_kwargs: Mapping[str, Any] | None = None,
        group_size: int = 1,
    ) -> int:
        """Queue one episode. Returns its task id.

        Args:
          workflow, workflow_kwargs, group_size: see resolve_workflow; the same class with equal
            arguments is made once.
          should_accept_fn: see resolve_accept_fn.

        Raises:
          ValueError: see there.
        """
        engine = self.engine
        resolved = self._workflows(workflow, workflow_kwargs, group_size)
        return engine.submit(data, resolved, resolve_accept_fn(should_accept_fn))

    def wait(self, count: int, timeout: float | None = None) -> Trajectory:
        """The oldest `count` accepted episodes as one batch.

        Raises:
          TimeoutError: they do not come within `timeout` seconds.
        """
        return self.engine.wait(count, timeout)

    def rollout_batch(
        self,
        data: Sequence[Row],
        workflow: WorkflowLike,
        should_accept_fn: AcceptFn | str | None = None,
        *,
        workflow_kwargs: Mapping[str, Any] | None = None,
        group_size: int = 1,
        is_eval: bool = False,
    ) -> Trajectory:
        """Every row once, now, under the servers' present weights; in the rows' order.

        Rows whose episode was rejected or not accepted are left out.

        Args:
          workflow, should_accept_fn, workflow_kwargs, group_size: see `submit`.

        Raises:
          EngineError: the servers have no weights yet, or nothing was accepted.
        """
        self._need_weights()
        run_all = self.engine.executor.run_all(
            list(data),
            self._workflows(workflow, workflow_kwargs, group_size),
            is_eval=is_eval,
            should_accept=resolve_accept_fn(should_accept_fn),
        )
        return self.engine.run(run_all, None)

    def prepare_batch(
        self,
        dataloader: Any,
        workflow: WorkflowLike,
        should_accept_fn: AcceptFn | str | None = None,
        *,
        workflow_kwargs: Mapping[str, Any] | None = None,
        group_size: int = 1,
        dynamic_bs: bool = False,
        fewest: int = 1,
    ) -> Trajectory:
        """The next `consumer_batch_size` episodes; generation of later ones goes on.

        Args:
          dataloader: see RowStream. The same object continues where the call before stood.
          workflow, should_accept_fn, workflow_kwargs, group_size: see `submit`.
          dynamic_bs: rejected episodes count, too, so that the batch is smaller and the step does
            not wait for others in their place.
          fewest: episodes of a dynamic batch; see WorkflowExecutor.prepare.

        Raises:
          EngineError: the servers have no weights yet, or episodes do nothing but fail.
          ValueError: the dataloader's batch is not a step's.
        """
        self._need_weights()
        stream = dataloader if isinstance(dataloader, RowStream) else self._stream_of(dataloader)
        if stream.batch_size != self.engine.batch_size:
            raise ValueError(
                f"dataloader.batch_size {stream.batch_size} must equal "
                f"rollout.consumer_batch_size {self.engine.batch_size}"
            )
        episodes = self.engine.executor.prepare(
            stream,
            self._workflows(workflow, workflow_kwargs, group_size),
            resolve_accept_fn(should_accept_fn),
            limit=self.config.queue_size,
            is_dynamic=dynamic_bs,
            fewest=fewest,
        )
        return as_batch(self.engine.run(episodes, None))

    def _stream_of(self, dataloader: Any) -> RowStream:
        if self._stream is None or self._stream.dataloader is not dataloader:
            self._stream = RowStream(dataloader)
        return self._stream

    def _need_weights(self) -> None:
        if self.engine is not None and self._pushed is None:
            raise EngineError("the servers have no weights yet: actor.connect_engine brings them")


def _addresses(given: str | Sequence[str] | None, config: InferenceEngineConfig) -> list[str]:
    if given is None:
        return named_servers(config.servers, config.setup_timeout_s)
    given = given.split(",") if isinstance(given, str) else list(given)
    if addresses := [address.strip() for address in given if address.strip()]:
        return addresses
    raise EngineError("no servers: addr is empty")
