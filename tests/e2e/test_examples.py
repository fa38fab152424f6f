"""Each example from its file as it stands, as a user starts it: real ranks, a real server.

Not covered: that they learn, which takes more than two steps.
"""

import math

import pytest
from whole_runs import QUICKSTART, REPOSITORY, Run

pytestmark = [pytest.mark.e2e, pytest.mark.server]

SHORT = [
    "total_train_steps=2",
    "train_dataset.batch_size=8",
    "valid_dataset.size=8",
    "actor.mb_spec.max_tokens_per_mb=1024",
    "gconfig.n_samples=4",
]
DP2 = ["actor.parallel.tp=1"]


def launch(example, *overrides, root):
    """The ended run; its steps have been looked at."""
    script = REPOSITORY / "examples" / example
    arguments = ["--config", str(QUICKSTART), *SHORT, *overrides]
    run = Run("launch", *arguments, root=root, config=script)
    code = run.wait()
    assert code == 0, run.text()
    run.assert_nothing_is_left()
    steps = run.steps()
    assert [row["version"] for row in steps] == [1, 2]
    for row in steps:
        assert math.isfinite(row["loss"])
        assert row["grad_norm"] > 0
        assert 0 <= row["reward"] <= 1
    # The base model is right every third time; one with other weights never is.
    assert sum(row["reward"] for row in steps) > 0.1
    assert steps[0]["staleness_max"] == 0
    return run


def test_asynchronous_grpo(tmp_path):
    """Rows from each replica's own share; one export and one evaluation on the way."""
    run = launch(
        "gsm8k_grpo.py", *DP2, "saver.freq_steps=2", "evaluator.freq_steps=1", root=tmp_path
    )
    first, second = run.steps()
    assert second["staleness_max"] <= 1
    assert first["prox_behave_gap_max"] < 1e-4
    assert 0 <= first["eval-rollout/reward"] <= 1
    assert first["timeperf/update_weights"] > 0
    assert (run.folder / "checkpoints" / "step_2" / "model.safetensors").is_file()
    assert not (run.folder / "checkpoints" / "step_1").exists()


@pytest.mark.parametrize("layout", [[], DP2], ids=["tp2", "dp2"])
def test_synchronous_grpo(tmp_path, layout):
    run = launch("gsm8k_grpo_sync.py", *layout, root=tmp_path)
    for row in run.steps():
        # Also after the update: what the servers read from disk are the trainer's weights.
        assert row["prox_behave_gap_max"] < 1e-4
        assert row["staleness_max"] == 0


def test_multi_turn_reflection(tmp_path):
    run = launch("multi_turn_reflection.py", "gconfig.n_samples=16", root=tmp_path)
    (line,) = [line for line in run.text().splitlines() if line.startswith("untrained: rewards")]
    rewards = [float(x) for x in line.partition("[")[2].rstrip("]").split(",")]
    assert len(rewards) == 2 * 16
    # Before any push: the servers have loaded the base model; random weights reach 0.05.
    assert sum(rewards) / len(rewards) > 0.2
    assert {round(x, 6) for x in rewards} <= {0.0, 0.81, 0.9, 1.0}
    assert run.steps()[0]["prox_behave_gap_max"] < 1e-4
