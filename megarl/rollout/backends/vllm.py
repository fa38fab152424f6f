"""vLLM 0.32: its token-in-token-out endpoint and its control routes.

One request asks for one sample. Every generated token comes back with its logprob under the
distribution it was sampled from (the server runs with `--logprobs-mode processed_logprobs`)
and with the version of the weights that sampled it.
"""

import asyncio
import logging
import time
from typing import Any

from megarl.config.schema import GenerationHyperparameters
from megarl.errors import EngineError, EngineTimeout
from megarl.rollout.api import NO_VERSION, GenerateChunk, ModelRequest
from megarl.rollout.backends.answers import checked_chunk, parse_version, token_versions
from megarl.rollout.client import (
    CONTROL_TIMEOUT_S,
    PauseMode,
    Refused,
    ServerClient,
    results_of,
)

logger = logging.getLogger(__name__)

GENERATE_PATH = "/inference/v1/generate"
COMPLETIONS_PATH = "/v1/completions"

_NO_SUCH_ROUTE = (403, 404)
_TOKENS_MADE = "vllm:generation_tokens_total"
_COUNTER_POLL_S = 5.0
_ALL_TOKENS = GenerationHyperparameters().top_k


class VLLMClient(ServerClient):
    """A vLLM server; what needs megarl's plugin in it is in megarl/bridge/engines/vllm.py.

    A server without GENERATE_PATH (it was started without `--enable-scale-out`, or is older) is
    asked at COMPLETIONS_PATH. That names no versions, so all tokens of an answer must be of one:
    requests end at a pause, and one that a pause overtook is sent again.
    """

    def __init__(self, address: str, *, request_timeout_s: float, retries: int) -> None:
        super().__init__(address, request_timeout_s=request_timeout_s, retries=retries)
        self._names_versions = True
        self._model = ""
        self._version: int | None = None
        """Of all tokens until the next pause; where answers name none."""
        self._resumed = asyncio.Event()
        self._resumed.set()

    async def _generate(
        self, request: ModelRequest, gconfig: GenerationHyperparameters, remaining: int
    ) -> GenerateChunk:
        payload = generate_payload(request, gconfig, remaining)
        while self._names_versions:
            try:
                return self._read(parse_generate, await self._ask(GENERATE_PATH, payload))
            except Refused as error:
                if error.status not in _NO_SUCH_ROUTE:
                    raise
                await self._go_without_versions(error)
        payload = completions_payload(request, gconfig, remaining, self._model)
        while True:
            await self._resumed.wait()
            num_pauses, version = self.num_pauses, self._version
            if version is None:
                version = await self.weight_version()
                if num_pauses != self.num_pauses:
                    continue
                self._version = version
            answer = await self._ask(COMPLETIONS_PATH, payload)
            is_in_first_pause = num_pauses + 1 == self.num_pauses and not self._resumed.is_set()
            if num_pauses == self.num_pauses or is_in_first_pause:
                return self._read(parse_completions, answer, version)

    async def _ask(self, path: str, payload: dict[str, Any]) -> Any:
        return await self._request(
            "POST", path, payload, timeout_s=self.request_timeout_s, keep_alive=True
        )

    async def _go_without_versions(self, error: Refused) -> None:
        models = await self._request("GET", "/v1/models", timeout_s=CONTROL_TIMEOUT_S)
        if self._names_versions:
            logger.warning("%s; %s is used instead", error, COMPLETIONS_PATH)
        self._model = self._read(lambda: str(models["data"][0]["id"]))
        self._names_versions = False

    async def _pause(self, mode: PauseMode, timeout_s: float) -> None:
        self._resumed.clear()
        self._version = None
        mode = mode if self._names_versions else "abort"
        await self._request("POST", f"/pause?mode={mode}&clear_cache=true", timeout_s=timeout_s)

    async def _resume(self, timeout_s: float) -> None:
        self._resumed.set()  # before the server can answer with the new weights
        await self._request("POST", "/resume", timeout_s=timeout_s)

    async def check_engine(self, timeout_s: float) -> None:
        # By its counter: a token of our own would wait behind all that is queued. A server without
        # one (`--disable-log-stats`) cannot be told from one that is only busy.
        deadline = time.monotonic() + timeout_s
        first = made = await self._tokens_made(timeout_s)
        while made is not None and made == first:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise EngineTimeout(f"{self.address}: no token within {timeout_s:g} s")
            await asyncio.sleep(min(left_s, _COUNTER_POLL_S))
            made = await self._tokens_made(timeout_s)

    async def _tokens_made(self, timeout_s: float) -> float | None:
        text = await self._request("GET", "/metrics", timeout_s=timeout_s, as_text=True)
        return self._read(tokens_made, text)

    async def make_token(self, timeout_s: float) -> None:
        request = ModelRequest(input_ids=[0])
        payload = generate_payload(request, GenerationHyperparameters(greedy=True), 1)
        path = GENERATE_PATH
        if not self._names_versions:
            path, payload = COMPLETIONS_PATH, {"model": self._model, "prompt": [0], "max_tokens": 1}
        await self._request("POST", path, payload, timeout_s=timeout_s)

    async def world_size(self, timeout_s: float = CONTROL_TIMEOUT_S) -> int:
        answer = await self._request("GET", "/get_world_size", timeout_s=timeout_s)
        return self._read(lambda: int(answer["world_size"]))

    async def weight_version(self, timeout_s: float = CONTROL_TIMEOUT_S) -> int:
        answer = await self._request("GET", "/weight_info", timeout_s=timeout_s)
        return self._read(lambda: parse_version(answer["weight_version"]))

    async def set_version(self, version: int, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        await self._request(
            "POST", "/update_weight_version", {"new_version": str(version)}, timeout_s=timeout_s
        )
        self._version = None

    async def load_from_disk(self, path: str, version: int, timeout_s: float) -> None:
        # `--load-format dummy` also governs a reload, and its loader reads no files (vLLM 0.32:
        # NotImplementedError, status 500).
        overrides = {"load_config": {"load_format": "safetensors"}}
        await self._collective_rpc("update_config", {"overrides": overrides}, timeout_s)
        await self._collective_rpc("reload_weights", {"weights_path": path}, timeout_s)
        await self.set_version(version, timeout_s=timeout_s)

    async def command(
        self, name: str, arguments: dict[str, Any], timeout_s: float = CONTROL_TIMEOUT_S
    ) -> list[Any]:
        answers = await self._collective_rpc(
            "megarl_command", {"name": name, "arguments": arguments}, timeout_s
        )
        return results_of(self.address, name, answers)

    async def has_agent(self, timeout_s: float = CONTROL_TIMEOUT_S) -> bool:
        # Not by trying a command: a method that is not there raises in every worker.
        answer = await self._request("GET", "/server_info?config_format=json", timeout_s=timeout_s)

        def is_ours() -> bool:
            transfer = answer["vllm_config"].get("weight_transfer_config") or {}
            return bool(transfer.get("backend") == "megarl")

        return self._read(is_ours)

    # ------------------------------------------------------------------ gathered broadcast

    async def init_weight_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        timeout_s: float,
    ) -> None:
        init_info = {
            "master_address": master_address,
            "master_port": master_port,
            "rank_offset": rank_offset,
            "world_size": world_size,
            "timeout_s": timeout_s,
        }
        await self._request(
            "POST",
            "/init_weight_transfer_engine",
            {"init_info": init_info},
            # The worker gives up first: it knows whom it waited for.
            timeout_s=timeout_s + CONTROL_TIMEOUT_S,
        )
        await self.command("check_update", {}, timeout_s)

    async def close_weight_group(self, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        await self._request("POST", "/shutdown_weight_transfer_engine", timeout_s=timeout_s)

    async def start_update(self, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        await self._request("POST", "/start_weight_update", timeout_s=timeout_s)

    async def update_weights(
        self, info: dict[str, Any], timeout_s: float = CONTROL_TIMEOUT_S
    ) -> None:
        await self._request(
            "POST",
            "/update_weights",
            {"update_info": info},
            timeout_s=timeout_s + CONTROL_TIMEOUT_S,
        )

    async def finish_update(self, version: int, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        await self.command("check_update", {}, timeout_s)  # a worker that failed told nobody yet
        await self._request(
            "POST", "/finish_weight_update", {"weight_version": str(version)}, timeout_s=timeout_s
        )

    async def cancel_update(self, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        # Layers that were complete keep the new weights, the others the old ones: nobody pushed
        # this mixture.
        await self.command("cancel_update", {}, timeout_s)
        await self.set_version(NO_VERSION, timeout_s=timeout_s)

    async def weight_digests(self, timeout_s: float = CONTROL_TIMEOUT_S) -> list[dict[str, int]]:
        answers = await self._collective_rpc("megarl_weight_digests", {}, timeout_s)
        return results_of(self.address, "weight_digests", answers)

    async def _collective_rpc(
        self, method: str, kwargs: dict[str, Any], timeout_s: float
    ) -> list[Any]:
        """A method of every worker; what each returned."""
        answer = await self._request(
            "POST", "/collective_rpc", {"method": method, "kwargs": kwargs}, timeout_s=timeout_s
        )
        return self._read(lambda: list(answer["results"]))


def generate_payload(
    request: ModelRequest, gconfig: GenerationHyperparameters, remaining: int
) -> dict[str, Any]:
    """JSON body that continues `request.input_ids` by at most `remaining` tokens.

    Raises:
      ValueError: there is nothing to continue, or no token to ask for.
    """
    if not request.input_ids or remaining < 1:
        raise ValueError(
            f"request {request.rid}: {len(request.input_ids)} input tokens and {remaining} to "
            "generate; both must be >= 1"
        )
    sampling: dict[str, Any] = {
        "max_tokens": remaining,
        "min_tokens": min(gconfig.min_new_tokens, remaining),
        "temperature": 0.0 if gconfig.greedy else gconfig.temperature,
        "top_p": gconfig.top_p,
        "top_k": 0 if gconfig.top_k >= _ALL_TOKENS else gconfig.top_k,
        "frequency_penalty": gconfig.frequency_penalty,
        "ignore_eos": gconfig.ignore_eos,
        "stop_token_ids": gconfig.stop_token_ids,
        # Only the sampled token's own: 1 would also sort the vocabulary for the likeliest.
        "logprobs": 0,
        # Only stop strings need text; building it costs the server more than a small model's
        # forward pass.
        "detokenize": bool(gconfig.stop),
    }
    if gconfig.stop:
        sampling["stop"] = gconfig.stop
        sampling["skip_special_tokens"] = gconfig.skip_special_tokens
    if gconfig.seed is not None:
        sampling["seed"] = gconfig.seed
    return {"token_ids": request.input_ids, "sampling_params": sampling}


def completions_payload(
    request: ModelRequest, gconfig: GenerationHyperparameters, remaining: int, model: str
) -> dict[str, Any]:
    """`generate_payload` for COMPLETIONS_PATH, of the model that the server calls `model`."""
    sampling = generate_payload(request, gconfig, remaining)["sampling_params"]
    del sampling["detokenize"]  # that route decides it
    return {
        "model": model,
        "prompt": request.input_ids,
        "return_token_ids": True,
        "add_special_tokens": False,
        **sampling,
    }


def parse_completions(answer: Any, version: int) -> GenerateChunk:
    """The one choice of `answer`, all of it of `version`. EngineError if a token has no logprob."""
    try:
        (choice,) = answer["choices"]
        tokens = choice["token_ids"] or []
        logprobs = (choice["logprobs"] or {}).get("token_logprobs") or []
        return checked_chunk(tokens, logprobs, [version] * len(tokens), choice["finish_reason"])
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise EngineError(f"not an answer of {COMPLETIONS_PATH}: {error!r}") from error


def tokens_made(metrics: str) -> float | None:
    """By all engines of a server since it began, of its /metrics; None if they do not say."""
    lines = [line for line in metrics.splitlines() if line.startswith(_TOKENS_MADE)]
    return sum(float(line.rpartition(" ")[2]) for line in lines) if lines else None


def parse_generate(answer: Any) -> GenerateChunk:
    """The one choice of `answer`. EngineError if a token lacks a logprob or a version."""
    try:
        (choice,) = answer["choices"]
        tokens = choice["token_ids"] or []
        content = (choice["logprobs"] or {}).get("content") or []
        logprobs = [entry["logprob"] for entry in content]
        versions = token_versions(choice["weight_versions"] or [], len(tokens))
        stop_reason = choice["finish_reason"]
        return checked_chunk(tokens, logprobs, versions, stop_reason)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise EngineError(f"not an answer of {GENERATE_PATH}: {error!r}") from error
