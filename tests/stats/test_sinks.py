"""metrics.jsonl, TensorBoard, offline W&B, the console, and the last line of a run."""

import json
from dataclasses import replace

import pytest
import yaml

from megarl.config.load import load
from megarl.config.run import WandbConfig
from megarl.errors import ConfigError
from megarl.stats import trace
from megarl.stats.console import ConsoleReporter
from megarl.stats.eval_file import read_evaluation
from megarl.stats.evaluation import Evaluation, PromptScores
from megarl.stats.report import RunReporter
from megarl.stats.sinks import MetricsLogger, check_wandb


def make_logger(run_dir, *, tensorboard=False, mode="disabled"):
    return MetricsLogger(
        run_dir,
        tensorboard=tensorboard,
        wandb=WandbConfig(mode=mode),
        config={"a": 1},
        experiment_name="e",
        trial_name="t",
    )


def rows_of(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_each_row_is_a_whole_line_once_committed(tmp_path):
    logger = make_logger(tmp_path)
    logger.commit(1, {"step": 1, "loss": 0.5})
    assert rows_of(tmp_path) == [{"step": 1, "loss": 0.5}]
    logger.commit(2, {"step": 2, "loss": float("nan"), "kl": float("inf")})
    logger.close()
    assert rows_of(tmp_path)[1] == {"step": 2, "loss": None, "kl": None}


def test_a_resumed_run_goes_on_with_its_file(tmp_path):
    for step in (1, 2):
        logger = make_logger(tmp_path)
        logger.commit(step, {"step": step})
        logger.close()
    assert rows_of(tmp_path) == [{"step": 1}, {"step": 2}]


def test_a_missing_wandb_is_found_before_the_run(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"stats_logger\.wandb\.mode: offline needs .* wandb"):
        make_logger(tmp_path / "run", mode="offline")
    assert not (tmp_path / "run").exists()
    check_wandb(WandbConfig(mode="disabled"))


def test_rows_after_the_step_a_run_goes_on_from_are_dropped(tmp_path):
    logger = make_logger(tmp_path)
    for step in (1, 2, 3):
        logger.commit(step, {"step": step})
    assert logger.keep_until(2) == [{"step": 1}, {"step": 2}]
    logger.commit(3, {"step": 3, "again": 1})
    logger.close()
    assert rows_of(tmp_path) == [{"step": 1}, {"step": 2}, {"step": 3, "again": 1}]
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    again = make_logger(tmp_path)
    assert len(again.keep_until(9)) == 3
    assert rows_of(tmp_path)[-1] == {"step": 3, "again": 1}
    assert again.keep_until(0) == []
    again.close()
    assert rows_of(tmp_path) == []


def test_tensorboard_and_offline_wandb_get_the_same_numbers(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = make_logger(tmp_path, tensorboard=True, mode="offline")
    logger.commit(3, {"step": 3, "loss": 0.25})
    logger.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (scalar,) = events.Scalars("loss")
    assert (scalar.step, scalar.value) == (3, 0.25)
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))


ROW = {
    "step": 7,
    "reward": 0.5,
    "loss": -0.25,
    "grad_norm": 1.0,
    "timeperf/rollout": 1.5,
    "timeperf/train_step": 0.5,
}


def test_a_log_gets_plain_lines(capsys):
    console = ConsoleReporter(10, is_tty=False)
    console.start()
    console.step(ROW)
    plain = {"step": 7, "eval/reward": 0.5, "eval/num_episodes": 4, "eval/response_tokens": 9}
    console.eval(plain)
    console.eval(plain | {"eval/failed": 2, "eval/pass@1": 0.4, "eval/pass@2": 0.6})
    console.close()
    first, second, third = capsys.readouterr().out.splitlines()
    assert first == "step 7/10  reward 0.500  loss -0.2500  grad_norm 1.000  s 2.0"
    assert second == "eval after step 7: reward 0.500 over 4 episodes, 9.0 tokens a response"
    assert third == f"{second}, pass@2 0.600, 2 samples without a score count as reward 0"


