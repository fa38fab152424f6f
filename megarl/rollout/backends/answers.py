"""What vLLM's and SGLang's answers have in common: versions as they write them, and the checks."""

from typing import Any

from megarl.errors import EngineError
from megarl.rollout.api import NO_VERSION, GenerateChunk

_INITIAL_VERSION = "default"  # what both call the weights they started with
_STOP_REASONS = ("stop", "length", "abort")
_NO_LOGPROB = -9999.0  # what vLLM writes for a token without one, or with nan
_MOST_LOGPROB = 1e-3
_MOST = (1 << 31) - 1
"""Token ids and versions are int32 from here on."""


def parse_version(text: str) -> int:
    """A version as the server writes it. ValueError if no push of ours wrote it."""
    return NO_VERSION if text == _INITIAL_VERSION else int(text)


def token_versions(spans: list[dict[str, Any]], count: int) -> list[int]:
    """`[{version, start, end}]`, contiguous from token 0 to `count`, as one version a token."""
    versions: list[int] = []
    for span in spans:
        start, end = span["start"], span["end"]
        if not len(versions) == start <= end <= count:
            raise ValueError(f"weight_versions {_short(spans)} are not those of {count} tokens")
        version = parse_version(span["version"])
        if not NO_VERSION <= version <= _MOST:
            raise ValueError(f"weight_versions {_short(spans)}: no push wrote {_short(version)}")
        versions += [version] * (end - start)
    return versions


def checked_chunk(
    tokens: Any, logprobs: list[Any], versions: list[int], stop_reason: Any
) -> GenerateChunk:
    """An answer whose every token has an id, a finite logprob and a version. Else EngineError."""
    count = len(tokens)
    if not count == len(logprobs) == len(versions):
        raise EngineError(
            f"{count} tokens came with {len(logprobs)} logprobs and {len(versions)} versions"
        )
    # Of all at once: a loop over tokens in Python is a third of an answer's time.
    if not (
        _are_of(tokens, {int}) and 0 <= min(tokens, default=0) <= max(tokens, default=0) <= _MOST
    ):
        index = next(i for i, token in enumerate(tokens) if not _is_token(token))
        raise EngineError(f"token {index} of {count} is {_short(tokens[index])}")
    if not (_are_of(logprobs, {float, int}) and all(map(_is_logprob, logprobs))):
        index = next(i for i, x in enumerate(logprobs) if not _is_logprob(x))
        raise EngineError(f"token {index} of {count} has logprob {_short(logprobs[index])}")
    if stop_reason not in _STOP_REASONS:
        raise EngineError(f"finish_reason {_short(stop_reason)} is none of {_STOP_REASONS}")
    if not tokens and stop_reason != "abort":
        raise EngineError(f"no token came, and finish_reason {stop_reason}")
    return GenerateChunk(tokens, list(map(float, logprobs)), versions, stop_reason)


def _are_of(values: list[Any], types: set[type]) -> bool:
    return set(map(type, values)) <= types


def _is_token(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MOST


def _is_logprob(value: Any) -> bool:
    # nan compares as False. Sums in float32 may end a little above 0.
    return type(value) in (float, int) and _NO_LOGPROB < value <= _MOST_LOGPROB


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + " ..."
