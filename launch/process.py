"""One process of a run, started through its guard.

A process that was started here never outlives the launcher, and neither does anything it
started: see `megarl.launch.guard`.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from megarl.errors import LaunchError

_GUARD = Path(__file__).with_name("guard.py")
_KILL_S = 40.0
"""More than the guard's own limit between SIGKILL and giving up."""
_TAIL_BYTES = 1 << 16


class Process:
    """A program with a name, an environment and a log.

    Args:
      env: the whole environment, not additions to the launcher's.
      log: file for stdout and stderr; None is the launcher's own stdout and stderr.
      port: on which it listens on the loopback interface once it is up, if it does.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        log: Path | None,
        port: int | None = None,
    ) -> None:
        self.name = name
        self.argv = list(argv)
        self.env = dict(env)
        self.log = log
        self.port = port
        self._log_mode: Literal["wb", "ab"] = "wb"
        self._popen: subprocess.Popen[bytes] | None = None
        self._lifeline: int | None = None

    def again(self) -> "Process":
        """The same program, not started; its log goes on."""
        process = Process(self.name, self.argv, env=self.env, log=self.log, port=self.port)
        process._log_mode = "ab"
        return process

    def start(self) -> None:
        """LaunchError if the guard cannot be started; a bad `argv` shows as exit code 127."""
        assert self._popen is None, f"{self.name} was started before"
        lifeline, self._lifeline = os.pipe()
        # -I -S: no site-packages, so a guard starts in milliseconds.
        guard = [sys.executable, "-I", "-S", str(_GUARD), str(lifeline), "--"]
        output = None
        try:
            if self.log is not None:
                output = self.log.open(self._log_mode)
            self._popen = subprocess.Popen(
                [*guard, *self.argv],
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=None if output is None else subprocess.STDOUT,
                pass_fds=(lifeline,),
                start_new_session=True,  # a terminal's Ctrl-C reaches the launcher only
            )
        except OSError as error:
            os.close(self._lifeline)
            raise LaunchError(f"{self.name}: cannot be started: {error}") from error
        finally:
            os.close(lifeline)
            if output is not None:
                output.close()

    @property
    def started(self) -> bool:
        return self._popen is not None

    def poll(self) -> int | None:
        """The exit code, 128 + n for signal n; None while the process runs."""
        assert self._popen is not None, f"{self.name} was not started"
        code = self._popen.poll()
        if code is not None and self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None
        return code if code is None or code >= 0 else 128 - code

    def terminate(self) -> None:
        """Ask the guard to end everything: SIGTERM, at a second call SIGKILL. Does not wait."""
        assert self._popen is not None, f"{self.name} was not started"
        self._popen.send_signal(signal.SIGTERM)  # does nothing after the end

    def wait(self, timeout_s: float) -> int | None:
        """The exit code; None if the process still runs after `timeout_s`."""
        assert self._popen is not None, f"{self.name} was not started"
        try:
            self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        return self.poll()

    def stop(self, grace_s: float) -> int:
        """End the process and everything it started; the exit code.

        Raises:
          LaunchError: it survived SIGKILL.
        """
        stop_all([self], grace_s)
        code = self.poll()
        assert code is not None
        return code

    def tail(self, lines: int = 20) -> str:
        """The last lines of the log, '' if it has none."""
        if self.log is None or not self.log.exists():
            return ""
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
        return "\n".join(text.splitlines()[-lines:])


def stop_all(processes: Iterable[Process], grace_s: float) -> None:
    """End all at once: SIGTERM now, SIGKILL for what is left after `grace_s`.

    Raises:
      LaunchError: names the processes that survived SIGKILL.
    """
    left = [p for p in processes if p.started and p.poll() is None]
    for limit_s in (grace_s, _KILL_S):
        for process in left:
            process.terminate()
        deadline = time.monotonic() + limit_s
        left = [p for p in left if p.wait(max(0.0, deadline - time.monotonic())) is None]
    if left:
        names = ", ".join(p.name for p in left)
        raise LaunchError(f"{names}: still there {_KILL_S} s after SIGKILL")
