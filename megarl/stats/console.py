"""A run as its user sees it: a live table on a terminal, plain lines in a log."""

import sys
from collections import deque

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

COLUMNS = {
    "step": "{:.0f}",
    "reward": "{:.3f}",
    "response_tokens": "{:.1f}",
    "loss": "{:+.4f}",
    "grad_norm": "{:.3f}",
    "kl": "{:.5f}",
    "clip_ratio": "{:.3f}",
    "entropy": "{:.3f}",
    "staleness_max": "{:.0f}",
    "time/step": "{:.1f}",
}
_SHORT = {"response_tokens": "tokens", "staleness_max": "stale", "time/step": "s"}
_ROWS = 12


class ConsoleReporter:
    """Shows steps as they come.

    Args:
      is_tty: None asks stdout.
    """

    def __init__(self, total_steps: int, *, is_tty: bool | None = None) -> None:
        self._live: Live | None = None
        self._rows: deque[dict[str, float]] = deque(maxlen=_ROWS)
        if sys.stdout.isatty() if is_tty is None else is_tty:
            self._progress = Progress(
                TextColumn("step"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
            )
            self._bar = self._progress.add_task("step", total=total_steps)
            self._live = Live(console=Console(), auto_refresh=False)

    def start(self) -> None:
        if self._live is not None:
            self._live.start()
            self._draw()

    def step(self, row: dict[str, float]) -> None:
        if self._live is None:
            print(_line(row), flush=True)
            return
        self._rows.append(row)
        self._progress.update(self._bar, completed=row["step"])
        self._draw()

    def eval(self, row: dict[str, float]) -> None:
        self.message(
            f"eval after step {row['step']:.0f}: reward {row['eval/reward']:.3f} over "
            f"{row['eval/num_episodes']:.0f} episodes, "
            f"{row['eval/response_tokens']:.1f} tokens a response"
        )

    def message(self, text: str) -> None:
        """A line that stays, above the table."""
        if self._live is not None:
            self._live.console.print(text)
        else:
            print(text, flush=True)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()

    def _draw(self) -> None:
        assert self._live is not None
        table = Table(*(_SHORT.get(name, name) for name in COLUMNS))
        for row in self._rows:
            table.add_row(*(_cell(row, name) for name in COLUMNS))
        self._live.update(Group(table, self._progress), refresh=True)


def _cell(row: dict[str, float], name: str) -> str:
    return COLUMNS[name].format(row[name]) if name in row else ""


def _line(row: dict[str, float]) -> str:
    """`step 3  reward 0.412  ...`, without what the run does not have."""
    parts = [f"{_SHORT.get(name, name)} {_cell(row, name)}" for name in COLUMNS if name in row]
    return "  ".join(parts)
