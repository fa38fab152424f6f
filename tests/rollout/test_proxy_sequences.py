"""For any conversations: what is exported is what was sampled, token by token."""

import asyncio

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from proxy_agents import EOS, TOKENIZER, ScriptedEngine, make_tokenizer, sampled, serving

from megarl.rollout.api import ModelResponse
from megarl.rollout.proxy.export import export, turn_returns
from megarl.rollout.proxy.messages import Message, Setting, ToolCall
from megarl.rollout.proxy.session import Completion, Session
from megarl.rollout.proxy.template import ChatTemplate

LETTERS = sorted({t for c in "abé \n<>|{}" for t in TOKENIZER.encode(c, add_special_tokens=False)})
# Any tokens: also half of a letter in two bytes, pairs of letters, and what looks like markup.
ANSWERS = st.lists(st.sampled_from([*LETTERS, *range(256, 300)]), max_size=12)


class AnyEngine(ScriptedEngine):
    """Samples lists of tokens; those without an end were cut."""

    async def agenerate(self, req):
        tokens = self.answers[len(self.requests)]
        self.requests.append(req)
        response = ModelResponse(
            input_tokens=list(req.input_ids),
            output_tokens=tokens,
            output_logprobs=[-token / 512 for token in tokens],
            output_versions=[len(self.requests)] * len(tokens),
            stop_reason="stop" if tokens[-1] == EOS else "length",
        )
        self.responses.append(response)
        return response


def is_within(inner, outer):
    return outer[: len(inner)] == inner


@settings(max_examples=25)
@given(
    st.lists(st.tuples(ANSWERS, st.booleans(), st.integers(0, 6)), min_size=1, max_size=7),
)
def test_sequences_are_what_was_sampled(turns):
    """Each turn asks on from an earlier conversation (0: a new one), whichever was sampled."""
    answers = [[*tokens, EOS] if ends or not tokens else tokens for tokens, ends, _ in turns]
    engine = AnyEngine(*answers)
    begins = []

    async def main():
        async with serving(engine) as proxy:
            session = proxy.open_session()
            access = {"base_url": proxy.base_url, "api_key": session.api_key, "max_retries": 0}
            async with openai.AsyncOpenAI(**access) as client:
                chats = []
                for number, (_, _, back) in enumerate(turns):
                    before = number - back if 0 < back <= number else None
                    chat = [] if before is None else list(chats[before])
                    # The number makes a history one turn's alone.
                    chat.append({"role": "user", "content": f"{number} ab<|im_end|>"})
                    answer = await client.chat.completions.create(model="m", messages=chat)
                    chats.append([*chat, answer.choices[0].message])
                    begins.append(before)
            return session

    session = asyncio.run(main())
    completions = session.completions
    for completion, before in zip(completions, begins, strict=True):
        assert completion.parent is (None if before is None else completions[before])
    for response, completion in zip(engine.responses, completions, strict=True):
        assert completion.response is response
        if completion.parent is not None:
            assert is_within(completion.parent.tokens, response.input_tokens)
    leaves = [i for i in range(len(turns)) if i not in begins]
    out = export(session, "concat")
    assert out["input_ids"].shape[0] == len(leaves)
    for row, leaf in enumerate(leaves):
        path = [leaf]
        while begins[path[0]] is not None:
            path.insert(0, begins[path[0]])
        mask = out["loss_mask"][row].bool()
        expected = [t for i in path for t in answers[i]]
        assert out["input_ids"][row][mask].tolist() == expected
        assert out["versions"][row][mask].tolist() == [i + 1 for i in path for _ in answers[i]]
        assert out["logprobs"][row][mask].tolist() == [-t / 512 for t in expected]
    turn_rows = export(session, "turns")
    trained = turn_rows["input_ids"][turn_rows["loss_mask"].bool()].tolist()
    assert trained == [t for tokens in answers for t in tokens]


