"""The command line as a user meets it, each time in a process of its own."""

import json
import os
import subprocess
import sys

import pytest
import yaml

from megarl import __version__
from megarl.config.load import load, resolve
from megarl.config.run import SFTConfig


def megarl(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "megarl.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},  # a run of two ranks fits any machine
    )


@pytest.fixture
def run_file(tmp_path):
    """A run that passes every check, writing under `tmp_path`."""
    model = tmp_path / "model"
    model.mkdir()
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    (model / "config.json").write_text(json.dumps({"model_type": "qwen3", **sizes}))
    (model / "tokenizer.json").write_text("{}")
    run = {
        "experiment_name": "e",
        "trial_name": "t",
        "cluster": {"fileroot": str(tmp_path / "runs"), "n_gpus_per_node": 2},
        "train_dataset": {"path": "reasoning_gym:chain_sum", "size": 8},
        "actor": {"path": str(model), "init_from_scratch": True},
    }
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(run))
    return file


def test_version():
    done = megarl("--version")
    assert (done.returncode, done.stdout) == (0, f"megarl {__version__}\n")


def test_help_lists_the_commands():
    done = megarl("--help")
    assert done.returncode == 0
    assert all(f"\n    {name} " in done.stdout for name in ("train", "sft", "eval", "doctor"))
    assert "--overwrite" in megarl("train", "--help").stdout


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["train"], ["eval", "x", "--overwrite"]])
def test_wrong_usage(arguments):
    assert megarl(*arguments).returncode == 2


@pytest.mark.parametrize(
    ("command", "override", "message"),
    [
        ("train", "actor.parallel.tpp=2", "actor.parallel.tpp: no such option; did you mean 'tp'?"),
        ("train", "sglang.context_len=9", "sglang.context_len: no such option; did you mean 'cont"),
        ("train", "cluster.n_nodes=2", "cluster.n_nodes: this launcher starts"),
        ("train", "allocation_mode=vllm:d1", "allocation_mode: 'vllm:d1': at 'vllm:d1': no trai"),
        ("sft", "gconfig.n_samples=2", "gconfig: no such option; known: "),
        ("eval", "seed=1", "valid_dataset: required by megarl eval"),
        ("eval", "valid_dataset.path=owner/name", "actor.path: "),
    ],
)
def test_a_config_that_cannot_run_is_one_line(run_file, command, override, message):
    done = megarl(command, run_file, override)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"megarl: {message}")
    assert done.stderr.count("\n") == 1
    assert not (run_file.parent / "runs").exists()


def test_a_used_trial_is_refused(run_file):
    """Flags may stand anywhere; nothing of the earlier trial is touched."""
    run_dir = run_file.parent / "runs" / "e" / "t"
    run_dir.mkdir(parents=True)
    (run_dir / "metrics.jsonl").write_text("{}\n")
    done = megarl("train", run_file, "seed=2")
    assert done.returncode == 2
    assert done.stderr.startswith("megarl: trial_name: ")
    assert done.stderr.count("\n") == 1
    assert list(run_dir.iterdir()) == [run_dir / "metrics.jsonl"]
    done = megarl("train", run_file, "--overwrite", "seed=2", "nonsense=1")
    assert "nonsense: no such option" in done.stderr


def test_a_run_that_fails_says_where(run_file):
    """Through the real launcher and two real ranks, for a model that cannot be built."""
    done = megarl("sft", run_file)
    assert done.returncode not in (0, 2)
    first, *rest = done.stderr.splitlines()
    run_dir = run_file.parent / "runs" / "e" / "t"
    assert first.startswith("megarl: 0 servers and 2 ranks on ")
    assert first.endswith(f"; logs in {run_dir / 'logs'}")
    assert any(line.startswith("megarl: rank ") and "ended with exit code" in line for line in rest)
    assert [log.name for log in (run_dir / "logs").iterdir()] == ["rank-1.log"]
    config = load(run_dir / "config.yaml", [], SFTConfig)
    assert config == resolve(load(run_file, [], SFTConfig))


def test_the_launcher_module_is_the_train_command(run_file):
    argv = [sys.executable, "-m", "megarl.launch.local", str(run_file), "seeed=1"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert done.stderr == "megarl: seeed: no such option; did you mean 'seed'?\n"


def test_doctor_finds_this_installation():
    done = megarl("doctor")
    assert done.returncode == 0, done.stderr
    rows = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert rows["megarl"] == __version__
    assert rows["torch"][0].isdigit()
    assert {"python", "megatron-core", "vllm", "transformer-engine", "cores", "memory"} <= set(rows)


def test_command_and_launcher_import_no_torch():
    code = (
        "import sys, megarl.cli, megarl.launch.local\n"
        "print([m for m in ('torch', 'transformers', 'vllm', 'megatron') if m in sys.modules])"
    )
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "[]\n"
