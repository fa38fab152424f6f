"""HTTP client of one inference server, whatever its engine; engines are in `backends`.

Everything here is async and belongs to the event loop that makes the first request; the
session is made there. Each wait ends: an answer that is late raises EngineTimeout, a wrong
one EngineError, both with the server's address and what was asked. Only a generation is
sent again, and only after a connection broke: it changes nothing on the server. A control
request is sent once.
"""

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Literal, Self, TypeVar

import aiohttp

from megarl.config.schema import GenerationHyperparameters
from megarl.errors import EngineError, EngineTimeout
from megarl.rollout.api import GenerateChunk, ModelRequest

T = TypeVar("T")
PauseMode = Literal["keep", "abort"]
CONTROL_TIMEOUT_S = 60.0
_FIRST_RETRY_DELAY_S = 0.5
_KEEP_ALIVE_S = 3.0  # vLLM's servers close an idle connection after 5
_MAX_ERROR_CHARS = 500
_OK = 200
_FAULTS_OF_A_REQUEST = (400, 413, 422)
"""Statuses that any server would answer; each other one is of this server, or of what is at its
address."""
_MAX_ANSWER_BYTES = 1 << 26
"""A token with its logprob is about 100 bytes."""


class ServerClient(ABC):
    """One server; `address` is `http://HOST:PORT`.

    Args:
      request_timeout_s: one generation, from send to last token.
      retries: how often a generation is sent again after its connection broke.
    """

    weight_protocol: ClassVar[Literal["megarl", "sglang"]] = "megarl"
    """Whose process group and buckets a gathered broadcast uses."""
    health_needs_tokens: ClassVar[bool] = False
    """Whether a paused server says that it is not well."""

    def __init__(self, address: str, *, request_timeout_s: float, retries: int) -> None:
        self.address = (address if "://" in address else f"http://{address}").rstrip("/")
        self.request_timeout_s = request_timeout_s
        self.retries = retries
        self.num_retries = 0
        """Generations sent again so far."""
        self.num_pauses = 0
        """Pauses that have begun."""
        self.is_paused = False
        self._sessions: dict[bool, aiohttp.ClientSession] = {}

    def again(self) -> Self:
        """Another client of the same address, for a server that was started again."""
        return type(self)(
            self.address, request_timeout_s=self.request_timeout_s, retries=self.retries
        )

    # ------------------------------------------------------------------ generation

    async def generate(
        self, request: ModelRequest, gconfig: GenerationHyperparameters, remaining: int
    ) -> GenerateChunk:
        """At most `remaining` tokens that continue `request.input_ids`.

        Raises:
          ValueError: there is nothing to continue, or no token to ask for.
          ServerFailed: the server failed, or its answer is not one.
          EngineError: the request was refused, or there was no answer.
        """
        delay_s = _FIRST_RETRY_DELAY_S
        was_sent = False
        for tries_left in reversed(range(self.retries + 1)):
            try:
                chunk = await self._generate(request, gconfig, remaining)
                break
            except ConnectionBroken as error:
                was_sent |= error.was_sent
                if not tries_left:
                    raise ConnectionBroken(str(error), was_sent=was_sent) from error
                self.num_retries += 1
                await asyncio.sleep(delay_s)
                delay_s *= 2
        if len(chunk.tokens) > remaining:
            raise ServerFailed(
                f"{self.address}: {len(chunk.tokens)} tokens came, asked for {remaining}", _OK
            )
        return chunk

    def _read(self, parse: Callable[..., T], *arguments: Any) -> T:
        """`parse(*arguments)`, of an answer of this server.

        Raises:
          Refused: it says that the request is wrong.
          ServerFailed: it is none.
        """
        try:
            return parse(*arguments)
        except Refused as error:
            raise refusal(f"{self.address}: {error}"[:_MAX_ERROR_CHARS], error.status) from error
        except EngineError as error:
            why = str(error)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            why = f"not an answer: {error!r}"
        raise ServerFailed(f"{self.address}: {why[:_MAX_ERROR_CHARS]}", _OK)

    @abstractmethod
    async def _generate(
        self, request: ModelRequest, gconfig: GenerationHyperparameters, remaining: int
    ) -> GenerateChunk:
        """Ask once. EngineError if a token lacks a logprob or a version."""

    async def pause(self, mode: PauseMode, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        """Stop generating; requests wait until `resume`, with their KV cache dropped.

        keep: requests in flight wait too. abort: they are answered with the tokens so far.
        """
        self.num_pauses += 1
        self.is_paused = True
        await self._pause(mode, timeout_s)

    async def resume(self, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        await self._resume(timeout_s)
        self.is_paused = False

    @abstractmethod
    async def _pause(self, mode: PauseMode, timeout_s: float) -> None: ...

    @abstractmethod
    async def _resume(self, timeout_s: float) -> None: ...

    # ------------------------------------------------------------------ health

    async def health(self, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        """Returns if the server can serve."""
        await self._request("GET", "/health", timeout_s=timeout_s)

    @abstractmethod
    async def check_engine(self, timeout_s: float) -> None:
        """Returns once the engine has made a token for anybody. Of a server that has requests
        and is not paused.

        Raises:
          EngineError: it has made none within `timeout_s`, or the server failed.
        """

    @abstractmethod
    async def make_token(self, timeout_s: float) -> None:
        """Returns once the engine has made a token, for us if for nobody else. EngineError: see
        check_engine."""

    # ------------------------------------------------------------------ weights

    @abstractmethod
    async def world_size(self, timeout_s: float = CONTROL_TIMEOUT_S) -> int:
        """Workers of the server: each is a rank of the weight group."""

    @abstractmethod
    async def weight_version(self, timeout_s: float = CONTROL_TIMEOUT_S) -> int:
        """The last version pushed; -1 if none, or if the last push failed."""

    @abstractmethod
    async def set_version(self, version: int, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        """Name the weights that the server has."""

    @abstractmethod
    async def load_from_disk(self, path: str, version: int, timeout_s: float) -> None:
        """Every worker reads the safetensors of folder `path`, as seen from the server."""

    @abstractmethod
    async def command(
        self, name: str, arguments: dict[str, Any], timeout_s: float = CONTROL_TIMEOUT_S
    ) -> list[Any]:
        """Have every worker do what megarl/bridge/engines/agent.py says; their answers.

        Raises:
          EngineError: a worker could not; its words.
        """

    @abstractmethod
    async def has_agent(self, timeout_s: float = CONTROL_TIMEOUT_S) -> bool:
        """Whether megarl's plugin is in its workers, so that they know `command`."""

    # ------------------------------------------------------------------ gathered broadcast

    @abstractmethod
    async def init_weight_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        timeout_s: float,
    ) -> None:
        """Every worker joins the weight group, as rank `rank_offset` + its own rank."""

    @abstractmethod
    async def start_update(self, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        """Open an update. Generation must be paused: until `finish_update` there is no model."""

    @abstractmethod
    async def update_weights(
        self, info: dict[str, Any], timeout_s: float = CONTROL_TIMEOUT_S
    ) -> None:
        """Every worker receives and loads the bucket that `info` describes."""

    @abstractmethod
    async def finish_update(self, version: int, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        """Close the update; tokens from now on carry `version`."""

    @abstractmethod
    async def cancel_update(self, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        """Make the server servable after a failed update, under version -1."""

    @abstractmethod
    async def weight_digests(self, timeout_s: float = CONTROL_TIMEOUT_S) -> list[dict[str, int]]:
        """Of each worker, what the last update brought: tensor name -> digest."""

    # ------------------------------------------------------------------ HTTP

    async def close(self) -> None:
        """Close the connections. In the loop that made them."""
        while self._sessions:
            _, session = self._sessions.popitem()
            await session.close()

    async def _request(
        self,
        method: str,
        path: str,
        payload: dict[str, Any] | None = None,
        *,
        timeout_s: float,
        keep_alive: bool = False,
        as_text: bool = False,
    ) -> Any:
        """The answer's JSON, None if the body is empty. Raises for every status but 200."""
        asked = f"{self.address}: {method} {path.partition('?')[0]}"
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        body = bytearray()
        try:
            async with self._session(keep_alive).request(
                method, self.address + path, json=payload, timeout=timeout
            ) as response:
                async for part in response.content.iter_any():
                    body += part
                    if len(body) > _MAX_ANSWER_BYTES:
                        raise ServerFailed(f"{asked}: more than {_MAX_ANSWER_BYTES} bytes", _OK)
        except TimeoutError as error:
            raise EngineTimeout(f"{asked}: no answer within {timeout_s:g} s") from error
        except aiohttp.ClientError as error:
            was_sent = not isinstance(error, aiohttp.ClientConnectorError)
            raise ConnectionBroken(f"{asked}: {error!r}", was_sent=was_sent) from error
        if response.status != _OK:
            text = f"{asked}: status {response.status}: {_reason(body)}"
            raise refusal(text, response.status)
        if as_text:
            return body.decode(errors="replace")
        try:
            return json.loads(body) if body else None
        except (ValueError, RecursionError) as error:
            text = f"{asked}: not JSON: {str(error)[:_MAX_ERROR_CHARS]}"
            raise ServerFailed(text, _OK) from error

    def _session(self, keep_alive: bool) -> aiohttp.ClientSession:
        """Made in the running loop, at the first request of its kind."""
        if keep_alive not in self._sessions:
            if keep_alive:
                # limit=0: aiohttp's 100 connections would hold back what the server can batch.
                connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S)
            else:
                # uvicorn drops the connection after an answer of status 500; the next control
                # request must not be sent on it.
                connector = aiohttp.TCPConnector(limit=0, force_close=True)
            self._sessions[keep_alive] = aiohttp.ClientSession(connector=connector)
        return self._sessions[keep_alive]


class ConnectionBroken(EngineError):
    """No connection, or it ended before the answer."""

    def __init__(self, text: str, *, was_sent: bool = True) -> None:
        super().__init__(text)
        self.was_sent = was_sent
        """Whether there was a connection, so that the server may have got the request."""


class Refused(EngineError):
    """A status other than 200, or an answer that is none."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


class ServerFailed(Refused):
    """The server's own fault: another one may well answer."""


def refusal(text: str, status: int) -> Refused:
    """The error of an answer with this status."""
    return (Refused if status in _FAULTS_OF_A_REQUEST else ServerFailed)(text, status)


def _reason(body: bytearray) -> str:
    """What an error answer says, short."""
    text = body.decode(errors="replace")
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):
        answer = None
    if isinstance(answer, dict):
        error = answer.get("error", answer.get("detail", answer))
        text = str(error.get("message", error)) if isinstance(error, dict) else str(error)
    return text if len(text) <= _MAX_ERROR_CHARS else text[:_MAX_ERROR_CHARS] + " ..."


def results_of(address: str, command: str, answers: list[dict[str, Any]]) -> list[Any]:
    """Of workers that answered `{"result": ...}` or `{"error": text}`; EngineError for an error."""
    errors = [f"worker {i}: {a['error']}" for i, a in enumerate(answers) if "error" in a]
    if errors:
        raise EngineError(f"{address}: {command}: " + "; ".join(errors))
    return [answer["result"] for answer in answers]
