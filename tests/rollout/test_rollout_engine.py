"""RemoteInferenceEngine against a scripted server: batches, versions, pauses, failures.

The script stands for a vLLM server's generate route only; real servers: tests/servers.
"""

import asyncio
import json
import threading

import pytest
import torch
from aiohttp import web

from megarl.config.schema import GenerationHyperparameters, InferenceEngineConfig
from megarl.errors import EngineError
from megarl.rollout import workflow_context
from megarl.rollout.api import ModelRequest, RolloutWorkflow
from megarl.rollout.backends.vllm import VLLMClient
from megarl.rollout.engine import RemoteInferenceEngine
from megarl.rollout.workflows.rlvr import to_trajectory

WAIT_S = 60.0


class ScriptedServer:
    """Answers each request with the tokens n, n + 1, ... where n is the prompt's length.

    `part_tokens` cuts an answer short with finish_reason abort, as a pause does.
    """

    def __init__(self):
        self.requests = []
        self.version = 0
        self.part_tokens = None
        self.stop_reason, self.cut_reason = "stop", "abort"
        self.in_flight = self.most_in_flight = 0
        self.status = 200
        self.hangs_next = False
        self.hangs = set()

    async def health(self, request):
        return web.Response(status=self.status)

    async def generate(self, request):
        body = await request.json()
        self.requests.append(body)
        if self.hangs_next:
            never = asyncio.Event()
            self.hangs.add(never)
            await never.wait()
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        await asyncio.sleep(0)
        self.in_flight -= 1
        start, budget = len(body["token_ids"]), body["sampling_params"]["max_tokens"]
        count = budget if self.part_tokens is None else min(budget, self.part_tokens)
        choice = {
            "token_ids": list(range(start, start + count)),
            "logprobs": {"content": [{"logprob": -0.5 * i} for i in range(count)]},
            "weight_versions": [{"version": str(self.version), "start": 0, "end": count}],
            "finish_reason": self.stop_reason if count == budget else self.cut_reason,
        }
        self.version += int(self.part_tokens is not None)
        return web.json_response({"choices": [choice]})


@pytest.fixture
def server():
    """A scripted server on a thread of its own; `server.address` is where."""
    script = ScriptedServer()
    ready, done = threading.Event(), None

    async def serve():
        nonlocal done
        done = asyncio.Event()
        app = web.Application()
        app.router.add_post("/inference/v1/generate", script.generate)
        app.router.add_get("/health", script.health)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        script.loop = asyncio.get_running_loop()
        script.address = f"http://127.0.0.1:{runner.addresses[0][1]}"
        ready.set()
        await done.wait()
        for never in script.hangs:
            never.set()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(WAIT_S)
    yield script
    script.loop.call_soon_threadsafe(done.set)
    thread.join(WAIT_S)


@pytest.fixture
def make_engine(server):
    engines = []

    def make(*, batch_size=4, dump_dir=None, **config):
        client = VLLMClient(server.address, request_timeout_s=WAIT_S, retries=0)
        engine = RemoteInferenceEngine(
            InferenceEngineConfig(**config), [client], batch_size=batch_size, dump_dir=dump_dir
        )
        engine.initialize()
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.destroy()


class Rows:
    """An endless stream of rows 0, 1, 2, ..."""

    def __init__(self, batch_size):
        self.batch_size, self.taken = batch_size, 0

    def __next__(self):
        rows = [{"prompt": "", "value": self.taken + i} for i in range(self.batch_size)]
        self.taken += self.batch_size
        return rows


class Echo(RolloutWorkflow):
    """A response of 3 tokens to a prompt of one; the reward is the row's value."""

    async def arun_episode(self, engine, data):
        gconfig = GenerationHyperparameters(max_new_tokens=3)
        response = await engine.agenerate(ModelRequest(input_ids=[7], gconfig=gconfig))
        return to_trajectory(response, data["value"])


def test_synchronous_batches_are_the_rows_in_order(make_engine):
    engine = make_engine(batch_size=4, max_head_offpolicyness=0)
    rows = Rows(4)
    for version in range(5):
        batch = engine.prepare_batch(rows, Echo())
        assert batch["rewards"].tolist() == [4 * version + i for i in range(4)]
        assert batch["group_ids"].tolist() == [0, 1, 2, 3]
        assert batch["input_ids"].tolist() == [[7, 1, 2, 3]] * 4
        assert batch["loss_mask"].tolist() == [[0, 1, 1, 1]] * 4
        counts = engine.export_stats()
        assert counts["accepted"] == 4 * (version + 1)
        assert counts["running"] == 0, "the bound of 0 lets nothing start before the next version"
        engine.set_version(version + 1)


