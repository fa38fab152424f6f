"""The command line and environment of a server; vLLM itself is started in test_generate."""

import sys

import pytest

from megarl.config.schema import RolloutParallelConfig, VLLMConfig
from megarl.rollout.servers import ServerCommand, vllm_command


def command(model_path="org/model", *, device="cuda", vllm=None, **options) -> ServerCommand:
    arguments = {
        "parallel": RolloutParallelConfig(),
        "load_format": "dummy",
        "weight_backend": True,
        "server_index": 0,
    }
    vllm = vllm or VLLMConfig()
    return vllm_command(
        model_path, "127.0.0.1", 8000, vllm=vllm, device=device, **(arguments | options)
    )


def value_of(argv: list[str], flag: str) -> str:
    assert argv.count(flag) == 1
    return argv[argv.index(flag) + 1]


def test_what_every_server_needs():
    made = command()
    assert made.argv[:2] == [sys.executable, "-m"]
    assert value_of(made.argv, "--host") == "127.0.0.1"
    assert value_of(made.argv, "--port") == "8000"
    assert value_of(made.argv, "--logprobs-mode") == "processed_logprobs"
    assert "--enable-scale-out" in made.argv
    assert made.env["VLLM_SERVER_DEV_MODE"] == "1"
    assert value_of(made.argv, "--weight-transfer-config") == '{"backend": "megarl"}'


def test_a_server_without_the_weight_backend():
    made = command(weight_backend=False, load_format="auto")
    assert "--weight-transfer-config" not in made.argv
    assert value_of(made.argv, "--load-format") == "auto"


def test_the_hub_is_asked_only_for_a_model_that_is_not_here(tmp_path):
    assert "HF_HUB_OFFLINE" not in command("org/model").env
    assert command(str(tmp_path)).env["HF_HUB_OFFLINE"] == "1"


def test_servers_sample_with_different_seeds():
    vllm = VLLMConfig(seed=5)
    seeds = [value_of(command(vllm=vllm, server_index=i).argv, "--seed") for i in range(3)]
    assert seeds == ["5", "6", "7"]


@pytest.mark.parametrize(("tp", "pp", "alone"), [(1, 1, True), (2, 1, False), (1, 2, False)])
def test_on_a_cpu(tp, pp, alone):
    made = command(
        device="cpu",
        parallel=RolloutParallelConfig(tp=tp, pp=pp),
        vllm=VLLMConfig(cpu_kvcache_gib=3),
        cpu_threads=2,
    )
    assert "--enforce-eager" in made.argv
    assert "--no-enable-chunked-prefill" in made.argv
    assert "--gpu-memory-utilization" not in made.argv
    assert value_of(made.argv, "--kv-cache-memory-bytes") == str(3 << 30)
    assert value_of(made.argv, "--tensor-parallel-size") == str(tp)
    assert value_of(made.argv, "--pipeline-parallel-size") == str(pp)
    assert made.env["OMP_NUM_THREADS"] == "2"
    assert made.env["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert ("--distributed-executor-backend" in made.argv) == alone
    assert ("VLLM_ENABLE_V1_MULTIPROCESSING" in made.env) == alone


def test_on_a_gpu():
    made = command(vllm=VLLMConfig(gpu_memory_utilization=0.5, max_model_len=100))
    assert value_of(made.argv, "--gpu-memory-utilization") == "0.5"
    assert value_of(made.argv, "--max-model-len") == "100"
    assert "--enforce-eager" not in made.argv
    assert "OMP_NUM_THREADS" not in made.env
    assert "--enforce-eager" in command(vllm=VLLMConfig(enforce_eager=True)).argv


def test_the_users_arguments_come_last():
    assert command(vllm=VLLMConfig(extra_args=["--dtype", "half"])).argv[-2:] == ["--dtype", "half"]


def test_the_engines_own_python(monkeypatch):
    monkeypatch.setenv("MEGARL_ENGINE_PYTHON", "/opt/vllm/bin/python")
    assert command().argv[0] == "/opt/vllm/bin/python"