def test_a_terminal_gets_a_table(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    console = ConsoleReporter(10, is_tty=True)
    console.start()
    console.step(ROW)
    console.message("[a line]")
    console.close()
    out = capsys.readouterr().out
    heading = next(line for line in out.splitlines() if "grad_norm" in line)
    assert "reward" in heading
    assert "entropy" not in heading  # the row has none
    assert "0.500" in out
    assert "7/10" in out
    assert "[a line]" in out  # brackets are text, not rich's markup


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "run.yaml"
    minimal = {
        "experiment_name": "e",
        "trial_name": "t",
        "train_dataset": {"path": "rows.jsonl"},
        "actor": {"path": "model"},
        "stats_logger": {"tensorboard": False},
    }
    path.write_text(yaml.safe_dump(minimal))
    return load(path)


def held_out(*rewards, tokens):
    prompts = [PromptScores(i, [r], [tokens], [False]) for i, r in enumerate(rewards)]
    return Evaluation(prompts, 1, 1.0)


def test_the_last_line_says_what_was_learned(config, tmp_path, capsys):
    with RunReporter(config, tmp_path, enabled=True) as report:
        report.start(1)
        report.evaluation(0, held_out(1.0, 0.0, 0.0, 0.0, tokens=5))
        report.step(1, {"reward": 0.3}, {"accepted": 8.0})
        report.evaluation(1, held_out(1.0, 1.0, 1.0, 0.0, tokens=9))
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("eval reward 0.25 -> 0.75 in 1 steps (")
    before, step, after = rows_of(tmp_path)
    assert step == {"step": 1, "version": 1, "reward": 0.3, "rollout/accepted": 8.0}
    for row, number, reward, tokens in ((before, 0, 0.25, 5.0), (after, 1, 0.75, 9.0)):
        low, high = row.pop("eval/pass@1_low"), row.pop("eval/pass@1_high")
        assert 0 < low < reward < high < 1
        assert row == {
            "step": number,
            "version": number,
            "eval/reward": reward,
            "eval/reward_se": 0.25,
            "eval/response_tokens": tokens,
            "eval/no_eos_ratio": 0.0,
            "eval/num_prompts": 4,
            "eval/num_episodes": 4,
            "eval/failed": 0,
            "eval-rollout/reward": reward,
            "eval/pass@1": reward,
        }


def test_each_evaluation_of_held_out_rows_is_a_file_that_can_be_compared(config, tmp_path):
    config = replace(config, valid_dataset=config.train_dataset)
    with RunReporter(config, tmp_path, enabled=True) as report:
        report.start(1)
        report.evaluation(0, held_out(1.0, 0.0, tokens=5))
    path = tmp_path / "eval" / "version_0.json"
    assert read_evaluation(path, config.valid_dataset) == held_out(1.0, 0.0, tokens=5)


def test_a_run_is_on_the_time_line_if_the_config_asks(config, tmp_path):
    for asked, name in ((False, "without"), (True, "with")):
        stats_logger = replace(config.stats_logger, trace=asked)
        run_dir = tmp_path / name
        with RunReporter(replace(config, stats_logger=stats_logger), run_dir, enabled=True) as run:
            run.start(2, after=0)
            run.step(1, {"reward": 0.3}, {})
            run.evaluation(1, held_out(1.0, 0.0, tokens=5))
        assert not trace.is_on()
    assert not (tmp_path / "without" / "trace.json").exists()
    events = json.loads((tmp_path / "with" / "trace.json").read_text() + "{}]")[:-1]
    assert [e["name"] for e in events if e["ph"] != "M"] == ["start", "step 1", "evaluation"]


def test_other_ranks_are_silent(config, tmp_path, capsys):
    with RunReporter(config, tmp_path / "rank1", enabled=False) as report:
        report.start(1)
        report.step(1, {"reward": 0.3}, {})
    assert capsys.readouterr().out == ""
    assert not (tmp_path / "rank1").exists()
