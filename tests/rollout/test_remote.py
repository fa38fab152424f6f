"""RemoteVLLMEngine on rank 0 against a server that answers and knows its version."""

import asyncio

import pytest
import torch
from aiohttp import web
from tiny_server import LoopThread

from megarl.config.schema import InferenceEngineConfig
from megarl.errors import EngineError
from megarl.rollout import fleet as fleet_module
from megarl.rollout import restarts
from megarl.rollout.api import ModelRequest
from megarl.rollout.remote import NO_WEIGHTS, RemoteVLLMEngine

WAIT_S = 120.0


class Server:
    """Two tokens for each request, under the version that it was told."""

    def __init__(self, version):
        self.version, self.named = version, []

    async def start(self):
        app = web.Application()
        app.router.add_get("/health", self.health)
        app.router.add_get("/weight_info", self.weight_info)
        app.router.add_post("/update_weight_version", self.name_version)
        app.router.add_post("/resume", self.health)
        app.router.add_post("/inference/v1/generate", self.generate)
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        self.address = f"127.0.0.1:{self.runner.addresses[0][1]}"

    async def health(self, request):
        return web.Response()

    async def weight_info(self, request):
        return web.json_response({"weight_version": self.version})

    async def name_version(self, request):
        self.version = (await request.json())["new_version"]
        self.named.append(self.version)
        return web.Response()

    async def generate(self, request):
        choice = {
            "token_ids": [7, 8],
            "logprobs": {"content": [{"logprob": -1.0}] * 2},
            "weight_versions": [{"version": self.version, "start": 0, "end": 2}],
            "finish_reason": "stop",
        }
        return web.json_response({"choices": [choice]})


class Plain:
    """As scripts write it: no base class, no versions, int64."""

    async def arun_episode(self, engine, data):
        response = await engine.agenerate(ModelRequest(input_ids=[data["value"] + 1]))
        tokens = response.input_tokens + response.output_tokens
        self.versions = response.output_versions
        return {
            "input_ids": torch.tensor([tokens]),
            "attention_mask": torch.ones(1, len(tokens)),
            "loss_mask": torch.tensor([[0, 1, 1]]),
            "logprobs": torch.tensor([[0.0, *response.output_logprobs]]),
            "rewards": torch.tensor([data["value"]]),
        }


class Loader(list):
    batch_size = 2


@pytest.fixture
def rollout(monkeypatch):
    """rollout(version): an initialised engine, and its server."""
    monkeypatch.delenv("RANK", raising=False)
    thread, made = LoopThread([]), []

    def make(version="default", *, has_weights=True, **config):
        server = Server(version)
        thread.run(server.start())
        monkeypatch.setenv("AREAL_LLM_SERVER_ADDRS", server.address)
        monkeypatch.setenv(NO_WEIGHTS, "0" if has_weights else "1")
        engine = RemoteVLLMEngine(InferenceEngineConfig(consumer_batch_size=2, **config))
        made.append((engine, server))
        engine.initialize()
        return engine, server

    yield make
    for engine, server in made:
        engine.destroy()
        thread.run(server.runner.cleanup())
    thread.close()


ROWS = [{"value": i} for i in range(4)]


def test_what_servers_loaded_is_version_0_and_answers_at_once(rollout):
    engine, _ = rollout()
    workflow = Plain()
    batch = engine.rollout_batch(ROWS, workflow)
    assert batch["rewards"].tolist() == [0, 1, 2, 3]
    assert workflow.versions == [0, 0]
    assert batch["versions"].tolist() == [[-1, 0, 0]] * 4
    assert engine.rollout_batch(ROWS, workflow, lambda t: t["rewards"].item() > 1)[
        "rewards"
    ].tolist() == [2, 3]


def test_what_an_earlier_engine_pushed_keeps_its_version(rollout):
    _, server = rollout("5")
    assert server.named == []


def test_servers_are_told_a_version_only_where_it_is_another(rollout):
    engine, server = rollout()
    engine.on_pushed(1)
    engine.set_version(1)
    assert server.named == ["0"]
    engine.set_version(8)
    assert server.named == ["0", "8"]
    assert engine.get_version() == 8


