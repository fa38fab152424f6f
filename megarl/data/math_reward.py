"""A reward for mathematical answers that are equal without being written the same.

A reward runs in a process of its own, so this module imports nothing slow at its top.
"""

import re
from typing import Any

_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")
_THOUGHT_END = "</think>"
_FINAL = "####"


def math_verify_reward(
    prompt: str,
    completion: str,
    prompt_ids: list[int],
    completion_ids: list[int],
    *,
    answer: str | float,
    **row: Any,
) -> float:
    """1 if the completion's final answer equals `answer` by math-verify, else 0.

    The final answer is the last \\boxed{...}, else what follows the last `####`, else what
    math-verify finds last in the text; thoughts before `</think>` are not read. `answer` may be
    a whole solution in GSM8K's form, which ends in `#### N`, or a number. 0.5, 1/2 and
    \\frac{1}{2} are equal, and so are 1,000 and $1000, 18 and 18%; a completion without an
    answer is worth 0.
    """
    from math_verify import parse, verify

    found = parse(final_answer(completion))
    wanted = parse(_boxed(str(answer).rpartition(_FINAL)[2]))
    return float(bool(found) and bool(wanted) and bool(verify(wanted, found)))


def final_answer(text: str) -> str:
    """The part of `text` that holds its final answer; all of it if nothing marks one."""
    if "<think>" in text and _THOUGHT_END not in text:
        return ""  # cut before its answer
    text = text.rpartition(_THOUGHT_END)[2]
    boxes = list(_BOXED.finditer(text))
    if boxes:
        return _boxed(_until_closed(text[boxes[-1].end() :]))
    if _FINAL in text:
        lines = text.rpartition(_FINAL)[2].strip().splitlines()
        line = lines[0] if lines else ""
        return _boxed(line) if "\\" in line else line  # words are none of a formula
    return text


def _boxed(text: str) -> str:
    """Text that math-verify reads as LaTeX: outside of a formula it would not."""
    inside = text.strip().strip("$")
    return f"\\boxed{{{inside}}}" if inside else ""


def _until_closed(text: str) -> str:
    """`a{b}c} d` -> `a{b}c`; '' if the brace is never closed."""
    depth = 1
    for i, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[:i]
    return ""
