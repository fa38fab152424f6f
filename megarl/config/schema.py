"""What a run is: frozen dataclasses. A field's docstring is its documentation.

Names and defaults follow AReaL's where a user would look for them. Rules over one section
live in that section's `__post_init__`; rules over two live in the class that owns both.
Rules that need a file (the model's `config.json`) are in `megarl.config.checks`. The servers'
sections are in `megarl.config.servers`, the rewards' in `megarl.config.rewards`; all can be
imported from here.
Nothing here imports torch, so a launcher or a laptop can check a run for any cluster.
"""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from megarl.config.rewards import RewardConfig as RewardConfig
from megarl.config.rules import above_zero, at_least, require
from megarl.config.servers import InferenceEngineConfig as InferenceEngineConfig
from megarl.config.servers import RolloutParallelConfig as RolloutParallelConfig
from megarl.config.servers import SGLangConfig as SGLangConfig
from megarl.config.servers import VLLMConfig as VLLMConfig
from megarl.config.servers import WeightUpdateConfig as WeightUpdateConfig

# ---------------------------------------------------------------- parallelism and placement


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """How the trainer's ranks are laid out. Data parallelism is what is left of the world."""

    tp: int = 1
    """Tensor-parallel ranks a layer is split over; sequence parallelism follows it."""
    pp: int = 1
    """Pipeline stages."""
    vpp: int | None = None
    """Virtual stages (model chunks) a pipeline rank holds; None is one."""
    cp: int = 1
    """Ranks a sequence is split over."""
    ep: int = 1
    """Ranks the experts are split over."""
    etp: int | None = None
    """Tensor-parallel ranks inside an expert; None is `tp`."""

    def __post_init__(self) -> None:
        at_least(self, 1, "tp", "pp", "vpp", "cp", "ep", "etp")
        require(
            self.vpp is None or self.vpp == 1 or self.pp > 1,
            f"vpp: {self.vpp} virtual stages need pp > 1, got pp {self.pp}",
        )
        # Megatron-Core 0.16.1 then sums the slices of an expert twice: logits off by 0.34.
        require(
            self.expert_tp == 1 or self.ep > 1 or self.tp > 1,
            f"etp: {self.etp} needs ep > 1 or tp > 1",
        )

    @property
    def virtual_stages(self) -> int | None:
        """Model chunks a pipeline rank holds if it holds several, else None: Megatron's form."""
        return self.vpp if self.vpp != 1 else None

    @property
    def fewest_samples(self) -> int:
        """Of an optimizer step, for each data-parallel rank."""
        # Interleaved stages take micro-batches in rounds of pp.
        return self.pp if self.virtual_stages else 1

    @property
    def expert_tp(self) -> int:
        """Tensor-parallel ranks inside an expert."""
        return self.etp or self.tp

    @property
    def model_size(self) -> int:
        """Ranks that hold one dense replica of the model."""
        return self.tp * self.pp * self.cp

    def dp(self, world_size: int) -> int:
        """Data-parallel replicas in `world_size` ranks. ConfigError if it does not divide."""
        require(
            world_size % self.model_size == 0,
            f"world of {world_size} ranks is not a multiple of tp {self.tp} * pp {self.pp} "
            f"* cp {self.cp} = {self.model_size}",
        )
        expert_size = self.ep * self.expert_tp * self.pp
        has_experts = self.ep > 1 or self.etp is not None
        require(
            not has_experts or world_size % expert_size == 0,
            f"world of {world_size} ranks is not a multiple of ep {self.ep} * etp "
            f"{self.expert_tp} * pp {self.pp} = {expert_size}",
        )
        return world_size // self.model_size


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterConfig:
    fileroot: str = "runs"
    """Folder of all runs; a run writes under `fileroot/experiment_name/trial_name`."""
    n_nodes: int = 1
    n_gpus_per_node: int = 8
    """On a machine without GPUs: how many processes of ours it may hold."""

    def __post_init__(self) -> None:
        at_least(self, 1, "n_nodes", "n_gpus_per_node")


# ---------------------------------------------------------------- generation


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationHyperparameters:
    n_samples: int = 1
    """Responses to one prompt; they form a group."""
    max_new_tokens: int = 16384
    min_new_tokens: int = 0
    max_tokens: int = 32768
    """Prompt and response together."""
    greedy: bool = False
    top_p: float = 1.0
    top_k: int = 100_000_000
    temperature: float = 1.0
    stop_token_ids: list[int] = field(default_factory=list)
    stop: list[str] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    frequency_penalty: float = 0.0
    seed: int | None = None
    """Sampling seed; sample i of a group uses seed + i. None is a fresh one each request."""

    def __post_init__(self) -> None:
        at_least(self, 1, "n_samples", "max_new_tokens", "max_tokens", "top_k")
        at_least(self, 0, "min_new_tokens", "temperature")
        require(0 < self.top_p <= 1, f"top_p: must be in (0, 1], got {self.top_p}")
        require(
            self.min_new_tokens <= self.max_new_tokens,
            f"min_new_tokens: {self.min_new_tokens} is more than max_new_tokens "
            f"{self.max_new_tokens}",
        )

    def new(self, **changes: Any) -> "GenerationHyperparameters":
        """A copy with `changes`."""
        return replace(self, **changes)


