"""What is started for a script, and how a mistake in its command line is told."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.config.load import resolve
from megarl.config.run import DatasetConfig, GRPOConfig
from megarl.config.schema import PPOActorConfig
from megarl.launch.local import plan
from megarl.launch.placement import Machine

RUN_DIR = Path("runs/e/t")
CPU = Machine(gpus=(), num_cores=8)


@pytest.fixture
def config():
    return resolve(
        GRPOConfig(
            experiment_name="e",
            trial_name="t",
            train_dataset=DatasetConfig(path="train.jsonl"),
            actor=PPOActorConfig(path="model", world_size=2),
        )
    )


def test_each_rank_runs_the_script_with_the_resolved_config(config):
    servers, ranks = plan(config, "script", RUN_DIR, CPU, script=Path("my/script.py"))
    command = [sys.executable, "my/script.py", "--config", "runs/e/t/config.yaml"]
    assert [rank.argv for rank in ranks] == [command, command]
    assert [rank.env["RANK"] for rank in ranks] == ["0", "1"]
    assert ranks[0].env["MEGARL_SERVER_ADDRS"].startswith("127.0.0.1:")
    assert "MEGARL_SERVERS_WITHOUT_WEIGHTS" not in ranks[0].env
    (server,) = servers
    # It answers before the first push, and can take that push.
    assert server.argv[server.argv.index("--load-format") + 1] == "auto"
    assert "--weight-transfer-config" in server.argv


def test_servers_of_a_model_without_weights_wait_for_them(config):
    config = replace(config, actor=replace(config.actor, init_from_scratch=True))
    (server,), ranks = plan(config, "script", RUN_DIR, CPU, script=Path("script.py"))
    assert server.argv[server.argv.index("--load-format") + 1] == "dummy"
    assert {rank.env["MEGARL_SERVERS_WITHOUT_WEIGHTS"] for rank in ranks} == {"1"}


@pytest.mark.parametrize("module", [["megarl.cli", "launch"], ["megarl.launch.local"]])
def test_a_mistake_is_one_line(module, tmp_path):
    argv = [sys.executable, "-m", *module, "nowhere.py", "--config", "nowhere.yaml", "seed=1"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (2, "megarl: SCRIPT.py: no file nowhere.py\n")
    script = tmp_path / "script.py"
    script.touch()
    argv[argv.index("nowhere.py")] = str(script)
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert done.stderr == "megarl: nowhere.yaml: No such file or directory\n"
