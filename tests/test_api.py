"""The public names: they are there, documented, and do what scripts ask of them."""

import inspect
from dataclasses import replace
from pathlib import Path

import pytest

from megarl import api
from megarl.actor import meta as meta_module
from megarl.actor.meta import run_folder
from megarl.api import (
    AllocationMode,
    FinetuneSpec,
    GRPOConfig,
    MegatronPPOActor,
    RecoverInfo,
    RemoteVLLMEngine,
    SaveLoadMeta,
    SFTConfig,
    StepInfo,
    WeightUpdateMeta,
    load_expr_config,
    stats_tracker,
)
from megarl.config.schema import InferenceEngineConfig, PPOActorConfig, TrainEngineConfig
from megarl.errors import CheckpointError, ConfigError, EngineError
from megarl.rollout.remote import RowStream

REPOSITORY = Path(__file__).parents[1]
QUICKSTART = "configs/quickstart.yaml"


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch):
    monkeypatch.chdir(REPOSITORY)  # the quickstart's paths begin there
    monkeypatch.setattr(meta_module, "_run_dir", None)
    for name in ("RANK", "MEGARL_SERVER_ADDRS", "AREAL_LLM_SERVER_ADDRS"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("name", api.__all__)
def test_every_name_is_there_and_documented(name):
    assert inspect.getdoc(getattr(api, name)), name


def test_no_name_is_public_by_accident():
    public = {name for name in vars(api) if not name.startswith("_")}
    assert public == set(api.__all__)
    assert len(api.__all__) == len(set(api.__all__))


def test_the_tracker_has_areals_functions():
    names = ("scalar", "stat", "denominator", "scope", "record_timing", "scope_func_wrapper")
    assert all(callable(getattr(stats_tracker, name)) for name in names)
    stats_tracker.export()
    with stats_tracker.scope("a"):
        stats_tracker.scalar(b=2.0)
    assert stats_tracker.export() == {"a/b": 2.0}


# ---------------------------------------------------------------- load_expr_config


@pytest.mark.parametrize("first", [["--config", QUICKSTART], [QUICKSTART]])
def test_the_runs_file_is_read_resolved_and_checked(first):
    config, path = load_expr_config([*first, "total_train_steps=3"], GRPOConfig)
    assert path == Path(QUICKSTART)
    assert config.total_train_steps == 3
    assert config.tokenizer_path == "configs/quickstart_base"
    assert config.rollout.consumer_batch_size == 32
    assert config.allocation_mode == "vllm:d1t1p1+megarl:d1t2p1c1e1"
    assert run_folder(config) == run_folder(config.saver) == config.run_dir


def test_overrides_may_come_first():
    config, _ = load_expr_config(["seed=4", "--config", QUICKSTART], GRPOConfig)
    assert config.seed == 4


def test_fine_tuning_is_read_too():
    config, _ = load_expr_config(["configs/quickstart_sft.yaml"], SFTConfig)
    assert config.actor.world_size


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "expected --config FILE"),
        (["seed=1"], "expected --config FILE"),
        (["--config"], "--config: expected a YAML file"),
        (["--config", "nowhere.yaml"], "nowhere.yaml: No such file"),
        ([QUICKSTART, "seeed=1"], "seeed: no such option"),
        ([QUICKSTART, "actor.parallel.tp=4", "actor.world_size=4"], "actor.parallel.tp: 4 does"),
    ],
)
def test_a_run_that_cannot_be_is_named(args, message):
    with pytest.raises(ConfigError, match=message):
        load_expr_config(args, GRPOConfig)


def test_a_section_alone_does_not_know_its_run():
    with pytest.raises(ConfigError, match="load_expr_config comes first"):
        run_folder(GRPOConfig.__dataclass_fields__["saver"].default_factory())


# ---------------------------------------------------------------- small values


def test_allocation_mode_has_areals_sizes():
    mode = AllocationMode.from_str("sglang.d1p1t2+d4p2t1c2")
    assert mode.gen_backend == "sglang"
    assert (mode.gen.tp_size, mode.gen.world_size) == (2, 2)
    train = mode.train
    assert (train.dp_size, train.pp_size, train.tp_size, train.cp_size) == (4, 2, 1, 2)
    assert train.world_size == 16
    with pytest.raises(ConfigError, match="no trainer part"):
        AllocationMode.from_str("vllm:d1")


@pytest.mark.parametrize(
    "text",
    ["vllm:d2t1p1+megarl:d1t2p1c1e1", "vllm:d1t1p1+megarl:(attn:d2t2p2c1|ffn:t2p2e2)"],
)
def test_the_written_allocation_says_what_the_keys_say(text):
    config, _ = load_expr_config([QUICKSTART], GRPOConfig)
    mode = AllocationMode.from_str(text)
    parallel = mode.train.as_config(like=config.actor.parallel)
    actor = replace(config.actor, parallel=parallel, world_size=mode.train.world_size)
    rollout = replace(
        config.rollout, parallel=replace(config.rollout.parallel, dp=mode.gen.dp_size)
    )
    assert meta_module._allocation_text(replace(config, actor=actor, rollout=rollout)) == text


