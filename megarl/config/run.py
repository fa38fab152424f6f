"""A whole run: the sections of `megarl.config.schema` put together.

`GRPOConfig` is RL, `SFTConfig` is supervised fine-tuning on the same actor.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megarl.config.rules import require
from megarl.config.schema import (
    ActorConfig,
    ClusterConfig,
    GenerationHyperparameters,
    InferenceEngineConfig,
    PPOActorConfig,
    RewardConfig,
    SGLangConfig,
    TrainEngineConfig,
    VLLMConfig,
    WeightUpdateConfig,
)
from megarl.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetConfig:
    path: str
    """`reasoning_gym:NAME`, `python:package.module:function` (called with size, seed and the
    options), a .json/.jsonl/.parquet file, or the name of a hub dataset."""
    split: str = "train"
    batch_size: int = 32
    """Prompts of one step, over all ranks."""
    shuffle: bool = True
    size: int | None = None
    """Rows to take; None is all. A generator needs it."""
    seed: int = 0
    """Seed of a generated dataset; shuffling uses the run's seed."""
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of the dataset's own loader."""
    exclude: "DatasetConfig | None" = None
    """Rows whose prompt also stands in this dataset are left out."""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ConfigError(f"batch_size: must be >= 1, got {self.batch_size}")
        if self.path.startswith(("reasoning_gym:", "python:")) and self.size is None:
            raise ConfigError(f"size: needed for the generated dataset {self.path!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class FrequencyConfig:
    """How often; None is never."""

    freq_epochs: int | None = None
    freq_steps: int | None = None
    freq_secs: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoverConfig(FrequencyConfig):
    """Training states; the same command started again goes on after the newest one."""

    mode: Literal["auto", "disabled"] = "auto"
    """disabled: an earlier state in the run folder is an earlier trial."""
    in_background: bool = False
    """Write a state while training goes on; needs up to one more copy of it in host memory."""

    @property
    def is_on(self) -> bool:
        """Whether a run saves states and goes on from them."""
        frequencies = (self.freq_epochs, self.freq_steps, self.freq_secs)
        return self.mode == "auto" and any(frequencies)


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluatorConfig(FrequencyConfig):
    at_start: bool = True
    """Evaluate version 0, before any training."""
    at_end: bool = True
    success_threshold: float = 1.0
    """A sample succeeds if its reward is at least this; pass@k counts successes. How many
    samples a prompt gets is `eval_gconfig.n_samples`."""

    def __post_init__(self) -> None:
        require(
            math.isfinite(self.success_threshold),
            f"success_threshold: must be finite, got {self.success_threshold}",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class WandbConfig:
    mode: Literal["disabled", "offline", "online"] = "disabled"
    project: str = "megarl"
    entity: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StatsLoggerConfig:
    tensorboard: bool = True
    wandb: WandbConfig = field(default_factory=WandbConfig)
    trace: bool = False
    """Write RUN/trace.json, a time line of requests, episodes, pushes and phases that
    ui.perfetto.dev opens; some 200 bytes an event, and several events an episode."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseExperimentConfig:
    experiment_name: str
    trial_name: str
    seed: int = 1
    total_train_epochs: int = 1
    total_train_steps: int | None = None
    """None is the epochs' worth."""
    tokenizer_path: str | None = None
    """None is `actor.path`."""
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    train_dataset: DatasetConfig
    valid_dataset: DatasetConfig | None = None
    saver: FrequencyConfig = field(default_factory=FrequencyConfig)
    """HF exports, for users of the model."""
    recover: RecoverConfig = field(default_factory=RecoverConfig)
    """Checkpoints with the optimizer's state, for going on with the run."""
    evaluator: EvaluatorConfig = field(default_factory=EvaluatorConfig)
    stats_logger: StatsLoggerConfig = field(default_factory=StatsLoggerConfig)

    @property
    def run_dir(self) -> Path:
        return Path(self.cluster.fileroot) / self.experiment_name / self.trial_name


@dataclass(frozen=True, kw_only=True, slots=True)
class GRPOConfig(BaseExperimentConfig):
    """One RL run. The name is AReaL's; every algorithm of `actor` uses it."""

    allocation_mode: str | None = None
    """Short form of backend and parallelism, `vllm:d1t2+megarl:d2t1p1`. What it says is
    written into rollout.backend, rollout.parallel, actor.parallel and actor.world_size."""
    gconfig: GenerationHyperparameters = field(default_factory=GenerationHyperparameters)
    eval_gconfig: GenerationHyperparameters | None = None
    """None is `gconfig` with one sample."""
    actor: PPOActorConfig
    ref: TrainEngineConfig | None = None
    """Frozen reference for the KL terms; shares the actor's ranks and parallelism."""
    rollout: InferenceEngineConfig = field(default_factory=InferenceEngineConfig)
    dynamic_bs: bool = False
    """A step takes what was accepted of a batch's prompts, not as many accepted ones: it does not
    wait for others where some were rejected. Its size varies; see `fewest_prompts`."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    vllm: VLLMConfig = field(default_factory=VLLMConfig)
    sglang: SGLangConfig = field(default_factory=SGLangConfig)
    weight_update: WeightUpdateConfig = field(default_factory=WeightUpdateConfig)

    def __post_init__(self) -> None:
        wants_ref = [k for k in ("kl_ctl", "kl_loss_coef") if getattr(self.actor, k) > 0]
        if wants_ref and self.ref is None:
            value = getattr(self.actor, wants_ref[0])
            raise ConfigError(f"actor.{wants_ref[0]}: {value} needs a reference model, ref is null")
        if self.ref is not None and self.ref.parallel != self.actor.parallel:
            raise ConfigError(
                f"ref.parallel: {self.ref.parallel} must equal actor.parallel {self.actor.parallel}"
            )
        if self.actor.temperature != self.gconfig.temperature:
            raise ConfigError(
                f"actor.temperature: {self.actor.temperature} must equal gconfig.temperature "
                f"{self.gconfig.temperature}: the ratio compares the two distributions"
            )
        for name in ("reward_norm", "adv_norm"):
            norm = getattr(self.actor, name)
            if norm and "group" in (norm.mean_level, norm.std_level) and self.gconfig.n_samples < 2:
                raise ConfigError(
                    f"actor.{name}: group level compares samples of one prompt, "
                    f"gconfig.n_samples must be >= 2, got {self.gconfig.n_samples}"
                )
        prompts, minibatches = self.train_dataset.batch_size, self.actor.ppo_n_minibatches
        if minibatches > prompts * self.gconfig.n_samples:
            raise ConfigError(
                f"actor.ppo_n_minibatches: {minibatches} is more than the "
                f"{prompts * self.gconfig.n_samples} samples of a batch"
            )

    @property
    def fewest_prompts(self) -> int:
        """Prompts that give every data-parallel rank enough samples of every minibatch."""
        dp = self.actor.parallel.dp(self.trainer_world_size)
        samples = dp * self.actor.ppo_n_minibatches * self.actor.parallel.fewest_samples
        return math.ceil(samples / self.gconfig.n_samples)

    @property
    def engine(self) -> VLLMConfig | SGLangConfig:
        """The section of the backend that is used; its name is the backend's."""
        return self.sglang if self.rollout.backend == "sglang" else self.vllm

    @property
    def trainer_world_size(self) -> int:
        """Trainer ranks. ConfigError if the servers leave none."""
        if self.actor.world_size is not None:
            return self.actor.world_size
        total = self.cluster.n_nodes * self.cluster.n_gpus_per_node
        if self.rollout.servers is not None:
            return total
        left = total - self.rollout.parallel.world_size
        if left < 1:
            raise ConfigError(
                f"rollout.parallel: {self.rollout.parallel.world_size} server ranks leave none "
                f"of cluster.n_nodes * cluster.n_gpus_per_node = {total} for the trainer"
            )
        return left


@dataclass(frozen=True, kw_only=True, slots=True)
class SFTConfig(BaseExperimentConfig):
    """Supervised fine-tuning on prompt and completion pairs."""

    actor: ActorConfig

    @property
    def trainer_world_size(self) -> int:
        if self.actor.world_size is not None:
            return self.actor.world_size
        return self.cluster.n_nodes * self.cluster.n_gpus_per_node
