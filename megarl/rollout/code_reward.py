"""A reward for programs: the last block of Python in an answer, run against the row's tests.

    reward:
      fn: megarl.rollout.code_reward:code_reward
      options: {fraction: true}
      timeout_s: 60

A row's `tests` are one of

  [{"input": stdin, "output": stdout}, ...]   the program is run for each
  "assert f(2) == 4\\nassert ..."              run behind the program, in its names; each `assert`
  ["assert f(2) == 4", ...]                   with the lines before it, or each text, is a test
  the JSON of one of the lists

Each run is in a PythonSandbox, see there for what holds it. A program cannot pass a test by
ending early: what passed is told by marks that it does not know. One that is written to look
for them in its own process can; the tests with stdin have no such weakness.
"""

import ast
import functools
import json
import re
import secrets
from collections.abc import Sequence
from typing import Any

from megarl.rollout.sandbox import Isolation, Limits, PythonSandbox

_BLOCK = re.compile(
    r"^[ \t]*```[ \t]*(?:python|py)[ \t0-9]*\n(.*?)^[ \t]*```",
    re.DOTALL | re.MULTILINE | re.IGNORECASE,
)
_THOUGHT_END = "</think>"
_RUN_TESTS = """
import json, os, sys

def main():
    job = json.loads(sys.stdin.read())
    marks = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    names = {"__name__": "solution"}
    exec(compile(job["code"], "solution.py", "exec"), names)
    for i, test in enumerate(job["tests"]):
        try:
            exec(compile(test, f"test {i}", "exec"), names)
        except BaseException as error:
            print(f"test {i}: {error!r}", file=sys.stderr)
            continue
        os.write(marks, f"{job['mark']} {i}\\n".encode())

main()
"""
"""Reads its job from stdin, which is no file that the program under test could open again."""


async def code_reward(
    prompt: str,
    completion: str,
    prompt_ids: list[int],
    completion_ids: list[int],
    *,
    tests: str | Sequence[Any],
    fraction: bool = False,
    wall_s: float = 10.0,
    cpu_s: float = 10.0,
    memory_bytes: int = 1 << 30,
    isolation: Sequence[Isolation] | None = None,
    **row: Any,
) -> float:
    """1 if the answer's program passes all tests, else 0; with `fraction` the part it passes.

    An answer without a block is worth 0. Of tests with stdin none is run after the first that
    fails, unless each counts; one that takes too long ends the run and fails those behind it.

    Args:
      wall_s, cpu_s, memory_bytes: of one run, see Limits. `reward.timeout_s` is for all runs.
      isolation: see PythonSandbox.

    Raises:
      ValueError: the row's tests have another form, are none, or test nothing.
    """
    code = last_block(completion)
    cases = _cases(tests)
    if not cases:
        raise ValueError("the row has no tests")
    if code is None:
        return 0.0
    limits = Limits(wall_s=wall_s, cpu_s=cpu_s, memory_bytes=memory_bytes, output_bytes=1 << 20)
    sandbox = _sandbox(limits, None if isolation is None else tuple(isolation))
    if all(isinstance(case, str) for case in cases):
        passed = await _run_asserts(sandbox, code, cases)
    elif all(isinstance(case, dict) and {"input", "output"} <= set(case) for case in cases):
        passed = await _run_with_stdin(sandbox, code, cases, is_fraction=fraction)
    else:
        raise ValueError(
            f"tests: expected asserts or objects with input and output, got {cases[0]!r:.200}"
        )
    return passed / len(cases) if fraction else float(passed == len(cases))


def last_block(text: str) -> str | None:
    """The last ```python block behind the thoughts; None if there is none."""
    blocks = _BLOCK.findall(text.rpartition(_THOUGHT_END)[2])
    return blocks[-1] if blocks else None


def _cases(tests: str | Sequence[Any]) -> list[Any]:
    """One for each test. ValueError if a text is no Python, or none could ever fail."""
    if isinstance(tests, str):
        try:
            decoded = json.loads(tests, strict=False)  # a line may end within a string
        except ValueError:
            decoded = None
        tests = decoded if isinstance(decoded, list) else split_tests(tests)
    cases = list(tests)
    texts = [case for case in cases if isinstance(case, str)]
    if texts and not any(_can_fail(statement) for text in texts for statement in _parse(text)):
        raise ValueError(f"tests: nothing is asserted or called by {texts[0]!r:.200}")
    return cases


def _parse(text: str) -> list[ast.stmt]:
    try:
        return ast.parse(text).body
    except (SyntaxError, ValueError) as error:  # a null byte is a ValueError
        raise ValueError(f"tests: {error}") from error


def _can_fail(statement: ast.stmt) -> bool:
    return any(isinstance(node, ast.Assert | ast.Raise | ast.Call) for node in ast.walk(statement))


def split_tests(text: str) -> list[str]:
    """Parts of a script that each end with one of its top-level asserts; the rest is one more.

    Raises:
      ValueError: it is no Python.
    """
    statements = _parse(text)
    parts: list[list[ast.stmt]] = [[]]
    for statement in statements:
        parts[-1].append(statement)
        if isinstance(statement, ast.Assert):
            parts.append([])
    return ["\n".join(map(ast.unparse, part)) for part in parts if part]


def same_output(given: str, wanted: str) -> bool:
    """Whether all lines are equal, white space at their ends and empty lines at the end aside."""

    def lines(text: str) -> list[str]:
        return [line.rstrip() for line in text.rstrip().splitlines()]

    return lines(given) == lines(wanted)


async def _run_asserts(sandbox: PythonSandbox, code: str, tests: list[str]) -> int:
    """How many passed."""
    mark = secrets.token_hex()
    job = json.dumps({"code": code, "tests": tests, "mark": mark})
    result = await sandbox.run(_RUN_TESTS, job)
    told = set(result.stdout.splitlines())
    return sum(f"{mark} {i}" in told for i in range(len(tests)))


async def _run_with_stdin(
    sandbox: PythonSandbox, code: str, cases: list[dict[str, Any]], *, is_fraction: bool
) -> int:
    """How many passed, up to the first that decides."""
    passed = 0
    for case in cases:
        result = await sandbox.run(code, str(case["input"]))
        if result.why == "ok" and same_output(result.stdout, str(case["output"])):
            passed += 1
        elif not is_fraction or result.why == "timeout":
            break
    return passed


@functools.cache
def _sandbox(limits: Limits, isolation: tuple[Isolation, ...] | None) -> PythonSandbox:
    return PythonSandbox(limits, isolation=isolation)