def test_generation_goes_on_while_the_trainer_trains(make_engine, server):
    engine = make_engine(batch_size=4, max_head_offpolicyness=2, max_concurrent_rollouts=64)
    rows = Rows(4)
    engine.prepare_batch(rows, Echo())
    # The trainer is busy now: two more batches finish without anybody asking.
    engine.run(poll(lambda: engine.executor.staleness.counts.accepted == 12), WAIT_S)
    engine.set_version(1)
    engine.run(poll(lambda: engine.executor.staleness.counts.accepted == 16), WAIT_S)


def test_cancelled_episodes_have_ended_and_none_follows(make_engine):
    ended = []

    class Endless(RolloutWorkflow):
        async def arun_episode(self, engine, data):
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(data["id"])

    engine = make_engine(batch_size=2, max_head_offpolicyness=0, max_concurrent_rollouts=8)
    for i in range(6):
        engine.submit({"id": i}, Endless())
    engine.cancel_episodes()
    assert sorted(ended) == [0, 1]
    engine.submit({"id": 6}, Endless())
    engine.set_version(1)
    assert engine.export_stats()["running"] == 2


def test_a_batch_waits_for_what_the_next_one_could_not_take(make_engine):
    gates = {}

    class Gated(Echo):
        async def arun_episode(self, engine, data):
            await gates.setdefault(data["value"], asyncio.Event()).wait()
            return await super().arun_episode(engine, data)

    engine = make_engine(batch_size=1, max_head_offpolicyness=1, max_concurrent_rollouts=4)

    def open_gate(*ids):
        engine._call(lambda: [gates.setdefault(i, asyncio.Event()).set() for i in ids])

    for i in range(3):
        engine.submit({"value": i}, Gated())
    open_gate(0)
    engine.wait(1, WAIT_S)
    engine.set_version(1)
    open_gate(2)
    engine.run(poll(lambda: engine.executor.staleness.counts.accepted == 2), WAIT_S)
    with pytest.raises(TimeoutError, match=r"1 of 1 episodes within 0\.01 s"):
        engine.wait(1, 0.01)
    open_gate(1)
    assert engine.wait(1, WAIT_S)["rewards"].tolist() == [1.0]


async def poll(condition):
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - counts have no event
            await asyncio.sleep(0.01)


def test_a_pause_stops_admission_until_resume(make_engine, server):
    engine = make_engine(batch_size=2)
    engine.pause()
    for i in range(2):
        engine.submit({"value": i}, Echo())
    assert engine.export_stats()["running"] == 0
    with pytest.raises(TimeoutError, match="0 of 2 episodes"):
        engine.wait(2, timeout_s=0.2)
    assert not server.requests
    engine.resume()
    assert engine.wait(2, timeout_s=WAIT_S)["rewards"].tolist() == [0.0, 1.0]


def test_an_aborted_response_is_continued_token_by_token(make_engine, server):
    server.part_tokens = 4
    engine = make_engine()
    gconfig = GenerationHyperparameters(max_new_tokens=10, min_new_tokens=6)
    request = ModelRequest(input_ids=[5, 5], gconfig=gconfig)
    response = engine.run(engine.agenerate(request), WAIT_S)
    assert response.output_tokens == list(range(2, 12))
    assert response.output_versions == [0] * 4 + [1] * 4 + [2] * 2
    assert response.output_logprobs == [-0.5 * i for i in [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]]
    assert response.stop_reason == "stop"
    asked = [(len(r["token_ids"]), r["sampling_params"]) for r in server.requests]
    assert [(n, p["max_tokens"], p["min_tokens"]) for n, p in asked] == [
        (2, 10, 6),
        (6, 6, 2),
        (10, 2, 0),
    ]


