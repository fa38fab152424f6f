"""Whose fault it is: a server's, a request's, or nobody's."""

import asyncio

import pytest
from scripted_fleet import LIMIT_S, arrived, ask, run, until

from megarl.errors import EngineError
from megarl.rollout import fleet as fleet_module
from megarl.rollout.api import NO_VERSION
from megarl.rollout.client import ConnectionBroken, ServerFailed
from megarl.rollout.server_state import State


def test_a_server_that_answered_during_its_check_makes_tokens(quick):
    """Whatever the check says: it may have waited behind all that is queued."""

    async def test(fleet, a, b):
        a.gate.clear()
        a.check_gate.clear()
        a.is_stuck = True
        waiting = asyncio.create_task(ask(fleet, "r0"))
        await arrived(a, 1)
        watch = asyncio.create_task(fleet.watch())
        await until(lambda: a.checked)
        a.gate.set()
        assert await waiting == "a"
        a.gate.clear()
        waiting = asyncio.create_task(ask(fleet, "r0"))
        await arrived(a, 2)
        first = fleet._servers[a].check
        a.is_stuck = False
        a.check_gate.set()
        await first
        await until(lambda: fleet._servers[a].check is not first)
        assert fleet.clients == [a, b]
        a.gate.set()
        assert await waiting == "a"
        watch.cancel()

    run(test)


def test_a_request_under_which_servers_die_is_not_asked_of_all():
    async def test(fleet, *clients):
        for client in clients:
            client.error_of["poison"] = ConnectionBroken("it was reset", was_sent=True)
        with pytest.raises(EngineError, match="request poison: 3 servers died while they had it"):
            await ask(fleet, "poison")
        assert len(fleet.clients) == 2
        assert {await ask(fleet, f"r{i}") for i in range(8)} <= {c.address for c in fleet.clients}

    run(test, names="abcde")


def test_a_request_under_which_servers_hang_is_not_asked_of_all(quick):
    async def test(fleet, *clients):
        for client in clients:
            client.is_stuck = True
            client.gate.clear()
        watch = asyncio.create_task(fleet.watch())
        with pytest.raises(EngineError, match="request poison: 3 servers died while they had it"):
            await ask(fleet, "poison")
        assert len(fleet.clients) == 2
        watch.cancel()

    run(test, names="abcde")


def test_servers_that_cannot_be_reached_say_nothing_of_a_request():
    async def test(fleet, *clients):
        for client in clients[:4]:
            client.error = ConnectionBroken("refused", was_sent=False)
        assert await ask(fleet, "r0") == "e"
        assert fleet.clients == [clients[4]]

    run(test, names="abcde")


def test_errors_of_one_request_are_not_those_of_a_server():
    """A group's samples have one id, and their home one cause to fail."""

    async def test(fleet, a, b):
        a.error_of["poison"] = b.error_of["poison"] = ServerFailed("status 500", 500)
        many = 3 * fleet_module.MAX_FAILED_ANSWERS
        asked = [asyncio.create_task(ask(fleet, "poison")) for _ in range(many)]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        assert all(isinstance(answer, ServerFailed) for answer in answers)
        assert fleet.clients == [a, b]

    run(test)


def test_who_waits_for_a_server_waits_on_if_it_goes_at_once(quick):
    async def test(fleet, a, b):
        for client in (a, b):
            fleet._servers[client].set_state(State.STALE)
        fleet._update()
        waiting = asyncio.create_task(ask(fleet, "r0"))
        await asyncio.sleep(0)
        for state in (State.READY, State.STALE):  # before the waiter's turn
            fleet._servers[a].set_state(state)
            fleet._update()
        for _ in range(5):
            await asyncio.sleep(0)
        assert not waiting.done()
        fleet.refitted([b])
        assert await waiting == "b"

    run(test)


@pytest.mark.parametrize("is_stuck", [False, True])
def test_a_server_that_was_out_of_reach_is_taken_back_where_nobody_ends_it(quick, is_stuck):
    async def test(fleet, a, b):
        watch = asyncio.create_task(fleet.watch())
        a.is_stuck = is_stuck
        fleet.drop(a, "the network was gone")
        if is_stuck:
            await asyncio.sleep(0.1)  # some polls, and none makes a token
            assert fleet.clients == [b]
            a.is_stuck = False
        await until(lambda: len(fleet.clients) == 2)
        again = fleet.clients[1]
        assert again is not a
        assert fleet.state_of(again) is State.STALE
        assert a.resumed
        watch.cancel()

    run(test, takes_back=True, comeback_s=LIMIT_S)


def test_one_late_check_is_not_the_end_of_a_server(quick, monkeypatch):
    """The loop itself may have been late."""
    monkeypatch.setattr(fleet_module, "UNHEALTHY_LIMIT_S", 0.0)

    async def test(fleet, a, b):
        watch = asyncio.create_task(fleet.watch())
        a.health_error = EngineError("late")
        await until(lambda: fleet._servers[a].num_ill == 1)
        a.health_error = None
        await until(lambda: fleet._servers[a].num_ill == 0)
        assert fleet.clients == [a, b]
        a.health_error = EngineError("gone")
        await until(lambda: fleet.clients == [b])
        watch.cancel()

    run(test)


def test_a_server_that_was_given_no_weights_was_not_started_again(quick):
    """An evaluation's have loaded their own, which have no version."""

    async def test(fleet, a, b):
        a.version = b.version = NO_VERSION
        watch = asyncio.create_task(fleet.watch())
        a.health_error = EngineError("late")
        await until(lambda: fleet._servers[a].num_ill)
        a.health_error = None
        await until(lambda: fleet._servers[a].num_ill == 0)
        assert fleet.clients == [a, b]
        assert fleet.state_of(a) is State.READY
        watch.cancel()

    run(test)


@pytest.mark.parametrize("takes_back", [True, False])
def test_a_server_that_does_not_come_up(monkeypatch, takes_back):
    """Of a launcher's servers that is a mistake; of a long list, one server less."""

    async def wait_healthy(address, timeout_s):
        if address in down:
            raise EngineError(f"{address} is not up")

    monkeypatch.setattr(fleet_module, "wait_healthy", wait_healthy)
    down = ["b"]

    async def test(fleet, a, b):
        if not takes_back:
            with pytest.raises(EngineError, match="b is not up"):
                await fleet.wait_healthy(1.0)
            return
        await fleet.wait_healthy(1.0)
        assert fleet.clients == [a]
        down.append("a")
        with pytest.raises(EngineError, match="a is not up"):
            await fleet.wait_healthy(1.0)

    run(test, takes_back=takes_back, comeback_s=LIMIT_S)
