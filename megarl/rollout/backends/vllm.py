"""vLLM 0.32: its token-in-token-out endpoint and its control routes.

One request asks for one sample. Every generated token comes back with its logprob under the
distribution it was sampled from (the server runs with `--logprobs-mode processed_logprobs`)
and with the version of the weights that sampled it.
"""

from typing import Any

from megarl.config.schema import GenerationHyperparameters
from megarl.errors import EngineError
from megarl.rollout.api import NO_VERSION, GenerateChunk, ModelRequest
from megarl.rollout.backends.versions import parse_version, token_versions
from megarl.rollout.client import (
    CONTROL_TIMEOUT_S,
    PauseMode,
    ServerClient,
    results_of,
)

GENERATE_PATH = "/inference/v1/generate"

_ALL_TOKENS = GenerationHyperparameters().top_k
_NO_LOGPROB = -9999.0  # what vLLM writes for a token without one, or with nan
_STOP_REASONS = ("stop", "length", "abort")


class VLLMClient(ServerClient):
    """A vLLM server in which megarl's plugin is, see megarl/bridge/engines/vllm.py."""

    def _generation(
        self, request: ModelRequest, gconfig: GenerationHyperparameters, remaining: int
    ) -> tuple[str, dict[str, Any]]:
        return generate_payload(request, gconfig, remaining)

    def _chunk(self, answer: Any) -> GenerateChunk:
        return parse_generate(answer)

    async def pause(self, mode: PauseMode, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        await self._request("POST", f"/pause?mode={mode}&clear_cache=true", timeout_s=timeout_s)

    async def resume(self, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        await self._request("POST", "/resume", timeout_s=timeout_s)

    async def world_size(self, timeout_s: float = CONTROL_TIMEOUT_S) -> int:
        answer = await self._request("GET", "/get_world_size", timeout_s=timeout_s)
        return int(answer["world_size"])

    async def weight_version(self, timeout_s: float = CONTROL_TIMEOUT_S) -> int:
        answer = await self._request("GET", "/weight_info", timeout_s=timeout_s)
        return parse_version(answer["weight_version"])

    async def set_version(self, version: int, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        await self._request(
            "POST", "/update_weight_version", {"new_version": str(version)}, timeout_s=timeout_s
        )

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
        transfer = answer["vllm_config"].get("weight_transfer_config") or {}
        return bool(transfer.get("backend") == "megarl")

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
        answers: list[Any] = answer["results"]
        return answers


def generate_payload(
    request: ModelRequest, gconfig: GenerationHyperparameters, remaining: int
) -> tuple[str, dict[str, Any]]:
    """Path and JSON body that continue `request.input_ids` by at most `remaining` tokens.

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
    return GENERATE_PATH, {"token_ids": request.input_ids, "sampling_params": sampling}


def parse_generate(answer: dict[str, Any]) -> GenerateChunk:
    """The one choice of `answer`. EngineError if a token lacks a logprob or a version."""
    try:
        (choice,) = answer["choices"]
        tokens: list[int] = choice["token_ids"] or []
        content = (choice["logprobs"] or {}).get("content") or []
        logprobs = [float(entry["logprob"]) for entry in content]
        versions = token_versions(choice["weight_versions"] or [])
        stop_reason = choice["finish_reason"]
    except (KeyError, TypeError, ValueError) as error:
        raise EngineError(f"not an answer of {GENERATE_PATH}: {error!r}") from error
    if not len(tokens) == len(logprobs) == len(versions):
        raise EngineError(
            f"{len(tokens)} tokens came with {len(logprobs)} logprobs and {len(versions)} versions"
        )
    if _NO_LOGPROB in logprobs:
        raise EngineError(f"token {logprobs.index(_NO_LOGPROB)} of {len(tokens)} has no logprob")
    if stop_reason not in _STOP_REASONS:
        raise EngineError(f"finish_reason {stop_reason!r} is none of {_STOP_REASONS}")
    return GenerateChunk(tokens, logprobs, versions, stop_reason)