def test_a_long_response_is_asked_for_in_parts(make_engine, server):
    engine = make_engine(max_tokens_per_request=4)
    gconfig = GenerationHyperparameters(max_new_tokens=10, min_new_tokens=6, seed=5)
    request = ModelRequest(input_ids=[5, 5], gconfig=gconfig)
    server.stop_reason = "length"
    response = engine.run(engine.agenerate(request), WAIT_S)
    assert response.output_tokens == list(range(2, 12))
    assert response.stop_reason == "length"
    asked = [(len(r["token_ids"]), r["sampling_params"]) for r in server.requests]
    assert [(n, p["max_tokens"], p["min_tokens"]) for n, p in asked] == [
        (2, 4, 4),
        (6, 4, 2),
        (10, 2, 0),
    ]
    seeds = [p["seed"] for _, p in asked]
    assert seeds[0] == 5
    assert len(set(seeds)) == 3, "the same seed would draw the same numbers again"


def test_a_part_that_ends_early_is_the_end(make_engine, server):
    """The server's own limit, max_model_len, is the end of the response too."""
    engine = make_engine(max_tokens_per_request=4)
    server.part_tokens, server.stop_reason, server.cut_reason = 3, "length", "length"
    request = ModelRequest(input_ids=[5, 5], gconfig=GenerationHyperparameters(max_new_tokens=10))
    response = engine.run(engine.agenerate(request), WAIT_S)
    assert (response.output_tokens, response.stop_reason) == ([2, 3, 4], "length")


@pytest.mark.parametrize("options", [{"stop": ["x"]}, {"frequency_penalty": 0.5}])
def test_what_needs_all_of_a_response_is_asked_for_once(make_engine, server, options):
    engine = make_engine(max_tokens_per_request=4)
    gconfig = GenerationHyperparameters(max_new_tokens=10, **options)
    engine.run(engine.agenerate(ModelRequest(input_ids=[5], gconfig=gconfig)), WAIT_S)
    assert [r["sampling_params"]["max_tokens"] for r in server.requests] == [10]


def test_a_prompt_without_room_is_refused(make_engine):
    engine = make_engine()
    request = ModelRequest(input_ids=[1] * 9, gconfig=GenerationHyperparameters(max_tokens=9))
    with pytest.raises(ValueError, match="prompt of 9 tokens leaves no room"):
        engine.run(engine.agenerate(request), WAIT_S)


class Picky(Echo):
    async def arun_episode(self, engine, data):
        if data["value"] % 4 == 1:
            return None
        if data["value"] % 4 == 2:
            raise KeyError("a bug in the user's workflow")
        return await super().arun_episode(engine, data)


def test_rejected_episodes_are_replaced_and_counted_by_reason(make_engine):
    engine = make_engine(batch_size=4)
    batch = engine.prepare_batch(Rows(4), Picky(), lambda t: t["rewards"].item() != 3)
    assert batch["rewards"].tolist() == [0, 4, 7, 8]
    stats = engine.export_stats()
    assert stats["accepted"] >= 4
    assert stats["rejected/workflow returned None"] >= 2
    assert stats["rejected/KeyError"] >= 2
    assert stats["rejected/filtered"] == 1


class Broken(RolloutWorkflow):
    async def arun_episode(self, engine, data):
        raise RuntimeError("never works")


def test_episodes_that_only_fail_end_the_run(make_engine):
    engine = make_engine(batch_size=4)
    with pytest.raises(EngineError, match=r"the last 32 episodes all failed.*never works"):
        engine.prepare_batch(Rows(4), Broken())


class WrongShape(Echo):
    async def arun_episode(self, engine, data):
        trajectory = await super().arun_episode(engine, data)
        return {**trajectory, "logprobs": trajectory["logprobs"].to(torch.complex64)}


def test_a_malformed_trajectory_is_named(make_engine):
    engine = make_engine(batch_size=1)
    with pytest.raises(EngineError, match=r"logprobs must be torch\.float32, got torch\.complex64"):
        engine.prepare_batch(Rows(1), WrongShape())


def test_what_was_on_its_way_comes_back(make_engine):
    """What had finished is not generated again, what was queued is; in the old order."""
    engine = make_engine(batch_size=2, max_head_offpolicyness=1, max_concurrent_rollouts=8)
    rows = Rows(2)
    engine.prepare_batch(rows, Echo())
    engine.run(poll(lambda: engine.executor.staleness.counts.accepted == 4), WAIT_S)
    state = engine.state_dict()
    assert [row["value"] for row, _ in state["pending"]] == [2, 3, 4, 5]
    assert [done is not None for _, done in state["pending"]] == [True, True, False, False]

    class Negative(Echo):
        async def arun_episode(self, engine, data):
            return await super().arun_episode(engine, {**data, "value": -data["value"]})

    again = make_engine(batch_size=2, max_head_offpolicyness=1, max_concurrent_rollouts=8)
    again.load_state_dict(state, 1, Negative())
    batches = []
    for version in (1, 2):
        batches += again.prepare_batch(rows, Negative())["rewards"].tolist()
        again.set_version(version + 1)
    assert batches == [2, 3, -4, -5]
    assert again.export_stats()["submitted"] == 10
    # As if it had never stopped: 2 batches handed out before, 2 here, one version ahead.
    again.run(poll(lambda: again.executor.staleness.counts.accepted == 10), WAIT_S)


