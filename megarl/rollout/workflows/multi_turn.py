"""Several turns for one answer: while it is wrong, ask the model to reflect and try again.

    prompt  answer 1 [eos]  reflection  answer 2 [eos]  reflection  answer 3
    given   sampled         given       sampled         given       sampled

Token ids go into the next turn as they were sampled; a reflection is tokenised once.
"""

from typing import Any

from megarl.config.schema import GenerationHyperparameters
from megarl.rollout.api import GenerationEngine, ModelRequest, ModelResponse, Row
from megarl.rollout.proxy.messages import Message, Setting
from megarl.rollout.proxy.template import ChatTemplate
from megarl.rollout.workflows.conversation import Conversation
from megarl.rollout.workflows.reward_fn import AnyRewardFn, RLVRWorkflow
from megarl.trajectory import Trajectory

REFLECTION = (
    "\nYour answer is either wrong or not parsable to the reward function. "
    "Please try to answer it again."
)


def reflection_tokens(
    tokenizer: Any,
    text: str,
    sampled: list[int],
    *,
    has_ended: bool = True,
    enable_thinking: bool = False,
) -> list[int]:
    """What stands between an answer, whose tokens are `sampled`, and the next one.

    All that the chat template writes there, from the end of the answer's text on: its end
    token, unless that was sampled, and what follows it (Qwen's has a line break). Without a
    template it is the tokenizer's end token, unless sampled, and `text` as it stands.

    Args:
      has_ended: the answer stopped by itself.

    Raises:
      ValueError: the template does not write an answer's text when a question follows it.
    """
    if not getattr(tokenizer, "chat_template", None):
        eos = tokenizer.eos_token_id
        end = [] if eos is None or sampled[-1:] == [eos] else [eos]
        return end + list(tokenizer.encode(text, add_special_tokens=False))
    chat = [Message("user", "question"), Message("assistant", "answer"), Message("user", text)]
    setting = Setting(enable_thinking=enable_thinking)
    tokens = ChatTemplate(tokenizer).after_answer(setting, chat, 1, sampled, has_ended=has_ended)
    if tokens is None:
        raise ValueError(
            "the chat template does not write an answer when a question follows it: no tokens "
            "can be put after an answer"
        )
    return tokens


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
      ValueError: max_turns < 1, turn_discount outside of [0, 1], or see reflection_tokens.
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
        self.reflection = reflection
        self._reflection_after(ModelResponse())  # a template that cannot is found now

    async def _sample(
        self, engine: GenerationEngine, rid: str, index: int, input_ids: list[int], data: Row
    ) -> Trajectory | None:
        """One conversation as a trajectory [1, S]; None if it was rejected."""
        conversation, reward, discount = Conversation(input_ids), 0.0, 1.0
        response = ModelResponse()
        for turn in range(self.max_turns):
            if turn:
                question = self._reflection_after(response)
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

    def _reflection_after(self, answer: ModelResponse) -> list[int]:
        return reflection_tokens(
            self.tokenizer,
            self.reflection,
            answer.output_tokens,
            has_ended=answer.stop_reason != "length",
            enable_thinking=self.enable_thinking,
        )
