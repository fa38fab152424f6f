"""Rows from reasoning-gym's generators, and the rewards that score them.

A reward runs in a process of its own, so this module imports nothing slow at its top.
"""

import re
from functools import cache
from typing import Any

_NUMBER = re.compile(r"(?<![\d.])-?\d+(?:\.\d+)?")


def generate_rows(
    name: str, *, size: int, seed: int, options: dict[str, Any]
) -> list[dict[str, Any]]:
    """`size` rows of reasoning-gym's dataset `name`: prompt or messages, answer, whole entry.

    Args:
      seed: entry i is made from seed + i, so the rows of two near seeds are mostly the same.
      options: the generator's own; and `bare`, which makes the prompt what follows the
        question's last colon, `3 + 4 - 5 =`, for a model that reads no instructions; and
        `chat`, which makes `messages` of it, one of a user, instead of `prompt`.

    Raises:
      ValueError: there is no such dataset, or it refuses an option.
    """
    import reasoning_gym

    options = dict(options)
    bare, chat = options.pop("bare", False), options.pop("chat", False)
    try:
        dataset = reasoning_gym.create_dataset(name, size=size, seed=seed, **options)
    except (TypeError, ValueError, AssertionError) as error:
        raise ValueError(f"reasoning_gym dataset {name!r}: {error}") from error
    rows = []
    for entry in dataset:
        question = entry["question"]
        prompt = question.rpartition(": ")[2] if bare else question
        asked = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
        rows.append({**asked, "answer": entry["answer"], "entry": entry})
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
    **row: Any,
) -> float:
    """The generator's own score of a completion against the row's entry, in [0, 1]."""
    return float(_scorer(entry["metadata"]["source_dataset"])(completion.strip(), entry))


@cache
def _scorer(name: str) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(name, size=1, seed=0).score_answer
