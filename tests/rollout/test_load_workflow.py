"""How a config names a workflow: what its class gets from the run, and what from the options."""

import pytest
from proxy_agents import TOKENIZER

from megarl.config.schema import GenerationHyperparameters
from megarl.errors import ConfigError
from megarl.rollout.workflows import load_workflow

GIVEN = {
    "reward_fn": print,
    "gconfig": GenerationHyperparameters(n_samples=3),
    "tokenizer": TOKENIZER,
}
AGENT_WORKFLOW = "megarl.rollout.workflows.agent:AgentWorkflow"
AGENT = "test_load_workflow:Agent"


class Plain:
    """Names one of the three, and takes options."""

    def __init__(self, gconfig, size=1):
        if size < 0:
            raise ValueError(f"size must be >= 0, got {size}")
        self.gconfig, self.size = gconfig, size

    async def arun_episode(self, engine, data):
        return None


class TakesAll(Plain):
    def __init__(self, **everything):
        super().__init__(everything["gconfig"])
        self.everything = everything


PLAIN = Plain(None)


class Agent:
    def __init__(self, worth=1.0):
        self.worth = worth

    async def run(self, data, base_url, api_key):
        return self.worth


def test_a_class_gets_what_it_names_and_its_options():
    made = load_workflow("test_load_workflow:Plain", GIVEN, {"size": 4})
    assert (made.gconfig, made.size) == (GIVEN["gconfig"], 4)
    everything = load_workflow("test_load_workflow:TakesAll", GIVEN, {"other": 5}).everything
    assert everything == GIVEN | {"other": 5}
    assert load_workflow("test_load_workflow:PLAIN", GIVEN, {}) is PLAIN


def test_an_agent_is_an_option():
    options = {
        "agent": AGENT,
        "agent_options": {"worth": 2.0},
        "export_style": "concat",
        "timeout_s": 7,
        "limits": {"max_choices": 5},
    }
    made = load_workflow(AGENT_WORKFLOW, GIVEN, options)
    assert made.agent.worth == 2.0
    assert (made.export_style, made.timeout_s, made.limits.max_choices) == ("concat", 7, 5)
    assert (made.gconfig, made.tokenizer) == (GIVEN["gconfig"], TOKENIZER)


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        (
            "test_load_workflow:Plain",
            {"sise": 4},
            r"workflow_options: test_load_workflow:Plain: .*unexpected keyword argument 'sise'",
        ),
        (AGENT_WORKFLOW, {}, r"workflow_options: .*missing a required argument: 'agent'"),
        ("test_load_workflow:Plain", {"size": -1}, r"workflow: .*size must be >= 0, got -1"),
        ("test_load_workflow:PLAIN", {"size": 1}, r"workflow: .*is an instance"),
        ("test_load_workflow:Nothing", {}, r"workflow: test_load_workflow:Nothing: "),
        (AGENT, {}, r"workflow: .*wrap it: AgentWorkflow"),
        (
            AGENT_WORKFLOW,
            {"agent": AGENT, "agent_options": {"value": 1}},
            r"workflow: .*agent_options: Agent: got an unexpected keyword argument 'value'",
        ),
        (
            AGENT_WORKFLOW,
            {"agent": AGENT, "limits": {"max_minutes": 1}},
            r"workflow: .*limits: Limits: got an unexpected keyword argument 'max_minutes'",
        ),
    ],
)
def test_what_a_class_refuses_names_the_key(target, options, message):
    with pytest.raises(ConfigError, match=rf"^rollout\.{message}"):
        load_workflow(target, GIVEN, options)
