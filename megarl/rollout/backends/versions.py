"""Versions of weights as servers write them; vLLM and SGLang use the same words."""

from typing import Any

from megarl.rollout.api import NO_VERSION

_INITIAL_VERSION = "default"  # what both call the weights they started with


def parse_version(text: str) -> int:
    """A version as the server writes it. ValueError if no push of ours wrote it."""
    return NO_VERSION if text == _INITIAL_VERSION else int(text)


def token_versions(spans: list[dict[str, Any]]) -> list[int]:
    """`[{version, start, end}]`, contiguous from token 0, as one version a token."""
    versions: list[int] = []
    for span in spans:
        if span["start"] != len(versions):
            raise ValueError(f"weight_versions {spans} leave out or repeat a token")
        versions += [parse_version(span["version"])] * (span["end"] - span["start"])
    return versions
