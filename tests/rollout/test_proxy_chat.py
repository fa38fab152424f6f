"""OpenAI's own client against the proxy: what it is told, and what is recorded."""

import asyncio
import json

import openai
import pytest
from proxy_agents import TOKENIZER, ScriptedEngine, make_tokenizer, sampled, serving

from megarl.config.schema import GenerationHyperparameters
from megarl.errors import EngineError
from megarl.rollout.proxy.export import export

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é"}}\n</tool_call>'
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}


def client_of(proxy, session, **options):
    return openai.AsyncOpenAI(
        base_url=proxy.base_url + "/v1", api_key=session.api_key, max_retries=0, **options
    )


def question(text):
    return {"role": "user", "content": text}


def run(engine, agent, **options):
    """What `agent(client, session)` returned, and the session."""

    async def main():
        async with serving(engine, **options) as proxy:
            session = proxy.open_session()
            async with client_of(proxy, session) as client:
                return await agent(client, session), session

    return asyncio.run(main())


def test_an_answer_and_its_numbers():
    async def agent(client, session):
        assert [model.id async for model in client.models.list()] == ["megarl"]
        return await client.chat.completions.create(
            model="any", messages=[question("hello there")], logprobs=True, seed=5
        )

    engine = ScriptedEngine("hello$")
    answer, session = run(engine, agent)
    (request,) = engine.requests
    text = "<|im_start|>user\nhello there<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert TOKENIZER.decode(request.input_ids) == text
    assert request.gconfig.seed == 5
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "hello")
    assert choice.finish_reason == "stop"
    assert [t.token for t in choice.logprobs.content] == [*"hello", "<|im_end|>"]
    assert [t.logprob for t in choice.logprobs.content] == [-t / 512 for t in sampled("hello$")]
    assert (answer.object, answer.model) == ("chat.completion", "any")
    made, given = len(sampled("hello$")), len(request.input_ids)
    counts = answer.usage
    assert (counts.prompt_tokens, counts.completion_tokens) == (given, made)
    assert counts.total_tokens == given + made
    (completion,) = session.completions
    assert completion.request_id == answer.id
    assert completion.response is engine.responses[0]


async def tool_agent(client, session):
    """Two calls of tools, messages given back as the client's own objects, then an answer."""
    messages = [{"role": "developer", "content": "You add."}, question("one and two")]
    for _ in range(2):
        answer = await client.chat.completions.create(model="m", messages=messages, tools=[ADD])
        (choice,) = answer.choices
        assert choice.finish_reason == "tool_calls"
        messages.append(choice.message)
        for call in choice.message.tool_calls:
            assert call.function.name == "add"
            assert json.loads(call.function.arguments) == {"a": 1, "b": "é"}
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "3"})
    answer = await client.chat.completions.create(model="m", messages=messages, tools=[ADD])
    return [m if isinstance(m, dict) else m.model_dump() for m in messages], answer


def test_a_conversation_with_tools_is_one_sequence_of_what_was_sampled():
    engine = ScriptedEngine(f"let me see\n{CALL}$", f"{CALL}\n{CALL}$", "it is three$")
    (messages, answer), session = run(engine, tool_agent)
    assert messages[2]["content"] == "let me see"
    assert messages[4]["content"] is None
    assert len(messages[4]["tool_calls"]) == 2
    assert answer.choices[0].message.content == "it is three"
    # Each prompt begins with all that stood before, as it was sampled.
    tokens = []
    for request, response in zip(engine.requests, engine.responses, strict=True):
        assert request.input_ids[: len(tokens)] == tokens
        tokens = request.input_ids + response.output_tokens
    # What lies between is what the template writes, its line feed after the end token included.
    written = TOKENIZER.decode(tokens)
    system = json.dumps(ADD)  # the template's tojson writes the same, its keys in this order
    ask = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    tool = "<|im_start|>tool\n3<|im_end|>\n"
    assert written == (
        f"<|im_start|>system{system}<|im_end|>\n<|im_start|>system\nYou add.<|im_end|>\n"
        f"<|im_start|>user\none and two<|im_end|>\n{ask}let me see\n{CALL}<|im_end|>\n"
        f"{tool}{ask}{CALL}\n{CALL}<|im_end|>\n{tool}{tool}{ask}it is three<|im_end|>"
    )
    session.set_reward(2.0)
    out = export(session, "concat", gamma=0.5)
    assert out["input_ids"].tolist() == [tokens]
    mask = out["loss_mask"].bool()
    expected = [t for response in engine.responses for t in response.output_tokens]
    assert out["input_ids"][mask].tolist() == expected
    assert out["logprobs"][mask].tolist() == [-t / 512 for t in expected]
    assert not out["logprobs"][~mask].any()
    assert out["versions"][mask].tolist() == [
        10 + i for i, r in enumerate(engine.responses) for _ in r.output_tokens
    ]
    assert set(out["versions"][~mask].tolist()) == {-1}
    assert out["rewards"].tolist() == [0.5]
    # Encoded again it would have been fewer tokens: letters come in pairs.
    assert len(TOKENIZER.encode(written, add_special_tokens=False)) < len(tokens)
    turns = export(session, "turns", gamma=0.5)
    assert turns["rewards"].tolist() == [0.5, 1.0, 2.0]
    assert turns["loss_mask"].sum(1).tolist() == [r.output_len for r in engine.responses]
    for i, response in enumerate(engine.responses):
        row = turns["input_ids"][i][turns["attention_mask"][i]].tolist()
        assert row == response.input_tokens + response.output_tokens


