"""examples/tool_agent.py against its base model's tokenizer, with answers that are written here."""

import asyncio
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from megarl.config.schema import GenerationHyperparameters
from megarl.rollout.api import ModelResponse
from megarl.rollout.workflows.agent import AgentWorkflow

ROOT = Path(__file__).parents[2]
TOKENIZER = AutoTokenizer.from_pretrained(ROOT / "configs" / "tool_agent_base")
QUESTION = {"role": "user", "content": "What is 47 * 86?"}
ROW = {"messages": [QUESTION], "answer": "4042"}
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "47 * 86"}}\n</tool_call>'
AGENTS = ["OpenAIAgent", "AnthropicAgent"]
PROBLEMS = {"size": 200, "seed": 7}


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
    """As `megarl train` is: examples.* is found, and configs/."""
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(ROOT)


class Engine:
    """Answers request i with the tokens of `answers[i]` and the end token."""

    def __init__(self, *answers):
        self.answers, self.prompts = iter(answers), []

    async def agenerate(self, req):
        self.prompts.append(TOKENIZER.decode(req.input_ids))
        tokens = TOKENIZER.encode(next(self.answers), add_special_tokens=False)
        tokens.append(TOKENIZER.eos_token_id)
        ones = [1] * len(tokens)
        return ModelResponse(list(req.input_ids), tokens, [-0.5] * len(tokens), ones, "stop")

    def get_version(self):
        return 1


def episode(agent, *answers):
    """The trajectory, and the text of each prompt."""
    engine = Engine(*answers)
    gconfig = GenerationHyperparameters(n_samples=1, max_tokens=384)
    target = f"examples.tool_agent:{agent}"
    workflow = AgentWorkflow(target, gconfig, TOKENIZER, export_style="concat")
    return asyncio.run(workflow.arun_episode(engine, ROW)), engine.prompts


@pytest.mark.parametrize("agent", AGENTS)
@pytest.mark.parametrize(
    ("answers", "reward"),
    [
        ([CALL, "The answer is 4042."], 1.0),
        (["The answer is 4042."], 1.0),
        ([CALL, "The answer is 4043."], 0.0),
        (["The answer is 3871."], 0.0),
        (["<tool_call>\n47 * 86\n</tool_call>"], 0.0),
        ([CALL.replace("*", "x"), CALL, "The answer is 4042."], 1.0),
        ([CALL, CALL, CALL], 0.0),
    ],
)
def test_a_conversation_is_one_row_of_what_was_sampled(agent, answers, reward):
    trajectory, prompts = episode(agent, *answers)
    assert trajectory["rewards"].tolist() == [reward]
    trained = trajectory["input_ids"][trajectory["loss_mask"].bool()]
    assert TOKENIZER.decode(trained) == "".join(f"{answer}<|im_end|>" for answer in answers)
    assert len(prompts) == len(answers)
    for answer, after in zip(answers, prompts[1:], strict=False):
        result = "4042" if "*" in answer else "error: expected two numbers with + - or * between"
        assert f"{answer}<|im_end|>\n<|im_start|>user\n<tool_response>\n{result}" in after


@pytest.mark.parametrize("agent", AGENTS)
def test_the_base_was_fine_tuned_on_the_prompts_that_agents_send(agent):
    from examples.tool_agent_base import transcripts

    shares = {"call_share": 1.0, "scribble_share": 0.0, "held_out": {"size": 0, "seed": 0}}
    for read_share, number in ((0.0, 0), (1.0, 1)):
        (row,) = transcripts(size=1, seed=5, read_share=read_share, **shares)
        question = row["prompt"].partition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
        expression = question.removeprefix("What is ").removesuffix("?")
        engine = Engine(CALL.replace("47 * 86", expression), "The answer is 1.")
        gconfig = GenerationHyperparameters(n_samples=1, max_tokens=384)
        workflow = AgentWorkflow(f"examples.tool_agent:{agent}", gconfig, TOKENIZER)
        asked = {"messages": [{"role": "user", "content": question}], "answer": "1"}
        asyncio.run(workflow.arun_episode(engine, asked))
        assert engine.prompts[number] == row["prompt"]


def test_transcripts_leave_the_held_out_problems_out():
    from examples.tool_agent_base import transcripts

    shares = {"call_share": 0.5, "scribble_share": 0.25, "read_share": 0.5}
    assert transcripts(**PROBLEMS, held_out=PROBLEMS, **shares) == []
    rows = transcripts(**PROBLEMS, held_out={"size": 3, "seed": 7}, **shares)
    assert 190 <= len(rows) <= 197
    assert rows == transcripts(**PROBLEMS, held_out={"size": 3, "seed": 7}, **shares)
