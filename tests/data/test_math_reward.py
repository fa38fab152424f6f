"""What counts as the right answer to a mathematical problem."""

import json
from pathlib import Path

import pytest

from megarl.data.math_reward import final_answer, math_verify_reward

GSM8K = Path("/work/shared/data/gsm8k/test.jsonl")
DUCKS = "She sells 16 - 3 - 4 = <<16-3-4=9>>9 eggs for 9 * 2 = $<<9*2=18>>18.\n#### 18"


def reward(completion, answer):
    return math_verify_reward("p", completion, [], [], answer=answer, row_id=3)


@pytest.mark.parametrize(
    "completion",
    [
        "18",
        "#### 18",
        "#### $18",
        "#### 18 dollars",
        r"#### \frac{36}{2}",
        "The answer is 18.",
        "She makes $18",
        "So 9*2 = 18 dollars",
        "**18**",
        "The answer is **18** dollars a day.",
        "9 * 2 = 18",
        "x = 18",
        "18.0",
        r"\boxed{18}",
        r"So it is $\boxed{18}$.",
        r"\boxed{\$18}",
        r"\boxed{18.00}",
        r"\boxed{18 \text{ dollars}}",
        r"\boxed{\frac{36}{2}}",
        r"\boxed{17}, no: \boxed{18}",
        "#### 17\n#### 18\nDone, after 3 steps.",
        "<think>17?</think>The answer is 18",
        r"<think>\boxed{17}</think>The answer is 18",
    ],
)
def test_right(completion):
    assert reward(completion, DUCKS) == 1.0
    assert reward(completion, "18") == 1.0


@pytest.mark.parametrize(
    "completion",
    [
        "",
        "no idea",
        "\x00\ufffd{{{}$$",
        r"\boxed{",
        r"\boxed{}",
        r"\boxed{18",
        "####",
        "#### none",
        "17",
        "9",  # stands in the solution
        "16",
        "180",
        "1.8",
        "-18",
        "18 or 17",
        r"\boxed{18}, no: \boxed{17}",
        r"I have 18: \boxed{17}",
        "#### 18\n#### 17",
        "<think>the answer is 18",
        "<think>18</think>The answer is 17",
        "9 * 2 = 18 = 17",
    ],
)
def test_wrong(completion):
    assert reward(completion, DUCKS) == 0.0


@pytest.mark.parametrize(
    ("completion", "answer", "value"),
    [
        ("70,000", "#### 70000", 1.0),
        ("70000", "#### 70,000", 1.0),
        (r"\boxed{70,000}", "70000", 1.0),
        ("$70,000.00", "#### 70000", 1.0),
        ("7,000", "#### 70000", 0.0),
        ("1,234,567", "#### 1234567", 1.0),
        ("-5", "#### -5", 1.0),
        ("5", "#### -5", 0.0),
        ("1/2", "0.5", 1.0),
        ("The answer is 1/2.", "0.5", 1.0),
        (r"\boxed{\frac{1}{2}}", "0.5", 1.0),
        ("0.5", r"\frac{1}{2}", 1.0),
        (r"$\frac{1}{2}$", "1/2", 1.0),
        (r"\boxed{\dfrac{2}{4}}", r"$\frac12$", 1.0),
        ("0.33", "1/3", 0.0),
        (r"\boxed{x^2-1}", "(x-1)(x+1)", 1.0),
        (r"\boxed{\sqrt{8}}", r"2\sqrt{2}", 1.0),
        (r"\boxed{1.414}", r"\sqrt{2}", 0.0),
        (r"\boxed{(1,2)}", "(1,2)", 1.0),
        (r"\boxed{(2,1)}", "(1,2)", 0.0),
        (r"\boxed{(1,234)}", "1234", 0.0),
        ("18%", "18%", 1.0),
        ("50 km/h", "#### 50", 1.0),
        ("3 hours and 20 minutes", "#### 3", 0.0),
        ("18", 18, 1.0),  # as a column of numbers has it
        ("17", 18, 0.0),
        (r"\boxed{\frac{1}{2}}", 0.5, 1.0),
        ("-5", -5.0, 1.0),
    ],
)
def test_other_forms(completion, answer, value):
    assert reward(completion, answer) == value


def test_the_last_box_may_hold_braces():
    assert final_answer(r"\boxed{1} or \boxed{\frac{1}{2}} {x}") == r"\boxed{\frac{1}{2}}"


@pytest.mark.skipif(not GSM8K.is_file(), reason=f"{GSM8K} is not there")
def test_every_solution_of_gsm8k_answers_its_own_problem():
    rows = [json.loads(line) for line in GSM8K.read_text().splitlines()[:150]]
    for row, other in zip(rows, rows[1:] + rows[:1], strict=True):
        solution, number = row["answer"], row["answer"].rpartition("#### ")[2]
        assert reward(solution, solution) == 1.0, row
        assert reward(rf"\boxed{{{number}}}", solution) == 1.0, row
        same = number == other["answer"].rpartition("#### ")[2]
        assert reward(other["answer"], solution) == float(same), (row, other)