def test_answers_that_were_cut_get_their_end_from_the_template():
    async def agent(client, session):
        messages = [question("hi")]
        create = client.chat.completions.create
        answer = await create(model="m", messages=messages, max_completion_tokens=3)
        assert (answer.choices[0].finish_reason, answer.choices[0].message.content) == (
            "length",
            "lon",
        )
        messages += [answer.choices[0].message, question("more")]
        answer = await create(model="m", messages=messages, stop="STOP")
        assert (answer.choices[0].finish_reason, answer.choices[0].message.content) == (
            "stop",
            "tell ",
        )
        messages += [answer.choices[0].message, question("more")]
        return await create(model="m", messages=messages, max_tokens=1 << 30)

    engine = ScriptedEngine("longer", "tell STOP", "x$")
    _, session = run(engine, agent)
    assert [r.gconfig.max_new_tokens for r in engine.requests] == [3, 16384, 16384]
    tokens = engine.requests[-1].input_ids
    written = TOKENIZER.decode(tokens)
    assert "lon<|im_end|>\n<|im_start|>user" in written
    assert "tell STOP<|im_end|>\n<|im_start|>user" in written
    mask = export(session, "concat")["loss_mask"][0]
    assert int(mask.sum()) == 3 + len("tell STOP") + 2
    assert export(session, "turns")["no_eos"].tolist() == [True, False, False]


def test_an_altered_history_is_another_conversation():
    async def agent(client, session):
        create = client.chat.completions.create
        first = await create(model="m", messages=[question("hi")])
        said = first.choices[0].message.content
        for text in (said, said + "!", said):
            history = [question("hi"), {"role": "assistant", "content": text}, question("so")]
            await create(model="m", messages=history)
        tools = await create(model="m", messages=history, tools=[ADD])
        assert tools.choices[0].message.tool_calls is None

    engine = ScriptedEngine("hello$", "one$", "two$", "three$", "four$")
    _, session = run(engine, agent)
    first, *others = session.completions
    assert [c.parent for c in others] == [first, None, first, None]
    assert session.num_retokenised == 0
    out = export(session, "concat")
    assert out["loss_mask"].sum(1).tolist() == [6 + 4, 4, 6 + 6, 5]
    mine = [c.response.input_tokens[: len(first.tokens)] == first.tokens for c in others]
    assert mine == [True, False, True, False]
    altered = TOKENIZER.decode(others[1].response.input_tokens)
    assert "hello!<|im_end|>" in altered


REFUSES_MARKS = (
    "{{ raise_exception('no') if messages[1].content[:6] == 'answer' }}{{ messages[1:] }}"
)
CANNOT_GO_ON = "{% if messages | length > 1 %}" + REFUSES_MARKS + "{% endif %}x"


