"""The trainer's handle on the servers: one thread, one asyncio loop, many episodes.

Methods without `async` are called from the trainer's thread and return when the loop has
answered; the loop itself never waits for the trainer. While the trainer trains, episodes go
on: whatever was submitted is admitted as versions advance.
"""

import asyncio
import gc
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from megarl.config.schema import InferenceEngineConfig
from megarl.errors import EngineError
from megarl.rollout import restarts
from megarl.rollout.api import (
    AcceptFn,
    ModelRequest,
    ModelResponse,
    RolloutWorkflow,
    Row,
)
from megarl.rollout.backends import make_client
from megarl.rollout.client import PauseMode, ServerClient
from megarl.rollout.executor import Prompts, WorkflowExecutor
from megarl.rollout.finished import as_batch
from megarl.rollout.fleet import Fleet
from megarl.rollout.generation import respond
from megarl.rollout.loop import LoopThread
from megarl.rollout.membership import read_servers
from megarl.rollout.server_state import State
from megarl.rollout.staleness import StalenessManager
from megarl.stats import trace
from megarl.trajectory import Trajectory

logger = logging.getLogger(__name__)
T = TypeVar("T")

_CONTROL_TIMEOUT_S = 120.0
_CLIENTS_POLL_S = 0.25
WEIGHTS_LIMIT_S = 150.0
"""Servers that are up, wait for weights so long, and nobody will bring any: an error. Longer than
a server is given to answer what it has before it leaves."""


class StandBy(Protocol):
    """What the trainer's thread does while it waits for episodes."""

    def refit(self) -> None:
        """Bring the present weights to servers that came back: no other one is left."""
        ...

    def go_on(self) -> None:
        """Called about once a second."""
        ...


