"""What vLLM's and SGLang's answers have in common: versions as they write them, and the checks."""

import math
from typing import Any

from megarl.errors import EngineError
from megarl.rollout.api import NO_VERSION, GenerateChunk

_INITIAL_VERSION = "default"  # what both call the weights they started with
_STOP_REASONS = ("stop", "length", "abort")
_NO_LOGPROB = -9999.0  # what vLLM writes for a token without one, or with nan
_MOST = (1 << 31) - 1
"""Token ids and versions are int32 from here on."""


def parse_version(text: str) -> int:
    """A version as the server writes it. ValueError if no push of ours wrote it."""
    return NO_VERSION if text == _INITIAL_VERSION else int(text)


def token_versions(spans: list[dict[str, Any]]) -> list[int]:
    """`[{version, start, end}]`, contiguous from token 0, as one version a token."""
    versions: list[int] = []
    for span in spans:
        start, end = span["start"], span["end"]
        if start != len(versions) or not start <= end <= _MOST:
            raise ValueError(f"weight_versions {spans} leave out or repeat a token")
        versions += [parse_version(span["version"])] * (end - start)
    return versions


def checked_chunk(
    tokens: Any, logprobs: list[Any], versions: list[int], stop_reason: Any
) -> GenerateChunk:
    """An answer whose every token has an id, a finite logprob and a version. Else EngineError."""
    if not len(tokens) == len(logprobs) == len(versions):
        raise EngineError(
            f"{len(tokens)} tokens came with {len(logprobs)} logprobs and {len(versions)} versions"
        )
    for index, token in enumerate(tokens):
        if type(token) is not int or not 0 <= token <= _MOST:
            raise EngineError(f"token {index} of {len(tokens)} is {_short(token)}")
    for index, logprob in enumerate(logprobs):
        is_number = isinstance(logprob, float) or type(logprob) is int
        if not is_number or not math.isfinite(logprob) or logprob == _NO_LOGPROB:
            raise EngineError(f"token {index} of {len(tokens)} has logprob {_short(logprob)}")
    for version in versions:
        if not NO_VERSION <= version <= _MOST:
            raise EngineError(f"a token came with version {version}")
    if stop_reason not in _STOP_REASONS:
        raise EngineError(f"finish_reason {_short(stop_reason)} is none of {_STOP_REASONS}")
    if not tokens and stop_reason != "abort":
        raise EngineError(f"no token came, and finish_reason {stop_reason}")
    return GenerateChunk(tokens, [float(x) for x in logprobs], versions, stop_reason)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + " ..."
