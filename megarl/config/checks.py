"""Rules of a run that need files: the model's `config.json`, datasets, the user's own code.

`check` takes a resolved config and reads; it starts nothing and imports no module of the
run. What it accepts the trainer and the servers can be built from. Rules over the config
alone are in `megarl.config.schema` and `megarl.config.run`.
"""

import ast
import importlib.machinery
import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from megarl.config.run import DatasetConfig, GRPOConfig, SFTConfig
from megarl.config.schema import (
    GenerationHyperparameters,
    InferenceEngineConfig,
    ParallelConfig,
    RolloutParallelConfig,
    TrainEngineConfig,
)
from megarl.errors import ConfigError

MODEL_TYPES = ("llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3", "kimi_k2")
"""`model_type` of the models the trainer builds."""
DATASET_SUFFIXES = (".json", ".jsonl", ".parquet")

_LENGTH_KEYS = {"vllm": "vllm.max_model_len", "sglang": "sglang.context_length"}
_EXPERT_KEYS = ("num_experts", "n_routed_experts", "num_local_experts")
_GENERATOR = "reasoning_gym:"
_AGENT_WORKFLOW = "megarl.rollout.workflows.agent:AgentWorkflow"


def check(config: GRPOConfig | SFTConfig) -> None:
    """ConfigError, naming the key, for the first thing that `config` cannot be started with."""
    for name in ("experiment_name", "trial_name"):
        value = getattr(config, name)
        if value in ("", "..") or value != Path(value).name:
            raise ConfigError(f"{name}: must be a folder's name, got {value!r}")
    model = _check_model("actor", config.actor)
    assert config.tokenizer_path is not None, "check takes a resolved config"
    _check_tokenizer(Path(config.tokenizer_path))
    _check_world(config)
    _check_dataset("train_dataset", config.train_dataset)
    if config.valid_dataset is not None:
        _check_dataset("valid_dataset", config.valid_dataset)
    if isinstance(config, GRPOConfig):
        if config.ref is not None:
            _check_model("ref", config.ref)
        _check_rollout(config, model)
        check_import("reward.fn", config.reward.fn)
        check_import("rollout.workflow", config.rollout.workflow)
        _check_agent(config.rollout)
        if config.rollout.should_accept_fn is not None:
            check_import("rollout.should_accept_fn", config.rollout.should_accept_fn)


def has_weights(folder: Path) -> bool:
    """Whether a model folder holds safetensors."""
    return any(folder.glob("*.safetensors"))


# ---------------------------------------------------------------- models and parallelism


@dataclass(frozen=True)
class _Model:
    """A model folder's config.json, for the section of the run that names the folder."""

    section: str
    folder: Path
    values: dict[str, Any]

    @classmethod
    def read(cls, section: str, folder: Path) -> "_Model":
        if not folder.is_dir():
            raise ConfigError(f"{section}.path: no folder {folder}")
        try:
            values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(f"{section}.path: {folder} has no config.json") from None
        except ValueError as error:
            raise ConfigError(f"{section}.path: {folder}/config.json: {error}") from error
        if not isinstance(values, dict):
            raise ConfigError(f"{section}.path: {folder}/config.json is not a mapping")
        return cls(section, folder, values)

    def size(self, name: str) -> int:
        value = self.values.get(name)
        if type(value) is not int or value < 1:
            raise ConfigError(
                f"{self.section}.path: {self.folder}/config.json has {name} {value!r}"
            )
        return value

    @property
    def heads(self) -> int:
        return self.size("num_attention_heads")

    @property
    def kv_heads(self) -> int:
        """A config without the key has one for each attention head."""
        return (
            self.size("num_key_value_heads") if "num_key_value_heads" in self.values else self.heads
        )

    @property
    def experts(self) -> int | None:
        name = next((key for key in _EXPERT_KEYS if self.values.get(key)), None)
        return None if name is None else self.size(name)


def _check_model(section: str, config: TrainEngineConfig) -> _Model:
    model = _Model.read(section, Path(config.path))
    model_type = model.values.get("model_type")
    if model_type not in MODEL_TYPES:
        raise ConfigError(
            f"{section}.path: model_type {model_type!r} of {model.folder} is not supported; "
            f"supported: {', '.join(MODEL_TYPES)}"
        )
    if not config.init_from_scratch and not has_weights(model.folder):
        raise ConfigError(
            f"{section}.path: {model.folder} holds no *.safetensors; "
            f"{section}.init_from_scratch=true starts from random weights"
        )
    if quantised := model.values.get("quantization_config"):
        raise ConfigError(
            f"{section}.path: {model.folder} holds weights quantised by "
            f"{quantised.get('quant_method')!r}; the trainer reads bfloat16 or float32"
        )
    _check_layout(f"{section}.parallel", config.parallel, model)
    if model.experts is not None and config.parallel.tp > 1 and not config.sequence_parallel:
        raise ConfigError(
            f"{section}.sequence_parallel: must be true for experts with tp {config.parallel.tp}"
        )
    if model.experts is None and config.parallel.etp is not None:
        raise ConfigError(
            f"{section}.parallel.etp: {config.parallel.etp} needs experts, {model.folder} has none"
        )
    return model


