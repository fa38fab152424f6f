"""`megarl.config.load`: strict reading, overrides, and writing back."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.config.load import dump, load, resolve
from megarl.config.run import DatasetConfig, GRPOConfig, SFTConfig, StatsLoggerConfig, WandbConfig
from megarl.config.schema import (
    GenerationHyperparameters,
    NormConfig,
    OptimizerConfig,
    ParallelConfig,
    PPOActorConfig,
    RolloutParallelConfig,
    SGLangConfig,
    VLLMConfig,
)
from megarl.errors import ConfigError


def test_the_file_is_read_into_the_sections(run_file):
    config = load(run_file(gconfig={"n_samples": 4, "stop": ["a", "b"]}, vllm={"seed": 3}))
    assert type(config) is GRPOConfig
    assert config.gconfig == GenerationHyperparameters(n_samples=4, stop=["a", "b"])
    assert config.vllm.seed == 3
    assert config.train_dataset.size == 10


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("gconfig.n_samples=8", "gconfig.n_samples", 8),
        ("rollout.setup_timeout_s=30", "rollout.setup_timeout_s", 30.0),
        ("rollout.setup_timeout_s=1e3", "rollout.setup_timeout_s", 1000.0),
        ("actor.optimizer.lr=1e-4", "actor.optimizer.lr", 1e-4),
        ("actor.optimizer.lr=3.5E+2", "actor.optimizer.lr", 350.0),
        ("actor.eps_clip_higher=1e-1", "actor.eps_clip_higher", 0.1),
        ("actor.rejection_sampling=null", "actor.rejection_sampling", None),
        ("actor.rejection_sampling.upper=2", "actor.rejection_sampling.upper", 2.0),
        ("actor.reward_norm.mean_level=batch", "actor.reward_norm.mean_level", "batch"),
        ("trial_name=7", "trial_name", "7"),
        ("trial_name=2025-01-01", "trial_name", "2025-01-01"),
        ("trial_name=[x", "trial_name", "[x"),
        ("tokenizer_path=null", "tokenizer_path", None),
        ("gconfig.stop=[a, b]", "gconfig.stop", ["a", "b"]),
        ("gconfig.stop_token_ids=[1,2]", "gconfig.stop_token_ids", [1, 2]),
        ("gconfig.greedy=true", "gconfig.greedy", True),
        ("reward.fn=my.rewards:score", "reward.fn", "my.rewards:score"),
        ("+train_dataset.options.min_terms=3", "train_dataset.options", {"min_terms": 3}),
        ("+train_dataset.options.a.b=1e-3", "train_dataset.options", {"a": {"b": 1e-3}}),
        ("train_dataset.exclude.path=x.json", "train_dataset.exclude.path", "x.json"),
        ("+seed=5", "seed", 5),
    ],
)
def test_override(run_file, override, key, value):
    got = load(run_file(), [override])
    for name in key.split("."):
        got = getattr(got, name)
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("gconfig.n_sample=8", r"^gconfig\.n_sample: no such option; did you mean 'n_samples'\?$"),
        ("gconfg.n_samples=8", r"^gconfg: no such option; did you mean 'gconfig'\?$"),
        ("actor.optimizer.zzz=8", r"^actor\.optimizer\.zzz: no such option; known: type, lr"),
        ("seed.x=8", r"^seed\.x: seed is int and has no keys$"),
        ("seed=1.5", r"^seed: expected int, got 1\.5$"),
        ("seed=true", r"^seed: expected int, got True$"),
        ("seed=null", r"^seed: expected int, got None$"),
        ("gconfig.top_p=x", r"^gconfig\.top_p: expected float, got 'x'$"),
        ("gconfig.greedy=1", r"^gconfig\.greedy: expected bool, got 1$"),
        ("gconfig.stop=x", r"^gconfig\.stop: expected list\[str\] \| None, got 'x'$"),
        ("gconfig.stop_token_ids=[1,b]", r"^gconfig\.stop_token_ids\[1\]: expected int, got 'b'$"),
        ("actor.dtype=bf16", r"^actor\.dtype: must be one of 'bfloat16', 'float32', got 'bf16'$"),
        ("actor.parallel=2", r"^actor\.parallel: expected a mapping, got 2$"),
        ("train_dataset.options=2", r"^train_dataset\.options: expected dict\[str, "),
        ("train_dataset.options={1: 2}", r"^train_dataset\.options: keys must be strings, got 1$"),
        ("train_dataset.options.a=2", r"^train_dataset\.options\.a: no such key; \+train_d"),
        ("seed", r"^'seed': expected key=value$"),
        ("=3", r"^'=3': expected key=value$"),
        ("seed=[1", r"^seed: '\[1' is not YAML$"),
        # from a section's own rules
        ("gconfig.top_p=2", r"^gconfig\.top_p: must be in \(0, 1\], got 2\.0$"),
        ("actor.parallel.tp=0", r"^actor\.parallel\.tp: must be >= 1, got 0$"),
        ("actor.adv_norm.eps=0", r"^actor\.adv_norm\.eps: must be > 0, got 0\.0$"),
        ("actor.eps_clip=1", r"^actor\.eps_clip: must be in \[0, 1\), got 1\.0$"),
        # from a rule over two sections
        (
            "actor.temperature=0.5",
            r"^actor\.temperature: 0\.5 must equal gconfig\.temperature 1\.0",
        ),
    ],
)
def test_a_wrong_override_is_named(run_file, override, message):
    with pytest.raises(ConfigError, match=message):
        load(run_file(), [override])


def test_wrong_keys_of_the_file_are_named(run_file):
    with pytest.raises(ConfigError, match=r"^actor\.optimiser: .*did you mean 'optimizer'\?$"):
        load(run_file(actor={"optimiser": {"lr": 1}}))
    with pytest.raises(ConfigError, match=r"^trial_name: expected str, got 7; quote it"):
        load(run_file(trial_name=7))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "experiment_name: required"),
        ("- a", r"run\.yaml: expected a mapping, got \['a'\]"),
        ("experiment_name: e\ntrial_name: t\nactor: {path: m}", "train_dataset: required"),
        ("actor: {}\nexperiment_name: e\ntrial_name: t\ntrain_dataset: {path: x}", "actor.path: r"),
        ("a: [", r"run\.yaml: while parsing"),
        ("seed: 1\nseed: 2", r"run\.yaml: key 'seed' is given twice"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path, text, message):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        load(file)
    assert "\n" not in str(caught.value)


def test_an_override_changes_one_place_of_an_alias(run_file):
    file = run_file()
    text = file.read_text()
    text += """
