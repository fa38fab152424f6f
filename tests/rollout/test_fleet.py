"""Requests over several servers, and servers that are lost."""

import asyncio

import pytest

from megarl.config.schema import GenerationHyperparameters
from megarl.errors import EngineError
from megarl.rollout import fleet as fleet_module
from megarl.rollout.api import GenerateChunk, ModelRequest
from megarl.rollout.client import ConnectionBroken
from megarl.rollout.fleet import Fleet, State

LIMIT_S = 60.0


class Client:
    """Answers when `gate` is open; `error` is raised instead."""

    def __init__(self, name):
        self.address = name
        self.gate = asyncio.Event()
        self.gate.set()
        self.error: EngineError | None = None
        self.health_error: EngineError | None = None
        self.asked: list[str] = []

    async def generate(self, request, gconfig, remaining):
        self.asked.append(request.rid)
        if self.error is not None:
            raise self.error
        await self.gate.wait()
        return GenerateChunk([1], [-1.0], [0], self.address)

    def again(self):
        return Client(self.address)

    async def health(self, timeout_s):
        if self.health_error is not None:
            raise self.health_error


def run(test, **options):
    """A coroutine function of (fleet, clients a and b), in a loop of its own."""

    async def main():
        clients = [Client("a"), Client("b")]
        await asyncio.wait_for(test(Fleet(clients, **options), *clients), LIMIT_S)

    asyncio.run(main())


async def ask(fleet, rid):
    request = ModelRequest(input_ids=[1], rid=rid)
    return (await fleet.generate(request, GenerationHyperparameters(), 1)).stop_reason


async def arrived(client, count):
    while len(client.asked) < count:  # noqa: ASYNC110
        await asyncio.sleep(0)


def test_requests_are_spread_and_return_to_their_server():
    async def test(fleet, a, b):
        a.gate.clear()
        b.gate.clear()
        running = [asyncio.create_task(ask(fleet, f"r{i}")) for i in range(6)]
        await arrived(a, 3)
        await arrived(b, 3)
        a.gate.set()
        b.gate.set()
        first = await asyncio.gather(*running)
        again = [await ask(fleet, f"r{i}") for i in range(6)]
        assert first == again
        assert sorted(first) == ["a"] * 3 + ["b"] * 3

    run(test)


def test_what_a_dropped_server_owed_is_asked_of_the_others():
    async def test(fleet, a, b):
        a.gate.clear()
        b.gate.clear()
        running = [asyncio.create_task(ask(fleet, f"r{i}")) for i in range(6)]
        await arrived(a, 3)
        b.gate.set()
        fleet.drop(a, "it burnt")
        assert await asyncio.gather(*running) == ["b"] * 6
        assert fleet.clients == [b]
        assert fleet.num_lost == 1
        assert await ask(fleet, "r0") == "b"  # though a was its server
        fleet.drop(a, "again")
        assert fleet.num_lost == 1

    run(test)


def test_a_cancelled_request_is_not_asked_again():
    async def test(fleet, a, b):
        a.gate.clear()
        running = asyncio.create_task(ask(fleet, "r0"))
        await arrived(a, 1)
        running.cancel()
        fleet.drop(a, "at the same time")
        with pytest.raises(asyncio.CancelledError):
            await running
        assert b.asked == []

    run(test)


def test_the_last_server_is_not_dropped():
    async def test(fleet, a, b):
        fleet.drop(a, "first")
        with pytest.raises(EngineError, match="no server is left: second"):
            fleet.drop(b, "second")
        assert await ask(fleet, "r0") == "b"

    run(test)


def test_a_server_whose_connections_break_is_dropped():
    async def test(fleet, a, b):
        a.error = ConnectionBroken("a: refused")
        assert [await ask(fleet, f"r{i}") for i in range(4)] == ["b"] * 4
        assert fleet.clients == [b]
        b.error = ConnectionBroken("b: refused")
        with pytest.raises(EngineError, match="b: refused"):
            await ask(fleet, "r9")

    run(test)


def test_a_refusal_is_an_error_of_the_request():
    async def test(fleet, a, b):
        a.error = b.error = EngineError("status 400")
        with pytest.raises(EngineError, match="status 400"):
            await ask(fleet, "r0")
        assert fleet.clients == [a, b]

    run(test)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(fleet_module, "HEALTH_INTERVAL_S", 0.01)
    monkeypatch.setattr(fleet_module, "UNHEALTHY_LIMIT_S", 0.2)


async def until(condition):
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


def test_a_server_that_stays_unhealthy_is_dropped(quick):
    async def test(fleet, a, b):
        watch = asyncio.create_task(fleet.watch())
        a.health_error = EngineError("silent")
        await until(lambda: a not in fleet.clients)
        b.health_error = EngineError("silent, too")
        error = str(await watch)
        assert "no server is left: not healthy for" in error
        assert error.endswith("silent, too")
        assert fleet.clients == [b]

    run(test)


def test_a_server_that_comes_back_answers_once_it_has_weights(quick):
    lost = []

    async def test(fleet, a, b):
        watch = asyncio.create_task(fleet.watch())
        b.gate.clear()
        a.health_error = b.health_error = EngineError("gone")
        fleet.drop(a, "gone")
        waiting = asyncio.create_task(ask(fleet, "r0"))
        await arrived(b, 1)
        fleet.drop(b, "gone, too")  # not the end: somebody starts them again
        assert fleet.clients == []
        assert not fleet.needs_weights
        assert lost == ["a", "b"]
        # Its answers before it was seen to be gone are those of the process that is sick.
        await until(lambda: fleet._servers[a].was_silent)
        a.health_error = None
        await until(lambda: fleet.clients)
        (again,) = fleet.clients
        assert again is not a
        assert fleet.state_of(again) is State.STALE
        assert fleet.needs_weights
        assert again.asked == []
        assert not waiting.done()
        fleet.refitted([again])
        assert not fleet.needs_weights
        assert await waiting == "a"
        assert again.asked == ["r0"]
        assert fleet.num_lost == 2
        watch.cancel()

    run(test, comeback_s=LIMIT_S, on_lost=lost.append)


def test_a_sick_server_that_answers_health_is_not_taken_back(quick):
    async def test(fleet, a, b):
        watch = asyncio.create_task(fleet.watch())
        fleet.drop(a, "its engine hangs")
        await asyncio.sleep(0.1)  # some polls, all of them good
        assert fleet.clients == [b]
        watch.cancel()

    run(test, comeback_s=LIMIT_S)


def test_when_no_server_comes_back_that_is_an_error(quick):
    async def test(fleet, a, b):
        a.health_error = b.health_error = EngineError("gone")
        fleet.drop(a, "gone")
        fleet.drop(b, "gone")
        assert "no server has come back for" in str(await fleet.watch())

    run(test, comeback_s=0.1)


def test_a_fleet_has_servers():
    with pytest.raises(ValueError, match="at least one server"):
        Fleet([])
