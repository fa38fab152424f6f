"""Evaluations as files and as tables."""

import json
import math
from pathlib import Path

import pytest

from megarl.config.run import DatasetConfig, EvaluatorConfig
from megarl.errors import ConfigError
from megarl.stats.eval_file import (
    comparison_table,
    free_name,
    read_evaluation,
    table,
    write_evaluation,
)
from megarl.stats.evaluation import Evaluation, PromptScores, compare

DATASET = DatasetConfig(path="rows.jsonl", options={"columns": {"answer": "a"}})


def make(*rewards, n_samples=2):
    prompts = [PromptScores(i, r, [3] * len(r), [False] * len(r)) for i, r in enumerate(rewards)]
    return Evaluation(prompts, n_samples, 1.0)


def test_a_file_gives_back_the_evaluation(tmp_path):
    path = tmp_path / "eval" / "final.json"
    written = make([1.0, 0.25], [], [0.0])
    write_evaluation(path, written, dataset=DATASET, checkpoint=tmp_path, version=7)
    assert read_evaluation(path, DATASET) == written
    record = json.loads(path.read_text())
    assert (record["version"], record["checkpoint"]) == (7, str(tmp_path))
    assert record["metrics"]["eval/failed"] == 3
    assert [p.name for p in path.parent.iterdir()] == ["final.json"]


def test_a_file_is_json_though_one_prompt_has_no_error(tmp_path):
    path = tmp_path / "one.json"
    write_evaluation(path, make([1.0, 0.0]), dataset=DATASET)

    def refuse(constant):
        raise AssertionError(constant)

    record = json.loads(path.read_text(), parse_constant=refuse)
    assert record["metrics"]["eval/reward_se"] is None


def test_an_evaluation_of_other_rows_is_refused(tmp_path):
    path = tmp_path / "final.json"
    write_evaluation(path, make([1.0, 1.0]), dataset=DATASET)
    other = DatasetConfig(path="other.jsonl", options=DATASET.options)
    with pytest.raises(ConfigError, match=r"valid_dataset.path 'rows.jsonl', this run 'other.js"):
        read_evaluation(path, other)
    # Fewer rows of it are its rows all the same.
    part = DatasetConfig(path="rows.jsonl", options=DATASET.options, size=1, batch_size=1)
    assert len(read_evaluation(path, part).prompts) == 1


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"prompts": [{"row": 1}]}'])
def test_a_file_of_something_else_is_named(tmp_path, text):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"--compare: .*x.json is no evaluation"):
        read_evaluation(path, DATASET)
    with pytest.raises(ConfigError, match=r"--compare: nothing\.json: No such file"):
        read_evaluation(Path("nothing.json"), DATASET)


def test_checkpoints_of_one_name_get_files_of_their_own(tmp_path):
    ours, theirs = tmp_path / "a" / "final", tmp_path / "b" / "final"
    first = free_name(tmp_path, ours)
    assert first == tmp_path / "final.json"
    write_evaluation(first, make([1.0]), dataset=DATASET, checkpoint=ours)
    assert free_name(tmp_path, ours) == first
    assert free_name(tmp_path, theirs) == tmp_path / "final-2.json"


def test_the_table_tells_every_number_and_what_failed():
    text = table(make([1.0, 0.0], [1.0, 1.0], [0.0]))
    lines = text.splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["mean@2", "pass@1", "pass@2"]
    assert lines[1].split()[1] == "0.5000"
    assert "3 prompts, 6 samples" in lines[4]
    assert lines[5] == ("1 of 6 samples have no score: they count as reward 0 and as no success")
    assert "no score" not in table(make([1.0, 0.0]))
    assert "no pass@k" in table(make([1.0, 0.0, 0.0]))


def test_a_difference_has_a_sign():
    num_pairs, differences = compare(make([0.0, 0.0], [1.0, 0.0]), make([1.0, 1.0], [1.0, 0.0]))
    lines = comparison_table(num_pairs, differences, "other.json").splitlines()
    assert lines[0] == "difference to other.json, paired over 2 prompts:"
    assert lines[1].split()[:2] == ["mean@2", "+0.5000"]
    assert math.isclose(differences["mean@2"].se, 0.5)


@pytest.mark.parametrize("threshold", [float("nan"), float("inf")])
def test_a_threshold_that_nothing_can_reach_is_refused(threshold):
    with pytest.raises(ConfigError, match="success_threshold: must be finite, got"):
        EvaluatorConfig(success_threshold=threshold)
