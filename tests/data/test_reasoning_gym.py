"""What scores a row of reasoning-gym in another process scores it as the generator does."""

import datetime
import json

import pytest
import reasoning_gym
from reasoning_gym.factory import DATASETS

from megarl.config.run import DatasetConfig
from megarl.data.datasets import load_rows
from megarl.data.reasoning_gym import _decode, dataset_reward, generate_rows
from megarl.errors import ConfigError

NO_ANSWER = ("boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour")
"""They know no right answer, only whether one is right."""


def sent(row):
    """As a process of a RewardPool reads it."""
    row = json.loads(json.dumps(row))
    row.pop("prompt")
    return row


def score(row, completion):
    return dataset_reward("p", completion, [], [], **sent(row))


@pytest.mark.parametrize("name", sorted(set(DATASETS) - {"composite"}))  # that is of others
def test_entries_come_back_as_they_were(name):
    (row,) = generate_rows(name, size=1, seed=5, options={})
    entry = reasoning_gym.create_dataset(name, size=1, seed=5)[0]
    assert _decode(sent(row)["entry"]) == entry
    if name not in NO_ANSWER:
        assert score(row, row["answer"]) == 1.0


def test_a_colouring_is_scored_by_its_numbers():
    (row,) = generate_rows("graph_color", size=1, seed=5, options={})
    known = _decode(row["entry"])["metadata"]["possible_answer"]
    assert score(row, json.dumps(known)) == 1.0
    assert score(row, json.dumps(dict.fromkeys(known, 1))) < 1.0


def test_scores_follow_the_options_of_the_dataset():
    def near(places):
        options = {"max_num_decimal_places": places, "min_num_decimal_places": places}
        (row,) = generate_rows("decimal_arithmetic", size=1, seed=3, options=options)
        return score(row, str(float(row["answer"]) + 0.004))

    assert (near(2), near(6)) == (1.0, 0.0)


@pytest.mark.parametrize("name", ["arc_agi", "rearc"])
def test_options_that_have_fields_are_read_from_a_config(name):
    options = {"board_format_opts": {"alphabet": list("abcdefghij"), "col_delimiter": ","}}
    (row,) = load_rows(DatasetConfig(path=f"reasoning_gym:{name}", size=1, options=options))
    assert "a,a" in row["prompt"] or "b,b" in row["prompt"]
    assert score(row, row["answer"]) == 1.0
    assert score(row, row["answer"].replace(",", " ")) < 1.0
    wrong = {"board_format_opts": {"letters": "ab"}}
    with pytest.raises(ConfigError, match=f"reasoning_gym dataset '{name}'"):
        load_rows(DatasetConfig(path=f"reasoning_gym:{name}", size=1, options=wrong))


def test_days_and_hours_are_options_too():
    options = {"min_date": datetime.date(2001, 2, 3), "max_time": datetime.time(20, 30)}
    (row,) = generate_rows("time_intervals", size=1, seed=1, options=options)
    assert _decode(sent(row)["dataset"]["options"]) == options
    assert score(row, row["answer"]) == 1.0
