"""One run of untrusted code: makes the walls, watches the program, ends all that it started.

    megarl.rollout.sandbox --socket--> supervisor --fork--> init --fork--> the program
                                       limits, pipes        walls          python main.py

    socket  in: one line of JSON, see `main`. Its end: the caller has gone, so kill and leave.
            out: one line of JSON, {"why", "exit_code", "stdout", "stderr", "wall_s"}, or
            {"setup": text} if the walls could not be made; the program has then not run.

Run as a file by `python -I -S`, so that it starts fast: it imports the standard library only.
`init` is process 1 of a PID namespace where there is one: with it the kernel ends the rest.
"""

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 36, 38
_CLONE_NEWUSER = 0x10000000
_NAMESPACES = 0x20000 | 0x4000000 | 0x8000000 | 0x20000000 | 0x40000000  # mount uts ipc pid net
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
_SYS_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _MOUNT_ATTR_RDONLY = 442, -100, 0x8000, 1
_FIRST_UID = 1_000_000_000  # of the users that programs run as: nobody's on a plain machine
_TICK_S = 0.05  # how often processes are counted where the kernel does not limit them
_SCRATCH = "/tmp"


class SetupError(Exception):
    """The kernel, or who started this machine, does not permit a wall."""


def main() -> None:
    """Serve the one request on stdin.

    {"code", "stdin", "python", "isolation": "namespaces" | "uid" | "process",
     "limits": fields of megarl.rollout.sandbox.Limits}
    """
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)  # the socket's end is what ends this process
    caller = os.dup(0)
    job = json.loads(sys.stdin.buffer.readline())
    try:
        answer = Run(job, caller).result()
    except (SetupError, OSError) as error:
        answer = {"setup": str(error)}
    with os.fdopen(caller, "wb") as out, contextlib.suppress(OSError):
        out.write(json.dumps(answer).encode() + b"\n")


class Run:
    """One program, from its start to the end of everything it left."""

    def __init__(self, job: dict[str, Any], caller: int) -> None:
        self.job, self.limits, self.caller = job, job["limits"], caller
        self.isolation: str = job["isolation"]
        self.has_namespaces = self.isolation == "namespaces"
        self.uid = os.getuid()
        if self.uid == 0 and self.isolation != "process":
            self.uid = _free_uid()
        elif self.isolation == "uid":
            raise SetupError("only root can run a program as another user")
        self.max_processes = self.limits["processes"]
        if self.uid == os.getuid():  # the kernel counts all that this user has: also init
            is_apart = self.has_namespaces and _kernel() >= (5, 14)
            self.max_processes += 1 + (0 if is_apart else _threads_of_user(self.uid))
        self.counts = self.isolation == "process"
        self.folder = _SCRATCH

    def result(self) -> dict[str, Any]:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # what daemonises itself becomes this one's child
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # of all processes these are the ones to end
        if self.has_namespaces:
            self._unshare()
            return self._run()  # its folder goes with them
        # Only here: they take as long to import as all the rest.
        import shutil
        import tempfile

        self.folder = tempfile.mkdtemp(prefix="megarl-sandbox-")
        try:
            self._fill_folder()
            return self._run()
        finally:
            _open_up(self.folder)
            shutil.rmtree(self.folder)

    def _run(self) -> dict[str, Any]:
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
            raise SetupError(said["setup"])
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

    def _unshare(self) -> None:
        uid, gid = os.getuid(), os.getgid()
        is_root = uid == 0
        _check(_LIBC.unshare(_NAMESPACES | (0 if is_root else _CLONE_NEWUSER)), "unshare")
        if not is_root:
            ids = {"uid_map": f"{uid} {uid} 1", "gid_map": f"{gid} {gid} 1"}
            for name, text in {"setgroups": "deny", **ids}.items():
                with open(f"/proc/self/{name}", "w") as file:
                    file.write(text)

    def _fill_folder(self) -> None:
        with open(os.path.join(self.folder, "main.py"), "wb") as file:
            file.write(self.job["code"].encode(errors="surrogatepass"))
        if self.uid != os.getuid():
            os.chown(self.folder, self.uid, self.uid)

    def _init(self) -> None:
        """Make what walls are left, start the program, and say how it ended."""
        os.setsid()
        try:
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if self.has_namespaces:
                self._mount()
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

    def _mount(self) -> None:
        """A fresh /tmp and /dev/shm, the rest read-only; no home, no sockets, no processes."""
        _mount("none", "/", "", _MS_REC | _MS_PRIVATE)
        home = os.path.realpath(self.job["home"])
        hidden = [_SCRATCH, "/dev/shm", "/run", *([home] if home != "/" else [])]
        needed = _prefixes(self.job["python"])
        if self.uid != os.getuid():
            hidden += [p for path in needed if (p := _closed_folder(path)) and p not in hidden]
        read_only = (ctypes.c_uint64 * 4)(_MOUNT_ATTR_RDONLY, 0, 0, 0)
        arguments = (_AT_FDCWD, b"/", _AT_RECURSIVE, read_only, ctypes.sizeof(read_only))
        _check(_LIBC.syscall(_SYS_MOUNT_SETATTR, *arguments), "read-only files")
        kept = [(path, os.open(path, os.O_PATH)) for path in needed]
        for folder in filter(os.path.isdir, hidden):
            size = self.limits["file_bytes"] if folder == _SCRATCH else 1 << 20
            mode = "1777" if folder in (_SCRATCH, "/dev/shm") else "755"
            options = f"size={size},nr_inodes=4096,mode={mode}"
            _mount("tmpfs", folder, "tmpfs", _MS_NOSUID | _MS_NODEV, options)
        for path, fd in kept:
            if any(os.path.commonpath([path, folder]) == folder for folder in hidden):
                os.makedirs(path, exist_ok=True)
                _mount(f"/proc/self/fd/{fd}", path, "", _MS_BIND | _MS_REC)
            os.close(fd)
        flags = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
        try:
            _mount("proc", "/proc", "proc", flags)
        except SetupError:  # a container whose own is covered in part: then there is none
            _mount("tmpfs", "/proc", "tmpfs", flags, "size=4k,mode=755")
        self.folder = os.path.join(_SCRATCH, "run")
        os.mkdir(self.folder, 0o755)

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
            _prctl(_PR_SET_NO_NEW_PRIVS, 1)
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


