"""Requests over several servers, and servers that are lost."""

import asyncio

import pytest

from megarl.config.schema import GenerationHyperparameters
from megarl.errors import EngineError
from megarl.rollout import fleet as fleet_module
from megarl.rollout.api import GenerateChunk, ModelRequest
from megarl.rollout.client import ConnectionBroken
from megarl.rollout.fleet import Fleet

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

    async def health(self, timeout_s):
        if self.health_error is not None:
            raise self.health_error


def run(test):
    """A coroutine function of (fleet, clients a and b), in a loop of its own."""

    async def main():
        clients = [Client("a"), Client("b")]
        await asyncio.wait_for(test(Fleet(clients), *clients), LIMIT_S)

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
        assert fleet.lost == {"a": "it burnt"}
        assert await ask(fleet, "r0") == "b"  # though a was its server
        fleet.drop(a, "again")
        assert fleet.lost == {"a": "it burnt"}

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
        assert fleet.lost == {"a": "a: refused"}
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


def test_a_server_that_stays_unhealthy_is_dropped(monkeypatch):
    monkeypatch.setattr(fleet_module, "HEALTH_INTERVAL_S", 0.01)
    monkeypatch.setattr(fleet_module, "UNHEALTHY_LIMIT_S", 0.2)

    async def test(fleet, a, b):
        watch = asyncio.create_task(fleet.watch())
        a.health_error = EngineError("silent")
        while a in fleet.clients:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert "not healthy for" in fleet.lost["a"]
        b.health_error = EngineError("silent, too")
        assert "no server is left: not healthy for" in str(await watch)
        assert fleet.clients == [b]

    run(test)


def test_a_fleet_has_servers():
    with pytest.raises(ValueError, match="at least one server"):
        Fleet([])
