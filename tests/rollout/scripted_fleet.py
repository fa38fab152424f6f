"""A fleet of servers that answer as a test says."""

import asyncio

from megarl.config.schema import GenerationHyperparameters
from megarl.errors import EngineError, EngineTimeout
from megarl.rollout.api import GenerateChunk, ModelRequest
from megarl.rollout.fleet import Fleet

LIMIT_S = 60.0


class Client:
    """Answers when `gate` is open; `error` is raised instead."""

    def __init__(self, name):
        self.address = name
        self.gate = asyncio.Event()
        self.gate.set()
        self.error: EngineError | None = None
        self.error_of: dict[str, EngineError] = {}
        """By request."""
        self.health_error: EngineError | None = None
        self.asked: list[str] = []
        self.version = 3
        self.num_pauses, self.is_paused = 0, False
        self.is_stuck = False
        self.health_needs_tokens = False
        self.check_gate = asyncio.Event()
        self.check_gate.set()
        self.checked = self.closed = self.resumed = 0

    async def generate(self, request, gconfig, remaining):
        self.asked.append(request.rid)
        if error := self.error or self.error_of.get(request.rid):
            raise error
        await self.gate.wait()
        return GenerateChunk([1], [-1.0], [0], self.address)

    def again(self):
        return Client(self.address)

    async def health(self, timeout_s):
        if self.health_error is not None:
            raise self.health_error

    async def weight_version(self):
        return self.version

    async def check_engine(self, timeout_s):
        self.checked += 1
        is_stuck = self.is_stuck
        await self.check_gate.wait()
        if is_stuck:
            raise EngineTimeout("no answer")

    async def resume(self):
        self.resumed += 1

    async def make_token(self, timeout_s):
        if self.is_stuck:
            raise EngineTimeout("no token")

    async def close(self):
        self.closed += 1


def run(test, *, names="ab", **options):
    """A coroutine function of (fleet, a client for each of `names`), in a loop of its own."""

    async def main():
        clients = [Client(name) for name in names]
        await asyncio.wait_for(test(Fleet(clients, **options), *clients), LIMIT_S)

    asyncio.run(main())


async def ask(fleet, rid):
    request = ModelRequest(input_ids=[1], rid=rid)
    return (await fleet.generate(request, GenerationHyperparameters(), 1)).stop_reason


async def arrived(client, count):
    while len(client.asked) < count:  # noqa: ASYNC110
        await asyncio.sleep(0)


async def until(condition):
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def request_under_way(fleet, client):
    """A request that `client`, the first to be asked, answers once its gate is open."""
    client.gate.clear()
    asked = asyncio.create_task(ask(fleet, "r0"))
    await arrived(client, 1)
    return asked


def members_of(names):
    """Options of a fleet whose members are those of the list `names`, whenever it is asked."""

    async def members():
        if isinstance(names[0], Exception):
            raise names[0]
        return list(names)

    return {"members": members, "connect": Client}
