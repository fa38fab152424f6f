"""examples/gsm8k_data.py: GSM8K's file as rows, and their reward."""

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from megarl.config.run import DatasetConfig

FILE = Path(__file__).parents[2] / "examples" / "gsm8k_data.py"
LINES = [
    {"question": "48 clips and half as many?", "answer": "48/2 = 24\n48+24 = 72\n#### 72"},
    {"question": "How much is it?", "answer": "a lot\n#### 1,000"},
    {"question": "And less?", "answer": "#### -3"},
]


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("gsm8k_data", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def section(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return DatasetConfig(path=str(path))


def test_rows_are_chats_where_the_model_chats(example, section):
    (first, *_) = example.get_dataset(section, SimpleNamespace(chat_template="some"))
    assert first == {
        "messages": [{"role": "user", "content": "48 clips and half as many?"}],
        "answer": "72",
    }
    (first, *_) = example.get_dataset(section, SimpleNamespace(chat_template=None))
    assert first["prompt"] == "Question: 48 clips and half as many?\nAnswer:"


def test_ranks_share_the_rows(example, section):
    tokenizer = SimpleNamespace(chat_template=None)
    shares = [example.get_dataset(section, tokenizer, rank, 2) for rank in range(2)]
    assert [[row["answer"] for row in share] for share in shares] == [["72", "-3"], ["1,000"]]


def test_a_generated_dataset_is_the_configs(example):
    section = DatasetConfig(path="reasoning_gym:chain_sum", size=3)
    rows = example.get_dataset(section, SimpleNamespace(chat_template=None))
    assert len(rows) == 3
    assert {"prompt", "answer"} <= set(rows[0])


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("so it is 72", "72", 1.0),
        ("72 clips, or 36 pairs", "72", 0.0),
        ("$1000.00", "1,000", 1.0),
        ("3", "-3", 0.0),
        ("no idea", "72", 0.0),
    ],
)
def test_the_last_number_counts(example, completion, answer, reward):
    assert example.gsm8k_reward_fn("", completion, [], [], answer, question="q") == reward