def _check_layout(key: str, parallel: ParallelConfig, model: _Model) -> None:
    """The trainer can split `model` by `parallel`."""
    tp, folder = parallel.tp, model.folder
    for name, count in (
        ("num_attention_heads", model.heads),
        ("num_key_value_heads", model.kv_heads),
    ):
        if count % tp:
            raise ConfigError(f"{key}.tp: {tp} does not divide {name} {count} of {folder}")
    layers = model.size("num_hidden_layers")
    chunks = parallel.pp * (parallel.vpp or 1)
    if layers < chunks:
        raise ConfigError(
            f"{key}.pp: pp {parallel.pp} * vpp {parallel.vpp or 1} = {chunks} is more than "
            f"num_hidden_layers {layers} of {folder}"
        )
    if parallel.ep > 1 and model.experts is None:
        raise ConfigError(f"{key}.ep: {parallel.ep} needs experts, {folder} has none")
    if model.experts is not None and model.experts % parallel.ep:
        raise ConfigError(
            f"{key}.ep: {parallel.ep} does not divide the {model.experts} experts of {folder}"
        )
    if model.experts is not None:
        width, etp = model.size("moe_intermediate_size"), parallel.expert_tp
        if width % etp:
            raise ConfigError(
                f"{key}.etp: {etp} does not divide moe_intermediate_size {width} of {folder}"
            )


def _check_world(config: GRPOConfig | SFTConfig) -> None:
    """Ranks fit the cluster, and every data-parallel rank gets a sample of each step."""
    world = config.trainer_world_size
    try:
        dp = config.actor.parallel.dp(world)
    except ConfigError as error:
        raise ConfigError(f"actor.parallel: {error}") from None
    samples, minibatches, counted = config.train_dataset.batch_size, 1, "train_dataset.batch_size"
    servers = 0
    if isinstance(config, GRPOConfig):
        samples *= config.gconfig.n_samples
        minibatches = config.actor.ppo_n_minibatches
        counted += " * gconfig.n_samples"
        servers = config.rollout.parallel.world_size
    fewest = config.actor.parallel.fewest_samples
    if samples < dp * minibatches * fewest:
        raise ConfigError(
            f"train_dataset.batch_size: {counted} = {samples} is less than {fewest} samples for "
            f"each of {dp} data-parallel ranks and {minibatches} minibatches"
        )
    places = config.cluster.n_nodes * config.cluster.n_gpus_per_node
    if world + servers > places:
        raise ConfigError(
            f"cluster.n_gpus_per_node: {servers} server ranks and {world} trainer ranks need "
            f"more than n_nodes {config.cluster.n_nodes} * n_gpus_per_node "
            f"{config.cluster.n_gpus_per_node} = {places} places"
        )


# ---------------------------------------------------------------- servers


def _check_rollout(config: GRPOConfig, model: _Model) -> None:
    rollout = config.rollout
    _check_server_layout(rollout.parallel, model)
    if rollout.consumer_batch_size != config.train_dataset.batch_size:
        raise ConfigError(
            f"rollout.consumer_batch_size: {rollout.consumer_batch_size} must equal "
            f"train_dataset.batch_size {config.train_dataset.batch_size}, what a step consumes"
        )
    sampling = {"gconfig": config.gconfig, "eval_gconfig": config.eval_gconfig}
    limit = config.engine.max_model_len
    for name, gconfig in sampling.items():
        if gconfig is not None and limit is not None and gconfig.max_new_tokens >= limit:
            raise ConfigError(
                f"{name}.max_new_tokens: {gconfig.max_new_tokens} leaves no room for a prompt "
                f"in {_LENGTH_KEYS[rollout.backend]} {limit}"
            )
    if rollout.backend == "sglang":
        _check_sglang(config)


def _check_sglang(config: GRPOConfig) -> None:
    """SGLang 0.5.23 does what is asked; it would leave some of it undone without a word."""
    pp, gconfig = config.rollout.parallel.pp, config.gconfig
    if pp > 1:
        raise ConfigError(
            f"rollout.parallel.pp: must be 1 with rollout.backend sglang, got {pp}: SGLang "
            "numbers the workers of a weight group by their tensor-parallel rank alone"
        )
    for name, all_of_it in (("top_p", 1.0), ("top_k", GenerationHyperparameters().top_k)):
        value = getattr(gconfig, name)
        if value < all_of_it:
            raise ConfigError(
                f"gconfig.{name}: {value} with rollout.backend sglang, whose logprobs are those "
                f"before {name}: not of the distribution that was sampled from; vllm's are"
            )
    for section, sampling in (("gconfig", gconfig), ("eval_gconfig", config.eval_gconfig)):
        if sampling is None:
            continue
        if sampling.seed is not None and not config.sglang.enable_deterministic_inference:
            raise ConfigError(
                f"{section}.seed: {sampling.seed} is ignored by SGLang unless "
                "sglang.enable_deterministic_inference is true"
            )
        if sampling.ignore_eos and sampling.stop_token_ids:
            raise ConfigError(
                f"{section}.stop_token_ids: with ignore_eos SGLang does not stop at "
                f"{sampling.stop_token_ids} either"
            )


