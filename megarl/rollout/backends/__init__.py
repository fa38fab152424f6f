"""Inference engines behind `megarl.rollout.client.ServerClient`."""

from typing import Literal

from megarl.rollout.backends.sglang import SGLangClient
from megarl.rollout.backends.vllm import VLLMClient
from megarl.rollout.client import ServerClient


def make_client(
    backend: Literal["vllm", "sglang"], address: str, *, request_timeout_s: float, retries: int
) -> ServerClient:
    """The client of one server of `rollout.backend`."""
    engine = SGLangClient if backend == "sglang" else VLLMClient
    return engine(address, request_timeout_s=request_timeout_s, retries=retries)