def test_finetune_spec_counts_steps():
    spec = FinetuneSpec(total_train_epochs=3, dataset_size=70, train_batch_size=32)
    assert (spec.steps_per_epoch, spec.total_train_steps) == (2, 6)
    assert replace(spec, max_train_steps=5).total_train_steps == 5
    with pytest.raises(ValueError, match="train_batch_size <= dataset_size, got 1, 32, 8"):
        FinetuneSpec(1, 8, 32)


def test_weight_updates_say_their_way(tmp_path):
    config, _ = load_expr_config([QUICKSTART, f"cluster.fileroot={tmp_path}"], GRPOConfig)
    weights = str(config.run_dir / "weights")
    assert WeightUpdateMeta.from_disk(config.saver).path == weights
    assert WeightUpdateMeta.from_disk(config).path == weights
    assert WeightUpdateMeta.from_disk(tmp_path).path == str(tmp_path)
    mode = AllocationMode.from_str(config.allocation_mode)
    meta = WeightUpdateMeta.from_megatron_nccl(mode)
    assert meta == WeightUpdateMeta.from_megatron_xccl(mode)
    assert meta.type == "xccl"
    assert (meta.with_version(3).version, meta.version) == (3, None)
    with pytest.raises(ValueError, match="needs a path"):
        WeightUpdateMeta(type="disk")
    with pytest.raises(ValueError, match="must be disk or xccl, got 'smoke'"):
        WeightUpdateMeta(type="smoke")


def test_save_load_meta_refuses_what_is_not_saved():
    with pytest.raises(ValueError, match="with_optim needs weight_format dcp"):
        SaveLoadMeta("x", with_optim=True)
    with pytest.raises(ValueError, match="must be hf or dcp, got 'gguf'"):
        SaveLoadMeta("x", weight_format="gguf")


def test_recover_info_comes_back(tmp_path):
    info = RecoverInfo(StepInfo(0, 1, 1, 2), {"position": 7})
    info.dump(tmp_path / "recover")
    assert RecoverInfo.load(tmp_path / "recover") == info
    assert info.last_step_info.next() == StepInfo(1, 0, 2, 2)
    with pytest.raises(CheckpointError, match=r"recover_info\.json"):
        RecoverInfo.load(tmp_path)


# ---------------------------------------------------------------- engines without servers


def test_on_other_ranks_the_rollout_engine_talks_to_nobody(monkeypatch):
    """No server is named at all: whatever asked one would fail."""
    monkeypatch.setenv("RANK", "1")
    rollout = RemoteVLLMEngine(InferenceEngineConfig())
    rollout.initialize(train_data_parallel_size=2)
    rollout.pause()
    rollout.resume()
    rollout.pause_generation()
    rollout.continue_generation()
    rollout.set_version(3)
    assert rollout.get_version() == 3
    assert rollout.export_stats() == {}
    for ask in (
        lambda: rollout.submit({}, None),
        lambda: rollout.wait(1),
        lambda: rollout.rollout_batch([], None),
        lambda: rollout.prepare_batch([], None),
    ):
        with pytest.raises(RuntimeError, match="rank 1 has no servers: only rank 0"):
            ask()
    rollout.destroy()


def test_rank_0_needs_servers():
    rollout = RemoteVLLMEngine(InferenceEngineConfig())
    with pytest.raises(RuntimeError, match=r"initialize\(\) comes first"):
        rollout.pause()
    with pytest.raises(EngineError, match="no servers: set MEGARL_SERVER_ADDRS"):
        rollout.initialize()


def test_a_dataloader_begins_again():
    class Loader(list):
        batch_size = 2

    stream = RowStream(Loader([[1, 2], [3]]))
    assert [next(stream) for _ in range(5)] == [[1, 2], [3], [1, 2], [3], [1, 2]]
    with pytest.raises(ValueError, match="gives no batch"):
        next(RowStream(Loader()))
    with pytest.raises(ValueError, match="needs a batch_size"):
        RowStream([[1, 2]])


def test_an_actor_says_what_comes_first():
    config = PPOActorConfig(path="model", overlong_reward_penalty=False)
    actor = MegatronPPOActor(config)
    for method, ask in (
        ("create_process_group", lambda: actor.data_parallel_rank),
        ("initialize", lambda: actor.compute_logp({})),
        ("connect_engine", lambda: actor.prepare_batch([])),
        ("connect_engine", lambda: actor.update_weights(WeightUpdateMeta(type="xccl"))),
    ):
        with pytest.raises(RuntimeError, match=rf"^{method}\(\) comes first"):
            ask()
    actor.destroy()
    penalty = {"overlong_tokens": 4, "overlong_penalty_factor": 1.0}
    config = PPOActorConfig(path="model", overlong_reward_penalty=True, **penalty)
    with pytest.raises(ValueError, match="needs max_response_tokens"):
        MegatronPPOActor(config)
    MegatronPPOActor(TrainEngineConfig(path="model"))
