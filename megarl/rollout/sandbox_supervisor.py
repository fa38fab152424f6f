"""One run of untrusted code: makes the walls, watches the program, ends all that it started.

    megarl.rollout.sandbox --socket--> supervisor --fork--> init --fork--> the program
                                       limits, pipes        walls          python main.py

    socket  in: one line of JSON, see `main`. Its end: the caller has gone, so kill and leave.
            out: one line of JSON, {"why", "exit_code", "stdout", "stderr", "wall_s"}, or
            {"setup": text} if the walls could not be made; the program has then not run.
            Nothing: this one broke, and the program may have run.

Run by `python -I -S`, so that it starts fast: it imports nothing but the standard library and
megarl/rollout/sandbox_walls.py. `init` is process 1 of a PID namespace where there is one: with
it the kernel ends the rest.
"""

import contextlib
import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from megarl.rollout.sandbox_walls import (
    PR_SET_CHILD_SUBREAPER,
    PR_SET_NO_NEW_PRIVS,
    PR_SET_PDEATHSIG,
    SetupError,
    empty_folder,
    free_uid,
    kernel,
    mount_walls,
    prctl,
    unshare,
)

_TICK_S = 0.05  # how often processes are counted where the kernel does not limit them
_CLEAN_UP_S = 20.0  # for what a program left in its folder


def main() -> None:
    """Serve the one request on stdin.

    {"code", "stdin", "python", "isolation": "namespaces" | "uid" | "process",
     "limits": fields of megarl.rollout.sandbox.Limits, "tmp": where folders may be made,
     "hidden": folders that hold what is the caller's}
    """
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)  # the socket's end is what ends this process
    caller = os.dup(0)
    job = json.loads(sys.stdin.buffer.readline())
    answer = _answer(job, caller)
    with os.fdopen(caller, "wb") as out, contextlib.suppress(OSError):
        out.write(json.dumps(answer).encode() + b"\n")


def _answer(job: dict[str, Any], caller: int) -> dict[str, Any]:
    """Of an error behind the program's start there is no answer: it is this one's end."""
    run = None
    try:
        try:
            run = Run(job, caller)
            run.prepare()
        except (SetupError, OSError) as error:
            return {"setup": str(error)}
        return run.result()
    finally:
        if run is not None:
            run.clean_up()


