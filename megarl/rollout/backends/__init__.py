"""Inference engines behind `megarl.rollout.client.ServerClient`."""

from typing import Literal

from megarl.rollout.backends.sglang import SGLangClient
from megarl.rollout.backends.vllm import VLLMClient
from megarl.rollout.client import ServerClient


def make_client(
    backend: Literal["vllm", "sglang"], address: str, *, request_timeout_s: float, retries: int
) -> ServerClient:
    """The client of one server.

    Args:
      backend: `rollout.backend`, for an address that does not name its engine.
      address: `HOST:PORT`, `http://HOST:PORT`, `vllm://HOST:PORT` or `sglang://HOST:PORT`.
    """
    scheme, separator, rest = address.partition("://")
    if separator and scheme in ("vllm", "sglang"):
        backend, address = scheme, rest  # type: ignore[assignment]
    engine = SGLangClient if backend == "sglang" else VLLMClient
    return engine(address, request_timeout_s=request_timeout_s, retries=retries)
