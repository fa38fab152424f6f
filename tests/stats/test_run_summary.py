"""`megarl report RUN_DIR`: what is told of metrics.jsonl and of dumps."""

import json
import subprocess
import sys

import pytest

from megarl.errors import ConfigError
from megarl.stats.run_summary import summary

STEPS = [
    {
        "step": i,
        "num_tokens": 1000.0,
        "ppo_actor/n_valid_tokens": 400.0,
        "staleness_mean": 0.25 * i,
        "staleness_max": float(i > 1),
        "timeperf/rollout": 3.0,
        "timeperf/train_step": float(i),
    }
    for i in (1, 2, 3)
]


def evaluation(step, reward, **more):
    return {"step": step, "eval/reward": reward, "eval/reward_se": 0.05, **more}


def write(run_dir, *rows, tail=""):
    text = "".join(json.dumps(row) + "\n" for row in rows) + tail
    (run_dir / "metrics.jsonl").write_text(text)


def test_a_run_is_told_in_numbers(tmp_path):
    write(
        tmp_path,
        evaluation(0, 0.25, **{"eval/pass@1": 0.25, "eval/pass@1_low": 0.1}),
        *STEPS,
        evaluation(3, 0.75, **{"eval/pass@1": 0.75, "eval/pass@10": 0.9, "eval/failed": 2}),
        tail='{"step": 4, "torn',
    )
    lines = summary(tmp_path).splitlines()
    assert lines[0] == f"{tmp_path}: 3 steps"
    told = "eval reward    0.250 +- 0.098 after step 0 -> 0.750 +- 0.098 after step 3"
    assert lines[2] == told
    assert lines[3].split() == ["pass@1", "0.250", "->", "0.750"]
    assert lines[4] == "2 samples had no score and counted as reward 0"
    table = {line.split()[0]: line.split()[1:] for line in lines[6:10]}
    assert table["rollout"] == ["9.0", "60.0%", "3.000", "3.000"]
    assert table["train_step"] == ["6.0", "40.0%", "2.000", "3.000"]
    assert lines[9].split() == ["all", "phases", "15.0"]
    assert "3,000 tokens, 200 tokens/s" in lines[11]
    assert "1,200 tokens, 80 tokens/s" in lines[12]
    assert "(mean of all 0.50)" in lines[14]
    assert [line.split()[:2] for line in lines[15:]] == [["0", "1"], ["1", "2"]]


def test_versions_of_dumped_responses_are_counted(tmp_path):
    write(tmp_path, *STEPS)
    for task, versions in enumerate([[(3, 3), (3, 2)], [(3, 1), (4, 3)]]):
        folder = tmp_path / "rollout" / "3"
        folder.mkdir(parents=True, exist_ok=True)
        records = [
            # A text that quotes the keys is no version.
            {"head_version": a, "tail_version": b, "prompt": '"head_version": 9, "tail_version": 0'}
            for a, b in versions
        ]
        text = "".join(json.dumps(record) + "\n" for record in records)
        (folder / f"{task}.jsonl").write_text(text)
    *_, zero, one, two = summary(tmp_path).splitlines()
    assert [line.split()[:2] for line in (zero, one, two)] == [["0", "1"], ["1", "2"], ["2", "1"]]


def test_a_run_without_evaluations_or_steps_is_told_as_well(tmp_path):
    write(tmp_path, evaluation(0, 0.5))
    assert summary(tmp_path).splitlines()[0] == f"{tmp_path}: 0 steps"
    write(tmp_path, {"step": 1, "loss": 0.5, "timeperf/data": 0.5})
    assert "eval reward" not in summary(tmp_path)


def test_a_folder_without_a_run_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match=r"RUN_DIR: .*metrics.jsonl: No such file"):
        summary(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ConfigError, match=r"RUN_DIR: .*metrics.jsonl has no rows yet"):
        summary(tmp_path)


def test_the_command_prints_it_without_torch(tmp_path):
    write(tmp_path, *STEPS)
    code = (
        "import sys; from megarl.cli import main; code = main(sys.argv[1:]); "
        "print('torch' in sys.modules); sys.exit(code)"
    )
    argv = [sys.executable, "-c", code, "report", str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == summary(tmp_path) + "\nFalse\n"
    argv[-1] = str(tmp_path / "nothing")
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("megarl: RUN_DIR: ")