class InContext(Echo):
    async def arun_episode(self, engine, data):
        context = workflow_context.get()
        trajectory = await super().arun_episode(engine, {"value": float(context.is_eval)})
        assert context.stat_scope() == ("eval-rollout" if context.is_eval else "rollout")
        return trajectory


def test_evaluation_is_outside_of_the_bound_and_in_row_order(make_engine):
    engine = make_engine(batch_size=1)
    rows = [{"value": i} for i in range(9)]
    assert engine.rollout_batch(rows, Echo())["rewards"].tolist() == list(range(9))
    assert engine.export_stats()["accepted"] == 0
    assert engine.rollout_batch(rows[:1], InContext())["rewards"].tolist() == [1.0]
    assert engine.prepare_batch(Rows(1), InContext())["rewards"].tolist() == [0.0]
    with pytest.raises(EngineError, match="none of 9 episodes"):
        engine.rollout_batch(rows, Broken())


class Counted(Echo):
    """How many of it run at one time, at most."""

    now = most = 0

    async def arun_episode(self, engine, data):
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            return await super().arun_episode(engine, data)
        finally:
            self.now -= 1


@pytest.mark.parametrize(("limit", "most"), [(None, 9), (2, 2)])
def test_an_evaluation_has_no_more_episodes_at_a_time_than_training(make_engine, limit, most):
    engine, workflow = make_engine(max_concurrent_rollouts=limit), Counted()
    batch = engine.rollout_batch([{"value": i} for i in range(9)], workflow)
    assert batch["rewards"].tolist() == list(range(9))
    assert workflow.most == most


def test_finished_trajectories_are_dumped(make_engine, tmp_path):
    engine = make_engine(batch_size=2, dump_dir=tmp_path)
    engine.prepare_batch(Rows(2), Echo())
    path = tmp_path / "rollout" / "0" / "1.jsonl"
    (record,) = [json.loads(line) for line in path.read_text().splitlines()]
    assert record == {
        "task_id": 1,
        "sample_idx": 0,
        "seqlen": 4,
        "prompt_len": 1,
        "head_version": 0,
        "tail_version": 0,
        "reward": 1.0,
        "prompt": "[7]",
        "completion": "[1, 2, 3]",
        "token_ids": [7, 1, 2, 3],
        "logprobs": [0.0, 0.0, -0.5, -1.0],
        "versions": [-1, 0, 0, 0],
        "loss_mask": [0, 1, 1, 1],
    }


def test_a_dead_server_ends_what_waits_for_it(make_engine, server, monkeypatch):
    """Its connections stay open and unanswered, as vLLM's do when its engine died."""
    monkeypatch.setattr("megarl.rollout.fleet.HEALTH_INTERVAL_S", 0.05)
    monkeypatch.setattr("megarl.rollout.fleet.UNHEALTHY_LIMIT_S", 0.5)
    engine = make_engine(batch_size=1)
    engine.start_health_watch()
    assert engine.prepare_batch(Rows(1), Echo())["rewards"].tolist() == [0.0]
    server.status, server.hangs_next = 503, True
    engine.set_version(1)  # the next episode starts
    with pytest.raises(EngineError, match=r"not healthy for .*status 503"):
        engine.prepare_batch(Rows(1), Echo())


def test_two_thousand_episodes_at_once(make_engine, server):
    engine = make_engine(batch_size=1000, max_head_offpolicyness=1, max_concurrent_rollouts=2000)
    rows = Rows(1000)
    for version in range(3):
        batch = engine.prepare_batch(rows, Echo())
        assert len(set(batch["rewards"].tolist())) == 1000
        engine.set_version(version + 1)
    counts = engine.export_stats()
    assert counts["rejected"] == 0
    assert counts["submitted"] >= counts["accepted"] + counts["running"]
