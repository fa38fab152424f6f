"""MultiTurnWorkflow with an engine whose answers are written down: every column, exactly."""

import asyncio

import pytest
import torch
from jinja2 import TemplateError
from proxy_agents import TOKENIZER

from megarl.config.schema import GenerationHyperparameters
from megarl.rollout.api import ModelResponse
from megarl.rollout.workflows.multi_turn import MultiTurnWorkflow, reflection_tokens

EOS = 1
REFLECTION = [ord(c) for c in "again?"]


class Tokenizer:
    """A token is a character; two tokens in a row decode to text that encodes as one."""

    eos_token_id = EOS
    chat_template = None

    def encode(self, text, add_special_tokens=False):
        assert not add_special_tokens
        return [ord(c) for c in text.replace("ab", "c")]

    def decode(self, ids, skip_special_tokens=False):
        return "".join(chr(i) for i in ids if not (skip_special_tokens and i == EOS))


class ScriptedEngine:
    """Answers request i with `answers[i]` under version 10 + i; a token's logprob is -token / 8."""

    def __init__(self, *answers):
        self.answers, self.requests = list(answers), []

    async def agenerate(self, req):
        answer = self.answers[len(self.requests)]
        self.requests.append(req)
        tokens = [EOS if c == "$" else ord(c) for c in answer]
        return ModelResponse(
            input_tokens=req.input_ids,
            output_tokens=tokens,
            output_logprobs=[-token / 8 for token in tokens],
            output_versions=[9 + len(self.requests)] * len(tokens),
            stop_reason="stop" if tokens[-1] == EOS else "length",
        )

    def get_version(self):
        return 0


async def reward(prompt, completion, prompt_ids, completion_ids, *, answer, **row):
    return None if completion == "never" else float(completion == answer)


def run(engine, *, n_samples=1, max_turns=3, reward_fn=reward, **gconfig):
    workflow = MultiTurnWorkflow(
        reward_fn,
        GenerationHyperparameters(n_samples=n_samples, **gconfig),
        Tokenizer(),
        max_turns=max_turns,
        turn_discount=0.5,
        reflection="again?",
    )
    return asyncio.run(workflow.arun_episode(engine, {"prompt": "hi", "answer": "7"}))


def ids(text):
    return [EOS if c == "$" else ord(c) for c in text]


def test_three_turns_token_by_token():
    """A wrong answer without an end, a wrong one with, a right one."""
    engine = ScriptedEngine("ab", "5$", "7$")
    out = run(engine)
    parts = [  # text, version of its weights or None if it was given
        ("hi", None),
        ("ab", 10),
        ("$again?", None),
        ("5$", 11),
        ("again?", None),
        ("7$", 12),
    ]
    tokens = [i for text, _ in parts for i in ids(text)]
    sampled = [(i, version) for text, version in parts for i in ids(text)]
    assert out["input_ids"].tolist() == [tokens]
    assert out["loss_mask"].tolist() == [[int(v is not None) for _, v in sampled]]
    assert out["logprobs"].tolist() == [[0.0 if v is None else -i / 8 for i, v in sampled]]
    assert out["versions"].tolist() == [[-1 if v is None else v for _, v in sampled]]
    assert out["attention_mask"].all()
    assert out["rewards"].tolist() == [0.25]
    assert out["no_eos"].tolist() == [False]
    dtypes = {key: column.dtype for key, column in out.items()}
    assert dtypes == {
        "input_ids": torch.int32,
        "attention_mask": torch.bool,
        "loss_mask": torch.int32,
        "logprobs": torch.float32,
        "versions": torch.int32,
        "rewards": torch.float32,
        "no_eos": torch.bool,
    }
    # What was sampled goes on as it is: "ab" encoded again would be one token.
    assert [r.input_ids for r in engine.requests] == [
        ids("hi"),
        ids("hiab$again?"),
        ids("hiab$again?5$again?"),
    ]
    assert len({r.rid for r in engine.requests}) == 1


@pytest.mark.parametrize(
    ("answers", "rewards", "no_eos"),
    [
        (["7$"], [1.0], [False]),
        (["5$", "7$"], [0.5], [False]),
        (["5$", "5$", "xx"], [0.0], [True]),
    ],
)
def test_turns_end_with_the_first_reward_or_the_last_turn(answers, rewards, no_eos):
    engine = ScriptedEngine(*answers)
    out = run(engine)
    assert len(engine.requests) == len(answers)
    assert out["rewards"].tolist() == rewards
    assert out["no_eos"].tolist() == no_eos


def test_a_group_is_had_at_the_same_time_and_rejected_conversations_leave_it():
    class Together(ScriptedEngine):
        """Answers only when all first turns have been asked."""

        first_turns = asyncio.Barrier(3)

        async def agenerate(self, req):
            response = await super().agenerate(req)
            if len(self.requests) <= 3:
                async with asyncio.timeout(60):
                    await self.first_turns.wait()
            return response

    engine = Together("7$", "never", "5$", "7$")
    out = run(engine, n_samples=3, seed=4)
    assert out["rewards"].tolist() == [1.0, 0.5]
    assert out["attention_mask"].sum(1).tolist() == [4, 12]
    assert {r.gconfig.n_samples for r in engine.requests} == {1}
    assert len({r.gconfig.seed for r in engine.requests}) == 4
    assert run(ScriptedEngine("never")) is None