class RemoteInferenceEngine:
    """Episodes on remote servers.

    Args:
      batch_size: B, the episodes of one training step.
      dump_dir: finished trajectories are written under it; None writes none.
      comeback_s, on_lost: see Fleet.
    """

    def __init__(
        self,
        config: InferenceEngineConfig,
        clients: list[ServerClient],
        *,
        batch_size: int,
        dump_dir: Path | None = None,
        comeback_s: float = 0.0,
        on_lost: Callable[[str], None] = lambda address: None,
    ) -> None:
        self.config = config
        source = config.servers
        self.fleet = Fleet(
            clients,
            comeback_s=comeback_s,
            on_lost=on_lost,
            token_timeout_s=config.token_timeout_s,
            members=partial(read_servers, source) if source is not None else None,
            takes_back=restarts.are_elsewhere(),
            connect=partial(
                make_client,
                config.backend,
                request_timeout_s=config.request_timeout_s,
                retries=config.request_retries,
            ),
        )
        self.batch_size = config.consumer_batch_size or batch_size
        self._dump_dir = dump_dir
        self._version = 0
        self._stopped: list[ServerClient] = []
        """By `pause_generation`, and not resumed yet."""
        self._stopped_s = time.monotonic()
        """When it last stopped them."""
        self.standby: StandBy | None = None
        """Set while the trainer waits here for episodes."""
        self._loop = LoopThread("rollout", self._main)

    # ------------------------------------------------------------------ the loop

    def initialize(self) -> None:
        """Start the loop's thread."""
        self._loop.start()

    async def _main(self, on_started: Callable[[], None], stop: asyncio.Event) -> None:
        self._generating = asyncio.Event()
        self._generating.set()
        self._health_watch: asyncio.Task[None] | None = None
        staleness = StalenessManager(
            self.config.max_concurrent_rollouts or self.batch_size,
            self.batch_size,
            self.config.max_head_offpolicyness,
        )
        self.executor = WorkflowExecutor(
            self,
            staleness,
            dump_dir=self._dump_dir,
            most_at_once=self.config.max_concurrent_rollouts,
        )
        # What is imported by now stays; a collection that walks it takes a second at a time.
        gc.freeze()
        on_started()
        await stop.wait()
        if self._health_watch is not None:
            self._health_watch.cancel()
        await self.executor.close()
        await self.fleet.close()
        gc.unfreeze()

    def run(self, coro: Coroutine[Any, Any, T], timeout_s: float | None) -> T:
        """The result of `coro`, run on the loop.

        Args:
          timeout_s: None is for what takes as long as episodes do.

        Raises:
          EngineTimeout: it is not done after `timeout_s`.
          EngineError: no server is left; or, without a limit, those that are up wait for weights
            that nobody brings.
        """
        served_s = time.monotonic()

        def on_wake() -> None:
            nonlocal served_s
            if self._stand_by() or not self.fleet.needs_weights:
                served_s = time.monotonic()
            elif timeout_s is None and time.monotonic() - served_s > WEIGHTS_LIMIT_S:
                raise self._unserved()

        return self._loop.run(coro, timeout_s, on_wake)

    def _stand_by(self) -> bool:
        """Whether somebody does."""
        standby, self.standby = self.standby, None  # what it asks of the loop waits here, too
        if standby is None:
            return False
        if self.fleet.needs_weights:
            standby.refit()
        else:
            standby.go_on()
        self.standby = standby
        return True

    def _unserved(self) -> EngineError:
        addresses = ", ".join(client.address for client in self.clients)
        return EngineError(
            f"servers {addresses} are up and have no weights, for {WEIGHTS_LIMIT_S:g} s, and no "
            "trainer stands by to bring them: they were started again, or are new"
        )

    async def watch_health(self) -> None:
        """Until no healthy server is left: then `run` raises. Ends with the loop."""
        try:
            error = await self.fleet.watch()
        except Exception as bug:
            # Without it a server that is lost would be waited for without end.
            logger.exception("the watch over the servers broke")
            error = EngineError(f"the watch over the servers broke: {bug!r}")
        self._loop.die(error)

    @property
    def clients(self) -> list[ServerClient]:
        """Of the servers that are up."""
        return self.fleet.clients

    def wait_for_clients(self) -> list[ServerClient]:
        """Of the servers that are up, once there is one. EngineError if none comes back."""

        async def wait() -> list[ServerClient]:
            while not self.fleet.clients:  # noqa: ASYNC110 - it is asked once a push
                await asyncio.sleep(_CLIENTS_POLL_S)
            return self.fleet.clients

        return self.run(wait(), timeout_s=None)

    def drop(self, client: ServerClient, why: str) -> None:
        """This server is dead; its requests go to the others. EngineError: none will come."""
        self._call(self.fleet.drop, client, why)

    def refitted(self, clients: Iterable[ServerClient]) -> None:
        """These servers have the present weights, and may answer requests."""
        self._call(self.fleet.refitted, list(clients))

    def _call(self, function: Any, *args: Any) -> Any:
        """Run a plain function on the loop."""

        async def call() -> Any:
            return function(*args)

        return self.run(call(), _CONTROL_TIMEOUT_S)

    def start_health_watch(self) -> None:
        """From now on a server that stays unhealthy ends what waits for it. Servers are up."""

        def start() -> None:
            self._health_watch = asyncio.create_task(self.watch_health(), name="health")

        self._call(start)

    def destroy(self) -> None:
        """End all episodes and the loop."""
        self._loop.stop()

    # ------------------------------------------------------------------ generation (in the loop)

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """One response, see `megarl.rollout.generation`."""
        limit = self.config.max_tokens_per_request
        return await respond(req, self.fleet, self._generating, limit)

    async def from_another_loop(self, coro: Coroutine[Any, Any, T]) -> T:
        """See LoopThread.run_from_another. EngineError: no server is left, or the loop ends."""
        return await self._loop.run_from_another(coro)

    # ------------------------------------------------------------------ versions and pauses

    def get_version(self) -> int:
        return self._version

    def set_version(self, version: int) -> None:
        """The servers hold `version`: more episodes may start.

        The last one before the first episode is where the pool begins, whatever its number: see
        StalenessManager.on_version.
        """

        def advance() -> None:
            self._version = version
            self.executor.staleness.on_version(version)
            self.executor.admit()

        self._call(advance)

    def state_dict(self) -> dict[str, Any]:
        """Counts, and the episodes that are not in a batch yet; plain values and tensors."""
        state: dict[str, Any] = self._call(self.executor.state_dict)
        return state

    def load_state_dict(
        self,
        state: dict[str, Any],
        version: int,
        workflow: RolloutWorkflow,
        should_accept_fn: AcceptFn | None = None,
    ) -> None:
        """Go on as an engine that has handed out `version` batches. Before the first submission."""
        self._version = version
        self._call(self.executor.load_state_dict, state, version, workflow, should_accept_fn)

    def pause(self) -> None:
        """Start no more episodes."""
        self._call(self.executor.pause)

    def resume(self) -> None:
        self._call(self.executor.resume)

    def pause_generation(self, mode: PauseMode = "abort") -> None:
        """Stop every server; requests aborted by it wait for `continue_generation`.

        One that fails is dead, and its requests go to the others. EngineError: none is left.
        """

        async def stop_all() -> None:
            self._generating.clear()
            self._stopped = self.clients
            try:
                await self.ask_each(self._stopped, lambda client: client.pause(mode))
            except BaseException:
                self._generating.set()
                raise
            self._stopped_s = time.monotonic()

        self.run(stop_all(), _CONTROL_TIMEOUT_S)

    def continue_generation(self) -> None:
        """EngineError: no server is left."""

        async def start_all() -> None:
            # One that was stopped may be about to leave, and still has requests.
            stopped = dict.fromkeys((*self.clients, *self._stopped))
            paused = [client for client in stopped if client.is_paused]
            try:
                await self.ask_each(paused, lambda client: client.resume())
            finally:
                self._stopped = []
                trace.span("generation stopped", trace.PAUSES, self._stopped_s, time.monotonic())
                self._generating.set()

        self.run(start_all(), _CONTROL_TIMEOUT_S)

    async def ask_each(
        self, clients: Iterable[ServerClient], call: Callable[[ServerClient], Awaitable[None]]
    ) -> None:
        """`call` of these servers at once; one that fails is dead. In the loop.

        Raises:
          EngineError: no server is left.
        """
        alive = [client for client in clients if self.fleet.state_of(client) is not State.DEAD]

        async def ask(client: ServerClient) -> EngineError | None:
            try:
                await call(client)
            except EngineError as error:
                return error
            return None

        for client, error in zip(alive, await asyncio.gather(*map(ask, alive)), strict=True):
            if error is not None:
                self.fleet.drop(client, str(error))

    def cancel_episodes(self) -> None:
        """End every episode, queued or running; returns when they have ended."""
        self.run(self.executor.close(), _CONTROL_TIMEOUT_S)

    # ------------------------------------------------------------------ batches

    def submit(
        self, data: Row, workflow: RolloutWorkflow, should_accept_fn: AcceptFn | None = None
    ) -> int:
        """Queue one episode. Returns its task id."""
        task_id: int = self._call(self.executor.submit, data, workflow, should_accept_fn)
        return task_id

    def wait(self, count: int, timeout_s: float | None = None) -> Trajectory:
        """The oldest `count` accepted episodes as one batch. TimeoutError if they do not come."""
        return self.run(self.executor.wait(count, timeout_s), None)

    def rollout_batch(
        self, data: Sequence[Row], workflow: RolloutWorkflow, *, is_eval: bool = True
    ) -> Trajectory:
        """Every row once, now, whatever the staleness; in the rows' order."""
        return self.run(self.executor.run_all(list(data), workflow, is_eval=is_eval), None)

    def prepare_batch(
        self,
        prompts: Prompts,
        workflow: RolloutWorkflow,
        should_accept_fn: AcceptFn | None = None,
        *,
        dynamic_bs: bool = False,
        fewest: int = 1,
    ) -> Trajectory:
        """The next batch; keeps the pool filled so that generation goes on after it returns.

        See WorkflowExecutor.prepare.
        """
        episodes = self.executor.prepare(
            prompts,
            workflow,
            should_accept_fn,
            limit=self.config.queue_size,
            is_dynamic=dynamic_bs,
            fewest=fewest,
        )
        return as_batch(self.run(episodes, None))

    def export_stats(self) -> dict[str, float]:
        stats: dict[str, float] = self._call(self.executor.export_stats)
        servers = {
            "servers_lost": float(self.fleet.num_lost),
            "servers_ready": float(self.fleet.num_in(State.READY)),
        }
        return stats | servers
