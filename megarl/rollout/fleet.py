"""The servers of a run: which one a request goes to, and what becomes of those that are lost.

    READY    answers requests
    STALE    is up and waits for weights: it was started again, or has just been added
    DEAD     does not answer; it is asked for its health until it comes back, as STALE

A request whose server is lost begins anew on another one, or waits until one is READY. Everything
here runs in the rollout loop.
"""

import asyncio
import enum
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable

from megarl.config.schema import GenerationHyperparameters
from megarl.errors import EngineError
from megarl.rollout.api import GenerateChunk, ModelRequest
from megarl.rollout.client import ConnectionBroken, ServerClient

logger = logging.getLogger(__name__)

HEALTH_INTERVAL_S = 5.0
UNHEALTHY_LIMIT_S = 30.0
"""A server without one good answer to /health for so long is dead."""
_STICKY_REQUESTS = 16384
"""Request ids whose server is remembered."""


class State(enum.Enum):
    """See the module."""

    READY = "ready"
    STALE = "stale"
    DEAD = "dead"


class _Server:
    """One of the fleet."""

    def __init__(self, client: ServerClient, state: State) -> None:
        self.client, self.state = client, state
        self.running: set[asyncio.Future[GenerateChunk]] = set()
        self.last_good_s = time.monotonic()
        self.was_silent = False
        """Since it is dead: it has gone, so an answer is that of another process."""


class Fleet:
    """See the module.

    Args:
      clients: one a server; all are up, with weights.
      comeback_s: how long all may be dead before that is an error. 0 is for servers that nobody
        starts again.
      on_lost: called with the address of a server that died.
    """

    def __init__(
        self,
        clients: list[ServerClient],
        *,
        comeback_s: float = 0.0,
        on_lost: Callable[[str], None] = lambda address: None,
    ) -> None:
        if not clients:
            raise ValueError("a rollout engine needs at least one server")
        self._servers = {client: _Server(client, State.READY) for client in clients}
        self._server_of: OrderedDict[str, _Server] = OrderedDict()
        self._comeback_s, self._on_lost = comeback_s, on_lost
        self._some_ready = asyncio.Event()
        self._some_ready.set()
        self._all_dead_since_s: float | None = None
        self.num_lost = 0
        """Servers that died so far."""

    @property
    def clients(self) -> list[ServerClient]:
        """Of the servers that are up: what new weights go to."""
        return [client for client, s in self._servers.items() if s.state is not State.DEAD]

    def state_of(self, client: ServerClient) -> State:
        """DEAD of one that is not here: it came back under another client."""
        server = self._servers.get(client)
        return State.DEAD if server is None else server.state

    @property
    def needs_weights(self) -> bool:
        """Whether requests wait for servers that are up to be given weights."""
        states = {server.state for server in self._servers.values()}
        return State.READY not in states and State.STALE in states

    async def generate(
        self, request: ModelRequest, gconfig: GenerationHyperparameters, remaining: int
    ) -> GenerateChunk:
        """See ServerClient.generate. A request whose server is lost begins anew on another one.

        Raises:
          EngineError: the server refused; or it is gone, and no other will come.
        """
        while True:
            await self._some_ready.wait()
            server = self._choose(request.rid)
            answer = asyncio.ensure_future(server.client.generate(request, gconfig, remaining))
            server.running.add(answer)
            try:
                return await answer
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if server.state is not State.DEAD or (task is not None and task.cancelling()):
                    raise
            except EngineError as error:
                if server.state is State.READY:
                    if not isinstance(error, ConnectionBroken):
                        raise
                    self.drop(server.client, str(error))
            finally:
                server.running.discard(answer)

    def drop(self, client: ServerClient, why: str) -> None:
        """A server is dead. One that is dead or unknown stays so.

        Raises:
          EngineError: it was the last one, and nobody will start it again.
        """
        server = self._servers.get(client)
        if server is None or server.state is State.DEAD:
            return
        if self.clients == [client] and not self._comeback_s:
            raise EngineError(f"no server is left: {why}")
        logger.warning("server %s is lost: %s", client.address, why)
        server.state = State.DEAD
        self.num_lost += 1
        for rid in [rid for rid, of in self._server_of.items() if of is server]:
            del self._server_of[rid]
        for answer in server.running:
            answer.cancel()
        self._on_lost(client.address)
        self._update()

    def refitted(self, clients: Iterable[ServerClient]) -> None:
        """These servers have the present weights."""
        for client in clients:
            server = self._servers.get(client)
            if server is not None and server.state is State.STALE:
                server.state = State.READY
                logger.info("server %s is ready", client.address)
        self._update()

    async def watch(self) -> EngineError:
        """Poll every server, drop the dead and take back those that are up again.

        A server whose engine died may keep open the connections it will never answer (vLLM
        0.32 waits for them before it exits), so a request's own limit is not enough.

        Returns:
          the error, once all have been dead for too long.
        """
        for server in self._servers.values():
            server.last_good_s = time.monotonic()
        while True:
            servers = list(self._servers.values())
            errors = await asyncio.gather(*(_error_of(server.client) for server in servers))
            for server, error in zip(servers, errors, strict=True):
                try:
                    self._judge(server, error)
                except EngineError as none_left:
                    return none_left
            if self._all_dead_since_s is not None:
                dead_s = time.monotonic() - self._all_dead_since_s
                if dead_s > self._comeback_s:
                    return EngineError(f"no server has come back for {dead_s:.0f} s")
            await asyncio.sleep(HEALTH_INTERVAL_S)

    def _judge(self, server: _Server, error: EngineError | None) -> None:
        if error is None:
            server.last_good_s = time.monotonic()
            if server.state is State.DEAD and server.was_silent:
                # Another client: who had asked the server that was before must ask again.
                del self._servers[server.client]
                client = server.client.again()
                self._servers[client] = _Server(client, State.STALE)
                logger.warning("server %s is up again", client.address)
                self._update()
        elif server.state is State.DEAD:
            server.was_silent = True
        else:
            silent_s = time.monotonic() - server.last_good_s
            if silent_s > UNHEALTHY_LIMIT_S:
                self.drop(server.client, f"not healthy for {silent_s:.0f} s: {error}")

    def _update(self) -> None:
        states = {server.state for server in self._servers.values()}
        if State.READY in states:
            self._some_ready.set()
        else:
            self._some_ready.clear()
        if states != {State.DEAD}:
            self._all_dead_since_s = None
        elif self._all_dead_since_s is None:
            self._all_dead_since_s = time.monotonic()

    def _choose(self, rid: str) -> _Server:
        """The server that had this request id; else the ready one with the fewest requests."""
        server = self._server_of.pop(rid, None)
        if server is None or server.state is not State.READY:
            ready = (s for s in self._servers.values() if s.state is State.READY)
            server = min(ready, key=lambda server: len(server.running))
        self._server_of[rid] = server
        if len(self._server_of) > _STICKY_REQUESTS:
            self._server_of.popitem(last=False)
        return server


async def _error_of(client: ServerClient) -> EngineError | None:
    try:
        await client.health(timeout_s=2 * HEALTH_INTERVAL_S)
    except EngineError as error:
        return error
    return None
