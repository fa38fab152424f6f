"""The folder of a run: who may write to it, and what stands in it before the start.

    RUN_DIR/config.yaml     the resolved config
            logs/NAME.log   one for each process but trainer rank 0; logs.1, ... of the run
                            before it was cut and went on
            metrics.jsonl   written by the trainer; its presence marks a folder as used

One launcher at a time holds a run folder: the lock is on the folder itself and ends with the
launcher, however that ends.
"""

import contextlib
import fcntl
import itertools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from megarl.config.run import RecoverConfig
from megarl.errors import ConfigError

CONFIG_NAME = "config.yaml"
METRICS_NAME = "metrics.jsonl"


@contextlib.contextmanager
def claimed(
    run_dir: Path, config_text: str, *, used: Literal["refuse", "empty", "keep"]
) -> Iterator[Path]:
    """Hold `run_dir` with `config_text` as its config and an empty `logs/`.

    Args:
      used: what to do with a folder that has metrics of an earlier trial. Kept logs of the
        processes before go to `logs.1`, `logs.2`, ...

    Raises:
      ConfigError: the folder is used, in use, or cannot be written.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ConfigError(f"cluster.fileroot: {run_dir}: {error.strerror}") from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"trial_name: another launcher is running in {run_dir}") from None
        if (run_dir / METRICS_NAME).exists():
            if used == "refuse":
                raise ConfigError(
                    f"trial_name: {run_dir} holds a trial already; choose another name, or "
                    f"--overwrite to delete that one"
                )
            if used == "empty":
                _empty(run_dir)
        if (run_dir / METRICS_NAME).exists():
            _put_logs_aside(run_dir)
        shutil.rmtree(run_dir / "logs", ignore_errors=True)
        (run_dir / "logs").mkdir()
        write_atomically(run_dir / CONFIG_NAME, config_text)
        yield run_dir
    finally:
        os.close(lock)


def goes_on(run_dir: Path, config_text: str, recover: RecoverConfig) -> bool:
    """Whether the run in `run_dir` is to be gone on with, not an earlier trial in the way.

    It left a training state; or it was cut before its first one, and the same command is given
    again.
    """
    if recover.mode == "disabled":
        return False
    if (run_dir / "recover" / "latest").is_file():
        return True
    config, final = run_dir / CONFIG_NAME, run_dir / "checkpoints" / "final"
    is_same = config.is_file() and config.read_text(encoding="utf-8") == config_text
    return recover.is_on and is_same and not final.exists()


def write_atomically(path: Path, text: str) -> None:
    """A reader finds the old text or the new, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def _put_logs_aside(run_dir: Path) -> None:
    """What a run wrote before it was cut tells why."""
    logs = run_dir / "logs"
    if logs.is_dir():
        taken = {path.name for path in run_dir.glob("logs.*")}
        number = next(i for i in itertools.count(1) if f"logs.{i}" not in taken)
        logs.rename(run_dir / f"logs.{number}")


def _empty(folder: Path) -> None:
    """Delete what `folder` holds; the folder stays, the lock is on it."""
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
