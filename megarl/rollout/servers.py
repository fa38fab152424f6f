"""How an inference server is started, and when it is ready.

A command is argv and environment, nothing is started here. Servers listen on the address they
are given and nowhere else; their control routes (`VLLM_SERVER_DEV_MODE`) have no password.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import aiohttp

from megarl.config.schema import RolloutParallelConfig, VLLMConfig
from megarl.errors import EngineError, EngineTimeout

SERVED_NAME = "actor"
PYTHON_ENV = "MEGARL_ENGINE_PYTHON"
"""The Python of the servers' environment, when it is not the trainer's."""
_POLL_S = 0.25
_PROBE_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class ServerCommand:
    """`env` is to be added to the starter's own environment."""

    argv: list[str]
    env: dict[str, str]


def vllm_command(
    model_path: str,
    host: str,
    port: int,
    *,
    vllm: VLLMConfig,
    parallel: RolloutParallelConfig,
    device: Literal["cpu", "cuda"],
    load_format: Literal["dummy", "auto"],
    weight_backend: bool,
    server_index: int,
    cpu_threads: int = 1,
) -> ServerCommand:
    """One vLLM server of `parallel.tp * parallel.pp` workers.

    Args:
      model_path: folder in HF format; `dummy` reads its config and tokenizer only.
      weight_backend: take weights over a process group; needs megarl in the server's
        environment (`pip install --no-deps`).
      server_index: of the run's servers; their sampling seeds differ.
      cpu_threads: of each worker, on a machine without GPUs.
    """
    argv = [
        os.environ.get(PYTHON_ENV) or sys.executable,
        *("-m", "vllm.entrypoints.launchers.api_server.entry"),
        *("--model", model_path),
        *("--served-model-name", SERVED_NAME),
        *("--host", host),
        *("--port", str(port)),
        *("--load-format", load_format),
        *("--dtype", vllm.dtype),
        *("--seed", str(vllm.seed + server_index)),
        *("--tensor-parallel-size", str(parallel.tp)),
        *("--pipeline-parallel-size", str(parallel.pp)),
        *("--max-num-seqs", str(vllm.max_num_seqs)),
        "--enable-prefix-caching",
        # /inference/v1/generate answers 403 without it.
        "--enable-scale-out",
        # The default, raw_logprobs, is of the distribution before the temperature.
        *("--logprobs-mode", "processed_logprobs"),
        "--disable-uvicorn-access-log",
        "--disable-log-stats",
        "--disable-fastapi-docs",
    ]
    env = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if vllm.max_model_len is not None:
        argv += ["--max-model-len", str(vllm.max_model_len)]
    if weight_backend:
        argv += ["--weight-transfer-config", json.dumps({"backend": "megarl"})]
    if Path(model_path).is_dir():
        env["HF_HUB_OFFLINE"] = "1"
    if device == "cpu":
        on_cpu, cpu_env = _on_cpu(vllm, parallel, cpu_threads)
        argv, env = argv + on_cpu, env | cpu_env
    else:
        argv += ["--gpu-memory-utilization", str(vllm.gpu_memory_utilization)]
        if vllm.enforce_eager:
            argv.append("--enforce-eager")
    return ServerCommand([*argv, *vllm.extra_args], env)


def _on_cpu(
    vllm: VLLMConfig, parallel: RolloutParallelConfig, cpu_threads: int
) -> tuple[list[str], dict[str, str]]:
    argv = [
        *("--kv-cache-memory-bytes", str(vllm.cpu_kvcache_gib << 30)),
        # Compiling takes minutes and wins nothing for models that a CPU can serve.
        "--enforce-eager",
        # A seeded request whose prompt is cut into chunks ends the engine of vLLM 0.32 on a CPU:
        # "RuntimeError: CPU Generator does not use offset".
        "--no-enable-chunked-prefill",
    ]
    env = {
        # The default binds each worker to a NUMA node and reserves a core: it refuses tp 2 on
        # one node, and would bind the workers of two servers to the same cores.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(cpu_threads),
    }
    if parallel.tp * parallel.pp == 1:
        # The worker inside the engine's process: two processes import vLLM, not three, which
        # halves the start (32 s to 16 s) and saves a third of the CPU time of short answers.
        # vLLM's CPU platform grants it only with this variable, for OMP_NUM_THREADS's sake.
        argv += ["--distributed-executor-backend", "uni"]
        env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return argv, env


async def wait_healthy(
    address: str, timeout_s: float, is_alive: Callable[[], str | None] = lambda: None
) -> None:
    """Returns once the server at `address` can serve.

    Args:
      is_alive: how the server's process ended, None while it runs.

    Raises:
      EngineError: the process ended.
      EngineTimeout: not ready within `timeout_s`.
    """
    url = address if "://" in address else f"http://{address}"
    deadline = time.monotonic() + timeout_s
    probe_timeout = aiohttp.ClientTimeout(total=_PROBE_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=probe_timeout) as session:
        while True:
            try:
                async with session.get(f"{url}/health") as response:
                    if response.status == 200:
                        return
                    state = f"status {response.status}"
            except (aiohttp.ClientError, TimeoutError) as error:
                state = repr(error)
            if (ending := is_alive()) is not None:
                raise EngineError(f"{url}: the server ended before it was ready: {ending}")
            if time.monotonic() > deadline:
                raise EngineTimeout(f"{url}: not ready within {timeout_s:g} s; last: {state}")
            await asyncio.sleep(_POLL_S)
