"""SGLang 0.5.23: its native /generate endpoint and its control routes.

Every generated token comes back with the version of the weights that sampled it and with its
logprob after the temperature, before top-p and top-k: where these cut anything off, it is not
the logprob of the distribution that was sampled from (`megarl.config.checks` refuses that).

Weights by gathered broadcast go through SGLang's own routes, so a server needs nothing of megarl
for it. SGLang loads in place: a server whose update failed holds a mixture of old and new
weights, under version -1 until a push succeeds. `command` needs the plugin of
megarl/bridge/engines/sglang.py.
"""

import asyncio
import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Literal

from megarl.config.schema import GenerationHyperparameters
from megarl.errors import EngineError, EngineTimeout
from megarl.rollout.api import NO_VERSION, GenerateChunk, ModelRequest
from megarl.rollout.backends.answers import checked_chunk, parse_version, token_versions
from megarl.rollout.client import (
    CONTROL_TIMEOUT_S,
    ConnectionBroken,
    PauseMode,
    ServerClient,
    ServerFailed,
    refusal,
    results_of,
)

logger = logging.getLogger(__name__)

GENERATE_PATH = "/generate"
COMMAND_PREFIX = "megarl:"
"""Of an action of /weights_checker that is a command of ours, in JSON."""

_RETRY_DELAY_S = 0.5
_ALL_TOKENS = GenerationHyperparameters().top_k
_PAUSE_MODES: dict[PauseMode, str] = {
    # Requests wait, and compute their KV cache again. (in_place would keep it: 5 nats off.)
    "keep": "retract",
    "abort": "abort",
}


