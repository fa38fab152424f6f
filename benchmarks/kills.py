"""A run whose servers are killed, beside one whose servers are not: does it learn the same?

    python benchmarks/kills.py --json benchmarks/results/kills_cpu.json

The quickstart with two servers; in the second run, every so many seconds one of those that are up
is taken at random and all its processes are killed with signal 9. Each run ends with the same
held-out evaluation, and fails if it does not end well. The difference of the rewards is reported
with its standard error.
"""

import argparse
import json
import math
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from timing import ROOT, CheckFailed, environment, write_json

_RUN_TIMEOUT_S = 3000.0
_POLL_S = 0.2
_SERVER = "api_server.entry"
OPTIONS = [
    "rollout.parallel.dp=2",
    "cluster.n_gpus_per_node=4",
    "rollout.server_restarts=1000",
    "weight_update.timeout_s=60",
]


@dataclass
class Outcome:
    """Of one run."""

    seconds: float
    steps: int
    kills: list[float] = field(default_factory=list)
    """Seconds after the start."""
    rewards: list[tuple[int, float]] = field(default_factory=list)
    """(step, held-out reward)."""
    num_held_out: int = 0
    servers_lost: int = 0
    rejected: int = 0
    gap_max: float = 0.0
    """Nats between trainer and servers, of the worst token of a step whose every token is of the
    weights it trains on."""

    @property
    def standard_error(self) -> float:
        """Of the last reward, which is a share of right answers."""
        share = self.rewards[-1][1]
        return math.sqrt(share * (1 - share) / self.num_held_out)


def run(folder: Path, options: list[str], kill_every_s: float | None, seed: int) -> Outcome:
    """One whole run.

    Raises:
      CheckFailed: it ended with an error, or not at all.
    """
    argv = [sys.executable, "-m", "megarl.cli", "train", str(ROOT / "configs" / "quickstart.yaml")]
    overrides = [*OPTIONS, *options, f"cluster.fileroot={folder}"]
    log = folder / "run.log"
    folder.mkdir(parents=True)
    dice = random.Random(seed)
    kills: list[float] = []
    started = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen([*argv, *overrides], cwd=ROOT, stdout=output, stderr=output)
        try:
            next_s = math.inf
            while process.poll() is None:
                now = time.monotonic() - started
                if now > _RUN_TIMEOUT_S:
                    raise CheckFailed(f"not done after {_RUN_TIMEOUT_S:.0f} s; see {log}")
                if kill_every_s is not None and next_s == math.inf and list(metrics(folder)):
                    next_s = now  # from its first row on
                if now >= next_s:
                    kills += [now] if kill_one(process.pid, dice) else []
                    next_s += kill_every_s or math.inf
                time.sleep(_POLL_S)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    if process.returncode != 0:
        end = log.read_text(errors="replace")[-2000:]
        raise CheckFailed(f"the run ended with exit code {process.returncode}:\n{end}")
    return outcome(folder, time.monotonic() - started, kills)


def metrics(folder: Path) -> list[dict[str, Any]]:
    found = list(folder.glob("*/*/metrics.jsonl"))
    lines = found[0].read_text().splitlines() if found else []
    return [json.loads(line) for line in lines]


def outcome(folder: Path, seconds: float, kills: list[float]) -> Outcome:
    rows = metrics(folder)
    steps = [row for row in rows if "loss" in row]
    held_out = [row for row in rows if "eval/reward" in row]
    return Outcome(
        seconds=seconds,
        steps=len(steps),
        kills=kills,
        rewards=[(row["step"], row["eval/reward"]) for row in held_out],
        num_held_out=int(held_out[-1]["eval/num_episodes"]),
        servers_lost=int(steps[-1]["rollout/servers_lost"]),
        rejected=int(steps[-1]["rollout/rejected"]),
        gap_max=max(
            (row["prox_behave_gap_max"] for row in steps if row["staleness_max"] == 0), default=0.0
        ),
    )


def kill_one(launcher: int, dice: random.Random) -> bool:
    """All processes of a random server that listens; whether there was one."""
    servers = [
        process for process in psutil.Process(launcher).children(recursive=True) if _is_up(process)
    ]
    if not servers:
        return False
    server = dice.choice(servers)
    for part in [server, *server.children(recursive=True)]:
        part.kill()
    return True


def _is_up(process: psutil.Process) -> bool:
    try:
        command = " ".join(process.cmdline())
        is_server = _SERVER in command and "guard.py" not in command
        return is_server and any(c.status == "LISTEN" for c in process.net_connections("tcp"))
    except psutil.NoSuchProcess:
        return False


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--kill-every-s", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0, help="of who is killed")
    parser.add_argument("options", nargs="*", help="key=value of the config, for both runs")
    arguments = parser.parse_args()
    found = environment(torch.device("cpu"), ("benchmarks", "megarl", "launch"))
    options = [f"total_train_steps={arguments.steps}", *arguments.options]
    with tempfile.TemporaryDirectory() as temporary:
        try:
            calm = run(Path(temporary) / "calm", options, None, arguments.seed)
            killed = run(
                Path(temporary) / "killed", options, arguments.kill_every_s, arguments.seed
            )
        except CheckFailed as error:
            print(f"FAILED {error}", file=sys.stderr)
            return 1
    difference = killed.rewards[-1][1] - calm.rewards[-1][1]
    error = math.hypot(calm.standard_error, killed.standard_error)
    for name, one in (("without", calm), ("with", killed)):
        rewards = " -> ".join(f"{reward:.3f}" for _, reward in one.rewards)
        print(
            f"{name:<8}{len(one.kills):>3} kills, {one.servers_lost} seen; held-out reward "
            f"{rewards} in {one.steps} steps ({one.seconds:.0f} s); {one.rejected} episodes "
            f"rejected; trainer and servers differ by {one.gap_max:.1e} at most"
        )
    print(f"difference {difference:+.3f}, standard error {error:.3f}")
    both = {"without": vars(calm), "with": vars(killed)}
    result = both | {"difference": difference, "standard_error": error}
    write_json(arguments.json, found, steps=arguments.steps, options=options, **result)
    return 0 if killed.steps == calm.steps == arguments.steps else 1


if __name__ == "__main__":
    sys.exit(main())
