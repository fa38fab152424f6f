"""How scripts name a workflow, and groups of runs of it."""

import asyncio

import pytest
import torch

from megarl.config.schema import GenerationHyperparameters
from megarl.rollout.api import ModelRequest, ModelResponse
from megarl.rollout.finished import as_batch
from megarl.rollout.workflows import ResolvedWorkflows, resolve_accept_fn, resolve_workflow
from megarl.rollout.workflows.rlvr import RLVRWorkflow, to_trajectory

RLVR = "megarl.rollout.workflows.rlvr:RLVRWorkflow"
GCONFIG = GenerationHyperparameters(max_new_tokens=2)


class Echo:
    """As scripts write it: no base class. Its reward is the seed of its one request."""

    def __init__(self, first=5, rejects=()):
        self.first, self.rejects, self.calls = first, rejects, 0

    async def arun_episode(self, engine, data):
        self.calls += 1
        call = self.calls
        gconfig = GCONFIG.new(seed=data.get("seed"))
        response = await engine.agenerate(ModelRequest(input_ids=[self.first], gconfig=gconfig))
        if call in self.rejects:
            return None
        rows = to_trajectory(response, float(response.latency_s))
        rows["input_ids"] = rows["input_ids"].long()  # taken where it says the same
        del rows["versions"]
        return rows


class Engine:
    """As many tokens as it was asked before; the seed comes back as latency."""

    version, asked = 3, 0

    async def agenerate(self, req):
        self.asked += 1
        self.version += 1
        made = list(range(self.asked))
        seed = -1 if req.gconfig.seed is None else req.gconfig.seed
        return ModelResponse(req.input_ids, made, [-1.0] * len(made), [3] * len(made), "stop", seed)

    def get_version(self):
        return self.version


def accepts_all(trajectory):
    return True


@pytest.mark.parametrize("named", [RLVR, RLVR.replace(":", "."), RLVRWorkflow])
def test_a_class_is_made_with_its_arguments(named):
    kwargs = {"reward_fn": accepts_all, "gconfig": GCONFIG, "tokenizer": 7}
    made = resolve_workflow(named, kwargs)
    assert type(made) is RLVRWorkflow
    assert (made.gconfig, made.tokenizer) == (GCONFIG, 7)
    echo = Echo()
    assert resolve_workflow(echo) is echo
    assert resolve_workflow(Echo).first == 5


class Agent:
    async def run(self, data, **kw):
        return 1.0


class Blocking:
    def arun_episode(self, engine, data):
        return None


@pytest.mark.parametrize(
    ("workflow", "options", "message"),
    [
        (Blocking(), {}, "has no `async def arun_episode"),
        (None, {}, "None has no `async def arun_episode"),
        (Agent, {}, r"wrap it: AgentWorkflow\(agent, gconfig, tokenizer\)"),
        (Echo(), {"workflow_kwargs": {"first": 1}}, "workflow_kwargs are for a class"),
        (Echo, {"group_size": 0}, "group_size must be an int >= 1, got 0"),
        (Echo, {"group_size": True}, "group_size must be an int >= 1, got True"),
        ("Echo", {}, "'Echo' is not `package.module:name`"),
        ("no.such.module:Echo", {}, "No module named 'no'"),
        ("megarl.rollout.workflows.rlvr:Nothing", {}, "no attribute 'Nothing'"),
    ],
)
def test_what_is_no_workflow_is_named(workflow, options, message):
    with pytest.raises(ValueError, match=message):
        resolve_workflow(workflow, **options)


def test_the_same_class_with_equal_arguments_is_made_once():
    workflows = ResolvedWorkflows()
    first = workflows(Echo, {"first": 1})
    assert workflows(Echo, {"first": 1}) is first
    assert workflows(Echo, {"first": 2}) is not first
    assert workflows(Echo, {"first": 1}, 2).workflow is not first
    assert workflows(Echo, {"first": 1}, 2) is workflows(Echo, {"first": 1}, 2)
    instances = [Echo(), Echo()]
    assert [workflows(echo) for echo in instances] == instances


def test_filters_have_import_strings():
    assert resolve_accept_fn(None) is None
    assert resolve_accept_fn(accepts_all) is accepts_all
    named = "megarl.rollout.workflows:resolve_accept_fn"
    assert resolve_accept_fn(named) is resolve_accept_fn

    async def waits(trajectory):
        return True

    for wrong in (7, waits):
        with pytest.raises(ValueError, match="must be a plain function"):
            resolve_accept_fn(wrong)


def grouped(data, group_size=3, **options):
    workflow = resolve_workflow(Echo, options, group_size)
    return asyncio.run(workflow.arun_episode(Engine(), data))


def test_a_group_is_one_trajectory_of_all_its_runs():
    rows = grouped({})
    assert rows["attention_mask"].sum(1).tolist() == [2, 3, 4]
    assert rows["input_ids"].dtype == torch.int32
    # No versions came, so they are those of the start, before any run had moved the engine on.
    assert rows["versions"][rows["loss_mask"].bool()].tolist() == [3] * 6
    assert rows["rewards"].tolist() == [-1, -1, -1]
    batch = as_batch([rows, grouped({}, 2)])
    assert batch["group_ids"].tolist() == [0, 0, 0, 1, 1]


def test_runs_that_are_rejected_leave_the_group():
    assert grouped({}, rejects=(2,))["attention_mask"].sum(1).tolist() == [2, 4]
    assert grouped({}, rejects=(1, 2, 3)) is None


def test_a_run_that_raises_rejects_the_group():
    class Fails(Echo):
        async def arun_episode(self, engine, data):
            rows = await super().arun_episode(engine, data)
            if rows["attention_mask"].sum() == 3:
                raise KeyError("a bug in the user's workflow")
            return rows

    with pytest.raises(ExceptionGroup) as raised:
        asyncio.run(resolve_workflow(Fails, None, 3).arun_episode(Engine(), {}))
    assert [type(error) for error in raised.value.exceptions] == [KeyError]


def test_runs_of_one_seed_have_seeds_of_their_own():
    seeds = grouped({"seed": 11}, 4)["rewards"].tolist()
    assert seeds[0] == 11
    assert len(set(seeds)) == 4
    assert seeds == grouped({"seed": 11}, 4)["rewards"].tolist()


def test_a_batch_has_its_own_group_ids_and_all_its_columns():
    one = to_trajectory(ModelResponse([1], [2], [-1.0], [0], "length"), 1.0)
    other = {key: column for key, column in one.items() if key != "no_eos"}
    batch = as_batch([{**one, "group_ids": torch.tensor([9])}, other])
    assert batch["group_ids"].tolist() == [0, 1]
    assert batch["no_eos"].tolist() == [True, False]