valid_dataset: &held_out {path: held_out.jsonl, size: 8}
"""
    text = text.replace("train_dataset:", "train_dataset:\n  exclude: *held_out", 1)
    head, _, tail = text.partition("valid_dataset:")
    file.write_text("valid_dataset:" + tail + head)
    config = load(file, ["valid_dataset.size=3"])
    assert config.valid_dataset.size == 3
    assert config.train_dataset.exclude.size == 8


def test_an_anchor_that_contains_itself(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("gconfig: &a {stop: [*a]}\n")
    with pytest.raises(ConfigError, match="an anchor contains itself"):
        load(file)


def test_no_file(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.yaml: No such file"):
        load(tmp_path / "none.yaml")


# ---------------------------------------------------------------- resolve


def test_resolve_fills_in_what_follows(run_file, model_dir):
    config = resolve(load(run_file(cluster={"n_gpus_per_node": 4}), ["gconfig.n_samples=2"]))
    assert config.tokenizer_path == str(model_dir)
    assert config.actor.world_size == 3  # one of four is the server's
    assert config.rollout.consumer_batch_size == 4
    assert config.rollout.max_concurrent_rollouts == 4
    assert config.rollout.queue_size == 8  # one batch to start, one to wait
    assert config.eval_gconfig == config.gconfig.new(n_samples=1)
    assert resolve(config) == config


def test_resolve_keeps_what_is_given(run_file):
    overrides = [
        "tokenizer_path=other",
        "rollout.max_concurrent_rollouts=7",
        "rollout.queue_size=9",
        "eval_gconfig.greedy=true",
        "actor.world_size=2",
    ]
    config = resolve(load(run_file(), overrides))
    assert config.tokenizer_path == "other"
    assert config.rollout.max_concurrent_rollouts == 7
    assert config.rollout.queue_size == 9
    assert config.eval_gconfig == GenerationHyperparameters(greedy=True)
    assert config.actor.world_size == 2


def test_resolve_of_a_fine_tuning_run(run_file, model_dir):
    config = resolve(load(run_file(cluster={"n_gpus_per_node": 2}), [], SFTConfig))
    assert config.tokenizer_path == str(model_dir)
    assert config.actor.world_size == 2


def test_allocation_mode_equals_the_keys_it_stands_for(run_file):
    short = load(run_file(), ["allocation_mode=vllm:d2t2+megatron:d2t2p2e2"])
    long = load(
        run_file(),
        [
            "rollout.backend=vllm",
            "rollout.parallel={dp: 2, tp: 2}",
            "actor.parallel={tp: 2, pp: 2, ep: 2, etp: 1}",
            "actor.world_size=8",
        ],
    )
    assert resolve(short) == resolve(long)
    assert resolve(short).allocation_mode is None


def test_allocation_mode_reaches_the_reference_too(run_file, model_dir):
    overrides = ["allocation_mode=vllm:d1+megarl:d1t2", f"ref.path={model_dir}"]
    config = resolve(load(run_file(), overrides))
    assert config.ref.parallel == config.actor.parallel == ParallelConfig(tp=2)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("actor.parallel.tp=1", r"^actor\.parallel\.tp: 1 contradicts allocation_mode .* says 2$"),
        ("actor.world_size=2", r"^actor\.world_size: 2 contradicts .* says 4$"),
        ("rollout.backend=sglang", r"^rollout\.backend: sglang contradicts .* says vllm$"),
        ("rollout.parallel.dp=2", r"^rollout\.parallel\.dp: 2 contradicts .* says 1$"),
        ("actor.parallel.vpp=2", r"^actor\.parallel\.vpp: 2 virtual stages need pp > 1"),
    ],
)
def test_allocation_mode_and_a_key_must_agree(run_file, override, message):
    """Also where the key has its default value, as `actor.parallel.tp=1`: it was written."""
    with pytest.raises(ConfigError, match=message):
        resolve(load(run_file(), ["allocation_mode=vllm:d1+megarl:d2t2", override]))


def test_allocation_mode_and_an_agreeing_key(run_file):
    file = run_file()
    mode = "allocation_mode=vllm:d1+megarl:d2t2"
    assert resolve(load(file, [mode, "actor.parallel.tp=2"])) == resolve(load(file, [mode]))


def test_a_config_made_in_python_contradicts_too(run_file):
    config = load(run_file(), ["actor.parallel.tp=4"])
    config = replace(config, allocation_mode="vllm:d1+megarl:d2t2")
    with pytest.raises(ConfigError, match=r"^actor\.parallel\.tp: 4 contradicts"):
        resolve(config)


# ---------------------------------------------------------------- dump

json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
# Strings that YAML or its 1.1 corners could read as something else.
strings = st.text() | st.sampled_from(["1e-4", ".5E3", "1_000", "0x1", "yes", "~", "1:30", "null"])
positive = st.integers(1, 10**6)
datasets = st.builds(
    DatasetConfig,
    path=strings.filter(lambda s: not s.startswith("reasoning_gym:")),
    size=st.none() | st.integers(),
    options=st.dictionaries(strings, json_like, max_size=3),
)
actors = st.builds(
    PPOActorConfig,
    path=strings,
    parallel=st.builds(ParallelConfig, tp=positive, ep=st.integers(2, 8), etp=st.none() | positive),
    optimizer=st.none() | st.builds(OptimizerConfig, lr=st.floats(0, 1), eps=st.floats(0, 1e-3)),
    adv_norm=st.none() | st.builds(NormConfig, eps=st.floats(1e-12, 1)),
    rejection_sampling=st.none(),
    world_size=st.none() | positive,
)
configs = st.builds(
    GRPOConfig,
    experiment_name=strings,
    trial_name=strings,
    train_dataset=datasets,
    valid_dataset=st.none() | datasets,
    actor=actors,
    gconfig=st.builds(
        GenerationHyperparameters,
        n_samples=st.integers(2, 64),
        stop=st.none() | st.lists(strings, max_size=3),
        stop_token_ids=st.lists(st.integers(), max_size=3),
    ),
    vllm=st.builds(VLLMConfig, extra_args=st.lists(strings, max_size=3)),
    sglang=st.builds(SGLangConfig, context_length=st.none() | st.integers(1, 1 << 20)),
    stats_logger=st.builds(StatsLoggerConfig, wandb=st.builds(WandbConfig, entity=strings)),
)


@given(config=configs)
@settings(deadline=None)
def test_what_was_dumped_loads_back(tmp_path_factory, config):
    file = tmp_path_factory.getbasetemp() / "dumped.yaml"
    file.write_text(dump(config), encoding="utf-8")
    assert load(file) == config


def test_a_resolved_run_loads_back(run_file, tmp_path):
    config = resolve(load(run_file(), ["allocation_mode=vllm:d1t2+megarl:d2"]))
    assert config.rollout.parallel == RolloutParallelConfig(dp=1, tp=2)
    file = tmp_path / "resolved.yaml"
    file.write_text(dump(config))
    assert resolve(load(file)) == load(file) == config
