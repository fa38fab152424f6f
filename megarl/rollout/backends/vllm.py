"""vLLM 0.32's token-in-token-out endpoint: requests made, answers read. Pure functions.

One request asks for one sample. Every generated token comes back with its logprob under the
distribution it was sampled from (the server runs with `--logprobs-mode processed_logprobs`)
and with the version of the weights that sampled it.
"""

from typing import Any, NamedTuple

from megarl.config.schema import GenerationHyperparameters
from megarl.errors import EngineError
from megarl.rollout.api import ModelRequest

GENERATE_PATH = "/inference/v1/generate"
NO_VERSION = -1
"""Version of weights that no push has brought: before the first one, or after a failed one."""

_ALL_TOKENS = GenerationHyperparameters().top_k
_INITIAL_VERSION = "default"  # what vLLM calls the weights it started with
_NO_LOGPROB = -9999.0  # what vLLM writes for a token without one, or with nan
_STOP_REASONS = ("stop", "length", "abort")


class GenerateChunk(NamedTuple):
    """Tokens of one answer; `stop_reason` abort means that the rest is still to be asked for."""

    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    stop_reason: str


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
        versions = _versions(choice["weight_versions"] or [])
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


def parse_version(text: str) -> int:
    """A version as the server writes it. ValueError if no push of ours wrote it."""
    return NO_VERSION if text == _INITIAL_VERSION else int(text)


def _versions(spans: list[dict[str, Any]]) -> list[int]:
    """`[{version, start, end}]`, contiguous from token 0, as one version a token."""
    versions: list[int] = []
    for span in spans:
        if span["start"] != len(versions):
            raise ValueError(f"weight_versions {spans} leave out or repeat a token")
        versions += [parse_version(span["version"])] * (span["end"] - span["start"])
    return versions
