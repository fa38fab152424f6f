"""HTTP client of one inference server.

Everything here is async and belongs to the event loop that makes the first request; the
session is made there. Each wait ends: an answer that is late raises EngineTimeout, a wrong
one EngineError, both with the server's address and what was asked. Only a generation is
sent again, and only after a connection broke: it changes nothing on the server. A control
request is sent once.
"""

import asyncio
import json
from typing import Any, Literal

import aiohttp

from megarl.errors import EngineError, EngineTimeout
from megarl.rollout.backends.vllm import NO_VERSION, parse_version

PauseMode = Literal["keep", "abort"]
CONTROL_TIMEOUT_S = 60.0
_FIRST_RETRY_DELAY_S = 0.5
_KEEP_ALIVE_S = 3.0  # vLLM's servers close an idle connection after 5
_MAX_ERROR_CHARS = 500


class ServerClient:
    """One server; `address` is `http://HOST:PORT`.

    Args:
      request_timeout_s: one generation, from send to last token.
      retries: how often a generation is sent again after its connection broke.
    """

    def __init__(self, address: str, *, request_timeout_s: float, retries: int) -> None:
        self.address = (address if "://" in address else f"http://{address}").rstrip("/")
        self.request_timeout_s = request_timeout_s
        self.retries = retries
        self.num_retries = 0
        """Generations sent again so far."""
        self._sessions: dict[bool, aiohttp.ClientSession] = {}

    async def health(self, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        """Returns if the server can serve."""
        await self._request("GET", "/health", timeout_s=timeout_s)

    async def generate(self, path: str, payload: dict[str, Any]) -> dict[str, Any]:
        """The answer to one generation; the backend makes `path` and `payload` and reads it."""
        delay_s = _FIRST_RETRY_DELAY_S
        for _ in range(self.retries):
            try:
                return await self._generate(path, payload)
            except _ConnectionBroken:
                self.num_retries += 1
                await asyncio.sleep(delay_s)
                delay_s *= 2
        return await self._generate(path, payload)

    async def pause(self, mode: PauseMode, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        """Stop generating; requests wait until `resume`, with their KV cache dropped.

        keep: requests in flight wait too. abort: they are answered with the tokens so far.
        """
        await self._request("POST", f"/pause?mode={mode}&clear_cache=true", timeout_s=timeout_s)

    async def resume(self, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        await self._request("POST", "/resume", timeout_s=timeout_s)

    async def world_size(self, timeout_s: float = CONTROL_TIMEOUT_S) -> int:
        """Workers of the server: each is a rank of the weight group."""
        answer = await self._request("GET", "/get_world_size", timeout_s=timeout_s)
        return int(answer["world_size"])

    async def weight_version(self, timeout_s: float = CONTROL_TIMEOUT_S) -> int:
        """The last version pushed; -1 if none, or if the last push failed."""
        answer = await self._request("GET", "/weight_info", timeout_s=timeout_s)
        return parse_version(answer["weight_version"])

    async def init_weight_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        timeout_s: float,
        *,
        sharded: bool = False,
    ) -> None:
        """Every worker joins the weight group, as rank `rank_offset` + its own rank.

        Args:
          sharded: a plan for each lies in the group's store, see megarl/bridge/sharded.py.
        """
        init_info = {
            "master_address": master_address,
            "master_port": master_port,
            "rank_offset": rank_offset,
            "world_size": world_size,
            "timeout_s": timeout_s,
            "sharded": sharded,
        }
        await self._request(
            "POST",
            "/init_weight_transfer_engine",
            {"init_info": init_info},
            # The worker gives up first: it knows whom it waited for.
            timeout_s=timeout_s + CONTROL_TIMEOUT_S,
        )

    async def close_weight_group(self, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        await self._request("POST", "/shutdown_weight_transfer_engine", timeout_s=timeout_s)

    async def start_update(self, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        """Open an update. Generation must be paused: until `finish_update` there is no model."""
        await self._request("POST", "/start_weight_update", timeout_s=timeout_s)

    async def update_weights(
        self, info: dict[str, Any], timeout_s: float = CONTROL_TIMEOUT_S
    ) -> None:
        """Every worker receives and loads the bucket that `info` describes."""
        await self._request(
            "POST",
            "/update_weights",
            {"update_info": info},
            timeout_s=timeout_s + CONTROL_TIMEOUT_S,
        )

    async def finish_update(self, version: int, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        """Close the update; tokens from now on carry `version`."""
        await self._request(
            "POST", "/finish_weight_update", {"weight_version": str(version)}, timeout_s=timeout_s
        )

    async def cancel_update(self, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        """Make the server servable after a failed update.

        Layers that were complete keep the new weights, the others the old ones, so the
        version becomes -1: nobody pushed this mixture.
        """
        try:
            await self._request(
                "POST",
                "/update_weights",
                {"update_info": {"cancel": True}},
                timeout_s=timeout_s + CONTROL_TIMEOUT_S,
            )
        except EngineTimeout:
            raise
        except EngineError as error:
            # vLLM closes an update only when a worker raises: status 500 is the good answer,
            # also from a server whose update had ended already.
            if not isinstance(error, _BadStatus):
                raise
        await self.set_version(NO_VERSION, timeout_s=timeout_s)

    async def set_version(self, version: int, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        """Name the weights that the server has."""
        await self._request(
            "POST", "/update_weight_version", {"new_version": str(version)}, timeout_s=timeout_s
        )

    async def load_from_disk(self, path: str, version: int, timeout_s: float) -> None:
        """Every worker reads the safetensors of folder `path`, as seen from the server."""
        # `--load-format dummy` also governs a reload, and its loader reads no files (vLLM 0.32:
        # NotImplementedError, status 500).
        await self._collective_rpc(
            "update_config",
            {"overrides": {"load_config": {"load_format": "safetensors"}}},
            timeout_s=timeout_s,
        )
        await self._collective_rpc("reload_weights", {"weights_path": path}, timeout_s=timeout_s)
        await self.set_version(version, timeout_s=timeout_s)

    async def needed_parts(
        self, tensors: list[list[Any]], timeout_s: float = CONTROL_TIMEOUT_S
    ) -> list[dict[str, list[list[int]]]]:
        """Of each worker, the boxes that its loader takes of each HF tensor.

        Args:
          tensors: [HF name, shape, torch's name of the dtype] each.
        """
        answer = await self._collective_rpc(
            "megarl_needed_parts", {"tensors": tensors}, timeout_s=timeout_s
        )
        parts: list[dict[str, list[list[int]]]] = answer["results"]
        return parts

    async def weight_digests(self, timeout_s: float = CONTROL_TIMEOUT_S) -> list[dict[str, int]]:
        """Of each worker, what the last update brought: tensor name -> digest."""
        answer = await self._collective_rpc("megarl_weight_digests", {}, timeout_s=timeout_s)
        digests: list[dict[str, int]] = answer["results"]
        return digests

    async def close(self) -> None:
        """Close the connections. In the loop that made them."""
        while self._sessions:
            _, session = self._sessions.popitem()
            await session.close()

    async def _generate(self, path: str, payload: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = await self._request(
            "POST", path, payload, timeout_s=self.request_timeout_s, keep_alive=True
        )
        return answer

    async def _collective_rpc(
        self, method: str, kwargs: dict[str, Any], *, timeout_s: float
    ) -> Any:
        return await self._request(
            "POST", "/collective_rpc", {"method": method, "kwargs": kwargs}, timeout_s=timeout_s
        )

    async def _request(
        self,
        method: str,
        path: str,
        payload: dict[str, Any] | None = None,
        *,
        timeout_s: float,
        keep_alive: bool = False,
    ) -> Any:
        """The answer's JSON, None if the body is empty. Raises for every status but 200."""
        asked = f"{self.address}: {method} {path.partition('?')[0]}"
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._session(keep_alive).request(
                method, self.address + path, json=payload, timeout=timeout
            ) as response:
                body = await response.read()
        except TimeoutError as error:
            raise EngineTimeout(f"{asked}: no answer within {timeout_s:g} s") from error
        except aiohttp.ClientError as error:
            raise _ConnectionBroken(f"{asked}: {error!r}") from error
        if response.status != 200:
            raise _BadStatus(f"{asked}: status {response.status}: {_reason(body)}")
        try:
            return json.loads(body) if body else None
        except ValueError as error:
            raise EngineError(f"{asked}: not JSON: {error}") from error

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


class _ConnectionBroken(EngineError):
    """No connection, or it ended before the answer."""


class _BadStatus(EngineError):
    """The server answered, and said no."""


def _reason(body: bytes) -> str:
    """What an error answer says, short."""
    text = body.decode(errors="replace")
    try:
        answer = json.loads(text)
    except ValueError:
        answer = None
    if isinstance(answer, dict):
        error = answer.get("error", answer.get("detail", answer))
        text = str(error.get("message", error)) if isinstance(error, dict) else str(error)
    return text if len(text) <= _MAX_ERROR_CHARS else text[:_MAX_ERROR_CHARS] + " ..."
