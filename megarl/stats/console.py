"""A run as its user sees it: a live table on a terminal, plain lines in a log."""

import sys
from collections import deque

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

SECONDS = "s"
"""The column of all phases together, the sum of a row's `timeperf/` keys."""
COLUMNS = {  # key of a row: (heading, format)
    "reward": ("reward", ".3f"),
    "response_tokens": ("tokens", ".1f"),
    "loss": ("loss", "+.4f"),
    "grad_norm": ("grad_norm", ".3f"),
    "kl": ("kl", ".5f"),
    "clip_ratio": ("clip", ".3f"),
    "entropy": ("entropy", ".3f"),
    "staleness_mean": ("stale", ".2f"),
    "staleness_max": ("stale_max", ".0f"),
    SECONDS: ("s", ".1f"),
}
_ROWS = 12


class ConsoleReporter:
    """Shows steps as they come; a column is there if the run's first row has its key.

    Args:
      total_steps: length of the run.
      is_tty: a live table rather than lines; None asks stdout.
    """

    def __init__(self, total_steps: int, *, is_tty: bool | None = None) -> None:
        self.total_steps = total_steps
        self._live: Live | None = None
        self._rows: deque[dict[str, float]] = deque(maxlen=_ROWS)
        if sys.stdout.isatty() if is_tty is None else is_tty:
            self._progress = Progress(
                TextColumn("step"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
            )
            self._bar = self._progress.add_task("step", total=total_steps)
            console = Console(force_terminal=True)
            self._live = Live(console=console, auto_refresh=False)

    def start(self) -> None:
        if self._live is not None:
            self._live.start()
            self._draw()

    def step(self, row: dict[str, float]) -> None:
        seconds = sum(value for key, value in row.items() if key.startswith("timeperf/"))
        row = {**row, SECONDS: seconds}
        if self._live is None:
            print(_line(row, self.total_steps), flush=True)
            return
        self._rows.append(row)
        self._progress.update(self._bar, completed=row["step"])
        self._draw()

    def eval(self, row: dict[str, float]) -> None:
        text = (
            f"eval after step {row['step']:.0f}: reward {row['eval/reward']:.3f} over "
            f"{row['eval/num_episodes']:.0f} episodes, "
            f"{row['eval/response_tokens']:.1f} tokens a response"
        )
        shares = [f"pass@{k} {row[f'eval/pass@{k}']:.3f}" for k in _ks(row) if k > 1]
        if failed := row.get("eval/failed"):
            shares.append(f"{failed:.0f} samples without a score count as reward 0")
        self.message(", ".join([text, *shares]))

    def message(self, text: str) -> None:
        """A line that stays, above the table."""
        if self._live is not None:
            self._live.console.print(text, markup=False, highlight=False)
        else:
            print(text, flush=True)

    def close(self) -> None:
        """Leave the last table on the screen."""
        if self._live is not None:
            self._live.stop()

    def _draw(self) -> None:
        assert self._live is not None
        shown = [key for key in COLUMNS if self._rows and key in self._rows[0]]
        table = Table("step", *(COLUMNS[key][0] for key in shown))
        for row in self._rows:
            table.add_row(f"{row['step']:.0f}", *(_cell(row, key) for key in shown))
        parts = [table, self._progress] if self._rows else [self._progress]
        self._live.update(Group(*parts), refresh=True)


def _ks(row: dict[str, float]) -> list[int]:
    """Those of the row's pass@k, in order."""
    names = (key.removeprefix("eval/pass@") for key in row if key.startswith("eval/pass@"))
    return sorted(int(name) for name in names if name.isdecimal())


def _cell(row: dict[str, float], key: str) -> str:
    return format(row[key], COLUMNS[key][1]) if key in row else ""


def _line(row: dict[str, float], total_steps: int) -> str:
    """`step 3/60  reward 0.412  ...`, without what the run does not have."""
    parts = [f"{COLUMNS[key][0]} {_cell(row, key)}" for key in COLUMNS if key in row]
    return "  ".join([f"step {row['step']:.0f}/{total_steps}", *parts])
