"""Rules that need files. Every error must name its key; what is legal must pass."""

import json
import subprocess
import sys

import pytest

from megarl.config.checks import check, check_import, generators
from megarl.config.load import load, resolve
from megarl.config.run import SFTConfig
from megarl.errors import ConfigError


def checked(file, *overrides, cls=None):
    check(resolve(load(file, overrides, cls) if cls else load(file, overrides)))


def edit_model(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["allocation_mode=vllm:d1t8+megarl:d1t4p3", "cluster.n_gpus_per_node=20"],  # 4 KV heads
        ["actor.world_size=4", "actor.parallel={pp: 2, vpp: 1}"],
        ["actor.world_size=4", "actor.parallel={pp: 2, vpp: 3}"],
        ["actor.world_size=4", "actor.parallel.cp=2"],
        ["vllm.max_model_len=100", "gconfig.max_new_tokens=99"],
        ["vllm.max_model_len=9", "rollout.backend=sglang", "gconfig.max_new_tokens=99"],
        ["allocation_mode=sglang:d1t2+megarl:d2t1", "eval_gconfig.top_p=0.9"],
        ["gconfig={top_p: 0.9, top_k: 50, seed: 1, ignore_eos: true, stop_token_ids: [7]}"],
        [
            "rollout.backend=sglang",
            "gconfig.seed=1",
            "sglang.enable_deterministic_inference=true",
        ],
        ["valid_dataset={path: 'reasoning_gym:composite', size: 3}"],
        ["train_dataset.path=owner/name"],  # on the hub: nothing to look at
    ],
)
def test_legal(run_file, overrides):
    checked(run_file(), *overrides)


