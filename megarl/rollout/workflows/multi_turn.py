"""Several turns for one answer: while it is wrong, ask the model to reflect and try again.

    prompt  answer 1 [eos]  reflection  answer 2 [eos]  reflection  answer 3
    given   sampled         given       sampled         given       sampled

Token ids go into the next turn as they were sampled. What has been decoded and encoded again
need not be the same tokens, and their logprobs would then belong to nothing.
"""

from typing import Any

import torch
from jinja2 import TemplateError

from megarl.config.schema import GenerationHyperparameters
from megarl.rollout.api import GenerationEngine, ModelRequest, ModelResponse, Row
from megarl.rollout.workflows.reward_fn import AnyRewardFn, RLVRWorkflow
from megarl.trajectory import Trajectory

REFLECTION = (
    "\nYour answer is either wrong or not parsable to the reward function. "
    "Please try to answer it again."
)
_ANSWER = {"role": "assistant", "content": "some random message."}
_QUESTION = {"role": "user", "content": "some random question."}


def reflection_tokens(tokenizer: Any, text: str, *, enable_thinking: bool = False) -> list[int]:
    """What stands between the end token of an answer and the next answer, tokenised once.

    The difference of two chats: one that ends with an answer, and the same one asked on. A
    tokenizer without a chat template encodes `text` as it stands.

    Raises:
      ValueError: the template writes an answer otherwise when a question follows it, so that
        there is no such difference.
    """
    if not getattr(tokenizer, "chat_template", None):
        return list(tokenizer.encode(text, add_special_tokens=False))

    def encoded(messages: list[dict[str, str]], asks: bool) -> list[int]:
        written = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=asks, enable_thinking=enable_thinking
        )
        return list(tokenizer.encode(written, add_special_tokens=False))

    # Qwen 3 writes an answer to a question with its thoughts if it is the last message, and
    # without them if it is not; others refuse a chat that begins with an answer.
    for chat in ([_ANSWER], [_QUESTION, _ANSWER]):
        try:
            before = encoded(chat, False)
            after = encoded([*chat, {"role": "user", "content": text}], True)
        except TemplateError:
            continue
        if after[: len(before)] == before:
            return after[len(before) :]
    raise ValueError(
        "the chat template writes an answer otherwise when a question follows it: no tokens can "
        "be put after an answer"
    )


class MultiTurnWorkflow(RLVRWorkflow):
    """At most `max_turns` answers to a prompt, until one has a reward other than 0.

    The trajectory's reward is the last answer's, times `turn_discount` for each turn before.
    `gconfig.n_samples` conversations are had at the same time; they form a group. One that
    would grow beyond `gconfig.max_tokens` ends where it is.

    Args:
      reward_fn: see as_reward_fn; called as fn(prompt, completion, prompt_ids,
        completion_ids, **row), the prompt being all that stands before the answer. None
        rejects the conversation.
      turn_discount: in [0, 1].
      reflection: what the model is told after a wrong answer.
      options: those of RLVRWorkflow.

    Raises:
      ValueError: max_turns < 1, or turn_discount outside of [0, 1].
    """

    def __init__(
        self,
        reward_fn: AnyRewardFn,
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        max_turns: int = 2,
        turn_discount: float = 1.0,
        reflection: str = REFLECTION,
        **options: Any,
    ) -> None:
        if max_turns < 1 or not 0 <= turn_discount <= 1:
            raise ValueError(
                f"need max_turns >= 1 and turn_discount in [0, 1], got {max_turns}, {turn_discount}"
            )
        super().__init__(reward_fn, gconfig, tokenizer, **options)
        self.max_turns, self.turn_discount = max_turns, turn_discount
        self.reflection = reflection_tokens(
            tokenizer, reflection, enable_thinking=self.enable_thinking
        )

    async def _sample(
        self, engine: GenerationEngine, rid: str, index: int, input_ids: list[int], data: Row
    ) -> Trajectory | None:
        """One conversation as a trajectory [1, S]; None if it was rejected."""
        conversation, reward, discount = _Conversation(input_ids), 0.0, 1.0
        for turn in range(self.max_turns):
            if turn:
                question = self._after_a_wrong_answer(conversation.tokens)
                if len(conversation.tokens) + len(question) >= self.gconfig.max_tokens:
                    break
                conversation.give(question)
                discount *= self.turn_discount
            seed = self.gconfig.seed
            if seed is not None:
                seed = self._seed(data) + index * self.max_turns + turn
            given = list(conversation.tokens)
            gconfig = self.gconfig.new(n_samples=1, seed=seed)
            request = ModelRequest(
                rid=rid, input_ids=given, gconfig=gconfig, tokenizer=self.tokenizer
            )
            response = await engine.agenerate(request)
            conversation.take(response)
            score = await self._score(given, response, data)
            if score is None:
                return None
            reward = score
            if reward != 0:
                break
        return conversation.as_trajectory(reward * discount)

    def _after_a_wrong_answer(self, tokens: list[int]) -> list[int]:
        eos = self.tokenizer.eos_token_id
        end = [] if eos is None or tokens[-1] == eos else [eos]
        return end + self.reflection

    async def _score(self, given: list[int], response: ModelResponse, data: Row) -> float | None:
        skip = self.gconfig.skip_special_tokens
        row = {key: value for key, value in data.items() if key not in ("prompt", "messages")}
        return await self.reward_fn(
            self.tokenizer.decode(given),
            self.tokenizer.decode(response.output_tokens, skip_special_tokens=skip),
            given,
            response.output_tokens,
            **row,
        )


class _Conversation:
    """Columns of one row, as they grow."""

    def __init__(self, prompt_ids: list[int]) -> None:
        self.tokens: list[int] = []
        self._loss_mask: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._stop_reason = ""
        self.give(prompt_ids)

    def give(self, tokens: list[int]) -> None:
        """Tokens that no weights of ours sampled."""
        self._append(tokens, 0, [0.0] * len(tokens), [-1] * len(tokens))

    def take(self, response: ModelResponse) -> None:
        count = response.output_len
        logprobs, versions = response.output_logprobs, response.output_versions
        assert len(logprobs) == len(versions) == count, "a logprob and a version for each token"
        self._append(response.output_tokens, 1, logprobs, versions)
        self._stop_reason = response.stop_reason

    def _append(
        self, tokens: list[int], sampled: int, logprobs: list[float], versions: list[int]
    ) -> None:
        self.tokens += tokens
        self._loss_mask += [sampled] * len(tokens)
        self._logprobs += logprobs
        self._versions += versions

    def as_trajectory(self, reward: float) -> Trajectory:
        """[1, S] columns; `no_eos` is the last answer's."""
        return {
            "input_ids": torch.tensor([self.tokens], dtype=torch.int32),
            "attention_mask": torch.ones(1, len(self.tokens), dtype=torch.bool),
            "loss_mask": torch.tensor([self._loss_mask], dtype=torch.int32),
            "logprobs": torch.tensor([self._logprobs], dtype=torch.float32),
            "versions": torch.tensor([self._versions], dtype=torch.int32),
            "rewards": torch.tensor([float(reward)]),
            "no_eos": torch.tensor([self._stop_reason == "length"]),
        }
