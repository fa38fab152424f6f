"""Programs against their tests, in real sandboxes."""

import asyncio
import json
from typing import get_args

import pytest

from megarl.config.schema import RewardConfig
from megarl.rollout.code_reward import code_reward, last_block, same_output, split_tests
from megarl.rollout.rewards import AsyncReward
from megarl.rollout.sandbox import Isolation
from megarl.rollout.workflows.reward_fn import make_reward

LONG_S = 120.0
DOUBLE = "print(2 * int(input()))"
ANY = get_args(Isolation)  # also where only root can read the interpreter
STDIN_TESTS = [{"input": "1\n", "output": "2"}, {"input": "5", "output": "10\n\n"}]
ASSERTS = "import math\nassert f(2) == 4\nassert f(math.inf) == math.inf"


def reward(code, tests, **options):
    answer = f"Here:\n```python\n{code}\n```\n"
    options = {"wall_s": LONG_S, "isolation": ANY, **options}
    return asyncio.run(code_reward("p", answer, [], [], tests=tests, row_id=1, **options))


def test_the_last_block_behind_the_thoughts_counts():
    text = "<think>```python\n0\n```</think>```python\n1\n```\nno:\n```Py\n2\n3\n```\n```\n4\n```"
    assert last_block(text) == "2\n3\n"
    assert last_block("```python\n1\n```</think>none") is None
    assert last_block("```python\ncut") is None
    assert asyncio.run(code_reward("p", "none", [], [], tests=STDIN_TESTS)) == 0.0


@pytest.mark.parametrize(
    ("code", "worth", "fraction"),
    [
        (DOUBLE, 1.0, 1.0),
        ("x = int(input())\nprint(x * x + 1)", 0.0, 0.5),
        ("input()\nprint(3)", 0.0, 0.0),
        (f"{DOUBLE}\nraise SystemExit(1)", 0.0, 0.0),
        ("not python", 0.0, 0.0),
    ],
)
def test_programs_are_run_on_each_input(code, worth, fraction):
    assert reward(code, STDIN_TESTS) == worth
    assert reward(code, STDIN_TESTS, fraction=True) == fraction


@pytest.mark.parametrize(
    ("code", "worth", "fraction"),
    [
        ("def f(x): return 2 * x", 1.0, 1.0),
        ("def f(x): return x + 2 if x < 9 else 0", 0.0, 0.5),
        ("def f(x): return 0", 0.0, 0.0),
        ("def f(x): exit(0)", 0.0, 0.0),
        ("def f(x):\n    if x > 9: import os; os._exit(0)\n    return 4", 0.0, 0.5),
        ("import os\nos._exit(0)", 0.0, 0.0),
        ("print('0 1 2 3')\ndef f(x): raise KeyError", 0.0, 0.0),
        ("if __name__ == '__main__': input()\ndef f(x): return 2 * x", 1.0, 1.0),
        ("def g(x): return 2 * x", 0.0, 0.0),
    ],
)
def test_asserts_are_run_behind_the_program(code, worth, fraction):
    assert reward(code, ASSERTS) == worth
    assert reward(code, ASSERTS, fraction=True) == fraction
    assert reward(code, ["assert f(2) == 4", "assert f(10) == 20"], fraction=True) == fraction


def test_what_a_program_prints_is_no_part_of_its_tests():
    flood = "def f(x):\n    print('x' * (1 << 22))\n    return 2 * x"
    assert reward(flood, ASSERTS) == 1.0


def test_a_script_is_cut_into_one_test_for_each_assert():
    text = "x = 1\nassert x\nassert (\n    x == 1\n)\ndef check(f):\n    assert f\ncheck(1)"
    assert split_tests(text) == [
        "x = 1\nassert x",
        "assert x == 1",
        "def check(f):\n    assert f\ncheck(1)",
    ]
    with pytest.raises(ValueError, match="tests: "):
        split_tests("assert (")


def test_white_space_at_ends_is_no_difference():
    assert same_output("1  \n2\n\n", "1\n2")
    assert not same_output("1\n\n2", "1\n2")
    assert not same_output(" 1", "1")


def test_a_program_that_does_not_end_fails_what_is_left():
    code = f"import os\nif int(input()) == 5:\n    while True: pass\nprint(2)\n#{DOUBLE}"
    tests = [*STDIN_TESTS, {"input": "1", "output": "2"}]
    assert reward(code, tests, cpu_s=1, fraction=True) == pytest.approx(1 / 3)
    loop = "def f(x):\n    while x > 9: pass\n    return 2 * x"
    assert reward(loop, ASSERTS, cpu_s=1, fraction=True) == 0.5


@pytest.mark.parametrize(
    ("code", "worth"), [(DOUBLE, 1.0), ("def f(x): return 2 * x\nprint(2)", 0.5), ("pass", 0.0)]
)
def test_lists_may_be_written_as_json(code, worth):
    with_lines = '[{"input": "1\n", "output": "2\n"}, {"input": "5\n", "output": "10\n"}]'
    for text in (json.dumps(STDIN_TESTS, indent=1), with_lines):
        assert reward(code, text, fraction=True) == worth
    asserts = json.dumps(["assert f(2) == 4", "assert f(3) == 6"])
    assert reward(code, asserts, fraction=True) == float("def f" in code)


@pytest.mark.parametrize(
    "tests",
    [
        *([], "", [{"stdin": "1"}], ["assert 1", {"input": "1"}], [3], "[]", "[3]", "x\0"),
        "[{'input': '1', 'output': '2'}]",  # Python's way to write it, not JSON's
        '{"input": "1", "output": "2"}',
        '[{"input": "1", "output": "2"}]\n[{"input": "1", "output": "2"}]',
        ['{"input": "1", "output": "2"}'],
        "x = 1\n'a text'",
        ["assert ("],
    ],
)
def test_other_forms_of_tests_are_errors(tests):
    with pytest.raises(ValueError, match="tests"):
        reward(DOUBLE, tests)


def test_a_config_names_it_with_its_options():
    config = RewardConfig(
        fn="megarl.rollout.code_reward:code_reward",
        options={"fraction": True, "wall_s": LONG_S, "isolation": list(ANY)},
        timeout_s=2 * LONG_S,
    )
    made = make_reward(config)
    assert isinstance(made, AsyncReward)
    code = "```python\nx = int(input())\nprint(x * x + 1)\n```"

    async def calls():
        try:
            good = made("p", code, [], [], tests=STDIN_TESTS)
            wrong_row = made("p", code, [], [], tests=[3])
            return await asyncio.gather(good, wrong_row)
        finally:
            await made.close()

    assert asyncio.run(calls()) == [0.5, 0.0]
    assert made.export_stats() == {
        "reward/failed": 1.0,
        "reward/attempts_failed/error": 3.0,
    }