def test_legal_fine_tuning(run_file):
    checked(run_file(), "actor.world_size=4", "actor.parallel.tp=2", cls=SFTConfig)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["actor.world_size=3", "actor.parallel.tp=3"],
            r"actor.parallel.tp: 3 does not divide num_attention_heads 8 of \S+model$",
        ),
        (
            ["actor.world_size=8", "actor.parallel.tp=8", "cluster.n_gpus_per_node=9"],
            r"actor.parallel.tp: 8 does not divide num_key_value_heads 4 of \S+model$",
        ),
        (
            ["actor.world_size=8", "actor.parallel.pp=8", "cluster.n_gpus_per_node=9"],
            r"actor.parallel.pp: pp 8 \* vpp 1 = 8 is more than num_hidden_layers 6",
        ),
        (
            ["actor.world_size=2", "actor.parallel={pp: 2, vpp: 4}"],
            r"actor.parallel.pp: pp 2 \* vpp 4 = 8 is more than num_hidden_layers 6",
        ),
        (["rollout.parallel.tp=3"], r"rollout.parallel.tp: 3 does not divide num_attention_heads"),
        (
            ["rollout.parallel.pp=7", "cluster.n_gpus_per_node=8"],
            r"rollout.parallel.pp: 7 is more than num_hidden_layers 6",
        ),
        (["actor.parallel.ep=2", "actor.world_size=2"], r"actor.parallel.ep: 2 needs experts"),
        (
            ["actor.parallel={tp: 2, etp: 1}", "actor.world_size=2"],
            r"actor.parallel.etp: 1 needs ex",
        ),
        (
            ["actor.parallel={pp: 2, vpp: 3}", "actor.world_size=4", "actor.ppo_n_minibatches=2"],
            r"train_dataset.batch_size: .* = 4 is less than 2 samples for each of 2 data-parallel "
            r"ranks and 2 minibatches",
        ),
        (
            ["actor.parallel.tp=2", "actor.world_size=3"],
            r"actor.parallel: world of 3 ranks is not a multiple",
        ),
        (
            ["train_dataset.batch_size=2", "actor.world_size=4"],
            r"train_dataset.batch_size: train_dataset.batch_size \* gconfig.n_samples = 2 is less "
            r"than 1 samples for each of 4 data-parallel ranks and 1 minibatches",
        ),
        (
            ["actor.world_size=4", "actor.ppo_n_minibatches=2"],
            r"train_dataset.batch_size: .* = 4 is less .* of 4 data-parallel ranks and 2 minib",
        ),
        (
            ["actor.world_size=4", "cluster.n_gpus_per_node=4"],
            r"cluster.n_gpus_per_node: 1 server ranks and 4 trainer ranks need more than .* = 4 ",
        ),
        (
            ["allocation_mode=sglang:p2+megarl:d1"],
            r"rollout.parallel.pp: must be 1 with rollout.backend sglang, got 2",
        ),
        (
            ["rollout.backend=sglang", "gconfig.top_p=0.9"],
            r"gconfig.top_p: 0.9 with rollout.backend sglang, whose logprobs are those before",
        ),
        (
            ["rollout.backend=sglang", "gconfig.top_k=50"],
            r"gconfig.top_k: 50 with rollout.backend sglang, whose logprobs",
        ),
        (
            ["rollout.backend=sglang", "gconfig.seed=1"],
            r"gconfig.seed: 1 is ignored by SGLang unless sglang.enable_deterministic_inference",
        ),
        (
            ["rollout.backend=sglang", "eval_gconfig={seed: 1}"],
            r"eval_gconfig.seed: 1 is ignored by SGLang",
        ),
        (
            ["rollout.backend=sglang", "gconfig={ignore_eos: true, stop_token_ids: [7]}"],
            r"gconfig.stop_token_ids: with ignore_eos SGLang does not stop at \[7\]",
        ),
        (
            ["rollout.backend=sglang", "sglang.context_length=9", "gconfig.max_new_tokens=9"],
            r"gconfig.max_new_tokens: 9 leaves no room for a prompt in sglang.context_length 9$",
        ),
        (["rollout.consumer_batch_size=3"], r"rollout.consumer_batch_size: 3 must equal"),
        (
            ["vllm.max_model_len=100", "gconfig.max_new_tokens=100"],
            r"gconfig.max_new_tokens: 100 leaves no room for a prompt in vllm.max_model_len 100$",
        ),
        (
            [
                "vllm.max_model_len=100",
                "gconfig.max_new_tokens=10",
                "eval_gconfig.max_new_tokens=200",
            ],
            r"eval_gconfig.max_new_tokens: 200 leaves no room",
        ),
        (["actor.path=/nowhere"], r"actor.path: no folder /nowhere$"),
        (["tokenizer_path=/nowhere"], r"tokenizer_path: no folder /nowhere$"),
        (["ref.path=/nowhere"], r"ref.path: no folder /nowhere$"),
        (["train_dataset.path=/nowhere/x.jsonl"], r"train_dataset.path: no file /nowhere/x.jsonl$"),
        (["valid_dataset.path=/x.parquet"], r"valid_dataset.path: no file /x.parquet$"),
        (["train_dataset.exclude.path=x.json"], r"train_dataset.exclude.path: no file x.json$"),
        (
            ["train_dataset.path=reasoning_gym:chain_sums"],
            r"train_dataset.path: reasoning_gym has no dataset 'chain_sums'; did you mean 'chain_s",
        ),
        (["reward.fn=no_such_package.x:f"], r"reward.fn: no module 'no_such_package.x'"),
        (["reward.fn=json.decoder:decode"], r"reward.fn: \S+decoder.py defines no 'decode'"),
        (["rollout.workflow=json.nothing:X"], r"rollout.workflow: no module 'json.nothing'"),
        (
            ["rollout.workflow_options={gconfig: {}}"],
            r"rollout.workflow_options.gconfig: comes from the run",
        ),
        (
            ["rollout.workflow=megarl.rollout.workflows.agent:AgentWorkflow"],
            r"rollout.workflow_options.agent: expected an agent's package.module:Class, got None",
        ),
        (
            [
                "rollout.workflow=megarl.rollout.workflows.agent:AgentWorkflow",
                "+rollout.workflow_options.agent=json.decoder:Agent",
            ],
            r"rollout.workflow_options.agent: \S+decoder.py defines no 'Agent'",
        ),
    ],
)
def test_refused(run_file, overrides, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        checked(run_file(), *overrides)


def test_experts_must_divide(run_file, model_dir):
    edit_model(model_dir, num_experts=6)
    overrides = ["actor.world_size=4", "actor.parallel={ep: 4, etp: 1}"]
    with pytest.raises(ConfigError, match=r"actor\.parallel\.ep: 4 does not divide the 6 experts"):
        checked(run_file(), *overrides)
    edit_model(model_dir, num_experts=8, moe_intermediate_size=24, model_type="qwen3_moe")
    checked(run_file(), *overrides)
    split = ["actor.world_size=4", "actor.parallel={tp: 4, ep: 1}"]
    checked(run_file(), *split)
    with pytest.raises(ConfigError, match=r"actor\.sequence_parallel: must be true for experts"):
        checked(run_file(), *split, "actor.sequence_parallel=false")
    edit_model(model_dir, moe_intermediate_size=18)
    with pytest.raises(ConfigError, match=r"actor\.parallel\.etp: 4 does not divide moe_interm"):
        checked(run_file(), *split)


def test_servers_replicate_kv_heads_only_evenly(run_file, model_dir):
    edit_model(model_dir, num_attention_heads=12)
    message = (
        r"^rollout\.parallel\.tp: 6 neither divides nor is a multiple of num_key_value_heads 4"
    )
    with pytest.raises(ConfigError, match=message):
        checked(run_file(), "rollout.parallel.tp=6", "cluster.n_gpus_per_node=7")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, r"model_type 'gpt2' of \S+ is not supported; .*llama, qwen2, qwe"),
        ({"num_hidden_layers": None}, r"config\.json has num_hidden_layers None"),
        ({"num_attention_heads": "8"}, r"config\.json has num_attention_heads '8'"),
    ],
)
def test_a_model_that_is_refused(run_file, model_dir, changes, message):
    edit_model(model_dir, **changes)
    with pytest.raises(ConfigError, match=rf"^actor\.path: .*{message}"):
        checked(run_file())


