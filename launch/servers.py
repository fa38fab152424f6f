"""The servers of a run: watched, and started again when one dies. Imports no torch.

A server that ends before it was ever up is a mistake of the run, and ends it. One that was up is
started again with the same command, so often as the config says, and later each time that it did
not come up; after an hour without trouble the count begins anew. The trainer gives it weights when
it is back. Who asks it for tokens and gets none can have it started again, too: a file in
`requests` whose name is its port, see megarl/rollout/restarts.py.
"""

import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from megarl.launch.process import Process, stop_all

_PROBE_S = 1.0
_SICK_GRACE_S = 2.0
"""From SIGTERM to SIGKILL of a server that does not answer."""
_LONGEST_DELAY_S = 30.0
_WELL_S = 3600.0
"""A server that was up for so long may be started again as often as a new one."""


class _Slot:
    """The place of one server, whichever process has it."""

    def __init__(self, process: Process, restarts: int) -> None:
        self.process = process
        self.restarts = self.restarts_left = restarts
        self.num_failed_starts = 0
        """In a row: it ended before it was up."""
        self.was_up = False
        self.up_since_s: float | None = None
        """Of the process that has the place now."""
        self.start_at_s: float | None = None
        """When it is to be started again; None while it runs."""
        self.is_given_up = False


class Servers:
    """See the module.

    Args:
      restarts: how often each may be started again.
      requests: folder of requests for a restart, made if it is not there; None takes none.
    """

    def __init__(
        self, processes: Sequence[Process], *, restarts: int = 0, requests: Path | None = None
    ) -> None:
        self._slots = [_Slot(process, restarts) for process in processes]
        self._requests = requests
        self._next_probe_s = 0.0
        if requests is not None:
            requests.mkdir(parents=True, exist_ok=True)

    @property
    def processes(self) -> list[Process]:
        """Those that run now, or ran last."""
        return [slot.process for slot in self._slots]

    def start(self) -> None:
        for slot in self._slots:
            slot.process.start()

    def poll(self) -> int | None:
        """Look at all, and start those that are due; an exit code if the run cannot go on."""
        now = time.monotonic()
        if now >= self._next_probe_s:
            self._next_probe_s = now + _PROBE_S
            for slot in self._slots:
                is_new = slot.up_since_s is None and slot.start_at_s is None
                if is_new and _listens(slot.process):
                    slot.up_since_s, slot.was_up = now, True
                    slot.num_failed_starts = 0
            self._take_requests()
        for slot in self._slots:
            if slot.is_given_up:
                continue
            if slot.start_at_s is not None:
                if now >= slot.start_at_s:
                    self._start_again(slot)
                continue
            code = slot.process.poll()
            if code is None:
                continue
            if not slot.was_up:
                report(slot.process, code, " before it was up")
                return code or 1
            self._plan_restart(slot, code)
            if all(slot.is_given_up for slot in self._slots):
                return code or 1
        return None

    def _plan_restart(self, slot: _Slot, code: int) -> None:
        now = time.monotonic()
        if slot.up_since_s is not None and now - slot.up_since_s > _WELL_S:
            slot.restarts_left = slot.restarts
        if slot.restarts_left:
            delay_s = min(_LONGEST_DELAY_S, 2.0**slot.num_failed_starts)
            slot.num_failed_starts += slot.up_since_s is None
            slot.up_since_s = None
            slot.start_at_s = now + delay_s
            what = f"; it is started again in {delay_s:g} s"
        else:
            slot.is_given_up = True
            left = sum(not s.is_given_up for s in self._slots)
            what = f"; {left} of {len(self._slots)} servers are left"
        report(slot.process, code, f" before the trainer was done{what}")

    def _start_again(self, slot: _Slot) -> None:
        slot.process = slot.process.again()
        slot.process.start()
        slot.start_at_s = None
        slot.restarts_left -= 1

    def _take_requests(self) -> None:
        """End the servers that are asked for; their end is then found like any other.

        One that is not up yet took the place of the one that was meant.
        """
        if self._requests is None:
            return
        for path in self._requests.iterdir():
            path.unlink()
            up = [slot.process for slot in self._slots if slot.up_since_s is not None]
            sick = [process for process in up if str(process.port) == path.name]
            stop_all([p for p in sick if p.started and p.poll() is None], _SICK_GRACE_S)


def report(process: Process, code: int | None, when: str = "") -> None:
    """On stderr: how a process ended, and the end of its log."""
    lines = [f"megarl: {process.name} ended with exit code {code}{when}"]
    if process.log is not None:
        lines[0] += f"; the end of {process.log}:"
        lines += [f"  {line}" for line in process.tail().splitlines()]
    print("\n".join(lines), file=sys.stderr, flush=True)


def _listens(process: Process) -> bool:
    if process.port is None:
        return False
    with socket.socket() as probe:
        probe.settimeout(_PROBE_S)
        return probe.connect_ex(("127.0.0.1", process.port)) == 0
