"""The other doors, through the clients that know them: Anthropic's messages, OpenAI's responses."""

import asyncio
import json

import anthropic
import openai
import pytest
from proxy_agents import TOKENIZER, ScriptedEngine, sampled, serving

from megarl.config.schema import GenerationHyperparameters
from megarl.rollout.proxy.export import export

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é"}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
LONG = "word " * 30


def run(engine, make_client, agent):
    """What `agent(client)` returned, and the session."""

    async def main():
        gconfig = GenerationHyperparameters(max_tokens=5000, temperature=0.7)
        async with serving(engine, gconfig=gconfig) as proxy:
            session = proxy.open_session()
            options = {"base_url": proxy.base_url, "api_key": session.api_key, "max_retries": 0}
            async with make_client(**options) as client:
                return await agent(client), session

    return asyncio.run(main())


def is_one_conversation(session, engine):
    """Everything that was sampled stands in one row, each prompt begins with the one before."""
    tokens = []
    for request, response in zip(engine.requests, engine.responses, strict=True):
        assert request.input_ids[: len(tokens)] == tokens
        tokens = request.input_ids + response.output_tokens
    out = export(session, "concat")
    assert out["input_ids"].tolist() == [tokens]
    trained = out["input_ids"][out["loss_mask"].bool()].tolist()
    return trained == [t for r in engine.responses for t in r.output_tokens]


def test_anthropics_client_with_tools_is_one_conversation():
    async def agent(client):
        tools = [{"name": "add", "description": "Adds.", "input_schema": SCHEMA}]
        ask = {"model": "m", "max_tokens": 500, "system": "You add.", "tools": tools}
        messages = [{"role": "user", "content": "one and two"}]
        first = await client.messages.create(messages=messages, **ask)
        text, call = first.content
        assert (text.text, call.name, call.input) == ("let me", "add", {"a": 1, "b": "é"})
        assert (first.stop_reason, first.stop_sequence) == ("tool_use", None)
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "3"}
        content = [{"type": "text", "text": t} for t in ("here", "go on")]
        content.insert(1, result)
        messages += [
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": content},
        ]
        async with client.messages.stream(messages=messages, **ask) as stream:
            second = await stream.get_final_message()
        assert [block.text for block in second.content] == [LONG]
        assert second.stop_reason == "end_turn"
        messages += [
            {"role": "assistant", "content": second.content},
            {"role": "user", "content": "more"},
        ]
        third = await client.messages.create(messages=messages, **ask, stop_sequences=["END"])
        assert (third.stop_reason, third.stop_sequence) == ("stop_sequence", "END")
        assert third.content[0].text == "the "
        return third, second

    engine = ScriptedEngine(f"let me{CALL}$", f"{LONG}$", "the END")
    (third, second), session = run(engine, anthropic.AsyncAnthropic, agent)
    assert is_one_conversation(session, engine)
    assert third.usage.input_tokens == len(engine.requests[2].input_ids)
    assert second.usage.output_tokens == len(sampled(f"{LONG}$"))
    written = TOKENIZER.decode(engine.requests[1].input_ids)
    assert "user\nhere<|im_end|>\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>user\ngo on" in written
    assert [c.request_id for c in session.completions][1:] == [second.id, third.id]


def test_a_streamed_call_of_anthropics_is_the_same_call():
    async def agent(client):
        tools = [{"name": "add", "input_schema": SCHEMA}]
        ask = {"model": "m", "max_tokens": 500, "tools": tools}
        messages = [{"role": "user", "content": "x"}]
        async with client.messages.stream(messages=messages, **ask) as stream:
            final = await stream.get_final_message()
        (call,) = final.content
        assert (call.name, call.input, final.stop_reason) == (
            "add",
            {"a": 1, "b": "é"},
            "tool_use",
        )
        result = {"type": "tool_result", "tool_use_id": call.id, "content": []}
        messages += [
            {"role": "assistant", "content": final.content},
            {"role": "user", "content": [result]},
        ]
        cut = await client.messages.create(messages=messages, **(ask | {"max_tokens": 2}))
        assert (cut.stop_reason, cut.content[0].text) == ("max_tokens", "so")

    engine = ScriptedEngine(f"{CALL}$", "so long$")
    _, session = run(engine, anthropic.AsyncAnthropic, agent)
    assert is_one_conversation(session, engine)


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"extra_body": {"temperature": 0.1}}, anthropic.BadRequestError, "trains at 0.7, got 0.1"),
        ({"extra_body": {"max_tokens": None}}, anthropic.BadRequestError, "max_tokens"),
        ({"tool_choice": {"type": "any"}}, anthropic.BadRequestError, "only auto and none"),
        ({"messages": [{"role": "tool", "content": ""}]}, anthropic.BadRequestError, "role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            anthropic.BadRequestError,
            r"content\[0\].type: only text",
        ),
    ],
)
def test_anthropics_client_knows_its_errors(changes, error, match):
    async def agent(client):
        ask = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}
        with pytest.raises(error, match=match) as raised:
            await client.messages.create(**(ask | changes))
        assert raised.value.body["type"] == "error"
        with pytest.raises(anthropic.AuthenticationError, match="wrong, or its session"):
            await client.with_options(api_key="wrong").messages.create(**ask)

    assert run(ScriptedEngine("a$"), anthropic.AsyncAnthropic, agent)[1].completions == []