def test_a_conversation_without_room_ends():
    out = run(ScriptedEngine("5$"), max_tokens=10)
    assert out["input_ids"].tolist() == [ids("hi5$")]
    assert out["rewards"].tolist() == [0.0]


def test_a_plain_function_is_a_reward():
    calls = []

    def plain(prompt, completion, prompt_ids, completion_ids, *, answer):
        calls.append((prompt, completion, prompt_ids, completion_ids, answer))
        return 1

    assert run(ScriptedEngine("5$"), reward_fn=plain)["rewards"].tolist() == [1.0]
    assert calls == [("hi", "5", ids("hi"), ids("5$"), "7")]

    def broken(*args, **row):
        raise KeyError("a bug in the user's reward")

    out = run(ScriptedEngine("5$"), reward_fn=broken, max_turns=1)
    assert out["rewards"].tolist() == [0.0]


class ChatTokenizer(Tokenizer):
    """<role>text$ for each message, as chat templates write it."""

    chat_template = "there is one"

    def apply_chat_template(
        self, messages, *, tools, tokenize, add_generation_prompt, enable_thinking
    ):
        assert not tokenize
        assert tools is None
        self.check(messages)
        text = "".join(f"<{m['role']}>{m['content']}{chr(EOS)}" for m in messages)
        return text + "<assistant>" * add_generation_prompt

    def check(self, messages):
        pass


class StrictTokenizer(ChatTokenizer):
    def check(self, messages):
        if messages[0]["role"] == "assistant":
            raise TemplateError("a chat begins with a question")


@pytest.mark.parametrize("tokenizer", [ChatTokenizer, StrictTokenizer])
def test_the_reflection_is_what_a_chat_has_after_an_answer(tokenizer):
    reflection = "<user>again?$<assistant>"
    assert reflection_tokens(tokenizer(), "again?", ids("5$")) == ids(reflection)
    # An answer that was cut gets the end that it lacks.
    cut = reflection_tokens(tokenizer(), "again?", ids("5"), has_ended=False)
    assert cut == ids("$" + reflection)


@pytest.mark.parametrize("ends", [True, False])
def test_all_that_the_template_writes_behind_an_end_token_is_kept(ends):
    """Qwen's writes a line break behind it, which no answer has sampled."""
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    chat.append({"role": "user", "content": "again?"})
    whole = TOKENIZER.apply_chat_template(
        chat, tools=None, tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    rest = whole.partition("<|im_start|>assistant\na<|im_end|>")[2]
    sampled = TOKENIZER.encode("a<|im_end|>" if ends else "a")
    tokens = reflection_tokens(TOKENIZER, "again?", sampled, has_ended=ends)
    assert TOKENIZER.decode(sampled + tokens) == "a<|im_end|>" + rest
    assert rest.startswith("\n<|im_start|>user")


def test_a_template_that_leaves_answers_out_is_refused():
    class Forgetful(ChatTokenizer):
        def apply_chat_template(self, messages, **options):
            kept = [m for m in messages if m["role"] == "user"]
            return super().apply_chat_template(kept, **options)

    with pytest.raises(ValueError, match="no tokens can be put after an answer"):
        reflection_tokens(Forgetful(), "again?", ids("5$"))
    with pytest.raises(ValueError, match="no tokens can be put after an answer"):
        MultiTurnWorkflow(reward, GenerationHyperparameters(), Forgetful())


class LineTokenizer(ChatTokenizer):
    """A message ends with a line break, which an answer may also have in it."""

    def apply_chat_template(self, messages, *, add_generation_prompt, **options):
        text = "".join(f"<{m['role']}>{m['content']}\n" for m in messages)
        return text + "<assistant>" * add_generation_prompt


def test_only_an_answer_that_has_ended_has_its_end():
    """ "5\n" was cut by its length: the line break is a part of it."""
    engine = ScriptedEngine("5\n", "7$")
    workflow = MultiTurnWorkflow(
        reward, GenerationHyperparameters(), LineTokenizer(), reflection="again?"
    )
    out = asyncio.run(workflow.arun_episode(engine, {"prompt": "hi", "answer": "7"}))
    assert out["input_ids"].tolist() == [ids("hi5\n\n<user>again?\n<assistant>7$")]


@pytest.mark.parametrize("options", [{"max_turns": 0}, {"turn_discount": 1.5}])
def test_wrong_numbers_are_named(options):
    with pytest.raises(ValueError, match=r"max_turns >= 1 and turn_discount in \[0, 1\]"):
        MultiTurnWorkflow(reward, GenerationHyperparameters(), Tokenizer(), **options)
