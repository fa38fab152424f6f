"""How an inference server is started, and when it is ready.

A command is argv and environment, nothing is started here. Servers listen on the address they
are given and nowhere else; their control routes (vLLM's with `VLLM_SERVER_DEV_MODE`, SGLang's
always) have no password.
"""

import asyncio
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import aiohttp

from megarl.config.servers import RolloutParallelConfig, SGLangConfig, VLLMConfig
from megarl.errors import ConfigError, EngineError, EngineTimeout

SERVED_NAME = "actor"
PYTHON_ENV = "MEGARL_ENGINE_PYTHON"
"""The Python of the servers' environment, if `engine_python` would not find it."""
SGLANG_ENVIRONMENT = ".venv-sglang"
"""Folder beside the trainer's own environment, where `make sglang` puts SGLang's."""
SGLANG_CPU_CACHE_TOKENS = 32768
_SGLANG_CPU_SERVER = str(Path(__file__).parents[1] / "bridge/engines/sglang_cpu/server.py")
_POLL_S = 0.25
_PROBE_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class ServerCommand:
    """`env` is to be added to the starter's own environment."""

    argv: list[str]
    env: dict[str, str]


def engine_python(backend: Literal["vllm", "sglang"]) -> str:
    """The Python that a server is started with.

    MEGARL_ENGINE_PYTHON if it is set; for SGLang, the environment `.venv-sglang` beside the
    trainer's if there is one; else the trainer's own.

    Raises:
      ConfigError: the backend is in none of them.
    """
    if python := os.environ.get(PYTHON_ENV):
        return python
    beside = Path(sys.prefix).parent / SGLANG_ENVIRONMENT / "bin" / "python"
    if backend == "sglang" and beside.is_file():
        return str(beside)
    if importlib.util.find_spec(backend) is None:
        also = f" nor in {beside.parents[1]} (make sglang)" if backend == "sglang" else ""
        raise ConfigError(
            f"rollout.backend: {backend} is not in the environment {sys.prefix}{also}; "
            f"{PYTHON_ENV} can name another Python"
        )
    return sys.executable


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
        engine_python("vllm"),
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
        "--disable-fastapi-docs",
    ]
    env = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        # The counters are read for whether the engine makes tokens; their log is for nobody.
        "VLLM_LOG_STATS_INTERVAL": "3600",
    }
    if vllm.max_model_len is not None:
        argv += ["--max-model-len", str(vllm.max_model_len)]
    if weight_backend:
        argv += ["--weight-transfer-config", json.dumps({"backend": "megarl"})]
    if Path(model_path).is_dir():
        env["HF_HUB_OFFLINE"] = "1"
    if device == "cpu":
        on_cpu, cpu_env = _vllm_on_cpu(vllm, parallel, cpu_threads)
        argv, env = argv + on_cpu, env | cpu_env
    else:
        argv += ["--gpu-memory-utilization", str(vllm.gpu_memory_utilization)]
        if vllm.enforce_eager:
            argv.append("--enforce-eager")
    return ServerCommand([*argv, *vllm.extra_args], env)


def _vllm_on_cpu(
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


def sglang_command(
    model_path: str,
    host: str,
    port: int,
    *,
    sglang: SGLangConfig,
    parallel: RolloutParallelConfig,
    device: Literal["cpu", "cuda"],
    load_format: Literal["dummy", "auto"],
    server_index: int,
    cpu_threads: int = 1,
) -> ServerCommand:
    """One SGLang server of `parallel.tp` workers. Arguments as of `vllm_command`;
    megarl's plugin is there if megarl is in the server's environment.

    Raises:
      ConfigError: SGLang cannot do this on a CPU, or is not installed.
    """
    assert parallel.pp == 1, "megarl.config.checks lets no other through"
    argv = [
        engine_python("sglang"),
        *(["-m", "sglang.launch_server"] if device == "cuda" else [_SGLANG_CPU_SERVER]),
        *("--model-path", model_path),
        *("--served-model-name", SERVED_NAME),
        *("--host", host),
        *("--port", str(port)),
        *("--load-format", load_format),
        *("--dtype", sglang.dtype),
        *("--random-seed", str(sglang.random_seed + server_index)),
        *("--tp-size", str(parallel.tp)),
        *("--max-running-requests", str(sglang.max_running_requests)),
        *("--log-level-http", "warning"),
    ]
    env = {
        # A probe that generates hangs for 20 s while the server is paused, then says 503.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
    }
    if sglang.context_length is not None:
        argv += ["--context-length", str(sglang.context_length)]
    cache_tokens = sglang.max_total_tokens
    if cache_tokens is None and device == "cpu":
        cache_tokens = SGLANG_CPU_CACHE_TOKENS
    if cache_tokens is not None:
        argv += ["--max-total-tokens", str(cache_tokens)]
    if sglang.mem_fraction_static is not None:
        argv += ["--mem-fraction-static", str(sglang.mem_fraction_static)]
    if sglang.enable_deterministic_inference:
        argv.append("--enable-deterministic-inference")
    if sglang.disable_cuda_graph or device == "cpu":
        argv.append("--disable-cuda-graph")
    if Path(model_path).is_dir():
        env["HF_HUB_OFFLINE"] = "1"
    if device == "cpu":
        on_cpu, cpu_env = _sglang_on_cpu(sglang, parallel, cpu_threads)
        argv, env = argv + on_cpu, env | cpu_env
    else:
        env |= nccl_settings()
    return ServerCommand([*argv, *sglang.extra_args], env)


def nccl_settings() -> dict[str, str]:
    """What SGLang 0.5.23 sets for its NCCL unless it is set; who is in a group with its workers
    needs the same."""
    return {name: os.environ.get(name, "0") for name in ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE")}


def _sglang_on_cpu(
    sglang: SGLangConfig, parallel: RolloutParallelConfig, cpu_threads: int
) -> tuple[list[str], dict[str, str]]:
    if sglang.enable_deterministic_inference:
        raise ConfigError(
            "sglang.enable_deterministic_inference: true needs a GPU: none of SGLang's "
            "deterministic attention backends runs on a CPU"
        )
    argv = [
        *("--device", "cpu"),
        # What SGLang would choose are kernels that are not built here.
        *("--attention-backend", "torch_native"),
        *("--sampling-backend", "pytorch"),
        *("--grammar-backend", "none"),
        # Its second stream is a GPU's.
        "--disable-overlap-schedule",
        "--skip-server-warmup",
        # Without work its scheduler would poll, with all of a core.
        "--sleep-on-idle",
    ]
    env = {
        "SGLANG_USE_CPU_ENGINE": "1",
        # One entry a worker, or SGLang 0.5.23 refuses more workers than the machine has NUMA
        # nodes. It binds no thread to them: that takes its own kernels.
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(i) for i in range(parallel.tp)),
        "OMP_NUM_THREADS": str(cpu_threads),
    }
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
