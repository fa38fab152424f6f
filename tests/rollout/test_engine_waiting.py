"""Those who wait for the rollout loop: the trainer that stands by, callers with a loop of their
own, and who stops the servers while one of them fails. Two scripted servers."""

import asyncio
import threading

import pytest
from aiohttp import web
from tiny_server import LoopThread

from megarl.config.schema import GenerationHyperparameters, InferenceEngineConfig
from megarl.errors import EngineError
from megarl.rollout import engine as engine_module
from megarl.rollout import loop as loop_module
from megarl.rollout.api import ModelRequest
from megarl.rollout.backends.vllm import VLLMClient
from megarl.rollout.engine import RemoteInferenceEngine
from megarl.rollout.remote import RemoteVLLMEngine
from megarl.rollout.server_state import State

WAIT_S = 120.0
GENERATE = "/inference/v1/generate"


class Server:
    """One token a request. `broken` routes end the connection, `held` ones wait for `open`."""

    def __init__(self, thread):
        self.thread, self.asked, self.broken, self.held = thread, [], set(), set()

    async def start(self):
        self.gate = asyncio.Event()
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.answer)
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        self.address = f"http://127.0.0.1:{self.runner.addresses[0][1]}"

    def open(self):
        async def set_gate():
            self.gate.set()

        self.thread.run(set_gate())

    async def answer(self, request):
        self.asked.append(request.path)
        if request.path in self.broken:
            request.transport.close()
        if request.path in self.held:
            await self.gate.wait()
        if request.path != GENERATE:
            return web.Response()
        choice = {
            "token_ids": [7],
            "logprobs": {"content": [{"logprob": -1.0}]},
            "weight_versions": [{"version": "0", "start": 0, "end": 1}],
            "finish_reason": "stop",
        }
        return web.json_response({"choices": [choice]})


@pytest.fixture
def servers():
    """Two of them."""
    thread = LoopThread([])
    made = [Server(thread), Server(thread)]
    for server in made:
        thread.run(server.start())
    yield made
    for server in made:
        server.open()
        thread.run(server.runner.cleanup())
    thread.close()


@pytest.fixture
def make_engine(servers, monkeypatch):
    """make_engine(): of both servers. Who waits for it wakes a hundred times a second."""
    monkeypatch.setattr(loop_module, "_WAKE_S", 0.01)
    engines = []

    def make(comeback_s=WAIT_S):
        clients = [VLLMClient(s.address, request_timeout_s=WAIT_S, retries=0) for s in servers]
        engine = RemoteInferenceEngine(
            InferenceEngineConfig(), clients, batch_size=4, comeback_s=comeback_s
        )
        engine.initialize()
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.destroy()


async def until(condition):
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - states have no event
            await asyncio.sleep(0.01)


def come_back(engine):
    """All servers were started again: they are up, and have no weights."""

    def they_do():
        for server in list(engine.fleet._servers.values()):
            engine.fleet._comes_back(server)
        engine.fleet._update()

    engine._call(they_do)


def request():
    return ModelRequest(input_ids=[1], gconfig=GenerationHyperparameters(max_new_tokens=1))


# ---------------------------------------------------------------- the trainer


class StandBy:
    def __init__(self, engine):
        self.engine, self.told = engine, []
        self.told_often = threading.Event()

    def refit(self):
        self.told.append("refit")
        assert self.engine.standby is None, "nobody stands by for what a refit waits for"
        self.engine.refitted(self.engine.wait_for_clients())

    def go_on(self):
        self.told.append("go on")
        if self.told == ["go on"] * 3:
            self.told_often.set()


def test_who_stands_by_is_called_again_and_again_and_brings_weights_when_no_server_has_any(
    make_engine,
):
    engine = make_engine()
    standby = engine.standby = StandBy(engine)
    assert engine.run(asyncio.to_thread(standby.told_often.wait, WAIT_S), None)
    assert "refit" not in standby.told
    come_back(engine)
    answer = engine.run(asyncio.wait_for(engine.agenerate(request()), WAIT_S), None)
    assert answer.output_tokens == [7]
    assert standby.told.count("refit") == 1
    assert engine.standby is standby


def test_weights_that_nobody_brings_are_an_error(make_engine, monkeypatch):
    monkeypatch.setattr(engine_module, "WEIGHTS_LIMIT_S", 0.05)
    engine = make_engine()
    come_back(engine)
    with pytest.raises(EngineError, match=r"http://127\.0\.0\.1.* are up and have no weights"):
        engine.run(asyncio.wait_for(engine.agenerate(request()), WAIT_S), None)
    # What has a limit of its own may be the push that brings them.
    assert engine.run(asyncio.sleep(0.3, "pushed"), WAIT_S) == "pushed"


