"""The server that agents speak to, in the loop that runs the episodes.

    POST /sessions                    admin  {}                          -> session_id, api_key
    POST /sessions/{id}/reward        either {reward, [completion_id]}
    POST /sessions/{id}/end           either
    POST /v1/reward, /v1/end          session  the same, for the session whose key it is
    GET  /v1/models                   session
    POST /v1/chat/completions         session
    POST /v1/responses                session
    POST /v1/messages                 session  Anthropic's

`either` is the admin's key or the session's own. Keys come as `Authorization: Bearer KEY` or as
`x-api-key: KEY`. The paths under /v1 are served without it, too: one base_url,
`http://HOST:PORT`, is right for OpenAI's client, which adds `/chat/completions`, and for
Anthropic's, which adds `/v1/messages`.
"""

import asyncio
import hashlib
import hmac
import logging
import os
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from megarl.config.schema import GenerationHyperparameters
from megarl.errors import EngineError
from megarl.rollout.api import GenerationEngine
from megarl.rollout.proxy.bodies import read_body
from megarl.rollout.proxy.doors import DOORS, Door
from megarl.rollout.proxy.errors import ProxyError
from megarl.rollout.proxy.fields import Fields
from megarl.rollout.proxy.generate import complete
from megarl.rollout.proxy.session import Counts, Limits, Session, ended
from megarl.rollout.proxy.template import ChatTemplate

logger = logging.getLogger(__name__)

