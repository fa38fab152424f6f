"""Requests over several servers, and servers that are lost."""

import asyncio

import pytest
from scripted_fleet import LIMIT_S, arrived, ask, run, until

from megarl.errors import EngineError
from megarl.rollout import fleet as fleet_module
from megarl.rollout.api import NO_VERSION
from megarl.rollout.client import ConnectionBroken, ServerFailed
from megarl.rollout.fleet import Fleet
from megarl.rollout.server_state import State


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


def test_a_request_in_which_a_server_failed_is_asked_of_another(quick):
    async def test(fleet, a, b):
        a.error = ServerFailed("status 500", 500)
        assert [await ask(fleet, f"r{i}") for i in range(4)] == ["b"] * 4
        assert fleet.state_of(a) is State.READY
        b.error = ServerFailed("status 500", 500)
        with pytest.raises(EngineError, match="status 500"):
            await ask(fleet, "poison")  # it is the request: both may live
        assert fleet.clients == [a, b]

    run(test)


def test_a_server_that_does_nothing_but_fail_is_dropped():
    async def test(fleet, a, b):
        a.error = ServerFailed("its engine is dead", 500)
        for i in range(40):
            assert await ask(fleet, f"r{i}") == "b"
        assert fleet.clients == [b]
        assert len(a.asked) == fleet_module.MAX_FAILED_ANSWERS

    run(test)


def test_a_server_that_makes_no_tokens_is_dropped(quick):
    """Its process answers; its engine hangs."""

    async def test(fleet, a, b):
        a.gate.clear()
        a.is_stuck = True
        waiting = asyncio.create_task(ask(fleet, "r0"))
        await arrived(a, 1)
        watch = asyncio.create_task(fleet.watch())
        assert await waiting == "b"
        assert fleet.clients == [b]
        assert b.checked == 0  # it owed nobody anything
        watch.cancel()

    run(test)


def test_a_paused_server_may_make_no_tokens(quick):
    async def test(fleet, a, b):
        a.gate.clear()
        a.is_stuck = a.is_paused = a.health_needs_tokens = True
        a.health_error = EngineError("paused, so no token for its own health either")
        waiting = asyncio.create_task(ask(fleet, "r0"))
        await arrived(a, 1)
        watch = asyncio.create_task(fleet.watch())
        await asyncio.sleep(0.5)  # some polls, longer than the limit of health
        assert fleet.clients == [a, b]
        a.is_paused, a.health_error = False, None
        assert await waiting == "b"
        watch.cancel()

    run(test)


def test_a_paused_server_whose_engine_died_is_dropped(quick):
    """vLLM then says so, and never answers the pause itself."""

    async def test(fleet, a, b):
        watch = asyncio.create_task(fleet.watch())
        a.is_paused, a.health_error = True, EngineError("status 503")
        await until(lambda: fleet.clients == [b])
        watch.cancel()

    run(test)


def test_a_server_that_was_started_again_unseen_waits_for_weights(quick):
    """It was away for less than the limit, and nobody asked it for anything meanwhile."""

    async def test(fleet, a, b):
        fleet.refitted([a, b])
        watch = asyncio.create_task(fleet.watch())
        a.health_error = EngineError("refused")
        await until(lambda: fleet._servers[a].num_ill)
        a.version, a.health_error = NO_VERSION, None
        await until(lambda: a not in fleet.clients)
        assert [fleet.state_of(client) for client in fleet.clients] == [State.READY, State.STALE]
        assert [await ask(fleet, f"r{i}") for i in range(4)] == ["b"] * 4
        await until(lambda: a.closed)
        watch.cancel()

    run(test)


def test_closing_a_fleet_closes_every_client():
    async def test(fleet, a, b):
        fleet.drop(a, "gone")
        await fleet.close()
        assert (a.closed, b.closed) == (1, 1)

    run(test)
