"""The servers of a run, in the states of `server_state`: who comes, who goes, who is lost.

A request whose server is lost is asked again of another one, or waits until one is READY. Which
one it goes to is `megarl.rollout.router`'s to say. Everything here runs in the rollout loop.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from megarl.config.schema import GenerationHyperparameters
from megarl.errors import EngineError
from megarl.rollout.api import GenerateChunk, ModelRequest
from megarl.rollout.client import ConnectionBroken, ServerClient, ServerFailed
from megarl.rollout.health import NoTokens, StartedAgain, check_dead, check_up
from megarl.rollout.router import BLOCK_TOKENS, Router
from megarl.rollout.server_state import UP, Server, State
from megarl.rollout.servers import wait_healthy

logger = logging.getLogger(__name__)

HEALTH_INTERVAL_S = 5.0
UNHEALTHY_LIMIT_S = 30.0
"""A server without one good answer to /health for so long is dead."""
DRAIN_LIMIT_S = 120.0
"""What a draining server has not answered by then is asked of another one."""
UNHEALTHY_CHECKS = 3
"""And not without so many bad ones: one may be late because this loop was."""
MAX_FAILED_ANSWERS = 8
"""A server whose answers to so many requests in a row are errors of its own is dead."""
_MAX_TRIES = 3
"""Servers that may fail, or die, in one request before it is the request that is wrong."""
_FIRST_USUAL_TOKENS = 512.0
_USUAL_WEIGHT = 0.02


class Fleet:
    """See the module.

    Args:
      clients: one a server; all are up, with weights.
      comeback_s: how long all may be dead before that is an error. 0 is for servers that nobody
        starts again.
      on_lost: called with the address of a server that died.
      token_timeout_s: a server that has requests and makes no token for so long is dead.
      members: the addresses of the servers there should be, asked again and again; None leaves
        the fleet as it is.
      connect: the client of an address.
      takes_back: nobody ends a server that died and is still there, such as after a network that
        was gone for a while: it is taken back once it makes a token.
    """

    def __init__(
        self,
        clients: list[ServerClient],
        *,
        comeback_s: float = 0.0,
        on_lost: Callable[[str], None] = lambda address: None,
        token_timeout_s: float = 120.0,
        members: Callable[[], Coroutine[Any, Any, list[str]]] | None = None,
        connect: Callable[[str], ServerClient] | None = None,
        takes_back: bool = False,
    ) -> None:
        if not clients:
            raise ValueError("a rollout engine needs at least one server")
        self._servers = {client: Server(client, State.READY) for client in clients}
        self._router: Router[Server] = Router()
        self._comeback_s, self._on_lost = comeback_s, on_lost
        self._token_timeout_s = token_timeout_s
        self._members, self._connect = members, connect
        self._members_error = ""
        self._asked_members: asyncio.Task[list[str]] | None = None
        self._takes_back = takes_back
        self._usual_tokens = _FIRST_USUAL_TOKENS
        """Of an answer, a running mean."""
        self._left: list[ServerClient] = []
        """To be closed."""
        self._some_ready = asyncio.Event()
        self._some_ready.set()
        self._none_up_since_s: float | None = None
        self.num_lost = 0
        """Servers that died so far."""

    @property
    def clients(self) -> list[ServerClient]:
        """Of the servers that new weights go to."""
        gets_weights = (State.STALE, State.READY)
        return [server.client for server in self._all() if server.state in gets_weights]

    def state_of(self, client: ServerClient) -> State:
        """DEAD of one that is not here: it left, or came back under another client."""
        server = self._servers.get(client)
        return State.DEAD if server is None else server.state

    @property
    def needs_weights(self) -> bool:
        """Whether requests wait for servers that are up to be given weights."""
        states = {server.state for server in self._all()}
        return State.READY not in states and State.STALE in states

    def num_in(self, state: State) -> int:
        """Servers of this state."""
        return sum(server.state is state for server in self._all())

    def _all(self) -> list[Server]:
        """As they are now, for other threads as well."""
        return list(self._servers.values())

    async def close(self) -> None:
        """Close all connections."""
        for client in (*self._servers, *self._left):
            await client.close()
        self._left.clear()

    async def wait_healthy(self, timeout_s: float) -> None:
        """Until all are up. Of servers that somebody else starts, one that is not is dead.

        Raises:
          EngineError: one is not up after `timeout_s`; or none, of servers of somebody else.
        """

        async def error_of(client: ServerClient) -> EngineError | None:
            try:
                await wait_healthy(client.address, timeout_s)
            except EngineError as error:
                return error
            return None

        clients = self.clients
        errors = await asyncio.gather(*map(error_of, clients))
        failed = [(c, error) for c, error in zip(clients, errors, strict=True) if error is not None]
        if failed and (not self._takes_back or len(failed) == len(clients)):
            raise failed[0][1]
        for client, error in failed:
            self.drop(client, str(error))

    # ------------------------------------------------------------------ requests

    async def generate(
        self, request: ModelRequest, gconfig: GenerationHyperparameters, remaining: int
    ) -> GenerateChunk:
        """See ServerClient.generate. What a lost server was asked for is asked of another one.

        Raises:
          EngineError: the request was refused; several servers failed, or died, while they had
            it; or the last one is gone, and no other will come.
        """
        failed: list[Server] = []
        num_lost = 0
        while True:
            while not self._some_ready.is_set():  # it may be cleared again before this goes on
                await self._some_ready.wait()
            cost = len(request.input_ids) + min(remaining, self._usual_tokens)
            server = self._choose(request, cost, failed)
            answer = asyncio.ensure_future(server.client.generate(request, gconfig, remaining))
            started_s = time.monotonic()
            server.running.add(answer)
            server.outstanding_tokens += cost
            try:
                chunk = await answer
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if server.state is not State.DEAD or (task is not None and task.cancelling()):
                    raise
                num_lost += server.is_lost
            except ServerFailed as error:
                server.failed.add(request.rid)
                if server.state is State.READY:
                    failed.append(server)
                    if len(server.failed) >= MAX_FAILED_ANSWERS:
                        self.drop(server.client, f"{len(server.failed)} failed requests: {error}")
                    if len(failed) >= _MAX_TRIES:
                        raise
            except ConnectionBroken as error:
                num_lost += error.was_sent
                if server.state is State.READY:
                    self.drop(server.client, str(error))
            except EngineError:
                if server.state is State.READY:
                    raise
            else:
                self._learn(server, request, chunk)
                server.record(request, chunk, started_s)
                return chunk
            finally:
                server.running.discard(answer)
                server.outstanding_tokens -= cost
            if num_lost >= _MAX_TRIES:
                raise EngineError(
                    f"request {request.rid}: {num_lost} servers died while they had it"
                )

    def _choose(self, request: ModelRequest, cost: float, failed: list[Server]) -> Server:
        ready = [server for server in self._all() if server.state is State.READY]
        others = [server for server in ready if server not in failed]
        loads = {server: server.outstanding_tokens for server in others or ready}
        return self._router.choose(request.rid, request.input_ids, cost, loads)

    def _learn(self, server: Server, request: ModelRequest, chunk: GenerateChunk) -> None:
        server.last_answer_s = time.monotonic()
        server.failed.clear()
        self._usual_tokens += _USUAL_WEIGHT * (len(chunk.tokens) - self._usual_tokens)
        if len(request.input_ids) + len(chunk.tokens) >= BLOCK_TOKENS:
            self._router.learn(server, request.input_ids + chunk.tokens)

    # ------------------------------------------------------------------ states

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
        server.set_state(State.DEAD, why)
        server.is_lost = True
        self.num_lost += 1
        self._abandon(server)
        self._on_lost(client.address)
        self._update()

    def refitted(self, clients: Iterable[ServerClient]) -> None:
        """These servers have the present weights."""
        for client in clients:
            server = self._servers.get(client)
            if server is not None:
                server.was_given = True
            if server is not None and server.state is State.STALE:
                server.set_state(State.READY)
                server.last_answer_s = time.monotonic()
                logger.info("server %s is ready", client.address)
        self._update()

    def set_members(self, addresses: Iterable[str]) -> None:
        """From now on the servers of these addresses: others are added, or drained."""
        assert self._connect is not None, "nobody can add to this fleet"
        wanted = {client.address: client for client in map(self._connect, addresses)}
        for server in self._all():
            if wanted.pop(server.client.address, None) is None:
                self._drain(server)
            elif server.state is State.DRAINING:
                server.set_state(State.STALE, "it may have missed a push")
        for client in wanted.values():
            logger.info("server %s is added", client.address)
            self._servers[client] = Server(client, State.STARTING)
        self._update()

    def _drain(self, server: Server) -> None:
        if server.state is State.READY and server.running:
            num_running = len(server.running)
            logger.info("server %s is to go: %d requests", server.client.address, num_running)
            server.set_state(State.DRAINING)
            server.draining_since_s = time.monotonic()
        elif server.state is not State.DRAINING:
            self._leave(server)

    def _leave(self, server: Server) -> None:
        logger.info("server %s has left", server.client.address)
        server.set_state(State.DEAD, "it has left")
        del self._servers[server.client]
        self._left.append(server.client)
        self._abandon(server)

    def _abandon(self, server: Server) -> None:
        """Its requests go elsewhere."""
        self._router.forget(server)
        for answer in server.running:
            answer.cancel()

    def _comes_back(self, server: Server) -> None:
        """Mostly as another process. Who had asked it before must ask again: another client."""
        del self._servers[server.client]
        self._left.append(server.client)
        server.state, server.is_lost = State.DEAD, True
        self._abandon(server)
        client = server.client.again()
        self._servers[client] = again = Server(client, State.STARTING)
        again.set_state(State.STALE, "it was started again")
        logger.warning("server %s is up again", client.address)

    def _update(self) -> None:
        states = {server.state for server in self._all()}
        if State.READY in states:
            self._some_ready.set()
        else:
            self._some_ready.clear()
        if not states.isdisjoint(UP):
            self._none_up_since_s = None
        elif self._none_up_since_s is None:
            self._none_up_since_s = time.monotonic()

    # ------------------------------------------------------------------ health

    async def watch(self) -> EngineError:
        """Poll every server, drop the dead, take back those that are up again, let others leave.

        A server whose engine died may keep open the connections it will never answer (vLLM
        0.32 waits for them before it exits), so a request's own limit is not enough.

        Returns:
          the error, once all have been dead for too long.
        """
        for server in self._all():
            server.last_good_s = time.monotonic()
        try:
            while True:
                self._look_at_members()
                for server in self._all():
                    try:
                        self._look_at(server)
                    except EngineError as none_left:
                        return none_left
                while self._left:
                    await self._left.pop().close()
                if self._none_up_since_s is not None:
                    dead_s = time.monotonic() - self._none_up_since_s
                    if dead_s > self._comeback_s:
                        return EngineError(f"no server has come back for {dead_s:.0f} s")
                await asyncio.sleep(HEALTH_INTERVAL_S)
        finally:
            for task in (*(server.check for server in self._all()), self._asked_members):
                if task is not None:
                    task.cancel()

    def _look_at_members(self) -> None:
        """Take the answer that has come, and ask again."""
        if self._members is None:
            return
        asked = self._asked_members
        if asked is not None and asked.done():
            try:
                self.set_members(asked.result())
                self._members_error = ""
            except EngineError as error:
                if str(error) != self._members_error:  # the fleet stays as it is
                    logger.warning("%s", error)
                self._members_error = str(error)
        if asked is None or asked.done():
            members = self._members()
            self._asked_members = asyncio.create_task(members, name="rollout.servers")

    def _look_at(self, server: Server) -> None:
        """Judge by the check that has ended, and begin the next one."""
        if server.state is State.DRAINING:
            drained_s = time.monotonic() - server.draining_since_s
            if not server.running or drained_s > DRAIN_LIMIT_S:
                self._leave(server)
                self._update()
                return
        if server.check is not None and server.check.done():
            error, server.check = server.check.result(), None
            self._judge(server, error)
        if server.check is None and server.client in self._servers:
            server.check = asyncio.create_task(self._check(server), name="health")

    async def _check(self, server: Server) -> EngineError | None:
        is_to_be_taken_back = server.state is State.DEAD and self._takes_back
        check = check_dead if is_to_be_taken_back else check_up
        return await check(server, HEALTH_INTERVAL_S, self._token_timeout_s)

    def _judge(self, server: Server, error: EngineError | None) -> None:
        if error is None:
            server.last_good_s = time.monotonic()
            if not server.client.is_paused:  # else nobody looked whether it was started again
                server.num_ill = 0
            if server.state is State.DEAD and (server.was_silent or self._takes_back):
                self._comes_back(server)
            elif server.state is State.STARTING:
                server.set_state(State.STALE)
                logger.info("server %s is up and waits for weights", server.client.address)
            self._update()
            return
        server.num_ill += 1
        if server.state is State.DEAD:
            server.was_silent = True
        elif server.client.is_paused and server.client.health_needs_tokens:
            # SGLang 0.5.23 makes a token to say that it is well. Who paused it notices its end.
            server.last_good_s = time.monotonic()
        elif isinstance(error, StartedAgain):
            self._comes_back(server)
            self._update()
        elif isinstance(error, NoTokens):
            self.drop(server.client, str(error))
        elif server.state is not State.STARTING:
            silent_s = time.monotonic() - server.last_good_s
            if silent_s > UNHEALTHY_LIMIT_S and server.num_ill >= UNHEALTHY_CHECKS:
                self.drop(server.client, f"not healthy for {silent_s:.0f} s: {error}")
