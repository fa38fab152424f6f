"""Servers and trainer ranks from their start to the end of all of them.

All are started at the same time; trainer rank 0 waits for the servers' health itself. Whatever
ends `supervise` (success, a failure of any process, Ctrl-C, or a kill -9 of the launcher) ends
every process that came of it.
"""

import contextlib
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from types import FrameType

from megarl.launch.process import Process, stop_all
from megarl.launch.servers import Servers, report

GRACE_S = 10.0
"""From SIGTERM to SIGKILL when a run ends."""
STRAGGLER_S = 300.0
"""A rank may go on for so long after another has ended well."""
_POLL_S = 0.1
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def supervise(
    servers: Servers,
    ranks: Sequence[Process],
    *,
    grace_s: float = GRACE_S,
    straggler_s: float = STRAGGLER_S,
) -> int:
    """Start all, wait for the ranks, and leave none running; the exit code.

    0 if all ranks ended well, 128 + n if signal n stopped the launcher, else the code of the
    process that failed first (1 for one that ended well before the ranks did). The end of a
    server that was up is a failure only if it was the last one: the trainer does without it.

    Raises:
      LaunchError: a process could not be started, or survived SIGKILL.
    """
    with _stop_signals() as received:
        try:
            servers.start()
            for rank in ranks:
                rank.start()
            return _watch(servers, ranks, received, straggler_s)
        finally:
            stop_all((*servers.processes, *ranks), grace_s)


def _watch(
    servers: Servers,
    ranks: Sequence[Process],
    received: list[int],
    straggler_s: float,
) -> int:
    """Wait until all ranks ended well, one or all servers did not, or a signal came."""
    first_end = None
    while not received:
        codes = {rank: rank.poll() for rank in ranks}
        if all(code == 0 for code in codes.values()):
            return 0
        ending: int | None = servers.poll()
        if ending is not None:
            return ending
        failed = [rank for rank in ranks if codes[rank]]
        for rank in failed:
            report(rank, codes[rank])
        if failed:
            return codes[failed[0]] or 1
        running = [rank.name for rank in ranks if codes[rank] is None]
        if len(running) < len(ranks):
            first_end = first_end or time.monotonic()
            if time.monotonic() > first_end + straggler_s:
                print(
                    f"megarl: {', '.join(running)} still running {straggler_s} s after another "
                    f"rank ended",
                    file=sys.stderr,
                )
                return 1
        time.sleep(_POLL_S)
    print(f"megarl: {signal.Signals(received[0]).name}, stopping", file=sys.stderr, flush=True)
    return 128 + received[0]


@contextlib.contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """Signals that ask this process to stop are only noted, so that stopping is not cut short."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)

    # One that is ignored stays so: nohup, or a job in the background of a script.
    wanted = [n for n in _STOP_SIGNALS if signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, note) for number in wanted}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
