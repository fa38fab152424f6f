"""Whole runs of the quickstart's config: real Megatron-Core ranks, a real vLLM server.

Not covered: that it learns within the quickstart's steps, which takes minutes; see README.
"""

import itertools
import os
import signal

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM
from whole_runs import REPOSITORY, Run

from megarl.config.load import load

pytestmark = [pytest.mark.e2e, pytest.mark.server]

SYNCHRONOUS = [
    "rollout.max_head_offpolicyness=0",
    "gconfig.seed=5",
    "total_train_steps=2",
    "valid_dataset.size=32",
    "train_dataset.batch_size=16",
    "actor.mb_spec.max_tokens_per_mb=1024",
]


@pytest.fixture(scope="module")
def tp2_run(tmp_path_factory):
    run = Run("train", *SYNCHRONOUS, "saver.freq_steps=1", root=tmp_path_factory.mktemp("tp2"))
    assert run.wait() == 0, run.text()
    return run


def test_a_run_leaves_what_the_readme_says_and_nothing_else(tp2_run):
    tp2_run.assert_nothing_is_left()
    assert tp2_run.text().splitlines()[-1].startswith("eval reward 0.")
    assert load(tp2_run.folder / "config.yaml").rollout.max_head_offpolicyness == 0
    first, second = tp2_run.steps()
    promised = {
        *("reward", "loss", "grad_norm", "kl", "clip_ratio", "entropy", "num_tokens"),
        *("staleness_mean", "staleness_max"),
        *("timeperf/rollout", "timeperf/train_step", "timeperf/update_weights"),
    }
    assert promised <= set(first)
    assert [row["version"] for row in (first, second)] == [1, 2]
    evaluations = [row for row in tp2_run.rows() if "eval/reward" in row]
    assert [row["step"] for row in evaluations] == [0, 2]
    assert list((tp2_run.folder / "tensorboard").iterdir())
    assert first["staleness_max"] == second["staleness_max"] == 0


def test_trainer_and_server_agree_on_logprobs_after_every_push(tp2_run):
    for row in tp2_run.steps():
        # float32 on both sides, sums in other orders: 1e-4 nats is some 100 roundings.
        assert row["prox_behave_gap_max"] < 1e-4


def test_checkpoints_are_hf_folders_of_each_version(tp2_run):
    base = AutoModelForCausalLM.from_pretrained(REPOSITORY / "configs" / "quickstart_base")
    versions = [
        AutoModelForCausalLM.from_pretrained(tp2_run.folder / "checkpoints" / name)
        for name in ("step_1", "step_2", "final")
    ]
    moved = [base, *versions]
    gaps = [
        max((a - b).abs().max().item() for a, b in zip(x.parameters(), y.parameters(), strict=True))
        for x, y in itertools.pairwise(moved)
    ]
    assert gaps[0] > 0
    assert gaps[1] > 0
    assert gaps[2] == 0
    with torch.no_grad():
        assert versions[2](torch.tensor([[3, 13, 10]])).logits.isfinite().all()


@pytest.mark.parametrize("layout", [["actor.parallel.pp=2"], []], ids=["pp2", "dp2"])
def test_other_layouts_have_the_same_first_step(tp2_run, tmp_path, layout):
    """Same data, synchronous: the loss of the first step to 1e-5."""
    short = [*SYNCHRONOUS, "total_train_steps=1", "evaluator.at_start=false"]
    run = Run("train", *short, "actor.parallel.tp=1", *layout, root=tmp_path)
    assert run.wait() == 0, run.text()
    got, want = run.steps()[0], tp2_run.steps()[0]
    assert got["reward"] == want["reward"]
    assert got["num_tokens"] == want["num_tokens"]
    assert got["loss"] == pytest.approx(want["loss"], abs=1e-5)
    assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-4)


def test_a_killed_run_goes_on_with_the_same_numbers(tp2_run, tmp_path):
    first = Run("train", *SYNCHRONOUS, "recover.freq_steps=1", root=tmp_path)
    first.wait_for_state()
    first.process.kill()
    first.wait()
    first.assert_nothing_is_left()
    again = Run("train", *SYNCHRONOUS, "recover.freq_steps=1", root=tmp_path)
    assert again.wait() == 0, again.text()
    assert "going on after step" in again.text()
    got = again.steps()
    assert [row["step"] for row in got] == [1, 2]
    for row, want in zip(got, tp2_run.steps(), strict=True):
        for key in ("reward", "loss", "grad_norm", "entropy", "num_tokens", "lr"):
            assert row[key] == want[key], key


@pytest.mark.parametrize("way", ["mode=broadcast", "mode=disk", "overlap=true"])
def test_the_same_run_whichever_way_the_weights_take(tp2_run, tmp_path, way):
    """tp2_run's went from shard to shard, each byte once."""
    run = Run("train", *SYNCHRONOUS, f"weight_update.{way}", root=tmp_path)
    assert run.wait() == 0, run.text()
    for row, want in zip(run.steps(), tp2_run.steps(), strict=True):
        assert want["bridge/bytes_sent"] == want["bridge/bytes_optimal"] > 0
        assert ("bridge/bytes_optimal" in row) == (way == "overlap=true")
        for key in ("reward", "loss", "grad_norm", "entropy", "num_tokens"):
            assert row[key] == want[key], key


