"""What `megarl.launch.local` would start for a run, on a CPU and on GPUs."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.config.load import resolve
from megarl.config.run import DatasetConfig, GRPOConfig, SFTConfig
from megarl.config.schema import (
    ActorConfig,
    ClusterConfig,
    InferenceEngineConfig,
    PPOActorConfig,
    RolloutParallelConfig,
)
from megarl.errors import ConfigError
from megarl.launch.local import plan, run
from megarl.launch.placement import Machine

RUN_DIR = Path("runs/e/t")
CPU = Machine(gpus=(), num_cores=8)
GPUS = Machine(gpus=tuple("01234567"), num_cores=8)
NAMES = {
    "experiment_name": "e",
    "trial_name": "t",
    "train_dataset": DatasetConfig(path="train.jsonl"),
}


@pytest.fixture
def rl(monkeypatch):
    """Two servers of two workers, two ranks."""
    for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FROM_THE_USER", "1")
    rollout = InferenceEngineConfig(parallel=RolloutParallelConfig(dp=2, tp=2))
    actor = PPOActorConfig(path="model", world_size=2)
    return resolve(GRPOConfig(**NAMES, actor=actor, rollout=rollout))


def test_ranks_know_each_other_and_the_servers(rl):
    servers, ranks = plan(rl, "train", RUN_DIR, CPU)
    assert [p.name for p in (*servers, *ranks)] == ["server 0", "server 1", "rank 0", "rank 1"]
    for i, rank in enumerate(ranks):
        assert rank.argv == [sys.executable, "-m", "megarl.train", "runs/e/t"]
        assert rank.env["RANK"] == rank.env["LOCAL_RANK"] == str(i)
        assert rank.env["WORLD_SIZE"] == rank.env["LOCAL_WORLD_SIZE"] == "2"
        assert rank.env["MASTER_ADDR"] == "127.0.0.1"
        assert rank.env["FROM_THE_USER"] == "1"
        assert rank.env["OMP_NUM_THREADS"] == "1"  # 8 cores, 2 ranks and 4 server workers
    assert ranks[0].env["MASTER_PORT"] == ranks[1].env["MASTER_PORT"]
    addresses = ranks[0].env["MEGARL_SERVER_ADDRS"].split(",")
    ports = [address.removeprefix("127.0.0.1:") for address in addresses]
    assert len({*ports, ranks[0].env["MASTER_PORT"]}) == 3
    for server, port in zip(servers, ports, strict=True):
        assert port in server.argv
        assert "dummy" in server.argv
        assert server.env["FROM_THE_USER"] == "1"


def test_ranks_know_whether_a_launcher_starts_servers_again(rl):
    """And that a launcher has them, where it does not: nobody else brings one back."""
    never = replace(rl, rollout=replace(rl.rollout, server_restarts=0))
    for config, program, named in (
        (rl, "train", str((RUN_DIR / "logs" / "restarts").absolute())),
        (never, "train", ""),
        (rl, "evaluate", ""),
    ):
        _, ranks = plan(config, program, RUN_DIR, CPU)
        assert ranks[0].env["MEGARL_RESTARTS"] == named


def test_verify_without_servers_pushes_into_nobodys(rl, monkeypatch):
    monkeypatch.setenv("MEGARL_SERVER_ADDRS", "10.0.0.7:8000")
    servers, ranks = plan(rl, "verify", RUN_DIR, CPU, with_servers=False)
    assert servers == []
    assert ranks[0].env["MEGARL_SERVER_ADDRS"] == ""


@pytest.mark.parametrize("program", ["train", "script"])
def test_servers_of_somebody_else_are_not_started(rl, program, monkeypatch):
    script = Path("s.py") if program == "script" else None
    monkeypatch.setenv("AREAL_LLM_SERVER_ADDRS", "10.0.0.7:8000")
    servers, ranks = plan(rl, program, RUN_DIR, CPU, script=script)
    assert servers == []
    assert ranks[0].env["AREAL_LLM_SERVER_ADDRS"] == "10.0.0.7:8000"
    assert "MEGARL_SERVER_ADDRS" not in ranks[0].env
    assert "MEGARL_RESTARTS" not in ranks[0].env
    monkeypatch.delenv("AREAL_LLM_SERVER_ADDRS")
    listed = replace(rl, rollout=replace(rl.rollout, servers="servers.txt"))
    servers, _ = plan(listed, program, RUN_DIR, CPU, script=script)
    assert servers == []


def test_an_evaluation_has_servers_of_its_own(rl, monkeypatch):
    """Those of somebody else have some other weights."""
    monkeypatch.setenv("MEGARL_SERVER_ADDRS", "10.0.0.7:8000")
    servers, ranks = plan(rl, "evaluate", RUN_DIR, CPU)
    assert len(servers) == 2
    assert "10.0.0.7" not in ranks[0].env["MEGARL_SERVER_ADDRS"]


def test_only_rank_0_writes_to_the_terminal(rl):
    servers, ranks = plan(rl, "train", RUN_DIR, CPU)
    assert ranks[0].log is None
    assert ranks[1].log == RUN_DIR / "logs" / "rank-1.log"
    assert [s.log.name for s in servers] == ["server-0.log", "server-1.log"]


def test_threads_are_shared_out_unless_the_user_says(rl, monkeypatch):
    machine = replace(CPU, num_cores=64)
    servers, ranks = plan(rl, "train", RUN_DIR, machine)
    threads = {process.env["OMP_NUM_THREADS"] for process in (*servers, *ranks)}
    assert threads == {"10"}  # 64 // 6
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    _, ranks = plan(rl, "train", RUN_DIR, machine)
    assert ranks[0].env["OMP_NUM_THREADS"] == "3"


def test_on_gpus_nobody_sees_anothers(rl):
    servers, ranks = plan(rl, "train", RUN_DIR, GPUS)
    assert [p.env["CUDA_VISIBLE_DEVICES"] for p in servers] == ["0,1", "2,3"]
    assert [p.env["CUDA_VISIBLE_DEVICES"] for p in ranks] == ["4,5", "4,5"]  # by LOCAL_RANK
    assert ranks[0].env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


@pytest.fixture
def sglang(rl, monkeypatch):
    """The same run with SGLang's servers, of a Python that is not here."""
    monkeypatch.setenv("MEGARL_ENGINE_PYTHON", "/opt/sglang/bin/python")
    for name in ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE"):
        monkeypatch.delenv(name, raising=False)
    return replace(rl, rollout=replace(rl.rollout, backend="sglang"))


