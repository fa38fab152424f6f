"""When and where a run writes its model: HF folders that any library can read."""

import json
import shutil
import time
from pathlib import Path

import torch
import torch.distributed as dist

from megarl.actor.engine import MegatronEngine
from megarl.bridge.disk import write_safetensors
from megarl.config.run import BaseExperimentConfig, FrequencyConfig

HF_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
"""Config and tokenizer files that go along from the model's own folder."""


class Frequency:
    """Says when something is due, by steps, epochs or seconds since it last was."""

    def __init__(self, config: FrequencyConfig, steps_per_epoch: int) -> None:
        self._config, self._steps_per_epoch = config, steps_per_epoch
        self._last_s = time.monotonic()

    def due(self, step: int) -> bool:
        config = self._config
        by_steps = config.freq_steps and step % config.freq_steps == 0
        by_epochs = config.freq_epochs and step % (config.freq_epochs * self._steps_per_epoch) == 0
        by_time = config.freq_secs and time.monotonic() - self._last_s >= config.freq_secs
        is_due = bool(by_steps or by_epochs or by_time)
        if is_due:
            self._last_s = time.monotonic()
        return is_due


class Checkpointer:
    """HF exports under RUN/checkpoints/step_N, and the last one under RUN/checkpoints/final."""

    def __init__(
        self,
        config: BaseExperimentConfig,
        run_dir: Path,
        engine: MegatronEngine,
        steps_per_epoch: int,
    ) -> None:
        self._folder, self._engine = run_dir / "checkpoints", engine
        self._saver = Frequency(config.saver, steps_per_epoch)

    def after_step(self, step: int, *, last: bool) -> None:
        """Collective. Rank 0's clock decides, so that all ranks save or none does."""
        due = torch.tensor([self._saver.due(step)])
        dist.broadcast(due, 0, group=self._engine.mesh.cpu_group)
        if due:
            save_hf(self._engine, self._folder / f"step_{step}")
        if last:
            save_hf(self._engine, self._folder / "final")


def save_hf(engine: MegatronEngine, folder: Path, max_shard_bytes: int = 5 << 30) -> None:
    """The engine's weights, config and tokenizer as an HF folder. Collective over the world.

    The folder appears whole or not at all; an older one of the same name is replaced.
    """
    if engine.mesh.rank == 0:
        partial = folder.with_name(folder.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        write_safetensors(engine.export, partial, max_shard_bytes=max_shard_bytes)
        source = Path(engine.config.path)
        for pattern in HF_FILES:
            for path in source.glob(pattern):
                if not path.name.endswith(".index.json"):
                    shutil.copy(path, partial / path.name)
        set_dtype(partial / "config.json", str(engine.spec.transformer.params_dtype))
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    else:
        for _ in engine.export:
            raise AssertionError("only rank 0 is given tensors")
    dist.barrier(group=engine.mesh.cpu_group)


def set_dtype(path: Path, dtype: str) -> None:
    config = json.loads(path.read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = dtype.removeprefix("torch.")
    path.write_text(json.dumps(config, indent=2) + "\n")
