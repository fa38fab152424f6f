"""Several runs on one row, as one group."""

import asyncio
import logging
from collections import Counter
from collections.abc import Coroutine, Iterable
from dataclasses import replace
from typing import Any

from megarl.rollout import workflow_context
from megarl.rollout.api import GenerationEngine, ModelRequest, ModelResponse, RolloutWorkflow, Row
from megarl.rollout.conform import conform
from megarl.trajectory import Trajectory, concat_padded

logger = logging.getLogger(__name__)

_SEED_STRIDE = 15_485_863
_SEEDS = 1 << 31

Run = Coroutine[Any, Any, Trajectory | None]


async def run_group(runs: Iterable[Run], failed: Counter[str]) -> list[Trajectory]:
    """What runs on one row give that go on at the same time, in order, without what is None.

    In training one that raises ends the others: a group of the rest would be compared with a
    mean of too few. In an evaluation each run is a sample of its own: one that raises, or has
    a reward that is no finite number, is left out, for the evaluation to count as failed, and the
    others stand.

    Args:
      failed: of the workflow; counts by their name the errors that were left out.

    Raises:
      What a run raised; in an evaluation only if no run gave anything.
    """
    errors: list[Exception] = []

    async def attempt(run: Run) -> Trajectory | None:
        try:
            rows = await run
            if rows is not None and not rows["rewards"].isfinite().all():
                raise ValueError(f"rewards must be finite, got {rows['rewards'].tolist()}")
            return rows
        except Exception as error:  # noqa: BLE001 - a run is the user's code: it is counted
            errors.append(error)
            return None

    is_eval = workflow_context.get().is_eval
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(attempt(run) if is_eval else run) for run in runs]
    kept = [rows for task in running if (rows := task.result()) is not None]
    if errors and not kept:
        raise errors[0]
    for error in errors:
        _count(error, failed)
    return kept


def _count(error: Exception, failed: Counter[str]) -> None:
    while isinstance(error, ExceptionGroup):  # a task group's: the cause is inside
        error = error.exceptions[0]
    kind = type(error).__name__
    failed[kind] += 1
    if failed[kind] == 1:
        logger.warning(
            "a sample of an evaluation has no score (later ones of this kind are not told): %s: %s",
            kind,
            error,
            exc_info=error,
        )


class GroupedWorkflow(RolloutWorkflow):
    """Runs `workflow` `group_size` times on a row, at the same time; the rows of all are one group.

    Runs that return None are left out; None if all of them do. See `run_group` for one that
    raises; `failed` counts those that an evaluation left out.
    """

    def __init__(self, workflow: RolloutWorkflow, group_size: int) -> None:
        self.workflow, self.group_size = workflow, group_size
        self.tokenizer: Any = getattr(workflow, "tokenizer", None)
        self.failed: Counter[str] = Counter()

    async def arun_episode(self, engine: GenerationEngine, data: Row) -> Trajectory | None:
        version = engine.get_version()

        async def run(index: int) -> Trajectory | None:
            rows = await self.workflow.arun_episode(_EngineOfRun(engine, index), dict(data))
            return None if rows is None else conform(rows, version)

        kept = await run_group(map(run, range(self.group_size)), self.failed)
        return concat_padded(kept) if kept else None


class _EngineOfRun:
    """The engine, with seeds of this run: a row's own would sample the same in every run."""

    def __init__(self, engine: GenerationEngine, index: int) -> None:
        self._engine, self._index = engine, index

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        seed = req.gconfig.seed
        if seed is not None and self._index:
            seed = (seed + self._index * _SEED_STRIDE) % _SEEDS
            req = replace(req, gconfig=req.gconfig.new(seed=seed))
        return await self._engine.agenerate(req)

    def get_version(self) -> int:
        return self._engine.get_version()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)