def test_a_dynamic_batch_is_what_was_accepted(tmp_path, monkeypatch):
    """Prompts whose samples all have the same reward are left out, and no others asked."""
    (tmp_path / "choosing.py").write_text(
        "def is_mixed(trajectory):\n    return trajectory['rewards'].unique().numel() > 1\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    run = Run(
        "train",
        *SYNCHRONOUS,
        "actor.parallel.tp=1",
        "evaluator.at_start=false",
        "evaluator.at_end=false",
        "dynamic_bs=true",
        "rollout.should_accept_fn=choosing:is_mixed",
        root=tmp_path,
    )
    assert run.wait() == 0, run.text()
    accepted = 0
    for step, row in enumerate(run.steps(), start=1):
        counts = row["rollout/accepted"], row["rollout/rejected/filtered"]
        assert sum(counts) == 16 * step
        assert all(counts)
        samples = row["ppo_actor/n_seqs"]
        assert samples == load(run.folder / "config.yaml").gconfig.n_samples * (
            counts[0] - accepted
        )
        accepted = counts[0]


def kill_server(run, index):
    """All processes of a server of a run, at once."""
    commands = {pid: c for pid, c in run.processes().items() if "guard.py" not in c}
    (pid,) = [pid for pid, command in commands.items() if f" --seed {index} " in command]
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        process.kill()


def test_a_run_waits_for_its_only_server_to_come_back(tmp_path):
    """It is given the present weights before it answers anybody."""
    run = Run("train", *SYNCHRONOUS, "total_train_steps=4", root=tmp_path)
    run.wait_for_step()
    kill_server(run, 0)
    assert run.wait() == 0, run.text()
    assert "it is started again in 1 s" in run.text()
    assert [row["step"] for row in run.steps()] == [1, 2, 3, 4]
    assert run.steps()[-1]["rollout/servers_lost"] == 1
    for row in run.steps():
        assert row["prox_behave_gap_max"] < 1e-4
        assert row["staleness_max"] == 0
    run.assert_nothing_is_left()


def test_a_run_goes_on_without_one_of_two_servers(tmp_path):
    two = ["rollout.parallel.dp=2", "cluster.n_gpus_per_node=4", "total_train_steps=5"]
    run = Run("train", *SYNCHRONOUS, *two, "rollout.server_restarts=0", root=tmp_path)
    run.wait_for_step()
    kill_server(run, 1)
    assert run.wait() == 0, run.text()
    assert "server 1 ended with exit code" in run.text()
    assert [row["step"] for row in run.steps()] == [1, 2, 3, 4, 5]
    assert run.steps()[-1]["rollout/servers_lost"] == 1
    assert all(row["prox_behave_gap_max"] < 1e-4 for row in run.steps())
    run.assert_nothing_is_left()


ENDLESS = ["total_train_steps=1000", "valid_dataset=null", "train_dataset.batch_size=8"]


@pytest.mark.parametrize("how", ["Ctrl-C", "kill -9 of the launcher", "a server that dies"])
def test_no_process_is_left(tmp_path, how):
    run = Run("train", *ENDLESS, "rollout.server_restarts=0", root=tmp_path)
    run.wait_for_step()
    before = run.processes()
    servers = [pid for pid, command in before.items() if "EngineCore" in command]
    assert servers, before
    assert sum("megarl.train" in command for command in before.values()) >= 2
    if how == "Ctrl-C":
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 130
    elif how == "kill -9 of the launcher":
        run.process.kill()
        assert run.wait() == -signal.SIGKILL
    else:
        os.kill(servers[0], signal.SIGKILL)
        assert run.wait() not in (0, 130)
        # Who notices first: the launcher (the server's process ended), or rank 0, whose error
        # then names the server's address (its API process may outlive its engine).
        ends = ("server 0 ended", "errors.EngineError: ", "errors.WeightUpdateError: ")
        assert any(end in run.text() for end in ends), run.text()
    run.assert_nothing_is_left()


def test_eval_scores_a_checkpoint(tp2_run, tmp_path):
    checkpoint = tp2_run.folder / "checkpoints" / "final"
    run = Run("eval", "valid_dataset.size=32", f"--checkpoint={checkpoint}", root=tmp_path)
    assert run.wait() == 0, run.text()
    run.assert_nothing_is_left()
    last = run.text().splitlines()[-1]
    assert "over 32 episodes" in last
    assert 0.1 < float(last.split()[2]) < 0.9


def test_a_mistake_is_one_line_before_any_process(tmp_path):
    run = Run("train", "actor.parallel.tp=4", "actor.world_size=4", root=tmp_path)
    assert run.wait() == 2
    (line,) = run.text().splitlines()
    assert "actor.parallel.tp: 4 does not divide num_key_value_heads 2" in line
    assert not run.folder.exists()
