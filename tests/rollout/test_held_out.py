"""RolloutHead.evaluate through a real executor: what failed is counted, never left out."""

import asyncio
import json

import pytest
import torch

from megarl.config.run import EvaluatorConfig
from megarl.config.schema import GenerationHyperparameters
from megarl.errors import EngineError
from megarl.rollout.api import ModelResponse, RolloutWorkflow
from megarl.rollout.executor import WorkflowExecutor
from megarl.rollout.staleness import StalenessManager
from megarl.rollout.workflows.rlvr import to_trajectory
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


def make_head(*rewards, n_samples=2):
    async def make():
        return WorkflowExecutor(Engine(), StalenessManager(4, 4, 0))

    head = RolloutHead.__new__(RolloutHead)
    head.config, head.engine = Config(), Engine(asyncio.run(make()))
    head.eval_rows = [{"row_id": f"row {i}", "rewards": r} for i, r in enumerate(rewards)]
    head.eval_workflow = Rewards()
    head.eval_gconfig = GenerationHyperparameters(n_samples=n_samples)
    return head


def test_every_row_is_in_the_evaluation_whatever_became_of_it():
    result = make_head([1.0, 0.0], None, [0.5], [], [float("nan"), 1.0]).evaluate()
    assert [(x.row_id, x.rewards) for x in result.prompts] == [
        ("row 0", [1.0, 0.0]),
        ("row 1", []),
        ("row 2", [0.5]),
        ("row 3", []),
        ("row 4", [1.0]),
    ]
    assert result.prompts[0].response_tokens == [1, 2]
    assert result.prompts[0].no_eos == [False, True]
    assert result.prompts[4].response_tokens == [2]
    assert (result.num_failed, result.num_episodes) == (6, 4)
    assert result.reward == pytest.approx((0.5 + 0.25 + 0.5) / 5)
    assert result.pass_at[2].value == pytest.approx(3 / 5)


def test_an_evaluation_of_which_nothing_came_is_an_error():
    with pytest.raises(EngineError, match=r"none of 2 episodes succeeded: .*ConnectionError"):
        make_head(None, None).evaluate()


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
