"""Where metrics go: metrics.jsonl always, TensorBoard and W&B by config.

A row is whole in metrics.jsonl once `commit` returns, so a reader beside the run, and one after
a crash, sees complete lines of valid JSON.
"""

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
    """One object a line in RUN_DIR/metrics.jsonl, and the same numbers to the other sinks.

    An older metrics.jsonl is gone on with, not replaced: a resumed run is one file.

    Args:
      config: what W&B shows as the run's settings.

    Raises:
      ConfigError: see `check_wandb`.
    """

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
        check_wandb(wandb)
        run_dir.mkdir(parents=True, exist_ok=True)
        # Unbuffered: each line is one write, which O_APPEND puts at the end as a whole.
        self._path = run_dir / "metrics.jsonl"
        self._file = self._path.open("ab", buffering=0)
        self._tensorboard = self._wandb = None
        if tensorboard:
            # Brings torch along, so only here: the launcher imports this module too.
            from torch.utils.tensorboard.writer import SummaryWriter

            self._tensorboard = SummaryWriter(str(run_dir / "tensorboard"))
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

    def keep_until(self, step: int) -> list[dict[str, Any]]:
        """Drop the rows after `step`, which a run that goes on writes again; the others.

        A run that begins (step 0) keeps none: what stands there came before the first state.
        """
        lines = self._path.read_text(encoding="utf-8").splitlines()
        # A machine that went down may have left a part of a line at the end.
        whole = [json.loads(line) for line in lines if line.endswith("}")]
        kept = [row for row in whole if row["step"] <= step] if step else []
        if len(kept) < len(lines):
            partial = self._path.with_suffix(".partial")
            partial.write_text("".join(f"{json.dumps(row)}\n" for row in kept), encoding="utf-8")
            partial.rename(self._path)
            self._file.close()
            self._file = self._path.open("ab", buffering=0)
        return kept

    def commit(self, step: int, row: dict[str, float]) -> None:
        """Write one row. What is not finite is null in the file: nan is not JSON."""
        clean = {
            key: value if isinstance(value, int) or math.isfinite(value) else None
            for key, value in row.items()
        }
        self._file.write(f"{json.dumps(clean)}\n".encode())
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