def _open_up(folder: str) -> None:
    """The program may have closed folders to itself."""
    for parent, names, _ in os.walk(folder):  # a parent before what is in it
        for path in [os.path.join(parent, name) for name in names]:
            if not os.path.islink(path):
                os.chmod(path, 0o700)


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _check(answer: int, what: str) -> None:
    if answer != 0:
        raise SetupError(f"{what}: {os.strerror(ctypes.get_errno())}")


def _prctl(option: int, value: int) -> None:
    _check(_LIBC.prctl(option, value, 0, 0, 0), f"prctl {option}")


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    texts = [text.encode() or None for text in (source, target, kind, options)]
    _check(_LIBC.mount(*texts[:3], ctypes.c_ulong(flags), texts[3]), f"mount {target}")


def _memory_file(text: str) -> int:
    """A descriptor at the start of a file that is nowhere but in memory."""
    fd = os.memfd_create("stdin")
    with os.fdopen(os.dup(fd), "wb") as file:
        file.write(text.encode(errors="surrogatepass"))
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _prefixes(python: str) -> list[str]:
    """The folders of an interpreter: that of its environment, and that of what it links to."""
    return [os.path.dirname(os.path.dirname(p)) for p in (python, os.path.realpath(python))]


def _closed_folder(path: str) -> str | None:
    """The first folder on the way to `path` that other users may not pass."""
    closed = None
    while path != "/":
        closed = closed if os.stat(path).st_mode & 0o001 else path
        path = os.path.dirname(path)
    return closed


def _free_uid() -> int:
    """A user that no other run has now: a process id of this machine is unique."""
    with open("/proc/self/uid_map") as file:
        first, _, count = (int(x) for x in file.readline().split())
    if first + count > _FIRST_UID + (1 << 22):
        return _FIRST_UID + os.getpid()
    low = first + count // 2  # a container's map is small: the upper half of it
    return low + os.getpid() % (count - count // 2)


def _kernel() -> tuple[int, ...]:
    return tuple(int(x) for x in os.uname().release.split(".")[:2])


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


if __name__ == "__main__":
    main()