class Run:
    """One program, from its start to the end of everything it left."""

    def __init__(self, job: dict[str, Any], caller: int) -> None:
        self.job, self.limits, self.caller = job, job["limits"], caller
        self.isolation: str = job["isolation"]
        self.has_namespaces = self.isolation == "namespaces"
        self.uid = os.getuid()
        if self.uid == 0 and self.isolation != "process":
            self.uid = free_uid()
        elif self.isolation == "uid":
            raise SetupError("only root can run a program as another user")
        self.max_processes = self.limits["processes"]
        if self.uid == os.getuid():  # the kernel counts all that this user has: also init
            is_apart = self.has_namespaces and kernel() >= (5, 14)
            self.max_processes += 1 + (0 if is_apart else _threads_of_user(self.uid))
        self.counts = self.isolation == "process"
        self.folder = ""
        self.open_folder: int | None = None

    def prepare(self) -> None:
        """All that is made before there is a process: with namespaces `init` makes the rest."""
        prctl(PR_SET_CHILD_SUBREAPER, 1)  # what daemonises itself becomes this one's child
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # of all processes these are the ones to end
        if self.has_namespaces:
            unshare()
            return
        # Not tempfile's: its import takes as long as all the rest.
        folder = os.path.join(self.job["tmp"], f"megarl-sandbox-{os.urandom(8).hex()}")
        os.mkdir(folder, 0o700)
        self.folder = folder
        self.open_folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        self._fill_folder()

    def clean_up(self) -> None:
        """Remove the folder, emptied wherever the program moved it; what stays is told."""
        if self.open_folder is None:  # none was made, or it goes with its namespaces
            return
        try:
            if (left := empty_folder(self.open_folder, _CLEAN_UP_S)) is not None:
                raise left
            with contextlib.suppress(FileNotFoundError):  # the program removed it
                os.rmdir(self.folder)
        except OSError as error:  # says nothing about the program, which has ended
            sys.stderr.write(f"sandbox supervisor: {self.folder} is left: {error}\n")

    def result(self) -> dict[str, Any]:
        """How the program ended, or that it could not be started."""
        started = time.monotonic()
        out, self.out_end = os.pipe()
        err, self.err_end = os.pipe()
        status, self.status_end = os.pipe()
        self.stdin = _memory_file(self.job["stdin"])
        self.output = {out: bytearray(), err: bytearray()}
        self.init = _fork(self._init)
        for fd in (self.out_end, self.err_end, self.status_end, self.stdin):
            os.close(fd)
        try:
            why, said = self._watch(status, started + self.limits["wall_s"])
        finally:
            self._kill_all()
        if why == "ended" and "setup" in said:
            return {"setup": said["setup"]}
        for fd in self.output:  # no writer is left: what is in the pipes is all
            while why == "ended" and (data := os.read(fd, 1 << 16)):
                why = "ended" if self._keep(fd, data) else "output"
        stdout, stderr = (bytes(x).decode(errors="replace") for x in self.output.values())
        code = os.waitstatus_to_exitcode(said["status"]) if why == "ended" else None
        return {
            "why": _reason(code, stderr) if why == "ended" else why,
            "exit_code": code,
            "stdout": stdout,
            "stderr": stderr,
            "wall_s": time.monotonic() - started,
        }

    # ------------------------------------------------------------------ watching

    def _watch(self, status: int, deadline: float) -> tuple[str, dict[str, Any]]:
        """Until the program ends or must: why, and what init said."""
        poller = select.poll()
        for fd in (*self.output, status, self.caller):
            poller.register(fd, select.POLLIN)
        while (left := deadline - time.monotonic()) > 0:
            wait_s = min(left, _TICK_S) if self.counts else left
            for fd, _ in poller.poll(wait_s * 1000 + 1):
                if fd == self.caller:
                    return "abandoned", {}
                if fd == status:
                    said = os.read(status, 1 << 16).partition(b"\n")[0]
                    # Nothing said: the program ended init, which it could as the same user.
                    return "ended", json.loads(said or b'{"status": 9}')
                data = os.read(fd, 1 << 16)
                if not data:
                    poller.unregister(fd)
                if not self._keep(fd, data):
                    return "output", {}
            if self.counts and len(_descendants(os.getpid())) > self.limits["processes"] + 1:
                return "processes", {}
        return "timeout", {}

    def _keep(self, fd: int, data: bytes) -> bool:
        """Whether there was room for all of `data`."""
        room: int = self.limits["output_bytes"] - len(self.output[fd])
        self.output[fd] += data[:room]
        return len(data) <= room

    def _kill_all(self) -> None:
        """Returns when no process of the run is left, whatever session or parent it chose."""
        while True:
            _send(self.init, signal.SIGKILL)
            if self.has_namespaces:  # the kernel ends what is in them, then lets init be reaped
                os.waitpid(self.init, 0)
                return
            if self.isolation == "uid":
                os.waitpid(_fork(self._kill_user), 0)
            else:
                for stop in (signal.SIGSTOP, signal.SIGKILL):  # what is stopped cannot fork
                    for pid in _descendants(os.getpid()):
                        _send(pid, stop)
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                return
            time.sleep(0.001)

    def _kill_user(self) -> None:
        os.setresuid(self.uid, self.uid, self.uid)
        _send(-1, signal.SIGKILL)

    # ------------------------------------------------------------------ walls

    def _fill_folder(self) -> None:
        with open(os.path.join(self.folder, "main.py"), "wb") as file:
            file.write(self.job["code"].encode(errors="surrogatepass"))
        if self.uid != os.getuid():
            os.chown(self.folder, self.uid, self.uid)

    def _init(self) -> None:
        """Make what walls are left, start the program, and say how it ended."""
        os.setsid()
        try:
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if self.has_namespaces:
                self.folder = mount_walls(
                    python=self.job["python"],
                    hidden=self.job["hidden"],
                    scratch_bytes=self.limits["file_bytes"],
                    is_other_user=self.uid != os.getuid(),
                )
                self._fill_folder()
            program = _fork(self._program)
            os.close(self.stdin)  # what the program has read nobody can read again
        except (SetupError, OSError) as error:
            self._say({"setup": str(error)})
            return
        pid = 0
        while pid != program:
            pid, status = os.wait()
        self._say({"status": status})

    def _say(self, message: dict[str, Any]) -> None:
        os.write(self.status_end, json.dumps(message).encode() + b"\n")

    def _program(self) -> None:
        try:
            os.setsid()
            for fd, number in ((self.stdin, 0), (self.out_end, 1), (self.err_end, 2)):
                os.dup2(fd, number)
            os.chdir(self.folder)
            self._limit()
            if self.uid != os.getuid():
                os.setgroups([])
                os.setresgid(self.uid, self.uid, self.uid)
                os.setresuid(self.uid, self.uid, self.uid)
            prctl(PR_SET_NO_NEW_PRIVS, 1)
            os.closerange(3, self.status_end)  # that one closes itself
            os.closerange(self.status_end + 1, 1 << 16)
            python = self.job["python"]
            environ = {**os.environ, "HOME": self.folder, "TMPDIR": self.folder}
            os.execve(python, [python, "main.py"], environ)
        except OSError as error:
            self._say({"setup": f"the program's start: {error}"})

    def _limit(self) -> None:
        limits = self.limits
        for kind, value in {
            resource.RLIMIT_CPU: max(1, round(limits["cpu_s"])),
            resource.RLIMIT_AS: limits["memory_bytes"],
            resource.RLIMIT_FSIZE: limits["file_bytes"],
            resource.RLIMIT_NOFILE: limits["open_files"],
            resource.RLIMIT_NPROC: self.max_processes,
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_MSGQUEUE: 0,
        }.items():
            hard = value + (kind == resource.RLIMIT_CPU)  # SIGKILL a second after SIGXCPU
            most = resource.getrlimit(kind)[1]
            if most != resource.RLIM_INFINITY:  # a user cannot raise what he was given
                value, hard = min(value, most), min(hard, most)
            resource.setrlimit(kind, (value, hard))