def test_a_template_that_cannot_go_on_is_counted_and_tokenised_again():
    tokenizer = make_tokenizer(CANNOT_GO_ON)

    async def agent(client, session):
        create = client.chat.completions.create
        answer = await create(model="m", messages=[question("hi")])
        again = [question("hi"), answer.choices[0].message, question("so")]
        await create(model="m", messages=again)

    _, session = run(ScriptedEngine("hello$"), agent, tokenizer=tokenizer)
    assert session.num_retokenised == 1
    assert [c.parent for c in session.completions] == [None, None]


def test_a_template_that_cannot_go_on_is_told_once_whatever_sessions_it_has(caplog):
    tokenizer = make_tokenizer(CANNOT_GO_ON)

    async def main():
        async with serving(ScriptedEngine("hello$"), tokenizer=tokenizer) as proxy:
            for _ in range(3):
                async with client_of(proxy, proxy.open_session()) as client:
                    create = client.chat.completions.create
                    chat = [question("hi")]
                    chat += [(await create(model="m", messages=chat)).choices[0].message]
                    await create(model="m", messages=[*chat, question("so")])

    asyncio.run(main())
    told = [r.getMessage() for r in caplog.records if r.name.startswith("megarl")]
    assert [text.split()[:4] for text in told] == [
        ["the", "chat", "template", "cannot"],
        ["3", "conversations", "were", "tokenised"],
    ]


def test_choices_are_recorded_each_and_gone_on_from():
    async def agent(client, session):
        create = client.chat.completions.create
        answer = await create(model="m", messages=[question("hi")], n=2, seed=7)
        assert [c.index for c in answer.choices] == [0, 1]
        assert [c.message.content for c in answer.choices] == ["one", "two"]
        assert answer.usage.completion_tokens == 8
        history = [question("hi"), answer.choices[1].message, question("so")]
        last = await create(model="m", messages=history)
        session.set_reward(1.0, f"{answer.id}:1")
        session.set_reward(4.0, last.id)

    engine = ScriptedEngine("one$", "two$", "three$")
    _, session = run(engine, agent)
    assert [r.gconfig.seed for r in engine.requests] == [7, 8, None]
    assert len({r.rid for r in engine.requests}) == 1
    one, two, three = session.completions
    assert (one.turn, two.turn, three.turn) == (0, 0, 1)
    assert three.parent is two
    assert export(session, "turns", 0.5)["rewards"].tolist() == [2.0, 3.0, 4.0]
    out = export(session, "concat", 0.5)
    assert out["rewards"].tolist() == [2.0, 3.0]
    assert out["loss_mask"].sum(1).tolist() == [4, 10]


@pytest.mark.parametrize(("answer", "tools"), [("a " * 100 + "$", None), (f"so {CALL}$", [ADD])])
def test_a_stream_says_what_the_whole_answer_says(answer, tools):
    async def agent(client, session):
        options = {"model": "m", "messages": [question("hi")], "n": 2, "logprobs": True}
        if tools:
            options["tools"] = tools
        whole = await client.chat.completions.create(**options)
        chunks = []
        async for chunk in await client.chat.completions.create(
            **options, stream=True, stream_options={"include_usage": True}
        ):
            chunks.append(chunk)
        async with client.chat.completions.stream(**options) as stream:
            return whole, chunks, await stream.get_final_completion()

    (whole, chunks, final), session = run(ScriptedEngine(answer), agent)
    assert chunks[-1].usage == whole.usage
    assert chunks[-1].choices == []
    assert {c.object for c in chunks} == {"chat.completion.chunk"}
    assert {c.id for c in chunks} == {session.completions[2].request_id}
    for expected, choice in zip(whole.choices, final.choices, strict=True):
        assert choice.finish_reason == expected.finish_reason
        assert (choice.message.content or None) == (expected.message.content or None)
        assert choice.logprobs.content == expected.logprobs.content
        calls = [[c.function.name, c.function.arguments] for c in choice.message.tool_calls or []]
        assert calls == [
            [c.function.name, c.function.arguments] for c in expected.message.tool_calls or []
        ]
    pieces = [c for c in chunks if c.choices and c.choices[0].delta.content]
    assert tools or len(pieces) > 4
    assert len(session.completions) == 6