def test_a_model_without_weights(run_file, model_dir):
    (model_dir / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"^actor\.path: .*actor\.init_from_scratch=true"):
        checked(run_file())
    checked(run_file(), "actor.init_from_scratch=true")


def test_a_folder_that_is_no_model(run_file, model_dir):
    (model_dir / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"^actor\.path: .*config\.json: Expecting"):
        checked(run_file())
    (model_dir / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"^actor\.path: .* has no config\.json$"):
        checked(run_file())


@pytest.mark.parametrize("name", ["..", ".", "a/b", ""])
def test_names_are_folder_names(run_file, name):
    """A trial called '..' would let --overwrite delete other trials."""
    with pytest.raises(ConfigError, match=r"^trial_name: must be a folder's name, got"):
        checked(run_file(trial_name=name))


REWARDS = """\
import heavy_thing_that_is_not_installed
from math import sqrt as root
def score(): ...
bound, (also, bound_too) = 1, (2, 3)
try:
    import a
except ImportError:
    late = None
"""


def test_the_users_code_is_read_and_not_run(tmp_path, monkeypatch):
    """Found in the working folder; its package and its own imports are not executed."""
    package = tmp_path / "my_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "rewards.py").write_text(REWARDS)
    (package / "broken.py").write_text("def f(:")
    monkeypatch.chdir(tmp_path)
    for name in ("score", "root", "bound", "bound_too", "late"):
        check_import("reward.fn", f"my_package.rewards:{name}")
    with pytest.raises(ConfigError, match=r"defines no 'scores'; did you mean 'score'\?$"):
        check_import("reward.fn", "my_package.rewards:scores")
    with pytest.raises(ConfigError, match=r"reward\.fn: \S+broken\.py, line 1: "):
        check_import("reward.fn", "my_package.broken:f")
    (package / "rewards.py").write_text("from elsewhere import *")
    check_import("reward.fn", "my_package.rewards:anything")


def test_generator_names_are_those_that_reasoning_gym_registers():
    code = "import reasoning_gym.factory as f; print(*f.DATASETS)"
    registered = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    ).stdout.split()
    assert generators() == set(registered)
