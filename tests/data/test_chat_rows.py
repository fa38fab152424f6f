"""Rows that ask through a chat template: generated, or a file's columns under other names."""

import json
from pathlib import Path

import pytest

from megarl.config.load import load
from megarl.config.run import DatasetConfig
from megarl.data.datasets import load_rows
from megarl.errors import ConfigError

GSM8K = Path("/work/shared/data/gsm8k/test.jsonl")
CONFIGS = Path(__file__).parents[2] / "configs"
CHAIN_SUM = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def rows_of(path, **options):
    return load_rows(DatasetConfig(path=str(path), size=5, options=options))


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "rows.jsonl"
    row = {"question": "How many?", "solution": "Two.\n#### 2", "level": 3}
    path.write_text(json.dumps(row) + "\n")
    return path


@pytest.mark.parametrize("bare", [False, True])
def test_generated_rows_become_messages(bare):
    plain = rows_of("reasoning_gym:chain_sum", **CHAIN_SUM, bare=bare)
    chat = rows_of("reasoning_gym:chain_sum", **CHAIN_SUM, bare=bare, chat=True)
    for row, asked in zip(plain, chat, strict=True):
        prompt = row.pop("prompt")
        assert asked == {**row, "messages": [{"role": "user", "content": prompt}]}


def test_held_out_questions_are_left_out_of_messages_too():
    options = {**CHAIN_SUM, "chat": True}
    path = "reasoning_gym:chain_sum"
    held_out = DatasetConfig(path=path, size=50, seed=999, options=options)
    kept = load_rows(DatasetConfig(path=path, size=300, options=options, exclude=held_out))
    asked = [row["messages"] for row in load_rows(held_out)]
    assert 0 < len(kept) < 300
    assert not any(row["messages"] in asked for row in kept)


def test_columns_of_a_file_get_the_names_that_are_read(file):
    (row,) = rows_of(
        file, columns={"messages": "question", "answer": "solution"}, instruction=" Think."
    )
    assert row == {
        "messages": [{"role": "user", "content": "How many? Think."}],
        "answer": "Two.\n#### 2",
        "level": 3,
        "row_id": 0,
    }
    (row,) = rows_of(file, columns={"prompt": "question"}, instruction=" Think.")
    assert row["prompt"] == "How many? Think."
    assert "question" not in row


def test_one_column_may_be_read_as_two(file):
    (row,) = rows_of(file, columns={"prompt": "question", "answer": "question"})
    assert row["prompt"] == row["answer"] == "How many?"


def test_messages_of_a_file_stay_as_they_are(tmp_path):
    path, messages = tmp_path / "rows.jsonl", [{"role": "user", "content": "a"}]
    path.write_text(json.dumps({"chat": messages}) + "\n")
    (row,) = rows_of(path, columns={"messages": "chat"})
    assert row["messages"] == messages


def test_a_column_that_is_not_there_is_named(file):
    message = "options.columns.answer: no column 'anser'; a row has question, solution, level"
    with pytest.raises(ConfigError, match=message):
        rows_of(file, columns={"prompt": "question", "answer": "anser"})


@pytest.mark.skipif(not GSM8K.is_file(), reason=f"{GSM8K} is not there")
def test_the_shipped_options_read_gsm8k():
    config = load(CONFIGS / "qwen3_1p7b_gsm8k.yaml").train_dataset
    options = {key: x for key, x in config.options.items() if key != "name"}  # of the hub
    first, *_ = rows_of(GSM8K, **options)
    (message,) = first["messages"]
    assert message["role"] == "user"
    assert message["content"].endswith(
        "?\nReason step by step, and put your final answer within \\boxed{}."
    )
    assert "\n#### " in first["answer"]
    assert "question" not in first
