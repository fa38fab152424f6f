"""Several runs of a workflow on one row, as one group."""

import asyncio
from dataclasses import replace
from typing import Any

from megarl.rollout.api import GenerationEngine, ModelRequest, ModelResponse, RolloutWorkflow, Row
from megarl.rollout.conform import conform
from megarl.trajectory import Trajectory, concat_padded

_SEED_STRIDE = 15_485_863
_SEEDS = 1 << 31


class GroupedWorkflow(RolloutWorkflow):
    """Runs `workflow` `group_size` times on a row, at the same time; the rows of all are one group.

    Runs that return None are left out; None if all of them do. One that raises ends the others
    and rejects the episode: a group of the rest would be compared with a mean of too few.
    """

    def __init__(self, workflow: RolloutWorkflow, group_size: int) -> None:
        self.workflow, self.group_size = workflow, group_size
        self.tokenizer: Any = getattr(workflow, "tokenizer", None)

    async def arun_episode(self, engine: GenerationEngine, data: Row) -> Trajectory | None:
        version = engine.get_version()
        async with asyncio.TaskGroup() as tasks:
            runs = [
                tasks.create_task(
                    self.workflow.arun_episode(_EngineOfRun(engine, index), dict(data))
                )
                for index in range(self.group_size)
            ]
        kept = [conform(rows, version) for run in runs if (rows := run.result()) is not None]
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