def test_the_end_of_a_stream_is_said():
    async def agent(client, session):
        create = client.chat.completions.with_raw_response.create
        raw = await create(model="m", messages=[question("hi")], stream=True)
        return raw.headers["content-type"], [line async for line in raw.http_response.aiter_lines()]

    (kind, lines), _ = run(ScriptedEngine("a$"), agent)
    assert kind == "text/event-stream"
    assert [line for line in lines if line][-1] == "data: [DONE]"


def refused(match, status=400, **request):
    async def agent(client, session):
        asked = {"model": "m", "messages": [question("hi")]} | request
        with pytest.raises(openai.APIStatusError, match=match) as raised:
            await client.chat.completions.create(**asked)
        return raised.value

    error, session = run(
        ScriptedEngine("a$"),
        agent,
        gconfig=GenerationHyperparameters(max_tokens=200, temperature=0.7),
    )
    assert error.status_code == status
    assert session.completions == []
    return error


@pytest.mark.parametrize(
    ("field", "value", "match"),
    [
        ("temperature", 0.2, "trains at 0.7, got 0.2"),
        ("top_p", 0.5, "trains at 1, got 0.5"),
        ("temperature", 9, r"\[0, 2\]"),
        ("n", 65, r"\[1, 64\]"),
        ("top_logprobs", 3, "only the sampled token"),
        ("tool_choice", "required", "only auto and none"),
        ("response_format", {"type": "json_object"}, "only text"),
        ("logit_bias", {"5": 1}, "has none"),
        ("messages", [], "a message at least"),
        ("messages", [{"role": "king", "content": "x"}], r"messages\[0\].role"),
        ("messages", [question([{"type": "image_url"}])], r"content\[0\].type: only text"),
        ("messages", [question("long" * 200)], "at most 200"),
        ("extra_body", {"wish": 1}, "wish: this server does not know it"),
        ("extra_body", {"chat_template_kwargs": {"chat_template": "x"}}, "does not know it"),
        ("stop", ["", "x"], "none empty"),
        ("tools", [{"type": "function", "function": {}}], r"tools\[0\].function.name"),
    ],
)
def test_what_is_not_served_is_named(field, value, match):
    assert refused(match, **{field: value}).type == "invalid_request_error"


def test_the_runs_sampling_is_taken_and_an_evaluation_may_change_it():
    async def main():
        engine = ScriptedEngine("a$")
        gconfig = GenerationHyperparameters(temperature=0.7, seed=3, max_tokens=1000)
        async with serving(engine, gconfig=gconfig) as proxy:
            for free, asked in ((False, {"temperature": 0.7}), (True, {"temperature": 0})):
                session = proxy.open_session(may_change_sampling=free)
                async with client_of(proxy, session) as client:
                    for _ in range(2):
                        await client.chat.completions.create(
                            model="m", messages=[question("hi")], **asked
                        )
        return [r.gconfig for r in engine.requests]

    trained, trained_again, evaluated, _ = asyncio.run(main())
    assert (trained.temperature, trained.greedy, trained.seed) == (0.7, False, 3)
    assert trained_again.seed == 4
    assert (evaluated.temperature, evaluated.greedy) == (0.0, True)


def test_a_dead_engine_is_told_as_one():
    async def agent(client, session):
        with pytest.raises(openai.InternalServerError, match="no server is left") as raised:
            await client.chat.completions.create(model="m", messages=[question("hi")])
        return raised.value

    error, session = run(ScriptedEngine(EngineError("no server is left")), agent)
    assert (error.status_code, error.code) == (503, "engine_error")
    assert session.completions == []


def test_thoughts_are_no_calls_and_broken_calls_stay_text():
    async def agent(client, session):
        create = client.chat.completions.create
        options = {"model": "m", "messages": [question("hi")], "tools": [ADD]}
        return [(await create(**options)).choices[0] for _ in range(3)]

    broken = "<tool_call>\n{'name': 'add'}\n</tool_call>"
    engine = ScriptedEngine(f"<think>{CALL}</think>no$", f"{broken}$", f"{broken}{CALL}$")
    (thought, wrong, half), _ = run(engine, agent)
    assert thought.message.tool_calls is None
    assert thought.message.content == f"<think>{CALL}</think>no"
    assert (wrong.message.content, wrong.finish_reason) == (broken, "stop")
    assert (half.message.content, len(half.message.tool_calls)) == (broken, 1)
