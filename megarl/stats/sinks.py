"""Where metrics go: metrics.jsonl always, TensorBoard and W&B by config."""

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

from megarl.config.run import WandbConfig
from megarl.errors import ConfigError


def check_wandb(config: WandbConfig) -> None:
    """ConfigError if W&B is asked for and not installed."""
    if config.mode != "disabled" and importlib.util.find_spec("wandb") is None:
        raise ConfigError(
            f"stats_logger.wandb.mode: {config.mode} needs the package wandb, which is missing"
        )


class MetricsLogger:
    """One row a step: an object a line in RUN_DIR/metrics.jsonl, scalars elsewhere."""

    def __init__(
        self,
        run_dir: Path,
        *,
        tensorboard: bool,
        wandb: WandbConfig,
        config: dict[str, Any],
        experiment_name: str,
        trial_name: str,
    ) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        # Line-buffered: a line is whole in the file once `commit` returns.
        self._file = (run_dir / "metrics.jsonl").open("a", encoding="utf-8", buffering=1)
        self._tensorboard = self._wandb = None
        if tensorboard:
            from torch.utils.tensorboard.writer import SummaryWriter

            self._tensorboard = SummaryWriter(str(run_dir / "tensorboard"))
        check_wandb(wandb)
        if wandb.mode != "disabled":
            import wandb as package

            self._wandb = package.init(
                project=wandb.project,
                entity=wandb.entity,
                mode=wandb.mode,
                group=experiment_name,
                name=trial_name,
                dir=str(run_dir),
                config=config,
            )

    def commit(self, step: int, row: dict[str, float]) -> None:
        """Write one row. What is not finite is null in the file: nan is not JSON."""
        clean = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in row.items()
        }
        self._file.write(json.dumps(clean) + "\n")
        if self._tensorboard is not None:
            for key, value in row.items():
                if key != "step":
                    self._tensorboard.add_scalar(key, value, step)
        if self._wandb is not None:
            self._wandb.log(row, step=step)

    def close(self) -> None:
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()
