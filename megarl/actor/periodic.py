"""What a script does beside its steps, when it is due: exports, evaluations, logs.

Steps are counted as scripts count them, from 0; files and charts count from 1, as the number
of the weights that a step made.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megarl.actor.checkpoint import Frequency
from megarl.actor.meta import FinetuneSpec, SaveLoadMeta, run_folder, script_rank
from megarl.actor.spmd import MegatronPPOActor
from megarl.config.run import BaseExperimentConfig, FrequencyConfig
from megarl.stats.report import RunReporter

T = TypeVar("T")


class Saver:
    """HF exports under RUN/checkpoints/step_N.

    Args:
      config: of the run, or its section `saver`.
    """

    def __init__(
        self, config: BaseExperimentConfig | FrequencyConfig, ft_spec: FinetuneSpec
    ) -> None:
        section = config.saver if isinstance(config, BaseExperimentConfig) else config
        self.folder = run_folder(config) / "checkpoints"
        self._frequency = Frequency(section, ft_spec.steps_per_epoch)

    def save(
        self,
        actor: MegatronPPOActor,
        epoch: int,
        step: int,
        global_step: int,
        tokenizer: Any = None,
    ) -> Path | None:
        """Export if it is due. Collective; rank 0's clock decides. Returns the folder."""
        if not _due(self._frequency, global_step):
            return None
        folder = self.folder / f"step_{global_step + 1}"
        actor.save(SaveLoadMeta(path=folder, tokenizer=tokenizer))
        return folder


class Evaluator:
    """Calls a function of the script when an evaluation is due.

    Args:
      config: of the run, or its section `evaluator`.
    """

    def __init__(
        self, config: BaseExperimentConfig | FrequencyConfig, ft_spec: FinetuneSpec
    ) -> None:
        section = config.evaluator if isinstance(config, BaseExperimentConfig) else config
        self._frequency = Frequency(section, ft_spec.steps_per_epoch)

    def evaluate(
        self, evaluate_fn: Callable[[], T], epoch: int, step: int, global_step: int
    ) -> T | None:
        """What `evaluate_fn` returns, called on every rank; None if it is not due."""
        return evaluate_fn() if _due(self._frequency, global_step) else None


def _due(frequency: Frequency, global_step: int) -> bool:
    due = torch.tensor([frequency.due(global_step + 1)])
    if dist.is_initialized():
        # Each rank has a clock of its own.
        device = torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")
        on_device = due.to(device)
        dist.broadcast(on_device, 0)
        due = on_device.cpu()
    return bool(due)


class StatsLogger:
    """Rows to metrics.jsonl, TensorBoard and W&B, and a table to the terminal, on rank 0.

    Args:
      start_step: steps that were done before; rows after them leave metrics.jsonl.
    """

    def __init__(
        self, config: BaseExperimentConfig, ft_spec: FinetuneSpec, *, start_step: int = 0
    ) -> None:
        enabled = script_rank() == 0
        self._reporter = RunReporter(config, config.run_dir, enabled=enabled).__enter__()
        self._reporter.start(ft_spec.total_train_steps, after=start_step)

    def commit(
        self,
        epoch: int,
        step: int,
        global_step: int,
        stats: Mapping[str, float] | Sequence[Mapping[str, float]],
    ) -> None:
        """One row for step `global_step`; the later of several mappings win."""
        parts = [stats] if isinstance(stats, Mapping) else stats
        row = {"epoch": float(epoch), "epoch_step": float(step)}
        for part in parts:
            row.update(part)
        self._reporter.step(global_step + 1, row, {})

    def close(self) -> None:
        """Leave the last table on the screen, end the sinks."""
        self._reporter.__exit__(None, None, None)
