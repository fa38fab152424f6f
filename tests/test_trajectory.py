import pytest
import torch

from megarl.trajectory import concat_padded, select, sequence_lengths


def row(length, value):
    return {
        "input_ids": torch.full((1, length), value, dtype=torch.int32),
        "attention_mask": torch.ones(1, length, dtype=torch.bool),
        "versions": torch.zeros(1, length, dtype=torch.int32),
        "rewards": torch.tensor([float(value)]),
    }


def test_rows_are_padded_on_the_right_and_keep_their_order():
    batch = concat_padded([row(2, 5), row(4, 6)])
    assert batch["input_ids"].tolist() == [[5, 5, 0, 0], [6, 6, 6, 6]]
    assert batch["versions"].tolist() == [[0, 0, -1, -1], [0, 0, 0, 0]]
    assert batch["rewards"].tolist() == [5.0, 6.0]
    assert sequence_lengths(batch).tolist() == [2, 4]
    assert {k: x.dtype for k, x in batch.items()} == {k: x.dtype for k, x in row(1, 1).items()}
    second = select(batch, torch.tensor([1]))
    assert second["input_ids"].tolist() == [[6, 6, 6, 6]]


def test_odd_columns_are_named():
    with pytest.raises(ValueError, match="columns: values"):
        concat_padded([row(2, 5), {**row(2, 5), "values": torch.zeros(1, 2)}])
    with pytest.raises(ValueError, match="no trajectory"):
        concat_padded([])
    with pytest.raises(ValueError, match=r"column values is \(1, 3\) beside input_ids \(1, 2\)"):
        concat_padded([{**row(2, 5), "values": torch.zeros(1, 3)}, {**row(4, 6), "values": 1}])


def test_parts_of_several_dtypes_and_lengths_keep_every_value():
    ints = {**row(1, 5), "scores": torch.tensor([[7]])}
    floats = {**row(3, 6), "scores": torch.tensor([[0.5, 1.5, 2.5]])}
    for parts in ([ints, floats], [floats, ints]):
        scores = concat_padded(parts)["scores"]
        assert scores.dtype == torch.float32
        assert sorted(scores.flatten().tolist()) == [0, 0, 0.5, 1.5, 2.5, 7]


@pytest.mark.parametrize("other", [torch.zeros(1, 4, 1), torch.zeros(1, 4), torch.zeros(1)])
def test_columns_of_another_rank_or_depth_are_named(other):
    """Copied into place they would be spread over it."""
    deep = {**row(2, 5), "features": torch.ones(1, 2, 3)}
    with pytest.raises(ValueError, match=r"column features is \(1,.*beside \(1, 2, 3\)"):
        concat_padded([deep, {**row(4, 6), "features": other}])


def test_one_part_is_not_copied():
    part = row(3, 5)
    batch = concat_padded([part])
    assert batch is not part
    assert all(batch[key] is part[key] for key in part)
