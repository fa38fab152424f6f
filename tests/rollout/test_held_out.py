"""RolloutHead.evaluate through a real executor: what failed is counted, never left out."""

import asyncio
import json
from collections import Counter

import openai
import pytest
import torch
from proxy_agents import TOKENIZER, ScriptedEngine

from megarl.config.run import EvaluatorConfig
from megarl.config.schema import GenerationHyperparameters
from megarl.errors import EngineError
from megarl.rollout.api import ModelResponse, RolloutWorkflow
from megarl.rollout.executor import WorkflowExecutor
from megarl.rollout.staleness import StalenessManager
from megarl.rollout.workflows.agent import AgentWorkflow
from megarl.rollout.workflows.group import GroupedWorkflow
from megarl.rollout.workflows.rlvr import RLVRWorkflow, to_trajectory
from megarl.rollout_head import RolloutHead
from megarl.stats import trace
from megarl.trajectory import concat_padded


class Rewards(RolloutWorkflow):
    """Samples of the rewards in the row; None instead of them is an episode that fails."""

    async def arun_episode(self, engine, data):
        if data["rewards"] is None:
            raise ConnectionError("no server")
        samples = [
            to_trajectory(
                ModelResponse(
                    input_tokens=[1],
                    output_tokens=[2] * (i + 1),
                    output_logprobs=[-1.0] * (i + 1),
                    output_versions=[3] * (i + 1),
                    stop_reason="length" if i else "stop",
                ),
                reward,
            )
            for i, reward in enumerate(data["rewards"])
        ]
        return concat_padded(samples) if samples else None


class Engine:
    """What an episode and the head need of one."""

    def __init__(self, executor=None):
        self.executor = executor

    def get_version(self):
        return 3

    def run(self, coro, timeout_s):
        return asyncio.run(coro)


class Config:
    evaluator = EvaluatorConfig(success_threshold=0.5)


def make_head(*rewards, n_samples=2, workflow=None, engine=None):
    async def make():
        return WorkflowExecutor(engine or Engine(), StalenessManager(4, 4, 0))

    head = RolloutHead.__new__(RolloutHead)
    head.config, head.engine = Config(), Engine(asyncio.run(make()))
    head.eval_rows = [{"row_id": f"row {i}", "rewards": r} for i, r in enumerate(rewards)]
    head.eval_workflow = workflow or Rewards()
    head.eval_gconfig = GenerationHyperparameters(n_samples=n_samples)
    return head


def test_every_row_is_in_the_evaluation_whatever_became_of_it():
    result = make_head([1.0, 0.0], None, [0.5], []).evaluate()
    assert [(x.row_id, x.rewards) for x in result.prompts] == [
        ("row 0", [1.0, 0.0]),
        ("row 1", []),
        ("row 2", [0.5]),
        ("row 3", []),
    ]
    assert result.prompts[0].response_tokens == [1, 2]
    assert result.prompts[0].no_eos == [False, True]
    assert (result.num_failed, result.num_episodes) == (5, 3)
    assert result.reward == pytest.approx((0.5 + 0.25) / 4)
    assert result.pass_at[2].value == pytest.approx(2 / 4)


def test_an_evaluation_of_which_nothing_came_is_an_error():
    with pytest.raises(EngineError, match=r"none of 2 episodes succeeded: .*ConnectionError"):
        make_head(None, None).evaluate()


class Talks:
    """Has as many turns as the first of `plans` that is left says, with a reward for each turn."""

    def __init__(self, *plans):
        self.plans = list(plans)

    async def run(self, data, base_url, api_key, http_client):
        plan = self.plans.pop(0)
        if isinstance(plan, Exception):
            raise plan
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client)
        messages = [{"role": "user", "content": "hi"}]
        for reward in plan:
            answer = await client.chat.completions.create(model="m", messages=messages)
            messages += [answer.choices[0].message, {"role": "user", "content": "and?"}]
            body = {"reward": reward, "completion_id": answer.id}
            headers = {"Authorization": f"Bearer {api_key}"}
            await http_client.post(f"{base_url}/reward", headers=headers, json=body)


def agents_evaluation(*plans, **options):
    """Of one prompt, with a sample for each plan; and the workflow."""
    gconfig = GenerationHyperparameters(n_samples=len(plans), max_tokens=10_000)
    workflow = AgentWorkflow(Talks(*plans), gconfig, TOKENIZER, **options)
    engine = ScriptedEngine("a$")
    head = make_head(None, n_samples=len(plans), workflow=workflow, engine=engine)
    return head.evaluate(), workflow


