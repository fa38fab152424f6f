"""conform: what scripts return is taken where it says the same, and named where it does not."""

import logging

import pytest
import torch

from megarl.rollout import conform as module
from megarl.rollout.conform import conform


def as_scripts_write_it(**changes):
    """The notebook's dtypes: int64 tokens, float masks, no versions."""
    columns = {
        "input_ids": torch.tensor([[5, 6, 7], [5, 8, 0]]),
        "attention_mask": torch.tensor([[1.0, 1, 1], [1, 1, 0]]),
        "loss_mask": torch.tensor([[0, 1, 1], [0, 1, 0]]),
        "logprobs": torch.tensor([[0.0, -0.1, -0.2], [0.0, -0.3, 0.0]], dtype=torch.float64),
        "rewards": torch.tensor([1, 0]),
        "turns": torch.tensor([2, 1]),
    }
    columns |= changes
    return {key: column for key, column in columns.items() if column is not None}


def test_values_stay_and_dtypes_follow():
    given = as_scripts_write_it()
    out = conform(given, version=4)
    assert {key: column.dtype for key, column in out.items()} == {
        "input_ids": torch.int32,
        "attention_mask": torch.bool,
        "loss_mask": torch.int32,
        "logprobs": torch.float32,
        "rewards": torch.float32,
        "turns": torch.int64,
        "versions": torch.int32,
    }
    for name in ("input_ids", "attention_mask", "loss_mask", "rewards", "turns"):
        assert out[name].tolist() == given[name].tolist()
    torch.testing.assert_close(out["logprobs"].double(), given["logprobs"], rtol=0, atol=1e-7)
    assert "versions" not in given


def test_missing_versions_are_those_of_the_start():
    assert conform(as_scripts_write_it(), version=4)["versions"].tolist() == [
        [-1, 4, 4],
        [-1, 4, -1],
    ]
    own = torch.tensor([[-1, 1, 2], [-1, 3, -1]])
    assert conform(as_scripts_write_it(versions=own), 4)["versions"].tolist() == own.tolist()


def test_reward_stands_for_rewards_and_is_told_once(caplog):
    module._warn_of_reward.cache_clear()
    old = as_scripts_write_it(rewards=None, reward=torch.tensor([0.5, 0.0]))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            out = conform(old, 0)
    assert out["rewards"].tolist() == [0.5, 0.0]
    assert "reward" not in out
    assert [r.getMessage() for r in caplog.records] == [
        "a trajectory's column 'reward' is deprecated: name it 'rewards'"
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logprobs": None}, "has no 'logprobs'"),
        ({"rewards": None}, "has no 'rewards'"),
        ({"rewards": [1.0, 0.0]}, "rewards must be a tensor, got list"),
        ({"note": "seen"}, "note must be a tensor, got str"),
        ({"rewards": torch.tensor(1.0)}, r"rewards must be \(2,\), got \(\)"),
        ({"rewards": torch.ones(2, 1)}, r"rewards must be \(2,\), got \(2, 1\)"),
        ({"attention_mask": torch.full((2, 3), 0.5)}, "attention_mask must be .* the value 0.5"),
        (
            {"input_ids": torch.full((2, 3), 1 << 40)},
            "input_ids must be .* the value 1099511627776",
        ),
        ({"rewards": torch.tensor([1.0, torch.nan])}, r"rewards must be finite, got \[1.0, nan\]"),
        ({"rewards": torch.tensor([-torch.inf, 0.0])}, "rewards must be finite"),
        ({"rewards": torch.tensor([1e39, 0.0], dtype=torch.float64)}, "rewards must be finite"),
        ({"input_ids": torch.zeros(3)}, r"input_ids must be \[B, S\], got \(3,\)"),
        ({"loss_mask": torch.ones(2, 4)}, r"loss_mask must be \(2, 3\), got \(2, 4\)"),
    ],
)
def test_what_cannot_be_taken_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        conform(as_scripts_write_it(**changes), 0)