ADMIN_KEY = "MEGARL_PROXY_ADMIN_KEY"
"""Environment variable with the key that opens sessions over HTTP."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class AgentProxy:
    """Sessions for agents, and the HTTP endpoints they use.

    All of it belongs to one asyncio loop, that of `start`. An agent in the same loop must be
    asynchronous: a call that blocks the loop waits for an answer that the loop has to give.

    Args:
      gconfig: of the run; see `generate.read_sampling` for what a request may change.
      admin_key: None is the environment's MEGARL_PROXY_ADMIN_KEY. Without any, sessions are
        opened by `open_session` alone.
      host, port: to listen on; port 0 is a free one.
      model: what `/v1/models` names. Requests may name any.
      enable_thinking: for the chat template, where a request does not say.

    Raises:
      ValueError: the tokenizer has no chat template.
    """

    def __init__(
        self,
        engine: GenerationEngine,
        tokenizer: Any,
        gconfig: GenerationHyperparameters,
        *,
        admin_key: str | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        model: str = "megarl",
        enable_thinking: bool = False,
        limits: Limits | None = None,
    ) -> None:
        self._engine, self._gconfig, self._template = engine, gconfig, ChatTemplate(tokenizer)
        self._admin_key = admin_key if admin_key is not None else os.environ.get(ADMIN_KEY, "")
        self._host, self._port, self._model = host, port, model
        self._enable_thinking, self.limits = enable_thinking, limits or Limits()
        self._sessions: dict[str, Session] = {}
        """Live ones by id."""
        self._ids_by_key: dict[bytes, str] = {}
        """By the key's digest: looking it up takes no time that tells of a key."""
        self._ended: asyncio.Queue[Session] = asyncio.Queue()
        self._counts = Counts()
        self._runner: web.AppRunner | None = None
        self._sweeper: asyncio.Task[None] | None = None

    # ------------------------------------------------------------------ the server

    async def start(self) -> None:
        """Listen. OSError if the port is taken."""
        app = web.Application(
            client_max_size=self.limits.max_body_bytes, middlewares=[self._answer_errors]
        )
        app.router.add_post("/sessions", self._open)
        app.router.add_post("/sessions/{id}/reward", self._reward)
        app.router.add_post("/sessions/{id}/end", self._end)
        for prefix in ("/v1", ""):
            app.router.add_get(prefix + "/models", self._models)
            app.router.add_post(prefix + "/reward", self._reward)
            app.router.add_post(prefix + "/end", self._end)
            for door in DOORS:
                app.router.add_post(prefix + door.path, self._handler(door))
        self._runner = web.AppRunner(
            app,
            access_log=None,
            auto_decompress=False,  # see bodies
            # A client that goes away ends its request, and with it what was sampled for nobody.
            handler_cancellation=True,
            shutdown_timeout=1.0,
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port)
        await site.start()
        self._port = self._runner.addresses[0][1]
        self._sweeper = asyncio.create_task(self._end_idle_ones(), name="agent-proxy-idle")

    async def close(self) -> None:
        """End every session and the server."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        for session_id in list(self._sessions):
            self.end(session_id)
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        if (count := self._counts.num_retokenised) > 1:
            logger.warning("%d conversations were tokenised again and trained as others", count)

    @property
    def base_url(self) -> str:
        """For OpenAI's and Anthropic's clients alike."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}"

    # ------------------------------------------------------------------ sessions

    def open_session(
        self,
        *,
        engine: GenerationEngine | None = None,
        gconfig: GenerationHyperparameters | None = None,
        may_change_sampling: bool = False,
        is_from_http: bool = False,
    ) -> Session:
        """A session with a key of its own, until `end`.

        Args:
          engine, gconfig: other ones than the proxy's.
          may_change_sampling, is_from_http: see Session.

        Raises:
          ProxyError: 429, there are `max_sessions`.
        """
        self._sweep()
        if len(self._sessions) + self._ended.qsize() >= self.limits.max_sessions:
            raise ProxyError(
                429, f"there are {self.limits.max_sessions} sessions", code="too_many_sessions"
            )
        session = Session(
            engine or self._engine,
            self._template,
            gconfig or self._gconfig,
            self.limits,
            may_change_sampling=may_change_sampling,
            is_from_http=is_from_http,
            counts=self._counts,
        )
        self._sessions[session.session_id] = session
        self._ids_by_key[_digest(session.api_key)] = session.session_id
        return session

    def set_reward(self, session_id: str, reward: float, completion_id: str | None = None) -> None:
        """See Session.set_reward. ProxyError 404 if no live session has the id."""
        self._live(session_id).set_reward(reward, completion_id)

    def end(self, session_id: str) -> Session:
        """End the session, and return it with what was sampled. ProxyError 404 as above."""
        session = self._live(session_id)
        del self._sessions[session_id]
        del self._ids_by_key[_digest(session.api_key)]
        session.end()
        if session.is_from_http:
            self._ended.put_nowait(session)
        return session

    async def next_ended(self, timeout_s: float | None = None) -> Session:
        """The next session that was opened over HTTP and has ended. TimeoutError."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._ended.get()
        except TimeoutError as error:
            raise TimeoutError(
                f"no session opened over HTTP ended within {timeout_s} s; "
                f"{len(self._sessions)} are live"
            ) from error

    def _sweep(self) -> None:
        for session in list(self._sessions.values()):
            if (
                session.is_from_http
                and not session.num_requests
                and session.idle_s > self.limits.idle_timeout_s
            ):
                logger.warning("%s has been idle: it is ended", session.session_id)
                self.end(session.session_id)

    async def _end_idle_ones(self) -> None:
        """Whoever waits in `next_ended` gets them without another session being opened."""
        period_s = max(0.1, min(self.limits.idle_timeout_s / 4, 60.0))
        while True:
            await asyncio.sleep(period_s)
            self._sweep()

    def _live(self, session_id: str) -> Session:
        if session_id not in self._sessions:
            raise ProxyError(404, "no live session has this id")
        return self._sessions[session_id]

    # ------------------------------------------------------------------ keys and bodies

    def _is_admin(self, request: web.Request) -> bool:
        given, own = _key(request).encode("utf-8", "surrogateescape"), self._admin_key.encode()
        return bool(own) and hmac.compare_digest(given, own)

    def _session_of(self, request: web.Request) -> Session:
        session_id = self._ids_by_key.get(_digest(_key(request)))
        if session_id is None:
            raise ProxyError(
                401, "the API key is wrong, or its session has ended", code="invalid_api_key"
            )
        return self._sessions[session_id]

    def _named_session(self, request: web.Request) -> Session:
        """That of the path, for its own key or the admin's; that of the key if none is there."""
        if "id" not in request.match_info:
            return self._session_of(request)
        session = self._sessions.get(request.match_info["id"])
        if self._is_admin(request):
            return self._live(request.match_info["id"])
        if session is None or not session.has_key(_key(request)):
            raise ProxyError(
                401, "the API key is neither the session's nor the admin's", code="invalid_api_key"
            )
        return session

    async def _body(self, request: web.Request, *, is_optional: bool = False) -> Fields:
        return await read_body(request, self.limits, is_optional=is_optional)

    # ------------------------------------------------------------------ handlers

    async def _open(self, request: web.Request) -> web.StreamResponse:
        if not self._is_admin(request):
            raise ProxyError(401, "sessions need the admin's key", code="invalid_api_key")
        (await self._body(request, is_optional=True)).only([])
        session = self.open_session(is_from_http=True)
        return web.json_response({"session_id": session.session_id, "api_key": session.api_key})

    async def _reward(self, request: web.Request) -> web.StreamResponse:
        session = self._named_session(request)
        body = await self._body(request)
        body.only(["reward", "completion_id"])
        reward = body.number("reward", -1e30, 1e30)
        if reward is None:
            raise ProxyError(400, "reward: expected a number, got nothing", param="reward")
        session.set_reward(reward, body.text("completion_id", "") or None)
        return web.json_response({"session_id": session.session_id, "reward": reward})

    async def _end(self, request: web.Request) -> web.StreamResponse:
        session = self._named_session(request)
        (await self._body(request, is_optional=True)).only([])
        self.end(session.session_id)
        return web.json_response(
            {"session_id": session.session_id, "completions": len(session.completions)}
        )

    async def _models(self, request: web.Request) -> web.StreamResponse:
        self._session_of(request)
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "megarl"}
        return web.json_response({"object": "list", "data": [model]})

    def _handler(self, door: Door) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            session = self._session_of(request)
            with session.slot():
                body = await self._body(request)
                if session.is_ended:
                    raise ended()
                ask = door.read(session, body, self._enable_thinking)
                completions = await complete(session, ask)
                if ask.stream:
                    return await self._send(request, door.events(session, ask, completions))
                return web.json_response(door.answer(session, ask, completions))

        return handle

    async def _send(self, request: web.Request, events: Any) -> web.StreamResponse:
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )
        await response.prepare(request)
        try:
            for event in events:
                async with asyncio.timeout(self.limits.client_timeout_s):
                    await response.write(event)
            async with asyncio.timeout(self.limits.client_timeout_s):
                await response.write_eof()
            return response
        except TimeoutError:
            logger.warning("a client did not take its answer: its connection is closed")
        except ConnectionError:
            pass  # the client went away
        except Exception:
            logger.exception("an answer failed that had begun")
        # Nothing else can be said in an answer that has begun, and no other one can follow it.
        if request.transport is not None:
            request.transport.abort()
        return response

    @web.middleware
    async def _answer_errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except Exception as raised:  # noqa: BLE001 - the door of the server: each has an answer
            error = _as_proxy_error(raised)
        is_anthropics = request.path.endswith("/messages")
        written = error.for_anthropic() if is_anthropics else error.for_openai()
        response = web.json_response(written, status=error.status)
        if request.content.exception() is not None:  # aiohttp will close it, and should say so
            response.force_close()
        return response


def _as_proxy_error(raised: Exception) -> ProxyError:
    while isinstance(raised, ExceptionGroup):  # a task group's: the cause is inside
        raised = raised.exceptions[0]
    if isinstance(raised, ProxyError):
        return raised
    if isinstance(raised, web.HTTPRequestEntityTooLarge):
        return ProxyError(413, raised.text or "the body is too large", code="request_too_large")
    if isinstance(raised, web.HTTPException):
        return ProxyError(raised.status, f"{raised.reason}: see the proxy's paths")
    if isinstance(raised, RecursionError):  # it was read, but cannot be written again
        return ProxyError(400, "body: nested too deeply")
    if isinstance(raised, EngineError):
        return ProxyError(503, f"the inference servers failed: {raised}", code="engine_error")
    if isinstance(raised, ConnectionError):
        return ProxyError(499, "the client went away")
    logger.error("a request failed", exc_info=raised)
    return ProxyError(500, f"a bug of the proxy: {type(raised).__name__}")


def _key(request: web.Request) -> str:
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return key.strip()
    return request.headers.get("x-api-key", "")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