def _reason(code: int | None, stderr: str) -> str:
    if code == 0:
        return "ok"
    if code == -signal.SIGXCPU:
        return "timeout"
    lines = stderr.strip().splitlines()
    if lines and lines[-1].partition(":")[0].endswith("MemoryError"):
        return "memory"
    return "crash" if code is None or code < 0 else "error"


# ---------------------------------------------------------------- the machine


def _fork(run: Callable[[], None]) -> int:
    """A child that runs `run`; its pid."""
    if pid := os.fork():
        return pid
    try:
        run()
    except BaseException as error:  # noqa: BLE001 - a child must not return into its parent's code
        sys.stderr.write(f"sandbox supervisor: {error!r}\n")
    os._exit(1)


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _memory_file(text: str) -> int:
    """A descriptor at the start of a file that is nowhere but in memory."""
    fd = os.memfd_create("stdin")
    with os.fdopen(os.dup(fd), "wb") as file:
        file.write(text.encode(errors="surrogatepass"))
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _threads_of_user(uid: int) -> int:
    count = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has ended
            if os.stat(f"/proc/{name}").st_uid == uid:
                count += len(os.listdir(f"/proc/{name}/task"))
    return count


def _descendants(ancestor: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            parent = int(file.read().rpartition(b")")[2].split()[1])
            children.setdefault(parent, []).append(int(name))
    found, waiting = [], [ancestor]
    while waiting:
        waiting += (below := children.get(waiting.pop(), []))
        found += below
    return found
