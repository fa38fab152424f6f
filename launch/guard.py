"""Runs one program and leaves nothing of it behind.

    python guard.py FD -- PROGRAM [ARGUMENT ...]

FD is the read end of a pipe whose write end only the launcher holds. The program, and every
process that came of it, is ended when
    - the pipe reaches its end: the launcher is gone, even by kill -9;
    - this process gets SIGTERM, SIGINT or SIGHUP;
    - the program ends by itself and left others running.
SIGTERM first, SIGKILL after GRACE_S or at a second signal. The exit code is the program's, 128 + n
if signal n ended it.

No descendant can get away: this process is a child subreaper, so orphans, also those with a
session of their own, become its children, and it leaves only when the kernel says that it
has none. If it is itself killed with SIGKILL, the kernel kills the program with it.

Standard library only: one of these stands beside every process of a run.
"""

import ctypes
import os
import select
import signal
import sys
import time
from types import FrameType

GRACE_S = 10.0
"""From SIGTERM to SIGKILL."""
KILL_S = 30.0
"""From SIGKILL to giving up on a process that the kernel cannot end."""
POLL_S = 0.05

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def descendants(pid: int) -> set[int]:
    """Living processes below `pid`, as /proc shows them; zombies are not living."""
    children: dict[int, list[tuple[int, str]]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdecimal():
            continue
        try:
            with open(f"/proc/{entry}/stat", "rb") as file:
                # The second field is the name in parentheses and may hold anything.
                state, parent = file.read().rpartition(b")")[2].decode().split()[:2]
        except (FileNotFoundError, ProcessLookupError):
            continue
        children.setdefault(int(parent), []).append((int(entry), state))
    found, queue = set(), [pid]
    while queue:
        for child, state in children.get(queue.pop(), ()):
            queue.append(child)
            if state not in "ZX":
                found.add(child)
    return found


class Guard:
    def __init__(self, lifeline: int) -> None:
        self.lifeline = lifeline
        self.stops = 0
        """Signals received that ask to stop."""
        self.child = 0
        self.code: int | None = None
        """Exit code of the program, None while it runs."""

    def run(self, program: list[str]) -> int:
        self._listen()
        self._spawn(program)
        while self.code is None and not self.stops:
            ready, _, _ = select.select([self.lifeline, self.wake], [], [])
            self._drain()
            if self.lifeline in ready and not os.read(self.lifeline, 1):
                break
            self._reap()
        self._end_all()
        return 1 if self.code is None else self.code

    def _listen(self) -> None:
        self.wake, wake_writer = os.pipe()
        os.set_blocking(self.wake, False)
        os.set_blocking(wake_writer, False)
        signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
        for number in (*_STOP_SIGNALS, signal.SIGCHLD):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number != signal.SIGCHLD:
            self.stops += 1

    def _drain(self) -> None:
        try:
            while os.read(self.wake, 4096):
                pass
        except BlockingIOError:
            pass

    def _spawn(self, program: list[str]) -> None:
        guard = os.getpid()
        self.child = os.fork()
        if self.child:
            return
        try:
            # Python ignores SIGPIPE, and an ignored signal stays so over exec.
            for number in (*_STOP_SIGNALS, signal.SIGCHLD, signal.SIGPIPE):
                signal.signal(number, signal.SIG_DFL)
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() == guard:  # else it died before the prctl
                os.execvp(program[0], program)
        except OSError as error:
            os.write(2, f"cannot start {program[0]}: {error.strerror}\n".encode())
        finally:
            os._exit(127)

    def _reap(self) -> bool:
        """Collect what has ended. False when no child is left, running or not."""
        try:
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return True
                if pid == self.child:
                    code = os.waitstatus_to_exitcode(status)
                    self.code = code if code >= 0 else 128 - code
        except ChildProcessError:
            return False

    def _end_all(self) -> None:
        kill_at = time.monotonic() + GRACE_S
        impatient = max(1, self.stops) + 1
        asked: set[int] = set()
        while self._reap():
            now = time.monotonic()
            killing = now >= kill_at or self.stops >= impatient
            if killing:
                kill_at = min(kill_at, now)
            left = descendants(os.getpid())
            if now > kill_at + KILL_S:
                print(f"guard: {sorted(left)} survived SIGKILL for {KILL_S} s", file=sys.stderr)
                return
            for pid in left if killing else left - asked:
                try:
                    os.kill(pid, signal.SIGKILL if killing else signal.SIGTERM)
                except ProcessLookupError:
                    continue
            asked |= left
            select.select([self.wake], [], [], POLL_S)
            self._drain()


def main(argv: list[str]) -> int:
    if len(argv) < 4 or not argv[1].isdecimal() or argv[2] != "--":
        print("usage: guard.py FD -- PROGRAM [ARGUMENT ...]", file=sys.stderr)
        return 2
    lifeline = int(argv[1])
    os.set_inheritable(lifeline, False)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    return Guard(lifeline).run(argv[3:])


if __name__ == "__main__":
    sys.exit(main(sys.argv))
