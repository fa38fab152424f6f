"""One agent's run: its key, its limits, and what was sampled for it."""

import asyncio
import contextlib
import hmac
import math
import secrets
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from megarl.config.schema import GenerationHyperparameters
from megarl.rollout.api import GenerationEngine, ModelResponse
from megarl.rollout.proxy.errors import ProxyError, bad_request
from megarl.rollout.proxy.messages import Message, Setting, histories
from megarl.rollout.proxy.template import ChatTemplate


@dataclass(eq=False)
class Completion:
    """One answer, as it was sampled."""

    request_id: str
    index: int
    """Among the answers to one request (`n`)."""
    turn: int
    """Number of its request among the session's, as they were answered."""
    parent: "Completion | None"
    """Whose tokens the prompt begins with."""
    response: ModelResponse
    message: Message
    text: str
    """All of it, tool calls included, without the stop string."""
    stop: str | None = None
    """The stop string that ended it."""
    reward: float | None = None
    has_child: bool = False

    @property
    def tokens(self) -> list[int]:
        return self.response.input_tokens + self.response.output_tokens

    @property
    def finish_reason(self) -> str:
        """As OpenAI names it."""
        if self.response.stop_reason == "length":
            return "length"
        return "tool_calls" if self.message.tool_calls else "stop"


@dataclass(frozen=True)
class Limits:
    max_body_bytes: int = 8 << 20
    max_concurrent_requests: int = 32
    """Of one session."""
    max_choices: int = 64
    """Answers to one request (`n`)."""
    max_sessions: int = 4096
    """Live, or ended and not yet taken."""
    idle_timeout_s: float = 3600.0
    """A session that was opened over HTTP and asks nothing for so long has ended."""
    client_timeout_s: float = 60.0
    """For a client to send its body, and to take each part of an answer."""


@dataclass(eq=False)
class Counts:
    """Of all sessions of a proxy."""

    num_retokenised: int = 0
    """See Session."""


@dataclass(eq=False)
class Session:
    """See `AgentProxy.open_session`. Everything happens in one asyncio loop."""

    engine: GenerationEngine
    template: ChatTemplate
    gconfig: GenerationHyperparameters
    """The run's. Its `n_samples` is not read."""
    limits: Limits = field(default_factory=Limits)
    may_change_sampling: bool = False
    """Requests may have another temperature, top_p or penalty than the run: not for training."""
    session_id: str = field(default_factory=lambda: f"session-{uuid.uuid4().hex}")
    api_key: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)
    completions: list[Completion] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)
    num_retokenised: int = 0
    """Requests that went on from an answer, but whose template could not be continued."""
    is_from_http: bool = False
    """Opened over HTTP: whoever trains on it waits in `AgentProxy.next_ended`."""
    is_ended: bool = False
    last_used_s: float = field(default_factory=time.monotonic)
    num_requests: int = 0
    """That run now."""
    _num_turns: int = 0
    _num_seeds: int = 0
    _by_history: dict[bytes, Completion] = field(default_factory=dict)
    _tasks: set[asyncio.Task[ModelResponse]] = field(default_factory=set)

    # ------------------------------------------------------------------ requests

    @property
    def idle_s(self) -> float:
        return time.monotonic() - self.last_used_s

    def has_key(self, key: str) -> bool:
        return hmac.compare_digest(self.api_key.encode(), key.encode("utf-8", "surrogateescape"))

    @contextlib.contextmanager
    def slot(self) -> Iterator[None]:
        """A place among the requests that run. ProxyError 429 if there is none."""
        most = self.limits.max_concurrent_requests
        if self.num_requests >= most:
            raise ProxyError(
                429,
                f"{most} requests of this session are running: wait for one of them",
                code="rate_limit_exceeded",
            )
        self.num_requests += 1
        try:
            yield
        finally:
            self.num_requests -= 1
            self.last_used_s = time.monotonic()

    def take_seed(self) -> int | None:
        """The run's seed, moved on: a session never uses one twice."""
        if self.gconfig.seed is None:
            return None
        self._num_seeds += 1
        return self.gconfig.seed + self._num_seeds - 1

    async def finish(self, task: asyncio.Task[ModelResponse]) -> ModelResponse:
        """What `task` gives. ProxyError 401 if the session ends before it is done."""
        self._tasks.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            if self.is_ended and task.cancelled():
                raise ended() from None
            raise
        finally:
            self._tasks.discard(task)

    # ------------------------------------------------------------------ what was sampled

    def longest_history(
        self, setting: Setting, messages: Sequence[Message]
    ) -> tuple[Completion | None, int]:
        """The completion that `messages` go on from, and the index of its answer in them."""
        digests = list(histories(setting, messages))
        for index in range(len(messages) - 1, -1, -1):
            if messages[index].role != "assistant":
                continue
            found = self._by_history.get(digests[index + 1])
            if found is not None:
                return found, index
        return None, -1

    def next_turn(self) -> int:
        self._num_turns += 1
        return self._num_turns - 1

    def record(
        self, completions: Sequence[Completion], setting: Setting, messages: Sequence[Message]
    ) -> None:
        """Keep what one request sampled after `messages`: all of it, or nothing and an error.

        Raises:
          ProxyError: 401, the session has ended.
          RecursionError: a message is nested too deeply to be written.
        """
        if self.is_ended:
            raise ended()
        digests = []
        for completion in completions:
            *_, digest = histories(setting, [*messages, completion.message])
            digests.append(digest)
        for completion, digest in zip(completions, digests, strict=True):
            self.completions.append(completion)
            if completion.parent is not None:
                completion.parent.has_child = True
            self._by_history[digest] = completion

    def set_reward(self, reward: float, completion_id: str | None = None) -> None:
        """What the session, or one of its completions, is worth; a later call replaces it.

        Args:
          completion_id: the `id` of an answer as the client has it, for all its choices, or
            `ID:INDEX` for one of them. None is the last request that was answered.

        Raises:
          ProxyError: 400, the reward is not finite or nothing was sampled; 404, there is no
            such completion.
        """
        if not math.isfinite(reward):
            raise bad_request("reward", f"must be finite, got {reward}")
        if not self.completions:
            raise bad_request("reward", "the session has no completion yet")
        if completion_id is None:
            turn = max(c.turn for c in self.completions)
            found = [c for c in self.completions if c.turn == turn]
        else:
            found = [
                c
                for c in self.completions
                if completion_id in (c.request_id, f"{c.request_id}:{c.index}")
            ]
        if not found:
            raise ProxyError(404, "completion_id: the session has no such completion")
        for completion in found:
            completion.reward = reward

    @property
    def has_reward(self) -> bool:
        return any(c.reward is not None for c in self.completions)

    def end(self) -> None:
        """Its key is no longer valid; requests that run are given up. What was sampled stays."""
        self.is_ended = True
        for task in list(self._tasks):
            task.cancel()


def ended() -> ProxyError:
    return ProxyError(401, "the session has ended", code="session_ended")
