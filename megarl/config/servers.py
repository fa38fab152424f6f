"""The inference servers of a run, and how weights get into them: frozen dataclasses."""

from dataclasses import dataclass, field
from typing import Any, Literal

from megarl.config.rules import above_zero, at_least, require


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutParallelConfig:
    """How the inference servers are laid out: `dp` servers of `tp * pp` workers each."""

    dp: int = 1
    tp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        at_least(self, 1, "dp", "tp", "pp")

    @property
    def world_size(self) -> int:
        return self.dp * self.tp * self.pp


@dataclass(frozen=True, kw_only=True, slots=True)
class InferenceEngineConfig:
    """The rollout pool and its servers."""

    backend: Literal["vllm", "sglang"] = "vllm"
    parallel: RolloutParallelConfig = field(default_factory=RolloutParallelConfig)
    workflow: str = "megarl.rollout.workflows.rlvr:RLVRWorkflow"
    """`package.module:Class` of a RolloutWorkflow. An agent that is written with a client of
    OpenAI's or Anthropic's runs in megarl.rollout.workflows.agent:AgentWorkflow."""
    workflow_options: dict[str, Any] = field(default_factory=dict)
    """Arguments of the workflow's class beside reward_fn, gconfig and tokenizer, which it gets
    from the run if it names them. AgentWorkflow needs `agent`, its `package.module:Class`."""
    should_accept_fn: str | None = None
    """`package.module:function` of a finished trajectory -> bool; False leaves it out."""
    max_concurrent_rollouts: int | None = None
    """Episodes in flight, of training and of an evaluation; None is `consumer_batch_size`."""
    consumer_batch_size: int | None = None
    """Prompts a training step consumes; None is `train_dataset.batch_size`."""
    max_head_offpolicyness: int = 0
    """Versions a finished episode may lag behind the step that trains on it; 0 is synchronous."""
    queue_size: int | None = None
    """Most episodes queued, running or finished and unused; None is what the staleness bound
    can use."""
    setup_timeout_s: float = 600.0
    """From the start of a server to its first healthy answer."""
    servers: str | None = None
    """Servers that somebody else starts and ends: a file with one `HOST:PORT` a line, read again
    and again, or `dns://NAME:PORT`, see megarl.rollout.membership. None: those that the launcher
    starts, or that MEGARL_SERVER_ADDRS names."""
    request_timeout_s: float = 3600.0
    request_retries: int = 3
    max_tokens_per_request: int | None = 4096
    """A longer response is asked for in parts of so many tokens, each with all before it as its
    prompt: so much is lost with a server at most, and then a response may move to another one.
    None asks once. A response with stop strings or a frequency penalty is always asked for once."""
    token_timeout_s: float = 120.0
    """A server that has requests and makes no token for so long is dead."""
    server_restarts: int = 8
    """How often each server that died is started again, in training; 0 is never. The count of one
    that was up for an hour begins anew."""
    dump_to_file: bool = False
    """Write finished trajectories to `RUN/rollout/VERSION/TASK.jsonl`."""

    def __post_init__(self) -> None:
        at_least(self, 1, "max_concurrent_rollouts", "consumer_batch_size", "queue_size")
        at_least(self, 1, "max_tokens_per_request")
        at_least(self, 0, "max_head_offpolicyness", "request_retries", "server_restarts")
        above_zero(self, "setup_timeout_s", "request_timeout_s", "token_timeout_s")
        for name in ("reward_fn", "gconfig", "tokenizer"):
            require(
                name not in self.workflow_options,
                f"workflow_options.{name}: comes from the run, not from here",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class VLLMConfig:
    """Options of each vLLM server. `extra_args` reaches `vllm serve` as it stands."""

    dtype: str = "bfloat16"
    max_model_len: int | None = None
    max_num_seqs: int = 256
    gpu_memory_utilization: float = 0.9
    enforce_eager: bool = False
    seed: int = 0
    cpu_kvcache_gib: int = 1
    """KV cache on a machine without GPUs."""
    extra_args: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        above_zero(self, "max_model_len", "max_num_seqs", "cpu_kvcache_gib")
        require(
            0 < self.gpu_memory_utilization <= 1,
            f"gpu_memory_utilization: must be in (0, 1], got {self.gpu_memory_utilization}",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SGLangConfig:
    """Options of each SGLang server. `extra_args` reaches `sglang.launch_server` as it stands."""

    dtype: str = "bfloat16"
    context_length: int | None = None
    max_running_requests: int = 256
    mem_fraction_static: float | None = None
    """Share of a GPU's memory for weights and KV cache; None is SGLang's choice."""
    max_total_tokens: int | None = None
    """Tokens of the KV cache; None is what the memory has room for, 32,768 without GPUs."""
    disable_cuda_graph: bool = False
    enable_deterministic_inference: bool = False
    """Sample by each request's own seed; without it SGLang ignores `gconfig.seed`. Slower, and
    needs a GPU."""
    random_seed: int = 0
    extra_args: list[str] = field(default_factory=list)

    @property
    def max_model_len(self) -> int | None:
        """`context_length`, by vLLM's name."""
        return self.context_length

    def __post_init__(self) -> None:
        above_zero(self, "context_length", "max_running_requests", "max_total_tokens")
        fraction = self.mem_fraction_static
        require(
            fraction is None or 0 < fraction < 1,
            f"mem_fraction_static: must be in (0, 1), got {fraction}",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightUpdateConfig:
    mode: Literal["auto", "sharded", "broadcast", "disk"] = "auto"
    """sharded: from the ranks that hold a part to the workers that need it, each byte once, over
    a process group (NCCL, or gloo on a CPU). broadcast: gathered on rank 0, from there to every
    worker. disk: safetensors that the servers reload. auto: sharded where megarl's plugin is in
    every server, else broadcast through the engine's own routes."""
    overlap: bool = False
    """Of sharded: the servers take new weights in while they still generate, and are paused only
    while they load them; each worker holds its part of the weights twice."""
    pause: Literal["keep", "abort"] = "keep"
    """What a request in flight does: keep waits and recomputes its KV cache with the new
    weights; abort returns the tokens so far and the client asks for the rest."""
    bucket_bytes: int = 1 << 28
    """Most bytes of one message; two buckets are in memory at once."""
    timeout_s: float = 600.0
    """One bucket, or one control request."""

    def __post_init__(self) -> None:
        above_zero(self, "bucket_bytes", "timeout_s")
