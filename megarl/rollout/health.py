"""One check of a server: is it there, does it know of a push, does its engine make tokens."""

import time

from megarl.errors import EngineError
from megarl.rollout.api import NO_VERSION
from megarl.rollout.client import ConnectionBroken
from megarl.rollout.server_state import Server, State


class NoTokens(EngineError):
    """A server that answers, and makes no tokens."""


class StartedAgain(EngineError):
    """A server that was READY and knows nothing of a push."""


async def check_up(server: Server, interval_s: float, token_timeout_s: float) -> EngineError | None:
    """What is wrong with it.

    Args:
      interval_s: between two checks.
      token_timeout_s: a server that has requests and makes no token for so long is dead.
    """
    client, num_pauses = server.client, server.client.num_pauses
    try:
        await client.health(timeout_s=2 * interval_s)
        if server.state is not State.READY or client.is_paused:
            return None
        if server.num_ill and server.was_given and await client.weight_version() == NO_VERSION:
            return StartedAgain("it has no weights of a push")
        if not server.running or time.monotonic() - server.last_answer_s < interval_s:
            return None
    except EngineError as error:
        return error
    began_s = time.monotonic()
    try:
        await client.check_engine(token_timeout_s)
    except ConnectionBroken as error:
        return error
    except EngineError as error:
        if client.is_paused or client.num_pauses != num_pauses:
            return None  # it makes none then, and that is no fault of it
        if not server.running or server.last_answer_s > began_s:
            return None
        return NoTokens(f"no token for {token_timeout_s:g} s: {error}")
    return None


async def check_dead(
    server: Server, interval_s: float, token_timeout_s: float
) -> EngineError | None:
    """Why one that is dead cannot be taken back."""
    client = server.client
    try:
        await client.health(timeout_s=2 * interval_s)
        # A push may have left it paused; what it answers goes to nobody before the next one.
        await client.resume()
        await client.make_token(token_timeout_s)
    except EngineError as error:
        return error
    return None
