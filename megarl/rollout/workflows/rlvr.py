"""One turn with a verifiable reward: prompt, n samples, a score for each."""

import operator
import uuid
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from megarl.config.schema import GenerationHyperparameters
from megarl.rollout.api import GenerationEngine, ModelRequest, ModelResponse, RolloutWorkflow, Row
from megarl.rollout.workflows.conversation import Conversation
from megarl.rollout.workflows.group import run_group
from megarl.trajectory import Trajectory, concat_padded

RewardFn = Callable[..., Awaitable[float | None]]
"""async (prompt, completion, prompt_ids, completion_ids, **row) -> reward; None rejects. `row` is
without columns of these names and `messages`."""

_GIVEN = ("prompt", "messages", "completion", "prompt_ids", "completion_ids")
"""Columns that are no keyword of a reward: it gets others of these names, or none."""


def default_data_extract_prompt_fn(data: Row) -> Any:
    """`messages` (chat) where the row has them, else `prompt` (text)."""
    return data["messages"] if "messages" in data else data["prompt"]


def default_get_input_ids_fn(prompt: Any, tokenizer: Any, enable_thinking: bool) -> list[int]:
    """Chat through the tokenizer's template, text as it stands."""
    if isinstance(prompt, str):
        ids: list[int] = tokenizer.encode(prompt, add_special_tokens=False)
        return ids
    text = tokenizer.apply_chat_template(
        prompt, add_generation_prompt=True, tokenize=False, enable_thinking=enable_thinking
    )
    return list(tokenizer.encode(text, add_special_tokens=False))


def row_number(data: Row) -> int:
    """For seeds: the row's `row_id` if that is an integer, else one made of its text."""
    row_id = data.get("row_id", 0)
    try:
        return operator.index(row_id)
    except TypeError:
        return zlib.crc32(str(row_id).encode(errors="surrogatepass"))


class RLVRWorkflow(RolloutWorkflow):
    """Samples `gconfig.n_samples` responses to a prompt and scores each.

    `failed` counts by their error the samples that an evaluation left out, see `run_group`.

    Args:
      reward_fn: see RewardFn; each of megarl.rollout.rewards is one.
    """

    def __init__(
        self,
        reward_fn: RewardFn,
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        enable_thinking: bool = False,
        get_input_ids_fn: Callable[[Any, Any, bool], list[int]] = default_get_input_ids_fn,
        data_extract_prompt_fn: Callable[[Row], Any] = default_data_extract_prompt_fn,
    ) -> None:
        self.reward_fn, self.gconfig, self.tokenizer = reward_fn, gconfig, tokenizer
        self.enable_thinking = enable_thinking
        self.get_input_ids_fn = get_input_ids_fn
        self.data_extract_prompt_fn = data_extract_prompt_fn
        self.failed: Counter[str] = Counter()

    async def arun_episode(self, engine: GenerationEngine, data: Row) -> Trajectory | None:
        """The samples as one trajectory [n_samples, S]; None if all of them were rejected."""
        prompt = self.data_extract_prompt_fn(data)
        input_ids = self.get_input_ids_fn(prompt, self.tokenizer, self.enable_thinking)
        # One id for the group: its samples share the prompt's cache on one server.
        rid = uuid.uuid4().hex
        samples = (
            self._sample(engine, rid, i, input_ids, data) for i in range(self.gconfig.n_samples)
        )
        accepted = await run_group(samples, self.failed)
        return concat_padded(accepted) if accepted else None

    async def _sample(
        self, engine: GenerationEngine, rid: str, index: int, input_ids: list[int], data: Row
    ) -> Trajectory | None:
        seed = None if self.gconfig.seed is None else self._seed(data) + index
        gconfig = self.gconfig.new(n_samples=1, seed=seed)
        response = await engine.agenerate(
            ModelRequest(rid=rid, input_ids=input_ids, gconfig=gconfig, tokenizer=self.tokenizer)
        )
        reward = await self._score(input_ids, response, data)
        return None if reward is None else to_trajectory(response, reward)

    async def _score(self, given: list[int], response: ModelResponse, data: Row) -> float | None:
        """The reward of an answer to the tokens `given`."""
        row = {key: value for key, value in data.items() if key not in _GIVEN}
        if getattr(self.reward_fn, "takes_messages", False):
            prompt = self.data_extract_prompt_fn(data)
            is_text = isinstance(prompt, str)
            row["messages"] = [{"role": "user", "content": prompt}] if is_text else prompt
        skip = self.gconfig.skip_special_tokens
        return await self.reward_fn(
            self.tokenizer.decode(given),
            self.tokenizer.decode(response.output_tokens, skip_special_tokens=skip),
            given,
            response.output_tokens,
            **row,
        )

    def _seed(self, data: Row) -> int:
        """Of the row, the same in each run."""
        assert self.gconfig.seed is not None
        return (self.gconfig.seed * 1_000_003 + row_number(data)) * 4096 % (1 << 31)


def to_trajectory(response: ModelResponse, reward: float) -> Trajectory:
    """A response as a trajectory of one row."""
    conversation = Conversation(response.input_tokens)
    conversation.take(response)
    return conversation.as_trajectory(reward)
