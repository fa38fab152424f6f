"""Servers that are added to a fleet, and servers that are to go."""

import asyncio

from scripted_fleet import arrived, ask, members_of, request_under_way, run, until

from megarl.errors import EngineError
from megarl.rollout import fleet as fleet_module
from megarl.rollout.server_state import State


def test_servers_are_added_and_wait_for_weights(quick):
    names = ["a", "b"]

    async def test(fleet, a, b):
        watch = asyncio.create_task(fleet.watch())
        names.append("c")
        await until(lambda: len(fleet.clients) == 3)
        c = fleet.clients[2]
        assert fleet.state_of(c) is State.STALE
        assert [await ask(fleet, f"r{i}") for i in range(9)].count("c") == 0
        fleet.refitted([c])
        a.gate.clear()
        b.gate.clear()
        running = [asyncio.create_task(ask(fleet, f"n{i}")) for i in range(3)]
        await arrived(c, 1)
        a.gate.set()
        b.gate.set()
        assert sorted(await asyncio.gather(*running)) == ["a", "b", "c"]
        watch.cancel()

    run(test, **members_of(names))


def test_a_server_that_is_to_go_answers_what_it_has(quick):
    names = ["a", "b"]

    async def test(fleet, a, b):
        watch = asyncio.create_task(fleet.watch())
        first = await request_under_way(fleet, a)
        names.remove("a")
        await until(lambda: fleet.state_of(a) is State.DRAINING)
        assert fleet.clients == [b]  # it needs no new weights
        assert [await ask(fleet, "r0"), await ask(fleet, "r1")] == ["b", "b"]
        a.gate.set()
        assert await first == "a"
        await until(lambda: a.closed)
        assert fleet.state_of(a) is State.DEAD
        assert fleet.num_lost == 0
        watch.cancel()

    run(test, **members_of(names))


def test_a_server_that_does_not_come_to_an_end_is_left(quick, monkeypatch):
    monkeypatch.setattr(fleet_module, "DRAIN_LIMIT_S", 0.1)
    names = ["a", "b"]

    async def test(fleet, a, b):
        watch = asyncio.create_task(fleet.watch())
        first = await request_under_way(fleet, a)
        names.remove("a")
        assert await first == "b"
        watch.cancel()

    run(test, **members_of(names))


def test_a_server_that_is_named_again_while_it_drains_waits_for_weights(quick):
    names = ["a", "b"]

    async def test(fleet, a, b):
        watch = asyncio.create_task(fleet.watch())
        first = await request_under_way(fleet, a)
        names.remove("a")
        await until(lambda: fleet.state_of(a) is State.DRAINING)
        names.append("a")
        await until(lambda: fleet.state_of(a) is State.STALE)
        a.gate.set()
        assert await first == "a"
        watch.cancel()

    run(test, **members_of(names))


def test_a_list_that_cannot_be_read_changes_nothing(quick, caplog):
    names = [EngineError("rollout.servers: servers.txt: no such file"), "a", "b"]

    async def test(fleet, a, b):
        watch = asyncio.create_task(fleet.watch())
        await until(lambda: "no such file" in caplog.text)
        assert fleet.clients == [a, b]
        del names[0]
        del names[1]
        await until(lambda: fleet.clients == [a])
        watch.cancel()

    run(test, **members_of(names))