# ---------------------------------------------------------------- training


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatchSpec:
    n_mbs: int = 1
    """At least this many micro-batches on each data-parallel rank."""
    max_tokens_per_mb: int | None = None
    """Packed tokens of one micro-batch, over all its cp ranks; None is no bound."""
    n_mbs_divisor: int = 1
    packing: Literal["ffd", "kk"] = "ffd"
    """ffd: first-fit decreasing, fewest bins. kk: Karmarkar-Karp, most even bins."""

    def __post_init__(self) -> None:
        at_least(self, 1, "n_mbs", "max_tokens_per_mb", "n_mbs_divisor")


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    type: Literal["adam", "sgd"] = "adam"
    lr: float = 1e-3
    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    min_lr_ratio: float = 0.0
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps_proportion: float = 0.001
    """Share of all steps over which the learning rate rises from 0."""
    gradient_clipping: float = 1.0

    def __post_init__(self) -> None:
        at_least(self, 0, "lr", "weight_decay", "min_lr_ratio", "gradient_clipping")
        require(
            0 <= self.warmup_steps_proportion <= 1,
            f"warmup_steps_proportion: must be in [0, 1], got {self.warmup_steps_proportion}",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RecomputeConfig:
    """Activations to compute again in the backward pass."""

    granularity: Literal["none", "selective", "full"] = "none"
    """selective: only `modules`; full: whole layers."""
    modules: list[str] = field(default_factory=lambda: ["core_attn"])
    """Of selective: core_attn, layernorm, mlp; of a model with experts also moe, moe_act."""
    method: Literal["uniform", "block"] = "uniform"
    num_layers: int = 1

    def __post_init__(self) -> None:
        at_least(self, 1, "num_layers")
        known = ("core_attn", "layernorm", "mlp", "moe", "moe_act")
        for name in self.modules:
            require(name in known, f"modules: {name!r} is not one of {', '.join(known)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class MoEConfig:
    """How a model with experts runs; models without experts ignore it."""

    token_dispatcher_type: Literal["alltoall", "allgather"] = "alltoall"
    """alltoall sends each token to its experts' ranks; allgather sends all tokens to all, which
    is simpler and faster for few ranks and small experts."""
    router_dtype: Literal["fp32", "model"] = "fp32"
    """Dtype of the router's scores and of the sum over experts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainEngineConfig:
    """A Megatron-Core model on the trainer's ranks."""

    path: str
    """Folder of the model in HF format."""
    init_from_scratch: bool = False
    """Random weights from the run's seed; only config and tokenizer are read from `path`."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    mb_spec: MicroBatchSpec = field(default_factory=MicroBatchSpec)
    optimizer: OptimizerConfig | None = None
    """None is a frozen model."""
    sequence_parallel: bool = True
    """With tp > 1, split norms and residuals over the tp ranks along the sequence."""
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    moe: MoEConfig = field(default_factory=MoEConfig)
    use_distributed_optimizer: bool = True
    overlap_grad_reduce: bool = False
    temperature: float = 1.0
    """Logits are divided by it before the softmax; must equal the sampling temperature."""
    fused_linear_logprob: bool = False
    """Compute logprobs with the output layer, in chunks of tokens, so that the logits of a whole
    micro-batch are never in memory. The backward pass then computes them again, unless the loss
    is a sum over tokens and `parallel.cp` is 1."""
    fused_linear_chunk_tokens: int = 2048
    """Of `fused_linear_logprob`: tokens whose logits are in memory at one time. In bytes, times
    vocabulary / tp and 2 (bfloat16) or 4 (float32)."""

    def __post_init__(self) -> None:
        above_zero(self, "temperature", "fused_linear_chunk_tokens")
        is_sgd = self.optimizer is not None and self.optimizer.type == "sgd"
        require(
            not (is_sgd and self.use_distributed_optimizer),
            "use_distributed_optimizer: true shards adam's state only, optimizer.type is sgd",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ActorConfig(TrainEngineConfig):
    """The model that learns, and the size of the trainer."""

    world_size: int | None = None
    """Trainer ranks; None is what `cluster` has left beside the servers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NormConfig:
    """x <- (x - mean) / (std + eps) over a group of samples or the whole batch."""

    mean_level: Literal["batch", "group", "none"] = "batch"
    mean_leave1out: bool = False
    std_level: Literal["batch", "group", "none"] = "batch"
    std_unbiased: bool = True
    eps: float = 1e-5

    def __post_init__(self) -> None:
        above_zero(self, "eps")


@dataclass(frozen=True, kw_only=True, slots=True)
class RejectionSamplingConfig:
    """Bounds on the behaviour weight exp(proximal - behaviour) of a decoupled loss."""

    level: Literal["token", "sequence"] = "token"
    action: Literal["mask", "clamp"] = "mask"
    metric: Literal["ratio", "k1", "k2", "k3"] = "ratio"
    agg: Literal["mean", "sum", "max"] = "mean"
    """How the metric of a sequence is made of its tokens'."""
    upper: float = 5.0
    lower: float | None = None

    def __post_init__(self) -> None:
        require(
            self.metric != "ratio" or self.upper > 1,
            f"upper: a ratio's bound must be > 1, got {self.upper}",
        )
        require(
            self.lower is None or self.lower < self.upper,
            f"lower: {self.lower} is not below upper {self.upper}",
        )
        require(
            self.action == "mask" or self.metric == "ratio",
            f"action: clamp bounds the ratio itself, not metric {self.metric!r}",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PPOActorConfig(ActorConfig):
    """Policy optimisation: GRPO and PPO-clip with the decoupled objective."""

    ppo_n_minibatches: int = 1
    """Optimizer steps a batch is cut into."""
    eps_clip: float = 0.2
    eps_clip_higher: float | None = None
    """Upper clip 1 + eps_clip_higher (DAPO); None is eps_clip."""
    objective: Literal["ppo", "cispo"] = "ppo"
    """cispo clips the weight of a token's gradient, so that no token loses it (arXiv:2506.13585);
    with eps_clip: 1 the weight has no lower bound, and eps_clip_higher must be set."""
    c_clip: float | None = None
    """Dual clip: bound on the loss of a negative advantage, > 1; None is off."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """sequence is GSPO: one length-normalised ratio a response."""
    reward_norm: NormConfig | None = None
    reward_scaling: float = 1.0
    reward_bias: float = 0.0
    reward_clip: float = 20.0
    overlong_reward_penalty: bool = False
    overlong_tokens: int | None = None
    overlong_penalty_factor: float | None = None
    mask_no_eos_with_zero: bool = False
    """A response cut by the length limit gets no outcome reward."""
    discount: float = 1.0
    gae_lambda: float = 1.0
    adv_norm: NormConfig | None = None
    kl_ctl: float = 0.0
    """Weight of the KL to the reference in the reward; needs `ref`."""
    kl_loss_coef: float = 0.0
    """Weight of the KL to the reference in the loss; needs `ref`."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    recompute_logprob: bool = False
    """Without a decoupled loss: replace the servers' logprobs by the trainer's own."""
    use_decoupled_loss: bool = True
    """Clip around the proximal policy (the trainer's weights before the step) and weigh
    each token by proximal / behaviour (arXiv:2505.24298)."""
    rejection_sampling: RejectionSamplingConfig | None = field(
        default_factory=RejectionSamplingConfig
    )
    """Bounds on the behaviour weight; None applies the weight unbounded."""

    def __post_init__(self) -> None:
        TrainEngineConfig.__post_init__(self)
        at_least(self, 1, "ppo_n_minibatches")
        at_least(self, 0, "eps_clip_higher", "kl_ctl", "kl_loss_coef")
        above_zero(self, "reward_clip", "overlong_tokens")
        for name in ("discount", "gae_lambda"):
            value = getattr(self, name)
            require(0 <= value <= 1, f"{name}: must be in [0, 1], got {value}")
        is_cispo = self.objective == "cispo"
        # At 1 the upper bound is another number, not the same one by default.
        is_one = is_cispo and self.eps_clip == 1 and self.eps_clip_higher is not None
        require(
            0 <= self.eps_clip < 1 or is_one, f"eps_clip: must be in [0, 1), got {self.eps_clip}"
        )
        require(self.c_clip is None or self.c_clip > 1, f"c_clip: must be > 1, got {self.c_clip}")
        require(
            not is_cispo or (self.c_clip is None and self.importance_sampling_level == "token"),
            "objective: cispo has no c_clip and needs importance_sampling_level: token",
        )
        require(
            not self.overlong_reward_penalty
            or (self.overlong_tokens is not None and self.overlong_penalty_factor is not None),
            "overlong_reward_penalty: needs overlong_tokens and overlong_penalty_factor",
        )
