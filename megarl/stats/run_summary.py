"""`megarl report RUN_DIR`: what a run did, from its metrics.jsonl and its dumped trajectories.

Imports no torch: a run can be read on any machine that has its folder.
"""

import json
import re
from collections import Counter
from pathlib import Path
from statistics import NormalDist
from typing import Any

from megarl.errors import ConfigError
from megarl.stats.evaluation import CONFIDENCE

Row = dict[str, Any]

_Z = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)
_PHASE = "timeperf/"
# Not json: a long run has gigabytes of dumps, and this stands near the start of each line. Inside
# a text of the line the quotes would have backslashes.
_VERSIONS = re.compile(rb'"head_version": (-?\d+), "tail_version": (-?\d+)')
_BAR = 40


def read_rows(run_dir: Path) -> list[Row]:
    """The whole lines of metrics.jsonl. ConfigError if there is none."""
    path = run_dir / "metrics.jsonl"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"RUN_DIR: {path}: {error.strerror}") from error
    # A run that goes on beside this, or was cut, may have left a part of a line at the end.
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    if not rows:
        raise ConfigError(f"RUN_DIR: {path} has no rows yet")
    return rows


def summary(run_dir: Path) -> str:
    """For people, some twenty lines. ConfigError if the folder holds no run."""
    rows = read_rows(run_dir)
    steps = [row for row in rows if any(key.startswith(_PHASE) for key in row)]
    sections = [
        [f"{run_dir}: {steps[-1]['step'] if steps else 0} steps"],
        _evaluations(rows),
        _phases(steps),
        _throughput(steps),
        _staleness(steps),
        _spread(run_dir / "rollout"),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def _evaluations(rows: list[Row]) -> list[str]:
    """First -> last."""
    found = [row for row in rows if row.get("eval/reward") is not None]
    if not found:
        return []
    first, last = found[0], found[-1]
    lines = [
        f"eval reward    {_reward(first)} after step {first['step']} -> "
        f"{_reward(last)} after step {last['step']}"
    ]
    names = [key for key in last if re.fullmatch(r"eval/pass@\d+", key)]
    for key in sorted(names, key=lambda key: int(key.rpartition("@")[2])):
        if key in first:
            name = key.removeprefix("eval/")
            lines.append(f"{name:<14} {_share(first, key)} -> {_share(last, key)}")
    if failed := sum(row.get("eval/failed") or 0 for row in found):
        lines.append(f"{failed} samples had no score and counted as reward 0")
    return lines


def _reward(row: Row) -> str:
    se = row.get("eval/reward_se")
    return f"{row['eval/reward']:.3f}" + ("" if se is None else f" +- {_Z * se:.3f}")


def _share(row: Row, key: str) -> str:
    value, low, high = row[key], row.get(f"{key}_low"), row.get(f"{key}_high")
    interval = "" if low is None or high is None else f" [{low:.3f}, {high:.3f}]"
    return f"{value:.3f}{interval}"


def _phases(steps: list[Row]) -> list[str]:
    seconds: dict[str, list[float]] = {}
    for row in steps:
        for key, value in row.items():
            if key.startswith(_PHASE) and value is not None:
                seconds.setdefault(key.removeprefix(_PHASE), []).append(value)
    if not seconds:
        return []
    total = sum(sum(values) for values in seconds.values())
    width = max(len("all phases"), *map(len, seconds))
    lines = [f"{'phase':<{width}}  {'total s':>9}  {'share':>6}  {'mean s':>8}  {'slowest s':>9}"]
    for name, values in sorted(seconds.items(), key=lambda item: -sum(item[1])):
        share = sum(values) / total if total else 0.0
        lines.append(
            f"{name:<{width}}  {sum(values):9.1f}  {share:6.1%}  "
            f"{sum(values) / len(values):8.3f}  {max(values):9.3f}"
        )
    lines.append(f"{'all phases':<{width}}  {total:9.1f}")
    return lines


def _throughput(steps: list[Row]) -> list[str]:
    """Over all phases of all steps: waits, pushes and saves are in it."""
    lines = []
    for key, what in (("num_tokens", "trained"), ("ppo_actor/n_valid_tokens", "of these sampled")):
        counted = [row for row in steps if row.get(key) is not None]
        tokens = sum(row[key] for row in counted)
        seconds = sum(
            value
            for row in counted
            for name, value in row.items()
            if name.startswith(_PHASE) and value is not None
        )
        if tokens and seconds:
            lines.append(f"{what:<16}  {tokens:,.0f} tokens, {tokens / seconds:,.0f} tokens/s")
    return lines


def _staleness(steps: list[Row]) -> list[str]:
    values = [row["staleness_max"] for row in steps if row.get("staleness_max") is not None]
    if not values:
        return []
    means = [row["staleness_mean"] for row in steps if row.get("staleness_mean") is not None]
    head = f"versions that the oldest token of a step lags (mean of all {_mean(means):.2f}):"
    return [head, *_histogram(Counter(int(value) for value in values), "steps")]


def _spread(folder: Path) -> list[str]:
    """Of dumped trajectories: how many versions a response was sampled over."""
    counts: Counter[int] = Counter()
    for path in folder.glob("*/*.jsonl"):
        for head, tail in _VERSIONS.findall(path.read_bytes()):
            counts[int(head) - int(tail)] += 1
    if not counts:
        return []
    head = "versions between the first and the last token of a dumped response:"
    return [head, *_histogram(counts, "responses")]


def _histogram(counts: Counter[int], unit: str) -> list[str]:
    most = max(counts.values())
    return [
        f"  {value:>3}  {count:>8} {unit}  {'#' * max(1, round(_BAR * count / most))}"
        for value, count in sorted(counts.items())
    ]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
