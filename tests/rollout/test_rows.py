"""Rows of any dataset: columns that a reward has names for, and ids that are no integers."""

import asyncio

import pytest
from proxy_agents import TOKENIZER, ScriptedEngine

from megarl.config.schema import GenerationHyperparameters
from megarl.rollout.workflows.agent import AgentWorkflow
from megarl.rollout.workflows.multi_turn import MultiTurnWorkflow
from megarl.rollout.workflows.reward_fn import RLVRWorkflow
from megarl.rollout.workflows.rlvr import row_number
from megarl.rollout.workflows.tools import ToolWorkflow


async def keeps(prompt, completion, prompt_ids, completion_ids, **row):
    return float(row == {"answer": 7} and completion.startswith("b") and completion_ids[0] < 512)


@pytest.mark.parametrize("kind", [RLVRWorkflow, MultiTurnWorkflow, ToolWorkflow])
def test_columns_of_a_rewards_own_names_are_not_given_to_it(kind):
    gconfig = GenerationHyperparameters(max_tokens=10_000)
    names = ("completion", "prompt_ids", "completion_ids", "messages")
    row = {"prompt": "hi", "answer": 7} | dict.fromkeys(names, "the dataset's")
    flow = kind(keeps, gconfig, TOKENIZER, data_extract_prompt_fn=lambda row: row["prompt"])
    out = asyncio.run(flow.arun_episode(ScriptedEngine("b$"), row))
    assert out["rewards"].tolist() == [1.0]


class Asks:
    async def run(self, data, base_url, api_key, http_client):
        body = {"messages": [{"role": "user", "content": "x"}]}
        headers = {"Authorization": f"Bearer {api_key}"}
        url = f"{base_url}/chat/completions"
        await http_client.post(url, headers=headers, json=body)
        return 1.0


IDS = [0, 3, "gsm8k/test/0", "gsm8k/test/1", "7", "é", "\ud800", None, 0.25, 0.5]


def seeds(row_id, *, is_agent):
    engine, gconfig = ScriptedEngine("b$"), GenerationHyperparameters(max_tokens=10_000, seed=5)
    agent = AgentWorkflow(Asks(), gconfig, TOKENIZER)
    flow = agent if is_agent else RLVRWorkflow(keeps, gconfig, TOKENIZER)
    asyncio.run(flow.arun_episode(engine, {"prompt": "hi", "answer": 7, "row_id": row_id}))
    return [request.gconfig.seed for request in engine.requests]


@pytest.mark.parametrize("is_agent", [False, True])
def test_a_row_whose_id_is_no_integer_has_a_seed_of_its_own(is_agent):
    found = [seeds(row_id, is_agent=is_agent)[0] for row_id in IDS]
    assert len(set(found)) == len(IDS)
    assert all(0 <= seed < 1 << 31 for seed in found)
    assert seeds(3, is_agent=is_agent) == [(5 * 1_000_003 + 3) * 4096 % (1 << 31)]


def test_a_rows_number_is_the_same_in_each_process():
    """A text's hash would not be."""
    assert [row_number({"row_id": row_id}) for row_id in (3, "gsm8k/test/0")] == [3, 2_592_939_869]
    assert row_number({}) == 0
