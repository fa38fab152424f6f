"""The command line and environment of a server; SGLang itself is started in test_sglang."""

import sys
from pathlib import Path

import pytest

from megarl.config.schema import RolloutParallelConfig, SGLangConfig
from megarl.errors import ConfigError
from megarl.rollout import servers
from megarl.rollout.servers import ServerCommand, engine_python, sglang_command


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    """A trainer's environment with SGLang's beside it."""
    for name in ("MEGARL_ENGINE_PYTHON", "NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    python = tmp_path / ".venv-sglang" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    return python


def command(model_path="org/model", *, device="cuda", sglang=None, **options) -> ServerCommand:
    arguments = {
        "parallel": RolloutParallelConfig(),
        "load_format": "dummy",
        "server_index": 0,
    }
    sglang = sglang or SGLangConfig()
    return sglang_command(
        model_path, "127.0.0.1", 8000, sglang=sglang, device=device, **(arguments | options)
    )


def value_of(argv: list[str], flag: str) -> str:
    assert argv.count(flag) == 1
    return argv[argv.index(flag) + 1]


def test_what_every_server_needs(environment):
    made = command()
    assert made.argv[:3] == [str(environment), "-m", "sglang.launch_server"]
    assert value_of(made.argv, "--host") == "127.0.0.1"
    assert value_of(made.argv, "--port") == "8000"
    assert value_of(made.argv, "--load-format") == "dummy"
    assert made.env["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] == "0"


def test_the_hub_is_asked_only_for_a_model_that_is_not_here(tmp_path):
    assert "HF_HUB_OFFLINE" not in command("org/model").env
    assert command(str(tmp_path)).env["HF_HUB_OFFLINE"] == "1"


def test_servers_sample_with_different_seeds():
    sglang = SGLangConfig(random_seed=5)
    seeds = [value_of(command(sglang=sglang, server_index=i).argv, "--random-seed") for i in (0, 2)]
    assert seeds == ["5", "7"]


@pytest.mark.parametrize(("tp", "cores"), [(1, "0"), (3, "0|1|2")])
def test_on_a_cpu(tp, cores):
    made = command(device="cpu", parallel=RolloutParallelConfig(tp=tp), cpu_threads=2)
    server = Path(made.argv[1])
    assert server.is_file()
    assert (server.parent / "sgl_kernel" / "__init__.py").is_file()
    assert value_of(made.argv, "--device") == "cpu"
    assert value_of(made.argv, "--tp-size") == str(tp)
    assert value_of(made.argv, "--max-total-tokens") == "32768"
    assert "--mem-fraction-static" not in made.argv
    assert made.argv.count("--disable-cuda-graph") == 1
    assert made.env["SGLANG_USE_CPU_ENGINE"] == "1"
    assert made.env["OMP_NUM_THREADS"] == "2"
    assert made.env["SGLANG_CPU_OMP_THREADS_BIND"] == cores
    assert "NCCL_CUMEM_ENABLE" not in made.env


def test_on_a_gpu(monkeypatch):
    options = {"mem_fraction_static": 0.5, "context_length": 100, "max_total_tokens": 1000}
    made = command(sglang=SGLangConfig(**options))
    assert value_of(made.argv, "--mem-fraction-static") == "0.5"
    assert value_of(made.argv, "--context-length") == "100"
    assert value_of(made.argv, "--max-total-tokens") == "1000"
    bare = command()
    for flag in ("--max-total-tokens", "--context-length", "--mem-fraction-static", "--device"):
        assert flag not in bare.argv
    assert "--disable-cuda-graph" not in bare.argv
    assert "--disable-cuda-graph" in command(sglang=SGLangConfig(disable_cuda_graph=True)).argv
    deterministic = command(sglang=SGLangConfig(enable_deterministic_inference=True))
    assert "--enable-deterministic-inference" in deterministic.argv
    assert "OMP_NUM_THREADS" not in bare.env
    # What the trainer's ranks are given, too.
    assert bare.env["NCCL_CUMEM_ENABLE"] == "0"
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "1")
    assert command().env["NCCL_CUMEM_ENABLE"] == "1"


def test_the_users_arguments_come_last():
    sglang = SGLangConfig(extra_args=["--dtype", "half"])
    assert command(sglang=sglang, device="cpu").argv[-2:] == ["--dtype", "half"]


def test_a_cpu_cannot_sample_by_seed():
    sglang = SGLangConfig(enable_deterministic_inference=True)
    with pytest.raises(ConfigError, match=r"^sglang\.enable_deterministic_inference: true needs"):
        command(sglang=sglang, device="cpu")


def test_whose_python(environment, monkeypatch):
    assert engine_python("sglang") == str(environment)
    assert engine_python("vllm") == sys.executable  # in the trainer's own environment
    environment.unlink()
    with pytest.raises(ConfigError, match=r"^rollout\.backend: sglang is not in .*make sglang"):
        engine_python("sglang")
    monkeypatch.setattr(servers.importlib.util, "find_spec", lambda name: name)
    assert engine_python("sglang") == sys.executable
    monkeypatch.setenv("MEGARL_ENGINE_PYTHON", "/opt/engine/bin/python")
    assert engine_python("sglang") == engine_python("vllm") == "/opt/engine/bin/python"