class SGLangClient(ServerClient):
    """One SGLang server."""

    weight_protocol: ClassVar[Literal["megarl", "sglang"]] = "sglang"
    health_needs_tokens: ClassVar[bool] = True

    def __init__(self, address: str, *, request_timeout_s: float, retries: int) -> None:
        super().__init__(address, request_timeout_s=request_timeout_s, retries=retries)
        self._weight_group: str | None = None
        self._keeps_digests = False

    async def _generate(
        self, request: ModelRequest, gconfig: GenerationHyperparameters, remaining: int
    ) -> GenerateChunk:
        payload = generate_payload(request, gconfig, remaining)
        answer = await self._request(
            "POST", GENERATE_PATH, payload, timeout_s=self.request_timeout_s, keep_alive=True
        )
        return self._read(parse_generate, answer)

    async def _pause(self, mode: PauseMode, timeout_s: float) -> None:
        await self._post("/pause_generation", {"mode": _PAUSE_MODES[mode]}, timeout_s)

    async def _resume(self, timeout_s: float) -> None:
        await self._post("/continue_generation", {}, timeout_s)

    async def check_engine(self, timeout_s: float) -> None:
        await self.make_token(timeout_s)  # anybody's token will do for that route

    async def make_token(self, timeout_s: float) -> None:
        # Gives up by itself, after 20 s if SGLANG_HEALTH_CHECK_TIMEOUT says nothing else.
        deadline = time.monotonic() + timeout_s
        while True:
            left_s = deadline - time.monotonic()
            try:
                await self._request("GET", "/health_generate", timeout_s=max(left_s, 1.0))
                return
            except ServerFailed:
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(_RETRY_DELAY_S)

    async def world_size(self, timeout_s: float = CONTROL_TIMEOUT_S) -> int:
        answer = await self._request("GET", "/server_info", timeout_s=timeout_s)
        sizes = self._read(lambda: [int(answer[f"{name}_size"]) for name in ("tp", "pp", "dp")])
        tp, pp, dp = sizes
        if pp > 1 or dp > 1:
            raise EngineError(
                f"{self.address}: a server of pp {pp} and dp {dp}; "
                "SGLang brings new weights to tensor-parallel workers only"
            )
        return tp

    async def weight_version(self, timeout_s: float = CONTROL_TIMEOUT_S) -> int:
        answer = await self._request("GET", "/model_info", timeout_s=timeout_s)
        return self._read(lambda: parse_version(answer["weight_version"]))

    async def set_version(self, version: int, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        # SGLang's default would end all requests.
        payload = {"new_version": str(version), "abort_all_requests": False}
        await self._post("/update_weight_version", payload, timeout_s)

    async def load_from_disk(self, path: str, version: int, timeout_s: float) -> None:
        # The format of the server's start may be `dummy`. The server is called by `path` from now
        # on, a name that only the routes of OpenAI's protocol read.
        payload = {"model_path": path, "load_format": "safetensors", "flush_cache": True}
        await self._post("/update_weights_from_disk", payload, timeout_s)
        await self.set_version(version, timeout_s=timeout_s)

    async def command(
        self, name: str, arguments: dict[str, Any], timeout_s: float = CONTROL_TIMEOUT_S
    ) -> list[Any]:
        action = COMMAND_PREFIX + json.dumps({"name": name, "arguments": arguments})
        answer = await self._post("/weights_checker", {"action": action}, timeout_s)
        # Several schedulers may answer for one server: the first speaks for all workers.
        answers = self._read(lambda: json.JSONDecoder().raw_decode(answer["message"])[0])
        return results_of(self.address, name, answers)

    async def has_agent(self, timeout_s: float = CONTROL_TIMEOUT_S) -> bool:
        try:
            await self.command("hello", {}, timeout_s)
        except EngineError as error:
            # SGLang's own words for an action that no plugin has taken.
            if "Unsupported action" not in str(error):
                raise
            return False
        return True

    # ------------------------------------------------------------------ gathered broadcast

    async def init_weight_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        timeout_s: float,
    ) -> None:
        await self._leave_weight_group(timeout_s)
        server = await self._request("GET", "/server_info", timeout_s=timeout_s)
        self._weight_group = group_name(master_port)
        payload = {
            "master_address": master_address,
            "master_port": master_port,
            "rank_offset": rank_offset,
            "world_size": world_size,
            "group_name": self._weight_group,
            "backend": "gloo" if server["device"] == "cpu" else "nccl",
        }
        await self._post("/init_weights_update_group", payload, timeout_s + CONTROL_TIMEOUT_S)

    async def start_update(self, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        self._keeps_digests = False
        await self._post("/begin_weight_update", {}, timeout_s)

    async def update_weights(
        self, info: dict[str, Any], timeout_s: float = CONTROL_TIMEOUT_S
    ) -> None:
        if info.get("wants_digests") and not self._keeps_digests:
            await self.command("keep_digests", {}, timeout_s)
            self._keeps_digests = True
        payload = {key: info[key] for key in ("names", "dtypes", "shapes")}
        await self._load(payload | {"flush_cache": False}, timeout_s)

    async def finish_update(self, version: int, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        # An update of no tensors, for the sake of its flush: the KV cache of the old weights.
        nothing: dict[str, Any] = {"names": [], "dtypes": [], "shapes": [], "flush_cache": True}
        await self._load(nothing, timeout_s)
        await self._post("/end_weight_update", {}, timeout_s)
        await self.set_version(version, timeout_s)

    async def cancel_update(self, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        with _refusals_ignored():  # no update is open
            await self._post("/end_weight_update", {}, timeout_s)
        await self.set_version(NO_VERSION, timeout_s)

    async def weight_digests(self, timeout_s: float = CONTROL_TIMEOUT_S) -> list[dict[str, int]]:
        return await self.command("digests", {}, timeout_s)

    async def _load(self, payload: dict[str, Any], timeout_s: float) -> None:
        assert self._weight_group is not None, "init_weight_group comes first"
        # An update of no tensors has no message, so it is not a bucket.
        load_format = "flattened_bucket" if payload["names"] else None
        payload |= {"group_name": self._weight_group, "load_format": load_format}
        await self._post("/update_weights_from_distributed", payload, timeout_s + CONTROL_TIMEOUT_S)

    async def _leave_weight_group(self, timeout_s: float) -> None:
        name, self._weight_group = self._weight_group, None
        if name is None:
            return
        with _refusals_ignored():  # it was never made, or is broken
            await self._post("/destroy_weights_update_group", {"group_name": name}, timeout_s)

    async def _post(self, path: str, payload: dict[str, Any], timeout_s: float) -> Any:
        return await self._request("POST", path, payload, timeout_s=timeout_s)


def group_name(master_port: int) -> str:
    """Of the weight group that meets at a port. SGLang refuses a name that is taken, and a group
    that could not be left keeps its own."""
    return f"megarl-{master_port}"


@contextmanager
def _refusals_ignored() -> Iterator[None]:
    try:
        yield
    except (EngineTimeout, ConnectionBroken):
        raise
    except EngineError as error:
        logger.info("refused, as it may be: %s", error)


def generate_payload(
    request: ModelRequest, gconfig: GenerationHyperparameters, remaining: int
) -> dict[str, Any]:
    """JSON body that continues `request.input_ids` by at most `remaining` tokens.

    Raises:
      ValueError: there is nothing to continue, or no token to ask for, or SGLang would not do
        what is asked.
    """
    if not request.input_ids or remaining < 1:
        raise ValueError(
            f"request {request.rid}: {len(request.input_ids)} input tokens and {remaining} to "
            "generate; both must be >= 1"
        )
    if gconfig.ignore_eos and gconfig.stop_token_ids:
        raise ValueError(
            f"request {request.rid}: with ignore_eos SGLang does not stop at stop_token_ids "
            f"{gconfig.stop_token_ids} either"
        )
    sampling: dict[str, Any] = {
        "max_new_tokens": remaining,
        "min_new_tokens": min(gconfig.min_new_tokens, remaining),
        "temperature": 0.0 if gconfig.greedy else gconfig.temperature,
        "top_p": gconfig.top_p,
        "top_k": -1 if gconfig.top_k >= _ALL_TOKENS else gconfig.top_k,
        "frequency_penalty": gconfig.frequency_penalty,
        "ignore_eos": gconfig.ignore_eos,
        "stop_token_ids": gconfig.stop_token_ids,
    }
    if gconfig.stop:
        sampling["stop"] = gconfig.stop
        sampling["skip_special_tokens"] = gconfig.skip_special_tokens
    if gconfig.seed is not None:
        sampling["sampling_seed"] = gconfig.seed
    # No `rid`: the server makes one of a fixed length. It ends a request whose connection broke
    # by the prefix of its id, and refuses an id that is under way, as that of a retry may be.
    return {
        "input_ids": request.input_ids,
        "sampling_params": sampling,
        "return_logprob": True,
    }


def parse_generate(answer: Any) -> GenerateChunk:
    """The tokens of `answer`. EngineError if one lacks a logprob or a version."""
    try:
        tokens = answer["output_ids"] or []
        meta = answer["meta_info"]
        # A request that was ended before its first token has neither of these.
        scored = meta.get("output_token_logprobs") or []
        versions = token_versions(meta.get("weight_versions") or [], len(tokens))
        finish = meta["finish_reason"]
        if finish["type"] == "abort" and (status := finish.get("status_code")) is not None:
            raise refusal(f"status {status}: {finish.get('message')}", status)
        logprobs, named = [entry[0] for entry in scored], [entry[1] for entry in scored]
        chunk = checked_chunk(tokens, logprobs, versions, finish["type"])
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise EngineError(f"not an answer of {GENERATE_PATH}: {error!r}") from error
    if named != tokens:
        raise EngineError(f"tokens {tokens} came with the logprobs of {named}")
    return chunk