def made_session(*turns):
    """A session of completions (turn, index of the parent or None, reward or None)."""
    session = Session(ScriptedEngine(), ChatTemplate(TOKENIZER), None)
    for turn, parent, reward in turns:
        before = None if parent is None else session.completions[parent]
        given = [] if before is None else before.tokens
        response = ModelResponse([*given, 1], [2, EOS], [-1.0, -1.0], [0, 0])
        message = Message("assistant", "")
        completion = Completion("id", 0, turn, before, response, message, "", reward=reward)
        if before is not None:
            before.has_child = True
        session.completions.append(completion)
    return session


@pytest.mark.parametrize(
    ("turns", "returns", "rows"),
    [
        # One reward at the end of a conversation.
        ([(0, None, None), (1, 0, None), (2, 1, 8.0)], [2.0, 4.0, 8.0], [2.0]),
        # Rewards on the way add up.
        ([(0, None, 1.0), (1, 0, None), (2, 1, 8.0)], [3.0, 4.0, 8.0], [3.0]),
        # Two conversations: the last reward reaches the other one, too.
        ([(0, None, None), (1, None, 8.0)], [4.0, 8.0], [4.0, 8.0]),
        # Choices of one turn: what comes before gets their mean, each row its own.
        ([(0, None, None), (1, 0, 8.0), (1, 0, 0.0)], [2.0, 8.0, 0.0], [4.0, 0.0]),
        # A row goes over the turns of others.
        ([(0, None, None), (1, None, None), (2, 0, 8.0)], [2.0, 4.0, 8.0], [4.0, 2.0]),
    ],
)
def test_rewards_go_back_over_turns(turns, returns, rows):
    session = made_session(*turns)
    found = turn_returns(session.completions, 0.5)
    assert [found[c] for c in session.completions] == returns
    assert export(session, "turns", 0.5)["rewards"].tolist() == returns
    assert export(session, "concat", 0.5)["rewards"].tolist() == rows


def test_choices_of_which_one_cannot_be_written_are_not_recorded():
    """At some depths the call's JSON can be read here, but not written again."""
    setting, chat = Setting(), [Message("user", "x")]
    refused = 0
    for depth in range(850, 1000):
        deep = ToolCall("id", "add", '{"a": ' + "[" * depth + "]" * depth + "}")
        session = made_session()
        choices = [
            Completion("id", i, 0, None, ModelResponse([1], [EOS], [-1.0], [0]), message, "")
            for i, message in enumerate(
                [Message("assistant", "a"), Message("assistant", "", tool_calls=(deep,))]
            )
        ]
        try:
            session.record(choices, setting, chat)
        except RecursionError:
            refused += 1
            assert session.completions == []
            assert session.longest_history(setting, [*chat, choices[0].message]) == (None, -1)
        else:
            assert session.completions == choices
    assert refused


def test_what_cannot_be_exported_is_named():
    assert export(made_session()) is None
    for options, match in (
        ({"gamma": 1.1}, r"\[0, 1\], got 1.1"),
        ({"style": "tree"}, "turns or concat"),
    ):
        with pytest.raises(ValueError, match=match):
            export(made_session(), **options)


def test_a_cut_answer_keeps_what_only_looks_like_its_end():
    """A template without end tokens: the line feed of a cut answer is its own."""
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    template = ChatTemplate(make_tokenizer(plain + "assistant: "))
    chat = [Message("user", "x"), Message("assistant", "a\n"), Message("user", "y")]
    for has_ended, between in ((True, ""), (False, "\n")):
        tokens = template.after_answer(Setting(), chat, 1, sampled("a\n"), has_ended=has_ended)
        assert TOKENIZER.decode(tokens) == f"{between}user: y\nassistant: "


def test_an_end_that_was_sampled_is_not_written_again():
    """Nor is the white space that some templates write before it."""
    spaced = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n<|im_end|>\n{% endfor %}"
    template = ChatTemplate(make_tokenizer(spaced))
    chat = [Message("user", "x"), Message("assistant", "a"), Message("user", "y")]
    for answer, has_ended, between in (("a$", True, ""), ("a", False, "\n<|im_end|>")):
        tokens = template.after_answer(Setting(), chat, 1, sampled(answer), has_ended=has_ended)
        assert TOKENIZER.decode(tokens) == f"{between}\nuser: y\n<|im_end|>\n"
