"""examples/tool_agent.py as it stands learns, through OpenAI's client and Anthropic's."""

import math

import pytest
from whole_runs import REPOSITORY, Run

pytestmark = [pytest.mark.e2e, pytest.mark.server]

STEPS = 16
NUM_HELD_OUT = 128
NUM_CONVERSATIONS = 16 * 8
SHORT = [
    f"total_train_steps={STEPS}",
    f"valid_dataset.size={NUM_HELD_OUT}",
    "rollout.max_head_offpolicyness=0",
]


@pytest.mark.parametrize("client", ["OpenAI", "Anthropic"])
def test_an_agent_learns_to_use_its_tool(tmp_path, client):
    agent = f"rollout.workflow_options.agent=examples.tool_agent:{client}Agent"
    config = REPOSITORY / "configs" / "tool_agent.yaml"
    run = Run("train", *SHORT, agent, root=tmp_path, config=config)
    run.folder = tmp_path / "tool_agent" / "openai"
    assert run.wait() == 0, run.text()
    run.assert_nothing_is_left()
    steps = run.steps()
    assert [row["version"] for row in steps] == list(range(1, STEPS + 1))
    for row in steps:
        # A token that was decoded and encoded again would have a logprob of another token.
        assert row["prox_behave_gap_max"] < 1e-4
        # An answer that could not be gone on from would have begun another row.
        assert row["ppo_actor/n_seqs"] == NUM_CONVERSATIONS
        assert row["staleness_max"] == 0
        assert row["rollout/rejected"] == 0
    first, last = (row for row in run.rows() if "eval/reward" in row)
    assert first["eval/reward"] < 0.5
    noise = math.hypot(first["eval/reward_se"], last["eval/reward_se"])
    assert last["eval/reward"] - first["eval/reward"] > 4 * noise