@pytest.mark.parametrize(("style", "tokens"), [("turns", [2, 2, 2]), ("concat", [2, 10, 4])])
def test_a_run_of_an_agent_is_one_sample_whatever_turns_it_took(style, tokens):
    plans = [1.0], [0.0] * 5, [0.5, 0.25]
    result, _ = agents_evaluation(*plans, export_style=style, turn_discount=0.5)
    assert sorted(result.prompts[0].rewards) == [0.0, 0.75, 1.0]
    assert sorted(result.prompts[0].response_tokens) == sorted(tokens)
    assert (result.num_episodes, result.num_failed) == (3, 0)
    assert result.reward == pytest.approx(1.75 / 3)
    assert result.pass_at[1].value == pytest.approx(2 / 3)


def test_a_run_of_an_agent_that_fails_is_one_failed_sample():
    result, workflow = agents_evaluation([1.0], [0.0] * 5, LookupError("the agent's bug"))
    assert sorted(result.prompts[0].rewards) == [0.0, 1.0]
    assert (result.num_failed, result.reward) == (1, pytest.approx(1 / 3))
    assert workflow.failed == {"LookupError": 1}


async def reward(prompt, completion, prompt_ids, completion_ids, **row):
    return float("nan") if completion.startswith("nan") else 1.0


def samples(engine, *, is_grouped):
    """A workflow of four samples, and a head that evaluates it on one prompt with `engine`."""
    n_samples = 1 if is_grouped else 4
    gconfig = GenerationHyperparameters(n_samples=n_samples, max_tokens=100)
    workflow = RLVRWorkflow(reward, gconfig, TOKENIZER)
    workflow = GroupedWorkflow(workflow, 4) if is_grouped else workflow
    head = make_head(None, n_samples=4, workflow=workflow, engine=engine)
    head.eval_rows = [{"row_id": 0, "prompt": "hi"}]
    return workflow, head


@pytest.mark.parametrize("is_grouped", [False, True])
def test_a_sample_that_fails_leaves_those_of_its_prompt(is_grouped, caplog):
    failures = [ConnectionError("gone"), ExceptionGroup("", [ConnectionError("gone, too")])]
    engine = ScriptedEngine("a$", *failures, "b$")
    workflow, head = samples(engine, is_grouped=is_grouped)
    result = head.evaluate()
    assert result.prompts[0].rewards == [1.0, 1.0]
    assert (result.num_failed, result.reward) == (2, 0.5)
    assert workflow.failed == Counter(ConnectionError=2)
    told = [r.getMessage() for r in caplog.records if "has no score" in r.getMessage()]
    assert [line.rpartition(": ")[2] for line in told] == ["gone"]


@pytest.mark.parametrize("is_grouped", [False, True])
def test_a_sample_whose_reward_is_no_number_leaves_those_of_its_prompt(is_grouped):
    workflow, head = samples(ScriptedEngine("a$", "nan$", "b$"), is_grouped=is_grouped)
    result = head.evaluate()
    assert result.prompts[0].rewards == [1.0] * 3
    assert (result.num_failed, result.reward) == (1, 0.75)
    assert workflow.failed == {"ValueError": 1}


@pytest.mark.parametrize("is_grouped", [False, True])
def test_a_prompt_of_which_all_samples_fail_fails_by_their_error(is_grouped):
    workflow, head = samples(ScriptedEngine(ConnectionError("gone")), is_grouped=is_grouped)
    with pytest.raises(EngineError, match=r"none of 1 episodes succeeded: .*ConnectionError"):
        head.evaluate()
    assert workflow.failed == {}


@pytest.mark.parametrize("is_grouped", [False, True])
def test_a_sample_that_fails_in_training_rejects_its_group(is_grouped):
    engine = ScriptedEngine("a$", ConnectionError("gone"), "b$")
    workflow, head = samples(engine, is_grouped=is_grouped)
    with pytest.raises(ExceptionGroup) as raised:
        asyncio.run(workflow.arun_episode(engine, head.eval_rows[0]))
    assert raised.group_contains(ConnectionError)
    assert workflow.failed == {}


def test_all_rows_as_a_batch_are_those_that_came():
    head = make_head([1.0, 0.0], None, [0.5])
    executor = head.engine.executor
    batch = asyncio.run(executor.run_all(head.eval_rows, head.eval_workflow, is_eval=True))
    assert batch["rewards"].tolist() == [1.0, 0.0, 0.5]
    assert batch["group_ids"].tolist() == [0, 0, 1]
    assert batch["no_eos"].dtype == torch.bool


def test_episodes_are_on_the_time_line(tmp_path):
    path = tmp_path / "trace.json"
    trace.start(path)
    try:
        make_head([1.0, 0.0], None).evaluate()
    finally:
        trace.stop()
    events = [e for e in json.loads(path.read_text() + "{}]")[:-1] if e["ph"] == "X"]
    told = {event["args"]["task_id"]: event["args"] for event in events}
    assert told == {
        0: {
            "task_id": 0,
            "accepted": True,
            "rewards": [1.0, 0.0],
            "response_tokens": [1, 2],
            "versions": [3],
        },
        1: {"task_id": 1, "accepted": False},
    }
