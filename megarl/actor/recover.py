"""Going on with a run that was cut: what is saved beside the model, and how it comes back.

A state is taken at the end of a step, when all that the step tells its user is written, and
read by the same command started again. Finished episodes that no step has used are kept;
those that were queued or running are run again from their rows, in their order.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megarl.actor.checkpoint import Frequency
from megarl.actor.engine import MegatronEngine
from megarl.actor.state import StateWriter, latest_state, load_pool, load_state
from megarl.config.run import BaseExperimentConfig
from megarl.data.prompts import PromptStream
from megarl.rollout_head import RolloutHead

FOLDER = "recover"


class Recovery:
    """Training states under RUN/recover, by the config's `recover` section."""

    def __init__(
        self,
        config: BaseExperimentConfig,
        run_dir: Path,
        engine: MegatronEngine,
        steps_per_epoch: int,
    ) -> None:
        self._config, self._engine = config.recover, engine
        self._root = run_dir / FOLDER
        self._frequency = Frequency(config.recover, steps_per_epoch)
        self._writer = StateWriter(engine, self._root, in_background=config.recover.in_background)

    def restore(self, prompts: PromptStream | None, head: RolloutHead | None = None) -> int:
        """Load the newest state. Collective.

        Args:
          prompts: rank 0's stream, None elsewhere.
          head: whose pool gets the episodes that were on their way.

        Returns:
          the step to go on after; 0 without a state.
        """
        folder = latest_state(self._root) if self._config.mode == "auto" else None
        if folder is None:
            return 0
        counters = load_state(self._engine, folder)
        if prompts is not None:
            prompts.load_state_dict(counters["prompts"])
        if head is not None:
            head.load_state_dict(load_pool(folder), counters["step"])
        step: int = counters["step"]
        return step

    def after_step(
        self, step: int, prompts: PromptStream | None, head: RolloutHead | None = None
    ) -> None:
        """Save if it is due. Collective; rank 0's clock decides."""
        self._writer.poll()
        due = torch.tensor([self._frequency.due(step)])
        dist.broadcast(due, 0, group=self._engine.mesh.cpu_group)
        if not due:
            return
        counters: dict[str, Any] = {}
        if prompts is not None:
            counters["prompts"] = prompts.state_dict()
        pool = head.state_dict() if head is not None else None
        self._writer.save(step, counters, pool)

    def finish(self) -> None:
        """Wait for a state that is still being written. Collective."""
        self._writer.wait()
