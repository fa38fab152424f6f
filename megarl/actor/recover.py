"""Going on with a run that was cut: what is saved beside the model, and how it comes back.

A state is taken after a step's push, and read by the same command started again. Episodes
that were queued, running, or finished and unused at that moment are run again from their
rows, in their order; nothing else of the rollout side needs saving.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megarl.actor.checkpoint import Frequency
from megarl.actor.engine import MegatronEngine
from megarl.actor.state import latest_state, load_state, save_state
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

    def restore(self, prompts: PromptStream | None, head: RolloutHead | None = None) -> int:
        """Load the newest state. Collective.

        Args:
          prompts: rank 0's stream, None elsewhere.
          head: whose pool gets the rows that were on their way.

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
            head.engine.recover(counters["step"])
            for row in counters["pending_rows"]:
                head.engine.submit(row, head.workflow, head.should_accept)
        step: int = counters["step"]
        return step

    def after_step(
        self, step: int, prompts: PromptStream | None, head: RolloutHead | None = None
    ) -> None:
        """Save if it is due. Collective; rank 0's clock decides."""
        due = torch.tensor([self._frequency.due(step)])
        dist.broadcast(due, 0, group=self._engine.mesh.cpu_group)
        if not due:
            return
        counters: dict[str, Any] = {}
        if head is not None:
            counters["pending_rows"] = head.engine.pending_rows()
        if prompts is not None:
            counters["prompts"] = prompts.state_dict()
        save_state(self._engine, self._root, step, counters)
