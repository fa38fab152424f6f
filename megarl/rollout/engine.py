"""The trainer's handle on the servers: one thread, one asyncio loop, many episodes.

Methods without `async` are called from the trainer's thread and return when the loop has
answered; the loop itself never waits for the trainer. While the trainer trains, episodes go
on: whatever was submitted is admitted as versions advance.
"""

import asyncio
import concurrent.futures
import gc
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from megarl.config.schema import GenerationHyperparameters, InferenceEngineConfig
from megarl.errors import EngineError, EngineTimeout
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
from megarl.rollout.membership import read_servers
from megarl.rollout.server_state import State
from megarl.rollout.staleness import StalenessManager
from megarl.stats import trace
from megarl.trajectory import Trajectory

logger = logging.getLogger(__name__)
T = TypeVar("T")

_CONTROL_TIMEOUT_S = 120.0
_CLIENTS_POLL_S = 0.25
_SEEDS = 1 << 31
_SEED_STRIDE = 1_000_003


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
        self._stopped_s = time.monotonic()
        """When `pause_generation` last stopped the servers."""
        self._dead: EngineError | None = None
        self.refit: Callable[[], None] | None = None
        """What brings weights to servers that came back while the trainer waits here for
        episodes. Runs in the trainer's thread."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    # ------------------------------------------------------------------ the loop

    def initialize(self) -> None:
        """Start the loop's thread."""
        started = threading.Event()

        def run_loop() -> None:
            asyncio.run(self._main(started))

        self._thread = threading.Thread(target=run_loop, name="rollout", daemon=True)
        self._thread.start()
        if not started.wait(_CONTROL_TIMEOUT_S):
            raise EngineTimeout(f"the rollout loop did not start in {_CONTROL_TIMEOUT_S} s")

    async def _main(self, started: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
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
        started.set()
        await self._stop.wait()
        if self._health_watch is not None:
            self._health_watch.cancel()
        await self.executor.close()
        await self.fleet.close()
        gc.unfreeze()

    def run(self, coro: Coroutine[Any, Any, T], timeout_s: float | None) -> T:
        """The result of `coro`, run on the loop. EngineTimeout after `timeout_s`."""
        assert self._loop is not None, "initialize() comes first"
        future = asyncio.run_coroutine_threadsafe(coro, self._loop)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            done, _ = concurrent.futures.wait([future], timeout=1.0)
            if done:
                return future.result()
            if self._dead is not None:
                future.cancel()
                raise self._dead
            if self.refit is not None and self.fleet.needs_weights:
                refit, self.refit = self.refit, None  # what it asks of the loop waits here, too
                refit()
                self.refit = refit
            if deadline is not None and time.monotonic() > deadline:
                future.cancel()
                name = getattr(coro, "__qualname__", "a coroutine")
                raise EngineTimeout(f"{name}: not done after {timeout_s} s on the loop")

    async def watch_health(self) -> None:
        """Until no healthy server is left: then `run` raises. Ends with the loop."""
        self._dead = await self.fleet.watch()

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
        if self._loop is None or self._thread is None:
            return
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(_CONTROL_TIMEOUT_S)
        if self._thread.is_alive():
            raise EngineTimeout(f"the rollout loop did not end in {_CONTROL_TIMEOUT_S} s")
        self._loop = self._thread = None

    # ------------------------------------------------------------------ generation (in the loop)

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """One response, through any number of interruptions.

        It is asked for in parts of at most `rollout.max_tokens_per_request`; what a pause ended
        is asked for again when generation is resumed, and what a server owed that is lost, of
        another one. Tokens so far are the next part's prompt; each keeps the logprob and version
        it was sampled with.

        Raises:
          ValueError: the prompt leaves no room for a token.
          EngineError: the server failed, or stayed silent.
        """
        gconfig = req.gconfig
        budget = min(gconfig.max_new_tokens, gconfig.max_tokens - len(req.input_ids))
        if budget < 1:
            raise ValueError(
                f"request {req.rid}: a prompt of {len(req.input_ids)} tokens leaves no room in "
                f"max_tokens {gconfig.max_tokens}"
            )
        out = ModelResponse(input_tokens=list(req.input_ids), stop_reason="abort")
        started = time.monotonic()
        most = self._most_tokens(gconfig, budget)
        while out.stop_reason == "abort":
            await self._generating.wait()
            done = out.output_len
            wanted = min(most, budget - done)
            part = ModelRequest(
                rid=req.rid, input_ids=out.input_tokens + out.output_tokens, gconfig=gconfig
            )
            chunk = await self.fleet.generate(part, _rest(gconfig, done), wanted)
            if not done:
                out.ttft_s = time.monotonic() - started
            out.output_tokens += chunk.tokens
            out.output_logprobs += chunk.logprobs
            out.output_versions += chunk.versions
            out.stop_reason = chunk.stop_reason  # type: ignore[assignment]
            if out.stop_reason == "length" and len(chunk.tokens) == wanted:
                out.stop_reason = "abort"  # of this part only
            if out.stop_reason == "abort" and out.output_len >= budget:
                out.stop_reason = "length"
        out.latency_s = time.monotonic() - started
        return out

    def _most_tokens(self, gconfig: GenerationHyperparameters, budget: int) -> int:
        """Of one part. A server that sees a part looks for no stop string that began before it,
        and counts no repetitions."""
        is_one_piece = bool(gconfig.stop) or gconfig.frequency_penalty != 0
        limit = None if is_one_piece else self.config.max_tokens_per_request
        return budget if limit is None else limit

    # ------------------------------------------------------------------ versions and pauses

    def get_version(self) -> int:
        return self._version

    def set_version(self, version: int) -> None:
        """The servers hold `version`: more episodes may start."""

        def advance() -> None:
            self._version = version
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
        """Stop every server; requests aborted by it wait for `continue_generation`."""

        async def stop_all() -> None:
            self._generating.clear()
            async with asyncio.TaskGroup() as tasks:
                for client in self.clients:
                    tasks.create_task(client.pause(mode))
            self._stopped_s = time.monotonic()

        self.run(stop_all(), _CONTROL_TIMEOUT_S)

    def continue_generation(self) -> None:
        async def start_all() -> None:
            async with asyncio.TaskGroup() as tasks:
                for client in self.clients:
                    tasks.create_task(client.resume())
            trace.span("generation stopped", trace.PAUSES, self._stopped_s, time.monotonic())
            self._generating.set()

        self.run(start_all(), _CONTROL_TIMEOUT_S)

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


def _rest(gconfig: GenerationHyperparameters, done: int) -> GenerationHyperparameters:
    """For what follows the first `done` tokens."""
    if not done:
        return gconfig
    # The same seed would draw the same numbers again.
    seed = None if gconfig.seed is None else (gconfig.seed + done * _SEED_STRIDE) % _SEEDS
    return gconfig.new(min_new_tokens=max(0, gconfig.min_new_tokens - done), seed=seed)
