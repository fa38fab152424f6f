"""Runs workflows as asyncio tasks under a staleness bound, and hands out batches.

    submit --> queue --admission--> episode tasks --accepted--> results --take--> batch
                          ^               |
                          +-- capacity <--+-- rejected (None, filtered, or failed)

Everything here belongs to the rollout loop; `megarl.rollout.engine` is the door for the
trainer's thread. Episodes start in the order of submission, and a batch is the oldest
accepted ones in that order, so with a bound of 0 the order of a batch is that of its rows.
"""

import asyncio
import bisect
import logging
import time
from collections import Counter, deque
from pathlib import Path
from typing import Any, Protocol

from megarl.errors import EngineError
from megarl.rollout import workflow_context
from megarl.rollout.api import AcceptFn, GenerationEngine, RolloutWorkflow, Row
from megarl.rollout.conform import conform
from megarl.rollout.episode_log import Task, dump_episode, trace_episode
from megarl.rollout.failures import Failures
from megarl.rollout.finished import Finished, as_batch
from megarl.rollout.staleness import StalenessManager
from megarl.rollout.workflow_context import WorkflowContext
from megarl.stats import trace
from megarl.trajectory import Trajectory

logger = logging.getLogger(__name__)


class Prompts(Protocol):
    """An endless stream of lists of rows."""

    def __next__(self) -> list[Row]: ...


