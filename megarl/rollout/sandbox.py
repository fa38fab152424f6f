"""Runs Python that a model wrote, in a process that can harm nothing and outlive nothing.

Each run has a supervisor of its own (megarl/rollout/sandbox_supervisor.py), which makes the
walls, keeps the limits and ends every process of the run. What the walls are depends on what
the machine permits. A program of ours, never one of a model, finds out which is the first of
these that it permits; one that it refuses is told in the log:

  namespaces  root with CAP_SYS_ADMIN, or a user who may make user namespaces. The program sees
              no network, no processes but its own, no terminals or disks, no home folder,
              nothing in /run, /tmp and the like; all files are read-only but a /tmp in memory,
              of `file_bytes` in all. Started by root it is a user without rights, of its own;
              else it can read, and connect to the sockets of, what the user can elsewhere.
  uid         root without that, as in most containers. The program is a user of its own, so
              that it can neither signal nor read other processes, nor files that are not
              everybody's. It has the network, and can write wherever everybody can.
  process     a user without rights. Limits and the end of all processes hold for a program
              that does not fight them. One that does can read and write what the trainer can,
              the environment of the trainer's processes included, and can kill them: run no
              hostile code. Root's program would be root: for root it must be asked for by name,
              as where there are no namespaces and the interpreter is one that only root can read.

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
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from megarl.errors import MegarlError
from megarl.rollout.slots import Slots

logger = logging.getLogger(__name__)

Isolation = Literal["namespaces", "uid", "process"]
Why = Literal["ok", "error", "crash", "timeout", "memory", "output", "processes"]

_ROOT = str(Path(__file__).parents[2])
_SUPERVISOR = (
    "import sys; sys.path.append(sys.argv[1]); "
    "from megarl.rollout.sandbox_supervisor import main; main()"
)
_GRACE_S = 30.0
"""A supervisor may take so much longer than its program."""
_END_S = 30.0
_POLL_S = 0.002
_PROBE_S = 60.0
_PRIVATE = ("~", "/run", "/var/tmp")
_PRIVATE_VARIABLES = ("TMPDIR", "XDG_RUNTIME_DIR")
"""Where sockets of the machine and of its users are, and the variables that name such a place."""
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
        None is namespaces, then uid as root and process as another user.

    Raises:
      ValueError: `isolation` is empty or names another one.
    """

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        max_concurrent: int | None = None,
        python: str = sys.executable,
        isolation: Sequence[Isolation] | None = None,
    ) -> None:
        if isolation is None:
            isolation = ("namespaces", "uid" if os.getuid() == 0 else "process")
        if not isolation or not set(isolation) <= set(get_args(Isolation)):
            raise ValueError(f"isolation: expected some of {get_args(Isolation)}, got {isolation}")
        self.limits, self.python = limits or Limits(), os.path.abspath(python)
        self._isolations = tuple(isolation)
        self._slots = Slots(max_concurrent or os.cpu_count() or 1)

    async def run(self, code: str, stdin: str = "") -> SandboxResult:
        """The end of `code`, run as a script. Every process of it has ended.

        Raises:
          SandboxFailed: no isolation works here, or a supervisor broke.
        """
        async with self._slots():
            isolation = await _isolation(self.python, self._isolations)
            answer = await _supervise(code, stdin, self.python, isolation, self.limits)
            if "setup" in answer:  # what has worked before: there is no other for this program
                raise SandboxFailed(f"sandbox, isolation {isolation}: {answer['setup']}")
            return SandboxResult(**answer, isolation=isolation)


_found: dict[tuple[str, tuple[Isolation, ...]], Isolation] = {}
"""What works here, by interpreter and by what may be used: of the whole process."""
_finding = Slots(1)


async def _isolation(python: str, isolations: tuple[Isolation, ...]) -> Isolation:
    """The first of `isolations` that can run a program of ours.

    Raises:
      SandboxFailed: none can, or one gave no answer.
    """
    key = (python, isolations)
    if key in _found:
        return _found[key]
    async with _finding():
        if key in _found:
            return _found[key]
        refusals: dict[str, str] = {}
        for isolation in isolations:
            refusal = await _refusal(python, isolation)
            if refusal is None:
                for name, reason in refusals.items():
                    logger.warning(
                        "sandbox: no isolation by %s here (%s): programs are held by %s alone, "
                        "see %s",
                        name,
                        reason,
                        isolation,
                        __name__,
                    )
                return _found.setdefault(key, isolation)
            refusals[isolation] = refusal
    told = "; ".join(f"isolation {name}: {reason}" for name, reason in refusals.items())
    if os.getuid() == 0 and "process" not in isolations:
        told += (
            ". Permit namespaces, start the run as a user without rights, or give the sandbox an "
            f"interpreter that every user can read ({python}). A program may be root itself only "
            "where `isolation` names 'process'"
        )
    raise SandboxFailed(f"sandbox: {told}")


async def _refusal(python: str, isolation: Isolation) -> str | None:
    """Why the machine does not permit it; None if it does."""
    answer = await _supervise(
        "pass", "", python, isolation, Limits(wall_s=_PROBE_S, cpu_s=_PROBE_S)
    )
    if "setup" in answer:
        return str(answer["setup"])
    if answer["why"] == "error":  # such as an interpreter that cannot read its own library
        lines = answer["stderr"].strip().splitlines()
        return f"{python} does not start: {lines[0] if lines else answer['exit_code']}"
    if answer["why"] != "ok":  # of a machine that has too much to do: it permits it or not
        raise SandboxFailed(f"sandbox, isolation {isolation}: its first program: {answer['why']}")
    return None


async def _supervise(
    code: str, stdin: str, python: str, isolation: Isolation, limits: Limits
) -> dict[str, Any]:
    """A supervisor's answer. SandboxFailed if it gave none."""
    job = {
        "code": code,
        "stdin": stdin,
        "python": python,
        "isolation": isolation,
        "limits": asdict(limits),
        "tmp": _temporary(),
        "hidden": _hidden(),
    }
    ours, theirs = socket.socketpair()
    with theirs:
        process = _start(theirs.fileno())
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(limits.wall_s + _GRACE_S):
            reader, writer = await asyncio.open_connection(sock=ours)
            writer.write(json.dumps(job).encode() + b"\n")
            await writer.drain()
            line = await reader.read(-1)
    except TimeoutError as error:
        raise SandboxFailed(
            f"sandbox: its supervisor {process.pid} did not answer within "
            f"{limits.wall_s + _GRACE_S:g} s"
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


def _start(stdin: int) -> "subprocess.Popen[bytes]":
    """Not asyncio's: on Python 3.11 it keeps a thread for each process."""
    kept = {k: os.environ[k] for k in ("LD_LIBRARY_PATH",) if k in os.environ}
    try:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _SUPERVISOR, _ROOT],
            stdin=stdin,
            stdout=subprocess.DEVNULL,
            env={**_ENVIRONMENT, **kept},
            cwd="/",
            start_new_session=True,
        )
    except OSError as error:
        raise SandboxFailed(f"sandbox: no supervisor could be started: {error}") from error


def _temporary() -> str:
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:  # on a full disk; the supervisor says it, if it needs one
        return "/tmp"


def _hidden() -> list[str]:
    """Folders of the machine and its users that are no program's business."""
    named = [os.environ[name] for name in _PRIVATE_VARIABLES if os.environ.get(name)]
    return [os.path.abspath(os.path.expanduser(x)) for x in (_temporary(), *_PRIVATE, *named)]


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