def test_without_weights_no_episode_starts(rollout):
    engine, server = rollout(has_weights=False)
    for ask in (engine.rollout_batch, engine.prepare_batch):
        with pytest.raises(EngineError, match=r"no weights yet: actor\.connect_engine"):
            ask(Loader([ROWS]), Plain())
    engine.submit(ROWS[0], Plain())
    engine.pause()
    engine.resume()
    assert engine.export_stats()["running"] + engine.export_stats()["accepted"] == 0
    engine.on_pushed(0)
    assert engine.wait(1, timeout=60)["rewards"].tolist() == [0]
    assert server.named == []


def test_a_push_does_not_end_the_scripts_own_pause(rollout):
    engine, _ = rollout(has_weights=False)
    engine.pause()
    engine.on_pushed(0)
    engine.submit(ROWS[3], Plain())
    assert engine.export_stats()["running"] + engine.export_stats()["accepted"] == 0
    engine.resume()
    assert engine.wait(1, timeout=60)["rewards"].tolist() == [3]


class Dated(Plain):
    """The version at which each episode started, by the row's value."""

    def __init__(self):
        self.born = {}

    async def arun_episode(self, engine, data):
        self.born[data["value"]] = engine.get_version()
        return await super().arun_episode(engine, data)


@pytest.mark.parametrize("first", [0, 1, 100])
def test_no_episode_is_too_old_wherever_a_script_begins(rollout, first):
    """After 1 step on batches made at once, or after 100 of an earlier process."""
    engine, _ = rollout(max_head_offpolicyness=0, max_concurrent_rollouts=64)
    workflow = Dated()
    engine.rollout_batch([{"value": -1}], workflow)
    if first:
        engine.on_pushed(first)
        engine.set_version(first)
    loader, lags = Loader([[{"value": 2 * i}, {"value": 2 * i + 1}] for i in range(9)]), []
    for version in range(first, first + 6):
        batch = engine.prepare_batch(loader, workflow)
        lags += [version - workflow.born[value] for value in batch["rewards"].tolist()]
        engine.on_pushed(version + 1)
        engine.set_version(version + 1)
    assert lags == [0] * 12


def test_a_fleet_of_somebody_elses_servers_may_be_gone_for_a_while(rollout, tmp_path, monkeypatch):
    """Servers that were only out of reach are asked for again, and wait for weights."""
    monkeypatch.setattr(fleet_module, "HEALTH_INTERVAL_S", 0.3)
    monkeypatch.setenv(restarts.FOLDER_ENV, "")  # of a launcher that starts none again
    engine, server = rollout(setup_timeout_s=WAIT_S)
    with pytest.raises(EngineError, match="no server is left: gone"):
        engine.engine.drop(engine.engine.clients[0], "gone")
    monkeypatch.delenv(restarts.FOLDER_ENV)
    listed = tmp_path / "servers.txt"
    listed.write_text(server.address)
    engine, server = rollout(servers=str(listed), setup_timeout_s=WAIT_S)
    engine.engine.drop(engine.engine.clients[0], "gone")
    fleet = engine.engine.fleet

    async def is_back():
        async with asyncio.timeout(WAIT_S):
            while not fleet.needs_weights:  # noqa: ASYNC110 - a state has no event
                await asyncio.sleep(0.01)

    engine.engine.run(is_back(), WAIT_S)
    assert fleet.num_lost == 1


def test_a_server_that_does_not_start_is_an_error_of_its_own(rollout, tmp_path):
    listed = tmp_path / "servers.txt"
    listed.write_text("127.0.0.1:9")
    with pytest.raises(EngineError, match=r"127\.0\.0\.1:9"):
        rollout(servers=str(listed), setup_timeout_s=0.1)


def test_batches_come_from_one_pass_over_the_dataloader(rollout):
    engine, _ = rollout()
    loader, seen = Loader([ROWS[:2], ROWS[2:]]), []
    for version in range(1, 4):
        seen.append(engine.prepare_batch(loader, Plain())["rewards"].tolist())
        engine.set_version(version)
    assert seen == [[0, 1], [2, 3], [0, 1]]
    with pytest.raises(ValueError, match=r"batch_size 3 must equal .*consumer_batch_size 2"):
        engine.prepare_batch(Loader3([ROWS[:3]]), Plain())


class Loader3(Loader):
    batch_size = 3