class WorkflowExecutor:
    """The pool. Every method runs in the rollout loop."""

    def __init__(
        self,
        engine: GenerationEngine,
        staleness: StalenessManager,
        *,
        dump_dir: Path | None = None,
        most_at_once: int | None = None,
    ) -> None:
        self._engine, self.staleness, self._dump_dir = engine, staleness, dump_dir
        self._most_at_once = most_at_once
        """Episodes of one `run_each`, which keeps to no staleness bound; None is all."""
        self._queue: deque[Task] = deque()
        self._episodes: set[asyncio.Task[None]] = set()
        self._others: set[asyncio.Task[Trajectory | None]] = set()
        """Episodes of `run_each`."""
        self._finished = Finished()
        self._is_dynamic = False
        """Whether rejected episodes use up their places, see `prepare`."""
        self._rows: dict[int, Row] = {}
        """Of training episodes from submission until they are taken or rejected."""
        self._arrived = asyncio.Event()
        self._next_task_id = 0
        self._paused = False
        self._failures = Failures(staleness.max_concurrent_rollouts)
        self._bug: BaseException | None = None

    # ------------------------------------------------------------------ admission

    def submit(
        self, data: Row, workflow: RolloutWorkflow, should_accept: AcceptFn | None = None
    ) -> int:
        """Queue an episode; it starts when the staleness bound allows. Returns its task id."""
        task = Task(self._take_id(), data, workflow, should_accept)
        self._queue.append(task)
        self._rows[task.task_id] = data
        self.staleness.on_submitted()
        self.admit()
        return task.task_id

    def pause(self) -> None:
        """Start no more episodes; those that run go on."""
        self._paused = True

    def resume(self) -> None:
        self._paused = False
        self.admit()

    def admit(self) -> None:
        """Start what the bound allows at the engine's version."""
        if self._paused:
            return
        version = self._engine.get_version()
        for _ in range(min(self.staleness.capacity(version), len(self._queue))):
            self.staleness.on_started(version)
            self._start(self._queue.popleft(), version)

    def state_dict(self) -> dict[str, Any]:
        """The counts, and what `num_pending` counts, in order of submission: (row, trajectory)s.

        The trajectory of an episode that is queued or running is None. `spent` are places that
        rejected episodes have used up; `rejected_before`, of each whose place no batch has taken
        yet, the pending episode that it stands before.
        """
        pending = sorted(self._rows)
        rejected = sorted(self._finished.rejected)
        counts = self.staleness.counts
        return {
            "submitted": counts.submitted,
            "rejected": counts.rejected,
            "spent": self.staleness.spent - len(rejected),
            "rejected_before": [bisect.bisect(pending, i) for i in rejected],
            "failures": dict(self._failures.reasons),
            "pending": [(self._rows[i], self._finished.accepted.get(i)) for i in pending],
        }

    def load_state_dict(
        self,
        state: dict[str, Any],
        version: int,
        workflow: RolloutWorkflow,
        should_accept: AcceptFn | None = None,
    ) -> None:
        """Go on as a pool that has handed out `version` batches. Before the first submission.

        What had finished can be taken at once; the other episodes run again from their rows.
        """
        assert not self._rows, "episodes were submitted before the state was loaded"
        pending = state["pending"]
        rejected_before = Counter(state.get("rejected_before", []))
        self._is_dynamic = bool(rejected_before)
        self.staleness.on_version_recovered(
            version,
            submitted=state["submitted"] - len(pending),
            rejected=state["rejected"],
            spent=state.get("spent", 0),
        )
        self._failures.reasons.update(state["failures"])
        for place in range(len(pending) + 1):
            for _ in range(rejected_before[place]):
                self._finished.rejected.add(self._take_id())
                self.staleness.on_restored(is_rejected=True)
            if place == len(pending):
                break
            row, trajectory = pending[place]
            if trajectory is None:
                self.submit(row, workflow, should_accept)
                continue
            task_id = self._take_id()
            self.staleness.on_submitted()
            self.staleness.on_restored()
            self._rows[task_id], self._finished.accepted[task_id] = row, trajectory

    @property
    def num_pending(self) -> int:
        """Episodes queued, running, or finished and not taken."""
        return len(self._rows)

    # ------------------------------------------------------------------ episodes

    def _take_id(self) -> int:
        self._next_task_id += 1
        return self._next_task_id - 1

    def _start(self, task: Task, version: int) -> None:
        episode = asyncio.create_task(self._run(task, version), name=f"episode-{task.task_id}")
        self._episodes.add(episode)
        episode.add_done_callback(self._episode_ended)

    def _episode_ended(self, episode: asyncio.Task[None]) -> None:
        self._episodes.discard(episode)
        if not episode.cancelled() and episode.exception() is not None:
            # Not the workflow's error, which `_attempt` counts: a bug of the pool itself.
            self._bug = episode.exception()
        self._arrived.set()
        self.admit()

    async def _run(self, task: Task, version: int) -> None:
        trajectory = await self._attempt(task)
        if trajectory is None:
            self.staleness.on_rejected(version, is_spent=self._is_dynamic)
            del self._rows[task.task_id]
            if self._is_dynamic:
                self._finished.rejected.add(task.task_id)
            return
        self.staleness.on_accepted(version)
        self._finished.accepted[task.task_id] = trajectory

    async def _attempt(self, task: Task) -> Trajectory | None:
        """The trajectory if it was accepted, else None with the reason counted."""
        started_s = time.monotonic()
        trajectory = await self._episode(task)
        if trace.is_on():
            trace_episode(task, trajectory, started_s)
        return trajectory

    async def _episode(self, task: Task) -> Trajectory | None:
        workflow_context.set_for_task(WorkflowContext(task.is_eval, task.task_id))
        try:
            version = self._engine.get_version()
            answer = await task.workflow.arun_episode(self._engine, task.data)
            if answer is None:
                self._failures.reasons["workflow returned None"] += 1
                return None
            trajectory = conform(answer, version)
            if task.should_accept is not None and not task.should_accept(trajectory):
                self._failures.reasons["filtered"] += 1
                return None
        except Exception as error:  # noqa: BLE001 - an episode is the user's code: it is counted
            self._failures.on_error(error, is_eval=task.is_eval)
            return None
        if not task.is_eval:
            self._failures.on_success()
        if self._dump_dir is not None:
            await asyncio.to_thread(dump_episode, self._dump_dir, task, trajectory)
        return trajectory

    # ------------------------------------------------------------------ results

    async def wait(self, count: int, timeout_s: float | None) -> Trajectory:
        """The oldest `count` accepted episodes, in order of submission, as one batch.

        Raises:
          TimeoutError: fewer are there after `timeout_s`.
          EngineError: see an_episode_ended.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while not self.is_ready(count):
                    await self.an_episode_ended()
        except TimeoutError as error:
            raise TimeoutError(
                f"{len(self._finished.accepted)} of {count} episodes within {timeout_s} s; "
                f"{self.staleness.counts}, {len(self._queue)} queued"
            ) from error
        return self.take(count)

    async def prepare(
        self,
        prompts: Prompts,
        workflow: RolloutWorkflow,
        should_accept: AcceptFn | None = None,
        *,
        limit: int | None = None,
        is_dynamic: bool = False,
        fewest: int = 1,
    ) -> list[Trajectory]:
        """The episodes of the next training batch, in order of submission; `as_batch` joins them.

        Args:
          prompts: endless; read whenever fewer than `limit` episodes are pending. None is one
            batch more than a version may start: the next version's start without the trainer.
          is_dynamic: the batch is what was accepted of `consumer_batch_size` episodes: a rejected
            one is not replaced, so it cannot hold up the step.
          fewest: of a dynamic batch; while fewer were accepted, rejected ones are replaced.

        Raises:
          ValueError: `fewest` is less than 1 or more than a batch has; or all that may start at
            this version was taken before.
          EngineError: episodes do nothing but fail.
        """
        count = self.staleness.consumer_batch_size
        if not 1 <= fewest <= count:
            raise ValueError(f"fewest: expected 1 to {count} episodes, got {fewest}")
        limit = max(limit or self.staleness.pending_limit + count, count)
        self._set_dynamic(is_dynamic)
        while True:
            while self.num_pending < limit:
                for row in next(prompts):
                    self.submit(row, workflow, should_accept)
            if freed := self._finished.drop_rejected(count, fewest):
                self._free(freed)
            elif self.is_ready(count):
                return self._take(count)
            else:
                self._check_that_episodes_may_come()
                await self.an_episode_ended()

    def _check_that_episodes_may_come(self) -> None:
        version = self._engine.get_version()
        if not self._episodes and not self._paused and self.staleness.capacity(version) <= 0:
            raise ValueError(
                f"every batch that may start at version {version} was taken: "
                f"set_version({version + 1}) comes before the next"
            )

    def _set_dynamic(self, is_dynamic: bool) -> None:
        if self._is_dynamic and not is_dynamic:
            rejected, self._finished.rejected = self._finished.rejected, set()
            self._free(len(rejected))
        self._is_dynamic = is_dynamic

    def _free(self, count: int) -> None:
        self.staleness.on_freed(count)
        self.admit()

    def is_ready(self, count: int) -> bool:
        """Whether `count` episodes that ended can be taken.

        A whole batch also waits for what would be too old for the next one.
        """
        if len(self._finished) < count:
            return False
        is_batch = count >= self.staleness.consumer_batch_size
        return not (is_batch and self.staleness.overdue(self._engine.get_version()))

    def take(self, count: int) -> Trajectory:
        """The oldest `count` accepted episodes, in order of submission, as one batch."""
        return as_batch(self._take(count))

    def _take(self, count: int) -> list[Trajectory]:
        taken = self._finished.take(count)
        for task_id in taken:
            del self._rows[task_id]
        return list(taken.values())

    async def an_episode_ended(self) -> None:
        """Waits for the next end of any episode. EngineError if they do nothing but fail."""
        self._arrived.clear()
        bug, self._bug = self._bug, None
        if error := bug or self._failures.take_error():
            raise error
        await self._arrived.wait()

    async def run_all(
        self,
        rows: list[Row],
        workflow: RolloutWorkflow,
        *,
        is_eval: bool,
        should_accept: AcceptFn | None = None,
    ) -> Trajectory:
        """`run_each` as one batch of what was accepted, in the rows' order."""
        results = await self.run_each(rows, workflow, is_eval=is_eval, should_accept=should_accept)
        return as_batch([trajectory for trajectory in results if trajectory is not None])

    async def run_each(
        self,
        rows: list[Row],
        workflow: RolloutWorkflow,
        *,
        is_eval: bool,
        should_accept: AcceptFn | None = None,
    ) -> list[Trajectory | None]:
        """Every row once, outside of the staleness bound; None where nothing was accepted.

        Raises:
          EngineError: every episode failed.
        """
        tasks = [Task(self._take_id(), row, workflow, should_accept, is_eval) for row in rows]
        places = asyncio.Semaphore(self._most_at_once or max(len(rows), 1))

        async def attempt(task: Task) -> Trajectory | None:
            async with places:
                return await self._attempt(task)

        async with asyncio.TaskGroup() as group:
            running = [group.create_task(attempt(task)) for task in tasks]
            for episode in running:
                self._others.add(episode)
                episode.add_done_callback(self._others.discard)
        results = [task.result() for task in running]
        num_failed = sum(trajectory is None for trajectory in results)
        if num_failed == len(rows):
            raise EngineError(
                f"none of {len(rows)} episodes succeeded: {dict(self._failures.reasons)}"
            )
        if num_failed:
            logger.warning("%d of %d episodes gave nothing", num_failed, len(rows))
        return results

    def export_stats(self) -> dict[str, float]:
        """Counts since the start, by reason for what was rejected."""
        counts = self.staleness.counts
        stats = {
            "submitted": counts.submitted,
            "running": counts.running,
            "accepted": counts.accepted,
            "rejected": counts.rejected,
        }
        rejected = {f"rejected/{reason}": n for reason, n in self._failures.reasons.items()}
        return {name: float(value) for name, value in (stats | rejected).items()}

    async def close(self) -> None:
        """Cancel what runs, start nothing more, and wait for the end of it."""
        self.pause()
        self._queue.clear()
        episodes = [*self._episodes, *self._others]
        for episode in episodes:
            episode.cancel()
        await asyncio.gather(*episodes, return_exceptions=True)