def test_the_backend_says_whose_servers(sglang):
    servers, ranks = plan(sglang, "train", RUN_DIR, CPU)
    for server, port in zip(servers, ranks[0].env["MEGARL_SERVER_ADDRS"].split(","), strict=True):
        assert server.argv[0] == "/opt/sglang/bin/python"
        assert server.argv[1].endswith("sglang_cpu/server.py")
        assert port.removeprefix("127.0.0.1:") in server.argv
        assert server.argv[server.argv.index("--tp-size") + 1] == "2"
        assert server.argv[server.argv.index("--load-format") + 1] == "dummy"
        assert server.env["OMP_NUM_THREADS"] == "1"
    assert "NCCL_CUMEM_ENABLE" not in ranks[0].env
    servers, _ = plan(sglang, "evaluate", RUN_DIR, CPU)
    assert all("auto" in server.argv for server in servers)


def test_sglang_and_the_ranks_agree_on_nccl(sglang, rl):
    servers, ranks = plan(sglang, "train", RUN_DIR, GPUS)
    assert servers[0].argv[1:3] == ["-m", "sglang.launch_server"]
    for process in (*servers, *ranks):
        assert process.env["NCCL_CUMEM_ENABLE"] == process.env["NCCL_NVLS_ENABLE"] == "0"
    _, ranks = plan(rl, "train", RUN_DIR, GPUS)
    assert "NCCL_CUMEM_ENABLE" not in ranks[0].env


def test_an_evaluation_is_one_client_of_servers_with_weights(rl):
    servers, ranks = plan(rl, "evaluate", RUN_DIR, CPU)
    assert len(servers) == 2
    assert all("auto" in server.argv and "dummy" not in server.argv for server in servers)
    assert [rank.argv[2] for rank in ranks] == ["megarl.evaluate"]
    assert ranks[0].env["WORLD_SIZE"] == "1"


def test_fine_tuning_has_no_servers():
    config = resolve(SFTConfig(**NAMES, actor=ActorConfig(path="model", world_size=3)))
    servers, ranks = plan(config, "sft", RUN_DIR, CPU)
    assert servers == []
    assert [rank.argv[2] for rank in ranks] == ["megarl.sft"] * 3
    assert "MEGARL_SERVER_ADDRS" not in ranks[0].env


def test_one_machine_only(rl, tmp_path):
    cluster = ClusterConfig(fileroot=str(tmp_path / "runs"), n_nodes=2)
    with pytest.raises(ConfigError, match=r"^cluster\.n_nodes: .* got 2$"):
        run(replace(rl, cluster=cluster), "train")
    assert not (tmp_path / "runs").exists()