def test_responses_with_tools_are_one_conversation():
    async def agent(client):
        tool = {"type": "function", "name": "add", "parameters": SCHEMA, "strict": False}
        ask = {"model": "m", "instructions": "You add.", "tools": [tool]}
        items = [{"role": "user", "content": "one and two"}]
        first = await client.responses.create(input=items, **ask)
        said, *calls = first.output
        assert (first.output_text, said.type) == ("let me", "message")
        assert [(c.name, json.loads(c.arguments)) for c in calls] == [
            ("add", {"a": 1, "b": "é"})
        ] * 2
        items += first.output
        items += [
            {"type": "function_call_output", "call_id": c.call_id, "output": "3"} for c in calls
        ]
        async with client.responses.stream(input=items, **ask) as stream:
            kinds = [event.type async for event in stream]
            second = await stream.get_final_response()
        assert kinds[0] == "response.created"
        assert kinds[-1] == "response.completed"
        assert [c.type for c in second.output] == ["function_call"]
        assert json.loads(second.output[0].arguments) == {"a": 1, "b": "é"}
        output = {"type": "function_call_output", "call_id": second.output[0].call_id}
        items += [*second.output, output | {"output": "4"}]
        async with client.responses.stream(input=items, **ask) as stream:
            third = await stream.get_final_response()
        assert third.output_text == LONG
        items += [*third.output, {"role": "user", "content": "more"}]
        cut = await client.responses.create(input=items, **ask, max_output_tokens=2)
        assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        return cut

    engine = ScriptedEngine(f"let me{CALL}{CALL}$", f"{CALL}$", f"{LONG}$", "so long$")
    cut, session = run(engine, openai.AsyncOpenAI, agent)
    assert is_one_conversation(session, engine)
    assert (cut.usage.input_tokens, cut.usage.output_tokens) == (
        len(engine.requests[3].input_ids),
        2,
    )


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"previous_response_id": "x"}, "send all of it as input"),
        ({"tools": [{"type": "web_search"}]}, "only function is supported"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "only messages and function calls"),
        ({"input": []}, "with an item at least"),
        ({"top_p": 0.5}, "trains at 1, got 0.5"),
    ],
)
def test_responses_name_what_is_not_served(changes, match):
    async def agent(client):
        with pytest.raises(openai.BadRequestError, match=match):
            await client.responses.create(**({"model": "m", "input": "x"} | changes))

    assert run(ScriptedEngine("a$"), openai.AsyncOpenAI, agent)[1].completions == []


def test_a_conversation_may_change_doors():
    """What one door recorded, another goes on from."""

    async def main():
        engine = ScriptedEngine("one$", "two$", "three$")
        async with serving(engine) as proxy:
            session = proxy.open_session()
            access = {"base_url": proxy.base_url, "api_key": session.api_key}
            messages = [{"role": "user", "content": "x"}]
            async with (
                openai.AsyncOpenAI(**access) as oai,
                anthropic.AsyncAnthropic(**access) as claude,
            ):
                chat = await oai.chat.completions.create(model="m", messages=messages)
                said = chat.choices[0].message.content
                messages += [{"role": "assistant", "content": said}]
                messages += [{"role": "user", "content": "y"}]
                message = await claude.messages.create(model="m", messages=messages, max_tokens=9)
                messages += [{"role": "assistant", "content": message.content[0].text}]
                messages += [{"role": "user", "content": "z"}]
                await oai.responses.create(model="m", input=messages)
        assert is_one_conversation(session, engine)

    asyncio.run(main())
