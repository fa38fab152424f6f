"""AgentWorkflow: agents with OpenAI's client as episodes, in the pool that runs them."""

import asyncio
import logging

import openai
import pytest
from proxy_agents import TOKENIZER, ScriptedEngine, make_tokenizer, sampled

from megarl.config.schema import GenerationHyperparameters
from megarl.rollout import workflow_context
from megarl.rollout.executor import WorkflowExecutor
from megarl.rollout.staleness import StalenessManager
from megarl.rollout.workflow_context import WorkflowContext
from megarl.rollout.workflows.agent import AgentWorkflow


class TwoTurns:
    """Asks, asks again, and is worth what its row says."""

    def __init__(self, factor=1.0):
        self.factor, self.access = factor, []

    async def run(self, data, base_url, api_key):
        self.access.append(api_key)
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            messages = [{"role": "user", "content": data["prompt"]}]
            for _ in range(2):
                answer = await client.chat.completions.create(model="m", messages=messages)
                messages += [answer.choices[0].message, {"role": "user", "content": "and?"}]
        return data["worth"] * self.factor


def episode(agent, engine=None, row=None, tokenizer=TOKENIZER, n_samples=1, seed=None, **options):
    """The trajectory of one episode, and the pool's counts."""
    engine = engine or ScriptedEngine("so$")
    gconfig = GenerationHyperparameters(n_samples=n_samples, max_tokens=1000, seed=seed)
    workflow = AgentWorkflow(agent, gconfig, tokenizer, **options)

    async def main():
        executor = WorkflowExecutor(engine, StalenessManager(4, 1, 8))
        async with asyncio.timeout(120):
            executor.submit(row or {"prompt": "hi", "worth": 3.0}, workflow)
            await executor.an_episode_ended()
            out = executor.take(1) if executor.is_ready(1) else None
        await executor.close()
        return out, executor.export_stats()

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("options", "rewards", "trained"),
    [
        ({"turn_discount": 0.5}, [1.5, 3.0] * 2, [3] * 4),
        ({"turn_discount": 0.5, "export_style": "concat"}, [1.5] * 2, [6] * 2),
    ],
)
def test_runs_of_an_agent_are_a_group(options, rewards, trained):
    engine, agent = ScriptedEngine("so$"), TwoTurns()
    out, counts = episode(agent, engine, n_samples=2, seed=1, **options)
    assert out["rewards"].tolist() == rewards
    assert out["loss_mask"].sum(1).tolist() == trained
    assert len(set(out["group_ids"].tolist())) == 1
    assert out["input_ids"][out["loss_mask"].bool()].tolist() == sampled("so$") * 4
    assert (counts["accepted"], counts["rejected"]) == (1, 0)
    assert len(set(agent.access)) == 2
    assert len({r.gconfig.seed for r in engine.requests}) == 4


def test_an_agent_by_its_import_string_with_a_client_of_its_own():
    out, _ = episode("test_agent_workflow:Careful", agent_options={"worth": 7})
    assert out["rewards"].tolist() == [7.0]


class Careful:
    """Takes the HTTP client that it is given."""

    def __init__(self, worth):
        self.worth = worth

    async def run(self, data, **kw):
        assert sorted(kw) == ["api_key", "base_url", "http_client"]
        client = openai.AsyncOpenAI(**kw)
        await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": data["prompt"]}]
        )
        return self.worth


def test_a_runs_log_has_no_line_for_each_request(caplog):
    caplog.set_level(logging.INFO)
    episode("test_agent_workflow:Careful", agent_options={"worth": 7})
    assert [record.name for record in caplog.records if record.name.startswith("httpx")] == []


class SetsItsReward:
    async def run(self, data, base_url, api_key, http_client):
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client)
        messages = [{"role": "user", "content": "x"}]
        for _ in range(2):
            await client.chat.completions.create(model="m", messages=messages)
        if data["session_reward"] is None:
            return
        headers = {"Authorization": f"Bearer {api_key}"}
        body = {"reward": data["session_reward"]}
        answer = await http_client.post(f"{base_url}/reward", headers=headers, json=body)
        assert answer.status_code == 200


