"""Whole runs as a user starts them, and a way to find every process that came of one."""

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
QUICKSTART = REPOSITORY / "configs" / "quickstart.yaml"
RUN_LIMIT_S = 400.0
GONE_LIMIT_S = 60.0


class Run:
    """`megarl COMMAND CONFIG overrides...` in the repository, marked by an environment variable."""

    def __init__(self, command: str, *overrides: str, root: Path, config: Path = QUICKSTART):
        self.marker = f"MEGARL_TEST_RUN={uuid.uuid4().hex}"
        name, _, value = self.marker.partition("=")
        self.folder = root / "quickstart" / "grpo"
        root.mkdir(exist_ok=True)
        self.output = root / "output.txt"
        self._file = self.output.open("w")
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "megarl.cli", command, str(config)),
                f"cluster.fileroot={root}",
                *overrides,
            ],
            cwd=REPOSITORY,
            env={**os.environ, name: value},
            stdout=self._file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def wait(self) -> int:
        """The exit code."""
        code = self.process.wait(RUN_LIMIT_S)
        self._file.close()
        return code

    def text(self) -> str:
        return self.output.read_text()

    def rows(self) -> list[dict]:
        path = self.folder / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def steps(self) -> list[dict]:
        return [row for row in self.rows() if "loss" in row]

    def wait_for_step(self, condition: Callable[[dict], bool] = lambda step: True) -> None:
        """Until metrics.jsonl has a step, and `condition` is true of the last one."""
        deadline = time.monotonic() + RUN_LIMIT_S
        while not (self.steps() and condition(self.steps()[-1])):
            assert self.process.poll() is None, f"the run ended early:\n{self.text()}"
            assert time.monotonic() < deadline, f"no step in {RUN_LIMIT_S} s:\n{self.text()}"
            time.sleep(0.1)

    def wait_for_state(self) -> None:
        """Until a training state is whole: it is written after its step's metrics."""
        deadline = time.monotonic() + RUN_LIMIT_S
        while not (self.folder / "recover" / "latest").is_file():
            assert self.process.poll() is None, f"the run ended early:\n{self.text()}"
            assert time.monotonic() < deadline, f"no state in {RUN_LIMIT_S} s:\n{self.text()}"
            time.sleep(0.1)

    def processes(self) -> dict[int, str]:
        """Pid and command line of every live process with this run's mark."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if self.marker.encode() in (folder / "environ").read_bytes():
                    command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    found[int(folder.name)] = command
            except (FileNotFoundError, PermissionError, ProcessLookupError):
                continue
        return {pid: command for pid, command in found.items() if command}

    def assert_nothing_is_left(self) -> None:
        deadline = time.monotonic() + GONE_LIMIT_S
        while left := self.processes():
            assert time.monotonic() < deadline, f"still running: {left}"
            time.sleep(0.1)
