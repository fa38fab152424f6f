"""Rows from reasoning-gym's generators, and the rewards that score them.

Imports reasoning_gym only where it is used: a reward's process should start fast.
"""

import re
from functools import cache
from typing import Any

_NUMBER = re.compile(r"-?\d+")


def generate_rows(
    name: str, *, size: int, seed: int, options: dict[str, Any]
) -> list[dict[str, Any]]:
    """`size` rows of reasoning_gym dataset `name`: prompt, answer, and its whole entry.

    The option `bare` (not passed on) makes the prompt what follows the question's last
    colon, `3 + 4 - 5 =`, for a model that reads no instructions.

    Raises:
      ValueError: the generator refuses an option.
    """
    import reasoning_gym

    options = dict(options)
    bare = options.pop("bare", False)
    try:
        dataset = reasoning_gym.create_dataset(name, size=size, seed=seed, **options)
    except (TypeError, AssertionError) as error:
        raise ValueError(f"reasoning_gym dataset {name!r}: {error}") from error
    rows = []
    for entry in dataset:
        question = entry["question"]
        prompt = question.rpartition(": ")[2] if bare else question
        rows.append({"prompt": prompt, "answer": entry["answer"], "entry": entry})
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
    """1 if the last number of the completion is `answer`, else 0."""
    numbers = _NUMBER.findall(completion)
    return float(bool(numbers) and int(numbers[-1]) == int(answer))


def dataset_reward(
    prompt: str,
    completion: str,
    prompt_ids: list[int],
    completion_ids: list[int],
    *,
    entry: dict[str, Any],
    **row: Any,
) -> float:
    """The generator's own score of a completion, in [0, 1]."""
    score = _scorer(entry["metadata"]["source_dataset"])
    return float(score(completion, entry))


@cache
def _scorer(name: str) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(name, size=1, seed=0).score_answer