# ---------------------------------------------------------------- callers with a loop


@pytest.fixture
def rollout(make_engine):
    """A RemoteVLLMEngine of both servers."""
    remote = RemoteVLLMEngine(InferenceEngineConfig(), rank=0)
    remote._engine = make_engine()
    return remote


async def ask_many(rollout, servers, count):
    """Tasks of requests that have all reached a server."""
    for server in servers:
        server.held.add(GENERATE)
    tasks = [asyncio.create_task(rollout.agenerate(request())) for _ in range(count)]
    await until(lambda: sum(len(server.asked) for server in servers) == count)
    return tasks


def test_more_callers_wait_at_once_than_there_are_threads(rollout, servers):
    async def main():
        try:
            tasks = await ask_many(rollout, servers, 100)
        finally:
            for server in servers:
                server.open()
        return await asyncio.gather(*tasks)

    assert [answer.output_tokens for answer in asyncio.run(main())] == [[7]] * 100


def test_a_request_is_cancelled_with_its_caller(rollout, servers):
    def num_running():
        return sum(len(server.running) for server in rollout.engine.fleet._servers.values())

    async def main():
        (task,) = await ask_many(rollout, servers, 1)
        assert num_running() == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: num_running() == 0)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await rollout.agenerate(request())
        await until(lambda: num_running() == 0)

    asyncio.run(main())


def test_a_caller_hears_that_no_server_is_left_and_that_the_loop_has_ended(rollout, servers):
    async def main():
        (dead,) = await ask_many(rollout, servers, 1)
        loop = rollout.engine._loop
        rollout.engine._call(loop.die, EngineError("no server has come back"))
        with pytest.raises(EngineError, match="no server has come back"):
            async with asyncio.timeout(WAIT_S):
                await dead
        loop._dead = None
        rollout.engine._call(loop._died.clear)
        for server in servers:
            server.asked.clear()
        (ended,) = await ask_many(rollout, servers, 1)
        await asyncio.to_thread(rollout.engine.destroy)
        with pytest.raises(EngineError, match="the rollout loop has ended"):
            async with asyncio.timeout(WAIT_S):
                await ended

    asyncio.run(main())


# ---------------------------------------------------------------- pauses


def test_a_server_that_fails_in_a_pause_is_lost_and_the_others_go_on(make_engine, servers):
    engine = make_engine()
    a, b = engine.clients
    servers[0].broken.add("/pause")
    engine.pause_generation()
    assert engine.fleet.state_of(a) is State.DEAD
    assert (b.is_paused, engine.clients) == (True, [b])
    engine.continue_generation()
    assert not b.is_paused
    assert servers[1].asked == ["/pause", "/resume"]
    assert engine.run(engine.agenerate(request()), WAIT_S).output_tokens == [7]


def test_a_server_that_fails_to_go_on_is_lost_and_the_others_go_on(make_engine, servers):
    engine = make_engine()
    a, b = engine.clients
    engine.pause_generation()
    servers[0].broken.add("/resume")
    engine.continue_generation()
    assert engine.fleet.state_of(a) is State.DEAD
    assert not b.is_paused
    assert engine.run(engine.agenerate(request()), WAIT_S).output_tokens == [7]


def test_a_server_that_is_about_to_leave_goes_on_too(make_engine, servers):
    engine = make_engine()
    a, b = engine.clients
    engine.pause_generation("keep")
    engine._call(engine.fleet._servers[a].set_state, State.DRAINING)
    assert engine.clients == [b]
    engine.continue_generation()
    assert not a.is_paused
    assert not b.is_paused


def test_when_the_last_server_fails_in_a_pause_that_is_an_error_and_nothing_waits_on(
    make_engine, servers
):
    engine = make_engine(comeback_s=0.0)
    for server in servers:
        server.broken.add("/pause")
    with pytest.raises(EngineError, match=r"no server is left: .*/pause"):
        engine.pause_generation()
    assert engine._generating.is_set()


def test_a_server_that_cannot_name_its_weights_is_lost(rollout, servers):
    _, b = rollout.engine.clients
    rollout.on_pushed(0)
    servers[0].broken.add("/update_weight_version")
    rollout.set_version(8)
    assert rollout.engine.clients == [b]
    assert rollout.engine.get_version() == 8
    assert servers[1].asked == ["/update_weight_version"]
