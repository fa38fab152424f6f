"""Runs Python that a model wrote, in a process that can harm nothing and outlive nothing.

Each run has a supervisor of its own (megarl/rollout/sandbox_supervisor.py), which makes the
walls, keeps the limits and ends every process of the run. What the walls are depends on what
the machine permits; the first of these that it permits is used, and one that it refuses is
told in the log:

  namespaces  root with CAP_SYS_ADMIN, or a user who may make user namespaces. The program sees
              no network, no processes but its own, no home folder, no sockets of the machine;
              all files are read-only but a /tmp in memory, of `file_bytes` in all. Started by
              root it is a user without rights, of its own.
  uid         root without that, as in most containers. The program is a user of its own, so
              that it can neither signal nor read other processes, nor files that are not
              everybody's. It has the network, and can write wherever everybody can.
  process     a user without rights, or an interpreter that only root can read. Limits and the
              end of all processes hold for a program that does not fight them. One that does
              can read and write what the trainer can, the environment of the trainer's
              processes included, and can kill them: run no hostile code.

In each of them the environment is built anew, no descriptor but 0, 1 and 2 is open, and a limit
is a program's own, not a user's. Not limited: memory over all processes of a run (each has
`memory_bytes`), and System V shared memory where there are no namespaces.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from megarl.errors import MegarlError
from megarl.rollout.slots import Slots

logger = logging.getLogger(__name__)

Isolation = Literal["namespaces", "uid", "process"]
Why = Literal["ok", "error", "crash", "timeout", "memory", "output", "processes"]

_SUPERVISOR = Path(__file__).with_name("sandbox_supervisor.py")
_GRACE_S = 30.0
"""A supervisor may take so much longer than its program."""
_END_S = 30.0
_POLL_S = 0.002
_HOME = os.path.expanduser("~")
_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONUTF8": "1",
    "PYTHONHASHSEED": "0",  # the same code gives the same answer in each run
    "PYTHONSAFEPATH": "1",
    "PYTHONNOUSERSITE": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    # A thread for each CPU is more than the limits allow, and not faster in a small run.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


class SandboxFailed(MegarlError):
    """A program could not be run; this says nothing about the program."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Of one run."""

    wall_s: float = 10.0
    cpu_s: float = 10.0
    """Of each process; the kernel counts whole seconds."""
    memory_bytes: int = 1 << 30
    """Address space of each process."""
    output_bytes: int = 1 << 16
    """Of stdout and of stderr; a program that writes more is ended."""
    file_bytes: int = 64 << 20
    """Of one file; with namespaces of all files together."""
    processes: int = 32
    """Processes and threads at one time."""
    open_files: int = 128

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not value > 0:
                raise ValueError(f"{name} must be above 0, got {value}")


@dataclass(frozen=True)
class SandboxResult:
    stdout: str
    """What was written up to the limit; bytes that are no UTF-8 are replaced."""
    stderr: str
    exit_code: int | None
    """Below 0: the signal that ended the program. None: a limit did."""
    why: Why
    """ok: exit code 0. error: another one, as of an exception. crash: a signal. timeout:
    `wall_s` or `cpu_s`. memory: a MemoryError. output, processes: more than the limit."""
    wall_s: float
    isolation: Isolation


class PythonSandbox:
    """Runs programs, `max_concurrent` at one time in each event loop; others wait.

    Args:
      max_concurrent: None is the number of CPUs.
      python: the interpreter; a program can import what it can.
      isolation: what may be used, the best first. With ("namespaces",) there is no other way.

    Raises:
      ValueError: `isolation` is empty or names another one.
    """

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        max_concurrent: int | None = None,
        python: str = sys.executable,
        isolation: Sequence[Isolation] = get_args(Isolation),
    ) -> None:
        if not isolation or not set(isolation) <= set(get_args(Isolation)):
            raise ValueError(f"isolation: expected some of {get_args(Isolation)}, got {isolation}")
        self.limits, self.python = limits or Limits(), os.path.abspath(python)
        self._isolations = list(isolation)
        self._has_run = False
        self._slots = Slots(max_concurrent or os.cpu_count() or 1)

    async def run(self, code: str, stdin: str = "") -> SandboxResult:
        """The end of `code`, run as a script. Every process of it has ended.

        Raises:
          SandboxFailed: no isolation works here, or a supervisor broke.
        """
        async with self._slots():
            while True:
                isolation = self._isolations[0]
                answer = await self._supervise(code, stdin, isolation)
                if "setup" not in answer:
                    self._has_run = True
                    return SandboxResult(**answer, isolation=isolation)
                self._refused(isolation, answer["setup"])

    def _refused(self, isolation: Isolation, reason: str) -> None:
        """Go on to the next isolation, unless this one has worked before."""
        if self._isolations[0] != isolation:
            return  # another run has found it out
        if self._has_run or len(self._isolations) == 1:
            raise SandboxFailed(f"sandbox, isolation {isolation}: {reason}")
        self._isolations.pop(0)
        logger.warning(
            "sandbox: no isolation by %s here (%s): programs are held by %s alone, see %s",
            isolation,
            reason,
            self._isolations[0],
            __name__,
        )

    async def _supervise(self, code: str, stdin: str, isolation: Isolation) -> dict[str, Any]:
        job = {
            "code": code,
            "stdin": stdin,
            "python": self.python,
            "isolation": isolation,
            "limits": asdict(self.limits),
            "home": _HOME,
        }
        ours, theirs = socket.socketpair()
        with theirs:
            process = self._start(theirs.fileno())
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(self.limits.wall_s + _GRACE_S):
                reader, writer = await asyncio.open_connection(sock=ours)
                writer.write(json.dumps(job).encode() + b"\n")
                await writer.drain()
                line = await reader.read(-1)
        except TimeoutError as error:
            raise SandboxFailed(
                f"sandbox: its supervisor {process.pid} did not answer within "
                f"{self.limits.wall_s + _GRACE_S:g} s"
            ) from error
        except ConnectionError as error:
            raise SandboxFailed(f"sandbox: its supervisor broke: {error!r}") from error
        finally:
            (writer or ours).close()  # a supervisor that still runs ends its program now
            await _ended(process)
        if not line:
            raise SandboxFailed(f"sandbox: its supervisor ended with code {process.returncode}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    @staticmethod
    def _start(stdin: int) -> "subprocess.Popen[bytes]":
        """Not asyncio's: on Python 3.11 it keeps a thread for each process."""
        kept = {k: os.environ[k] for k in ("LD_LIBRARY_PATH", "TMPDIR") if k in os.environ}
        try:
            return subprocess.Popen(
                [sys.executable, "-I", "-S", "-B", str(_SUPERVISOR)],
                stdin=stdin,
                stdout=subprocess.DEVNULL,
                env={**_ENVIRONMENT, **kept},
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            raise SandboxFailed(f"sandbox: no supervisor could be started: {error}") from error


async def _ended(process: "subprocess.Popen[bytes]") -> None:
    """Wait for a supervisor that has answered or was left; kill one that does not end."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_END_S):
            while process.poll() is None:  # noqa: ASYNC110 - it ends as it closes its socket
                await asyncio.sleep(_POLL_S)
            return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    logger.warning("sandbox: supervisor %d did not end within %g s, killed", process.pid, _END_S)
    process.wait(_END_S)