def _check_server_layout(parallel: RolloutParallelConfig, model: _Model) -> None:
    """The servers can split `model`; they replicate KV heads where there are too few."""
    key, tp, folder = "rollout.parallel", parallel.tp, model.folder
    if model.heads % tp:
        raise ConfigError(
            f"{key}.tp: {tp} does not divide num_attention_heads {model.heads} of {folder}"
        )
    if model.kv_heads % tp and tp % model.kv_heads:
        raise ConfigError(
            f"{key}.tp: {tp} neither divides nor is a multiple of num_key_value_heads "
            f"{model.kv_heads} of {folder}"
        )
    layers = model.size("num_hidden_layers")
    if parallel.pp > layers:
        raise ConfigError(
            f"{key}.pp: {parallel.pp} is more than num_hidden_layers {layers} of {folder}"
        )


# ---------------------------------------------------------------- data and code


def _check_tokenizer(folder: Path) -> None:
    if not folder.is_dir():
        raise ConfigError(f"tokenizer_path: no folder {folder}")
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        raise ConfigError(f"tokenizer_path: {folder} has no tokenizer.json")


def _check_dataset(section: str, dataset: DatasetConfig) -> None:
    path = dataset.path
    if path.startswith(_GENERATOR):
        _check_generator(f"{section}.path", path.removeprefix(_GENERATOR))
    elif path.endswith(DATASET_SUFFIXES) and not Path(path).is_file():
        raise ConfigError(f"{section}.path: no file {path}")
    if dataset.exclude is not None:
        _check_dataset(f"{section}.exclude", dataset.exclude)


def _check_generator(key: str, name: str) -> None:
    names = generators()
    if not names:
        raise ConfigError(f"{key}: the package reasoning_gym is not installed")
    if name not in names:
        close = get_close_matches(name, names, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"{key}: reasoning_gym has no dataset {name!r}{hint}")


def generators() -> set[str]:
    """Names of reasoning_gym's datasets, from its source: importing it takes over a second."""
    spec = importlib.util.find_spec("reasoning_gym")
    if spec is None or spec.origin is None:
        return set()
    names = {"composite"}
    for file in Path(spec.origin).parent.rglob("*.py"):
        names.update(re.findall(r'^DATASET_NAME = "(\w+)"', file.read_text("utf-8"), re.MULTILINE))
    return names


def _check_agent(rollout: InferenceEngineConfig) -> None:
    if rollout.workflow != _AGENT_WORKFLOW:
        return
    agent = rollout.workflow_options.get("agent")
    if not isinstance(agent, str):
        raise ConfigError(
            f"rollout.workflow_options.agent: expected an agent's package.module:Class, got "
            f"{agent!r}"
        )
    check_import("rollout.workflow_options.agent", agent)


def check_import(key: str, target: str) -> None:
    """ConfigError unless `package.module:name` is a file that binds `name`; imports nothing."""
    module, _, name = target.partition(":")
    file = _module_file(module)
    if file is None:
        raise ConfigError(f"{key}: no module {module!r} on the Python path (or in {Path.cwd()})")
    if file.suffix != ".py":
        return  # compiled: nothing to read
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except SyntaxError as error:
        raise ConfigError(f"{key}: {file}, line {error.lineno}: {error.msg}") from error
    names = set(_bound_names(tree.body))
    if name not in names and "*" not in names:
        close = get_close_matches(name, names, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"{key}: {file} defines no {name!r}{hint}")


def _module_file(module: str) -> Path | None:
    """The file of a dotted module, found without importing its packages."""
    # The processes of a run are started with `python -m`, which puts the working folder first.
    locations = [str(Path.cwd()), *sys.path]
    spec = None
    path = ""
    for part in module.split("."):
        path = f"{path}.{part}" if path else part
        spec = importlib.machinery.PathFinder.find_spec(path, locations)
        if spec is None and path == part and part.isidentifier():
            spec = importlib.util.find_spec(part)  # editable installs have finders of their own
        if spec is None:
            return None
        locations = list(spec.submodule_search_locations or ())
    return Path(spec.origin) if spec is not None and spec.origin else None


def _bound_names(body: list[ast.stmt]) -> Iterator[str]:
    """Names that a module's statements bind; '*' if any could be."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                yield from (t.id for t in ast.walk(target) if isinstance(t, ast.Name))
        elif isinstance(node, ast.If | ast.Try):
            yield from _bound_names(node.body + node.orelse)
            for handler in getattr(node, "handlers", ()):
                yield from _bound_names(handler.body)
