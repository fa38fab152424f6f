"""The names a workflow is written against: requests, responses, RolloutWorkflow, the engine."""

import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from megarl.config.schema import GenerationHyperparameters
from megarl.trajectory import Trajectory

StopReason = Literal["stop", "length", "abort", "tool_calls"]
NO_VERSION = -1
"""Version of weights that no push has brought: before the first one, or after a failed one."""
Row = dict[str, Any]
"""One row of a dataset: `prompt` (text) or `messages` (chat), and what the reward reads."""


@dataclass
class ModelRequest:
    """One response to one prompt."""

    input_ids: list[int]
    gconfig: GenerationHyperparameters = field(default_factory=GenerationHyperparameters)
    rid: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Requests of one id go to one server, whose cache then has their prefix."""
    tokenizer: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass
class ModelResponse:
    """What was sampled, token by token, as the server said it."""

    input_tokens: list[int] = field(default_factory=list)
    output_tokens: list[int] = field(default_factory=list)
    output_logprobs: list[float] = field(default_factory=list)
    """Nats, under the distribution that was sampled from."""
    output_versions: list[int] = field(default_factory=list)
    """The weights that sampled each token."""
    stop_reason: StopReason = "stop"
    latency_s: float = 0.0
    ttft_s: float = 0.0
    """Until the first part of the response came back."""

    @property
    def input_len(self) -> int:
        return len(self.input_tokens)

    @property
    def output_len(self) -> int:
        return len(self.output_tokens)


class GenerateChunk(NamedTuple):
    """Tokens of one answer; `stop_reason` abort means that the rest is still to be asked for."""

    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    stop_reason: str


class GenerationEngine(Protocol):
    """What an episode sees of the rollout engine."""

    async def agenerate(self, req: ModelRequest) -> ModelResponse: ...

    def get_version(self) -> int: ...


class InferenceEngine(GenerationEngine, Protocol):
    """What a training script sees of it. Only the trainer's rank 0 has one that acts."""

    def set_version(self, version: int) -> None: ...

    def submit(
        self,
        data: Row,
        workflow: "RolloutWorkflow",
        should_accept_fn: "AcceptFn | None" = None,
    ) -> int: ...

    def wait(self, count: int) -> Trajectory: ...

    def rollout_batch(self, data: Sequence[Row], workflow: "RolloutWorkflow") -> Trajectory: ...

    def prepare_batch(
        self,
        dataloader: Any,
        workflow: "RolloutWorkflow",
        should_accept_fn: "AcceptFn | None" = None,
        /,
    ) -> Trajectory: ...

    def pause(self) -> None:
        """Start no more episodes."""

    def resume(self) -> None: ...

    def pause_generation(self) -> None:
        """Stop the servers."""

    def continue_generation(self) -> None: ...

    def export_stats(self) -> dict[str, float]: ...

    def destroy(self) -> None: ...


class RolloutWorkflow(ABC):
    """How a row becomes a trajectory. One instance runs many episodes at the same time."""

    @abstractmethod
    async def arun_episode(self, engine: GenerationEngine, data: Row) -> Trajectory | None:
        """A trajectory dict (see megarl.trajectory), or None to reject the episode."""


AcceptFn = Callable[[Trajectory], bool]
"""Whether a finished trajectory is worth training on."""
