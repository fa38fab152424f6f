"""Tool calls in a model's text: which are found, which are none, and how often a text is read."""

import asyncio
import json
import re

import anthropic
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from proxy_agents import ScriptedEngine, serving

from megarl.rollout.proxy.tool_calls import call_spans, split_tool_calls

CALL = '{"name": "add", "arguments": {"a": 1}}'
PIECES = ("<tool_call>", "</tool_call>", "</think>", "<tool_call", ">", "\n", " ", "x", "{}", CALL)


def by_regex(text):
    """What `split_tool_calls` is to give, by a search that reads a text again and again."""
    thought, end, said = text.rpartition("</think>")
    calls = []

    def take(match):
        if match.group(1).strip() != CALL:
            return match.group(0)
        calls.append(("add", '{"a": 1}'))
        return ""

    rest = re.sub("<tool_call>(.*?)</tool_call>", take, said, flags=re.DOTALL)
    return ((thought + end + rest).strip() if calls else text), calls


@given(st.lists(st.sampled_from(PIECES), max_size=24).map("".join))
@example(f"a <tool_call>{CALL}</tool_call> b <tool_call>{CALL}</tool_call> c ")
@example(f"<tool_call><tool_call>{CALL}</tool_call><tool_call>{CALL}\n</tool_call></tool_call>")
def test_calls_are_what_stands_between_an_opening_tag_and_the_next_closing_one(text):
    rest, calls = split_tool_calls(text)
    assert (rest, [(call.name, call.arguments) for call in calls]) == by_regex(text)
    assert len({call.call_id for call in calls}) == len(calls)


class Counted(str):
    """A text that counts the letters its searches go over."""

    __slots__ = ("read",)

    def find(self, what, start):
        at = super().find(what, start)
        self.read += (len(self) if at < 0 else at + len(what)) - start
        return at


@pytest.mark.parametrize(
    "text", ["<tool_call>\n" * 50_000, "<tool_call>a</tool_call>" * 9_000, "</tool_call>" * 9_000]
)
def test_no_letter_is_read_twice_whatever_a_model_repeats(text):
    counted = Counted(text)
    counted.read = 0
    assert len(list(call_spans(counted))) == text.count("<tool_call>a")
    assert 0 < counted.read <= len(text)


def test_half_a_million_opening_tags_are_no_call():
    """A search that starts anew at each would take hours."""
    text = "<tool_call>\n" * 500_000
    assert split_tool_calls(text) == (text, ())


def call(arguments, name="add"):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def nested(depth):
    return '{"a": ' + "[" * (depth - 1) + "]" * (depth - 1) + "}"


@pytest.mark.parametrize(
    "text",
    [
        call('{"a": NaN}'),
        call('{"a": [-Infinity]}'),
        call('{"a": 1e999}'),
        call('{"a": "\\ud800"}'),
        call('{"\\udfff": 1}'),
        call("{}", name="add\\ud800"),
        call(nested(129)),
        call(nested(990)),
        call(nested(100_000)),
        call('{"a": ' + "9" * 5000 + "}"),
        call("[1]"),
    ],
    ids=lambda text: text[11:60],
)
def test_a_call_that_no_client_can_send_back_is_text(text):
    assert split_tool_calls(text) == (text, ())


@pytest.mark.parametrize(
    "arguments", ['{"a": "\\ud83d\\ude00 é"}', '{"a": 1e300}', nested(128), "{}"]
)
def test_a_call_that_can_be_sent_back_is_one(arguments):
    rest, (found,) = split_tool_calls(f" so {call(arguments)}")
    assert rest == "so"
    assert json.loads(found.arguments) == json.loads(arguments)
    found.arguments.encode()


@pytest.mark.parametrize(("depth", "kind"), [(128, "tool_use"), (300, "text"), (992, "text")])
def test_anthropics_client_goes_on_from_an_answer_however_deep(depth, kind):
    tools = [{"name": "add", "input_schema": {"type": "object"}}]
    ask = {"model": "m", "max_tokens": 5000, "tools": tools}

    async def main():
        engine = ScriptedEngine(call(nested(depth)) + "$", "so$")
        async with serving(engine) as proxy:
            session = proxy.open_session()
            access = {"base_url": proxy.base_url, "api_key": session.api_key, "max_retries": 0}
            async with anthropic.AsyncAnthropic(**access) as client:
                chat = [{"role": "user", "content": "hi"}]
                answer = await client.messages.create(messages=chat, **ask)
                assert [block.type for block in answer.content] == [kind]
                chat += [
                    {"role": "assistant", "content": answer.content},
                    {"role": "user", "content": "and?"},
                ]
                await client.messages.create(messages=chat, **ask)
            first, second = session.completions
            assert second.parent is first

    asyncio.run(main())