def test_an_agent_may_set_its_reward_over_http_or_leave_the_episode_out():
    out, _ = episode(SetsItsReward(), row={"session_reward": 2.0})
    assert out["rewards"].tolist() == [2.0, 2.0]
    out, counts = episode(SetsItsReward(), row={"session_reward": None})
    assert out is None
    assert counts["rejected/workflow returned None"] == 1


class Failing:
    def __init__(self, how):
        self.how = how

    async def run(self, data, base_url, api_key):
        if self.how == "late":
            await asyncio.Event().wait()
        if self.how == "raises":
            raise LookupError("the agent's bug")
        if self.how == "infinite":
            await TwoTurns().run(data, base_url, api_key)
            return float("inf")
        return 1.0


@pytest.mark.parametrize(
    ("how", "reason", "timeout_s"),
    [
        ("late", "AgentTimeout", 0.05),
        ("raises", "LookupError", 60),
        ("silent", "AgentSampledNothing", 60),
        ("infinite", "ProxyError", 60),
    ],
)
def test_failures_are_counted_by_their_name(how, reason, timeout_s):
    out, counts = episode(Failing(how), timeout_s=timeout_s)
    assert out is None
    assert (counts["rejected"], counts[f"rejected/{reason}"]) == (1, 1)


def test_a_workflow_outlives_its_loop_and_its_keys_do_not_outlive_an_episode():
    agent = TwoTurns()
    gconfig = GenerationHyperparameters(max_tokens=1000)
    workflow = AgentWorkflow(agent, gconfig, TOKENIZER)

    async def main():
        await workflow.arun_episode(ScriptedEngine("so$"), {"prompt": "hi", "worth": 1.0})
        url = workflow._proxy.base_url
        async with openai.AsyncOpenAI(base_url=url, api_key=agent.access[-1]) as client:
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()
        return url

    urls = [asyncio.run(main()) for _ in range(2)]
    assert len(urls) == 2

    async def is_closed():
        with pytest.raises(OSError, match="Connect call failed"):
            await asyncio.open_connection("127.0.0.1", int(urls[1].rpartition(":")[2]))

    asyncio.run(is_closed())


@pytest.mark.parametrize(
    ("agent", "options", "match"),
    [
        (object(), {}, "has no `async def run"),
        ("json:JSONDecoder", {}, "has no `async def run"),
        (TwoTurns(), {"agent_options": {"factor": 2}}, "for a class"),
        (TwoTurns(), {"timeout_s": 0}, "timeout_s must be above 0"),
        (TwoTurns(), {"turn_discount": 1.5}, r"turn_discount in \[0, 1\]"),
        (TwoTurns(), {"export_style": "tree"}, "turns or concat"),
        (TwoTurns(), {"tokenizer": make_tokenizer(None)}, "no chat template"),
    ],
)
def test_wrong_options_are_named(agent, options, match):
    arguments = {"tokenizer": TOKENIZER} | options
    with pytest.raises(ValueError, match=match):
        AgentWorkflow(agent, GenerationHyperparameters(), **arguments)


class Independent:
    """Asks at its own temperature, ends its session, and may be late by a limit of its own."""

    async def run(self, data, base_url, api_key, http_client):
        headers = {"Authorization": f"Bearer {api_key}"}
        body = {"messages": [{"role": "user", "content": "x"}], "temperature": 0.25}
        answer = await http_client.post(f"{base_url}/responses", headers=headers, json={})
        assert answer.status_code == 400
        url = f"{base_url}/chat/completions"
        data["answer"] = await http_client.post(url, headers=headers, json=body)
        if data["answer"].status_code == 200:
            ended = await http_client.post(f"{base_url}/end", headers=headers)
            assert ended.status_code == 200
            return 1.0
        raise TimeoutError("a limit of the agent's")


def test_an_evaluation_may_sample_otherwise_and_an_agent_end_its_session():
    engine, row = ScriptedEngine("so$"), {}
    workflow = AgentWorkflow(Independent(), GenerationHyperparameters(max_tokens=999), TOKENIZER)

    async def main():
        workflow_context.set_for_task(WorkflowContext(is_eval=True))
        return await workflow.arun_episode(engine, row)

    assert asyncio.run(main())["rewards"].tolist() == [1.0]
    assert engine.requests[0].gconfig.temperature == 0.25
    _, counts = episode(Independent(), row={"is": "training"})
    assert counts["rejected/TimeoutError"] == 1
