"""Prompt streams, datasets, and the quickstart's task."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from megarl.config.run import DatasetConfig
from megarl.data.datasets import load_rows
from megarl.data.prompts import PromptStream
from megarl.data.quickstart import work_out, works_or_guesses, write_quickstart_model
from megarl.data.reasoning_gym import dataset_reward, final_number_reward
from megarl.errors import ConfigError

CHAIN_SUM = {"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1}
QUICKSTART_BASE = Path(__file__).parents[2] / "configs" / "quickstart_base"


def make_stream(num_rows=10, batch_size=3, shuffle=True, seed=1, shard=(0, 1)):
    rows = [{"prompt": str(i)} for i in range(num_rows)]
    return PromptStream(rows, batch_size=batch_size, shuffle=shuffle, seed=seed, shard=shard)


def take(stream, count):
    return [[row["prompt"] for row in next(stream)] for _ in range(count)]


def take_flat(stream, count):
    return [prompt for batch in take(stream, count) for prompt in batch]


@given(before=st.integers(0, 12), shuffle=st.booleans())
def test_a_resumed_stream_goes_on_at_the_exact_row(before, shuffle):
    stream, resumed = make_stream(shuffle=shuffle), make_stream(shuffle=shuffle)
    take(stream, before)
    resumed.load_state_dict(json.loads(json.dumps(stream.state_dict())))
    assert take(stream, 8) == take(resumed, 8)


def test_epochs_hold_each_row_once_in_orders_of_their_own():
    stream = make_stream(num_rows=9)
    assert stream.steps_per_epoch == 3
    epochs = [take_flat(stream, 3) for _ in range(3)]
    assert all(sorted(epoch) == [str(i) for i in range(9)] for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert take(make_stream(num_rows=9, seed=2), 3) != take(make_stream(num_rows=9), 3)
    assert take_flat(make_stream(num_rows=9, shuffle=False), 3) == [str(i) for i in range(9)]


def make_shards(count, num_rows, batch_size):
    return [
        make_stream(num_rows=num_rows, batch_size=batch_size, shard=(i, count))
        for i in range(count)
    ]


def take_together(shards, steps):
    """The batches of all shards, step by step, as one list of rows."""
    return [row for _ in range(steps) for shard in shards for row in take_flat(shard, 1)]


@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 8))
def test_shards_are_disjoint_and_together_the_whole_stream(count, batch_size, more):
    num_rows = count * batch_size + more
    shards = make_shards(count, num_rows, batch_size)
    whole = make_stream(num_rows=num_rows, batch_size=batch_size * count)
    assert take_together(shards, 7) == take_flat(whole, 7)
    assert {shard.steps_per_epoch for shard in shards} == {whole.steps_per_epoch}
    assert all(shard.state_dict() == whole.state_dict() for shard in shards)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 5), st.integers(0, 9))
def test_shards_go_on_as_another_number_of_shards(before, after, batch_size, steps):
    """Nothing is asked twice in an epoch, nothing is left out but what fills no batch."""
    shards = make_shards(before, 24, batch_size)
    take_together(shards, steps)
    state = shards[-1].state_dict()
    resumed = make_shards(after, 24, batch_size)
    whole = make_stream(num_rows=24, batch_size=batch_size * after)
    for stream in (*resumed, whole):
        stream.load_state_dict(json.loads(json.dumps(state)))
    assert take_together(resumed, 6) == take_flat(whole, 6)


def test_too_few_rows_are_an_error():
    with pytest.raises(ValueError, match="2 rows do not fill one batch of 3"):
        make_stream(num_rows=2)
    with pytest.raises(ValueError, match="5 rows do not fill one batch of 3 in each of 2 shards"):
        make_stream(num_rows=5, shard=(0, 2))


@pytest.mark.parametrize("shard", [(2, 2), (-1, 2), (0, 0)])
def test_a_shard_that_is_none_is_refused(shard):
    with pytest.raises(ValueError, match="0 <= index < count, got"):
        make_stream(shard=shard)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_rows": 11}, "num_rows 11 cannot go on where one with num_rows 10"),
        ({"seed": 2}, "seed 2 cannot go on where one with seed 1"),
        ({"shuffle": False}, "shuffle 0 cannot go on where one with shuffle 1"),
    ],
)
def test_a_state_of_other_rows_is_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        make_stream(**changed).load_state_dict(make_stream().state_dict())


def test_generated_rows_are_reproducible_and_exclude_the_held_out():
    options = {"bare": True, **CHAIN_SUM}
    held_out = DatasetConfig(path="reasoning_gym:chain_sum", size=300, seed=7, options=options)
    config = DatasetConfig(
        path="reasoning_gym:chain_sum", size=2000, seed=3, options=options, exclude=held_out
    )
    rows = load_rows(config)
    asked = {row["prompt"] for row in load_rows(held_out)}
    assert not asked & {row["prompt"] for row in rows}
    assert 1500 < len(rows) < 2000
    assert load_rows(config) == rows
    first = rows[0]
    assert eval(first["prompt"].removesuffix(" =")) == int(first["answer"])


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        ("reasoning_gym:nope", {}, "valid_dataset: reasoning_gym dataset 'nope'"),
        ("reasoning_gym:chain_sum", {"terms": 3}, "'chain_sum': .* keyword argument 'terms'"),
        ("reasoning_gym:chain_sum", {"min_terms": 0}, "'chain_sum': min_terms must be positive"),
        ("python:nope:rows", {}, "valid_dataset.path: python:nope:rows: No module named 'nope'"),
        ("python:json:rows", {}, "valid_dataset.path: python:json:rows: module 'json' has no"),
        (
            "python:megarl.data.quickstart:works_or_guesses",
            {"max_error": 6},
            "valid_dataset.options: .* missing a required argument: 'work_share'",
        ),
    ],
)
def test_what_is_wrong_with_a_generator_is_named(path, options, message):
    with pytest.raises(ConfigError, match=message):
        load_rows(DatasetConfig(path=path, size=3, options=options), "valid_dataset")


def test_rows_keep_their_ids_whatever_is_excluded(tmp_path):
    rows, held_out = tmp_path / "rows.jsonl", tmp_path / "held_out.jsonl"
    rows.write_text("".join(json.dumps({"prompt": c}) + "\n" for c in "abcd"))
    held_out.write_text('{"prompt": "b"}\n')
    exclude = DatasetConfig(path=str(held_out))
    config = DatasetConfig(path=str(rows), size=3, exclude=exclude)
    assert load_rows(config) == [{"prompt": "a", "row_id": 0}, {"prompt": "c", "row_id": 2}]
    with pytest.raises(ConfigError, match=r"row 0 of .* lacks completion; it has prompt"):
        load_rows(config, needs=("completion",))


def test_a_row_id_that_is_null_is_none(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "row_id": 7}\n{"prompt": "b", "row_id": null}\n')
    assert [row["row_id"] for row in load_rows(DatasetConfig(path=str(path)))] == [7, 1]


def test_rows_come_from_jsonl_files(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "answer": "1"}\n{"prompt": "b", "answer": "2"}\n')
    rows = load_rows(DatasetConfig(path=str(path)))
    assert rows == [
        {"prompt": "a", "answer": "1", "row_id": 0},
        {"prompt": "b", "answer": "2", "row_id": 1},
    ]


@pytest.mark.parametrize(
    ("path", "text", "message"),
    [
        ("missing.jsonl", None, "train_dataset.path: missing.jsonl"),
        ("odd.jsonl", '{"question": "a"}\n', "row 0 of odd.jsonl lacks prompt or messages; it"),
        ("bad.jsonl", '{"prompt": "a"}\nnot json\n', "train_dataset.path: bad.jsonl: JSON parse"),
        ("empty.jsonl", "", "train_dataset.path: empty.jsonl"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(tmp_path, monkeypatch, path, text, message):
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path(path).write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_rows(DatasetConfig(path=path))


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        (" 7 - 5 = 2", 1.0),
        (" 2", 1.0),
        (" -2", 0.0),
        ("", 0.0),
        (" 2 = 3", 0.0),
        (" 7 - 5 = 2 =", 0.0),
        ("= 02", 1.0),
        ("= 2.0", 1.0),
        ("2.5", 0.0),
        ("3-2", 1.0),
        ("1,002", 0.0),
    ],
)
def test_the_last_number_is_what_counts(completion, reward):
    assert final_number_reward("p", completion, [], [], answer="2", row_id=1) == reward


def test_a_generators_own_score():
    config = DatasetConfig(path="reasoning_gym:chain_sum", size=1, options=CHAIN_SUM)
    (row,) = load_rows(config)
    made = {"entry": row["entry"], "dataset": row["dataset"]}
    assert dataset_reward("", row["answer"], [], [], **made) == 1.0
    assert dataset_reward("", "no idea", [], [], **made) < 1.0


def test_worked_sums_are_right_and_guesses_are_wrong():
    assert work_out("3 + 4 - 5 =") == " 7 - 5 = 2"
    assert work_out("1 - 9 =") == " -8"
    rows = works_or_guesses(size=400, seed=5, work_share=0.5, max_error=6, **CHAIN_SUM)
    worked = [row for row in rows if "=" in row["completion"]]
    assert 150 < len(worked) < 250
    for row in rows:
        right = final_number_reward("", row["completion"], [], [], answer=row["answer"])
        assert right == ("=" in row["completion"])


def test_the_shipped_model_folder_is_what_the_code_writes(tmp_path):
    write_quickstart_model(tmp_path)
    for path in tmp_path.iterdir():
        want = json.loads(path.read_text())
        got = json.loads((QUICKSTART_BASE / path.name).read_text())
        want.pop("transformers_version", None)
        got.pop("transformers_version", None)
        assert got == want, path.name


def test_a_token_is_a_character():
    tokenizer = AutoTokenizer.from_pretrained(QUICKSTART_BASE)
    text = "3 + 4 - 5 ="
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == len(text)
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text
    assert len(tokenizer) == 16
    for unknown in ("3 * 4 =", "3\n"):
        # tokenizers raises plain Exception; it takes the text for that of an unknown word
        with pytest.raises(Exception, match="WordLevel error"):
            tokenizer.encode(unknown)
