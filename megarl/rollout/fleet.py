"""The servers in use: which one a request goes to, and what happens when one is lost.

Everything here runs in the rollout loop.
"""

import asyncio
import logging
import time
from collections import OrderedDict

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


class _Server:
    """One of the fleet."""

    def __init__(self, client: ServerClient) -> None:
        self.client = client
        self.running: set[asyncio.Future[GenerateChunk]] = set()
        self.lost: str | None = None
        """Why it is no longer in use."""


class Fleet:
    """See the module.

    Args:
      clients: one a server.
    """

    def __init__(self, clients: list[ServerClient]) -> None:
        if not clients:
            raise ValueError("a rollout engine needs at least one server")
        self._servers = {client: _Server(client) for client in clients}
        self._server_of: OrderedDict[str, _Server] = OrderedDict()
        self.lost: dict[str, str] = {}
        """Address -> why it was dropped."""

    @property
    def clients(self) -> list[ServerClient]:
        """Of the servers in use."""
        return list(self._servers)

    async def generate(
        self, request: ModelRequest, gconfig: GenerationHyperparameters, remaining: int
    ) -> GenerateChunk:
        """See ServerClient.generate. A request whose server is lost begins anew on another one.

        Raises:
          EngineError: the server failed, and it is not one server among others that is gone.
        """
        while True:
            server = self._choose(request.rid)
            answer = asyncio.ensure_future(server.client.generate(request, gconfig, remaining))
            server.running.add(answer)
            try:
                return await answer
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if server.lost is None or (task is not None and task.cancelling()):
                    raise
            except EngineError as error:
                if server.lost is None:
                    if not isinstance(error, ConnectionBroken) or len(self._servers) == 1:
                        raise
                    self.drop(server.client, str(error))
            finally:
                server.running.discard(answer)

    def drop(self, client: ServerClient, why: str) -> None:
        """Use a server no more. One that is not in use stays so.

        Raises:
          EngineError: it is the last one.
        """
        server = self._servers.get(client)
        if server is None:
            return
        if len(self._servers) == 1:
            raise EngineError(f"no server is left: {why}")
        logger.warning("server %s is dropped: %s", client.address, why)
        del self._servers[client]
        server.lost = self.lost[client.address] = why
        for rid in [rid for rid, of in self._server_of.items() if of is server]:
            del self._server_of[rid]
        for answer in server.running:
            answer.cancel()

    async def watch(self) -> EngineError:
        """Poll every server and drop the dead; returns, with its error, once none would be left.

        A server whose engine died may keep open the connections it will never answer (vLLM
        0.32 waits for them before it exits), so a request's own limit is not enough.
        """
        last_good_s = dict.fromkeys(self._servers, time.monotonic())
        while True:
            clients = self.clients
            errors = await asyncio.gather(*(_error_of(client) for client in clients))
            now = time.monotonic()
            for client, error in zip(clients, errors, strict=True):
                silent_s = now - last_good_s.setdefault(client, now)
                if error is None:
                    last_good_s[client] = now
                elif silent_s > UNHEALTHY_LIMIT_S:
                    try:
                        self.drop(client, f"not healthy for {silent_s:.0f} s: {error}")
                    except EngineError as none_left:
                        return none_left
            await asyncio.sleep(HEALTH_INTERVAL_S)

    def _choose(self, rid: str) -> _Server:
        """The server that had this request id; else the one with the fewest requests."""
        server = self._server_of.pop(rid, None)
        if server is None:
            server = min(self._servers.values(), key=lambda server: len(server.running))
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
