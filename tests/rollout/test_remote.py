"""RemoteVLLMEngine on rank 0 against a server that answers and knows its version."""

import pytest
import torch
from aiohttp import web
from tiny_server import LoopThread

from megarl.config.schema import InferenceEngineConfig
from megarl.errors import EngineError
from megarl.rollout.api import ModelRequest
from megarl.rollout.remote import NO_WEIGHTS, RemoteVLLMEngine


class Server:
    """Two tokens for each request, under the version that it was told."""

    def __init__(self, version):
        self.version, self.named = version, []

    async def start(self):
        app = web.Application()
        app.router.add_get("/health", self.health)
        app.router.add_get("/weight_info", self.weight_info)
        app.router.add_post("/update_weight_version", self.name_version)
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
