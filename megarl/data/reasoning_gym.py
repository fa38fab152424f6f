"""Rows from reasoning-gym's generators, and the rewards that score them.

A reward runs in a process of its own, so this module imports nothing slow at its top.
"""

import dataclasses
import datetime
import json
import re
from functools import cache
from typing import Any

_TUPLE, _DICT = "__tuple__", "__dict__"
_TIMES = {f"__{kind.__name__}__": kind for kind in (datetime.date, datetime.time)}
_NUMBER = re.compile(r"(?<![\d.])-?\d+(?:\.\d+)?")


def generate_rows(
    name: str, *, size: int, seed: int, options: dict[str, Any]
) -> list[dict[str, Any]]:
    """`size` rows of reasoning-gym's dataset `name`: prompt or messages, answer, and what
    `dataset_reward` reads: the whole entry as JSON has it, the dataset's name and options.

    Args:
      seed: entry i is made from seed + i, so the rows of two near seeds are mostly the same.
      options: the generator's own; and `bare`, which makes the prompt what follows the
        question's last colon, `3 + 4 - 5 =`, for a model that reads no instructions; and
        `chat`, which makes `messages` of it, one of a user, instead of `prompt`.

    Raises:
      ValueError: there is no such dataset, or it refuses an option.
    """
    options = dict(options)
    bare, chat = options.pop("bare", False), options.pop("chat", False)
    try:
        dataset = _create(name, size, seed, options)
    except (TypeError, ValueError, AttributeError, AssertionError) as error:
        raise ValueError(f"reasoning_gym dataset {name!r}: {error}") from error
    rows, made_by = [], {"name": name, "options": _encode(options)}
    for entry in dataset:
        question = entry["question"]
        prompt = question.rpartition(": ")[2] if bare else question
        asked = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
        rows.append(
            {**asked, "answer": entry["answer"], "entry": _encode(entry), "dataset": made_by}
        )
    return rows


def final_number_reward(
    prompt: str,
    completion: str,
    prompt_ids: list[int],
    completion_ids: list[int],
    *,
    answer: str,
    **row: Any,
) -> float:
    """1 if the last number after the completion's last `=` equals `answer`, else 0.

    A completion without `=` is read whole; one that ends in `=` has no final number. Commas
    between digits are dropped, and 2.0 equals 2.
    """
    text = re.sub(r"(?<=\d),(?=\d)", "", completion.rpartition("=")[2])
    numbers = _NUMBER.findall(text)
    return float(bool(numbers) and float(numbers[-1]) == float(answer))


def dataset_reward(
    prompt: str,
    completion: str,
    prompt_ids: list[int],
    completion_ids: list[int],
    *,
    entry: dict[str, Any],
    dataset: dict[str, Any],
    **row: Any,
) -> float:
    """The generator's own score of a completion against the row's entry, in [0, 1].

    Args:
      entry, dataset: as `generate_rows` writes them; the generator's options change some scores.
    """
    score = _scorer(dataset["name"], json.dumps(dataset["options"]))
    return float(score(completion.strip(), _decode(entry)))


@cache
def _scorer(name: str, options: str) -> Any:
    return _create(name, 1, 0, _decode(json.loads(options))).score_answer


def _create(name: str, size: int, seed: int, options: dict[str, Any]) -> Any:
    """The dataset; an option that is a dataclass may be given by its fields, as a config does."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    given = dict(options)
    if name in DATASETS:
        for field in dataclasses.fields(DATASETS[name][1]):
            value, kind = given.get(field.name), field.type
            if (
                isinstance(value, dict)
                and isinstance(kind, type)
                and dataclasses.is_dataclass(kind)
            ):
                given[field.name] = kind(**value)
    return reasoning_gym.create_dataset(name, size=size, seed=seed, **given)


def _encode(value: Any) -> Any:
    """`value` in what JSON keeps: some scores tell a tuple from a list, or have numbers as keys."""
    if isinstance(value, tuple):
        return {_TUPLE: [_encode(x) for x in value]}
    if isinstance(value, list):
        return [_encode(x) for x in value]
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {key: _encode(x) for key, x in value.items()}
        return {_DICT: [[_encode(key), _encode(x)] for key, x in value.items()]}
    for tag, kind in _TIMES.items():
        if type(value) is kind:
            return {tag: value.isoformat()}
    return value


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(x) for x in value]
    if isinstance(value, dict):
        if set(value) == {_TUPLE}:
            return tuple(_decode(x) for x in value[_TUPLE])
        if set(value) == {_DICT}:
            return {_decode(key): _decode(x) for key, x in value[_DICT]}
        for tag, kind in _TIMES.items():
            if set(value) == {tag}:
                return kind.fromisoformat(value[tag])
        return {key: _decode(x) for key, x in value.items()}
    return value
