"""kill -9 at any moment, and the same command again: the run ends with the same numbers."""

import random
import time

import pytest
from whole_runs import Run

pytestmark = [pytest.mark.e2e, pytest.mark.server]

KILLS, STEPS = 10, 12
COMMAND = [
    "rollout.max_head_offpolicyness=0",
    "gconfig.seed=5",
    f"total_train_steps={STEPS}",
    "evaluator.freq_steps=5",
    "valid_dataset.size=16",
    "train_dataset.batch_size=8",
    "gconfig.n_samples=4",
    "actor.mb_spec.max_tokens_per_mb=512",
    "saver.freq_steps=4",
    "recover.freq_steps=1",
]


def numbers(run):
    """All that a run reports but times."""
    return [
        {
            key: x
            for key, x in row.items()
            if not key.startswith("timeperf/") and not key.endswith("_s")
        }
        for row in run.rows()
    ]


def kill_somewhere(run, rng):
    """While it starts, or anywhere from the end of a step to well into the next but one."""
    steps_before = len(run.steps())
    deadline = time.monotonic() + (rng.uniform(0, 15) if rng.random() < 0.2 else 300)
    while len(run.steps()) <= steps_before and time.monotonic() < deadline:
        if run.process.poll() is not None:
            return
        time.sleep(0.02)
    time.sleep(rng.uniform(0, 2))
    run.process.kill()


@pytest.mark.parametrize("seed", [random.SystemRandom().randrange(1000)], ids="seed{}".format)
def test_ten_kills_change_no_number(tmp_path, seed):
    reference = Run("train", *COMMAND, root=tmp_path / "reference")
    assert reference.wait() == 0, reference.text()
    rng = random.Random(seed)
    for _ in range(KILLS):
        run = Run("train", *COMMAND, root=tmp_path / "killed")
        kill_somewhere(run, rng)
        run.wait()
        run.assert_nothing_is_left()
    run = Run("train", *COMMAND, root=tmp_path / "killed")
    assert run.wait() == 0, run.text()
    assert [row["step"] for row in run.steps()] == list(range(1, STEPS + 1))
    assert numbers(run) == numbers(reference)
