"""Anthropic's `/v1/messages`, mapped onto the chat of the other doors."""

import json
from collections.abc import Iterator
from typing import Any

from megarl.rollout.proxy.errors import bad_request
from megarl.rollout.proxy.fields import Fields
from megarl.rollout.proxy.generate import Ask, read_enable_thinking, read_sampling
from megarl.rollout.proxy.messages import Message, Setting, ToolCall
from megarl.rollout.proxy.openai_chat import pieces, tool_json
from megarl.rollout.proxy.session import Completion, Session

_READ = (
    *("messages", "system", "model", "max_tokens", "tools", "tool_choice", "stream"),
    *("stop_sequences", "temperature", "top_p", "top_k", "thinking", "chat_template_kwargs"),
)
_IGNORED = ("metadata", "service_tier", "cache_control", "inference_geo")


def read(session: Session, body: Fields, enable_thinking: bool) -> Ask:
    """The request. ProxyError 400 for what is wrong, unknown or not supported."""
    body.only([*_READ, *_IGNORED])
    thinking = body.object("thinking")
    thinking.refuse("type", ("disabled",), "thoughts are part of the text here")
    max_tokens = body.integer("max_tokens", 1, 1 << 31)
    if max_tokens is None:
        raise bad_request("max_tokens", "expected an integer, got nothing")
    messages = []
    system = _texts(body, "system")
    if system:
        messages.append(Message("system", system))
    for message in body.objects("messages"):
        messages += _read_message(message)
    if not body.items("messages"):
        raise bad_request("messages", "expected a list with a message at least")
    return Ask(
        messages=messages,
        setting=Setting(_read_tools(body), read_enable_thinking(body, enable_thinking)),
        gconfig=read_sampling(session, body, max_tokens),
        stream=body.flag("stream"),
        options={"model": body.text("model", "default")},
    )


def _read_tools(body: Fields) -> tuple[str, ...]:
    choice = body.object("tool_choice")
    choice.refuse("type", ("auto", "none"), "only auto and none are supported")
    tools = []
    for tool in body.objects("tools"):
        tool.refuse("type", ("custom",), "only tools of the client are supported")
        tools.append(tool_json(tool, "input_schema"))
    return () if choice.any("type") == "none" else tuple(tools)


def _read_message(message: Fields) -> list[Message]:
    """The results of tools are messages of their own in a template."""
    role = message.text("role")
    if role not in ("user", "assistant"):
        raise bad_request(message.path("role"), "expected user or assistant")
    if isinstance(message.any("content"), str):
        return [Message(role, message.text("content"))]  # type: ignore[arg-type]
    if role == "assistant":
        return [_read_answer(message)]
    out: list[Message] = []
    texts: list[str] = []
    for block in message.objects("content"):
        kind = block.text("type")
        if kind == "text":
            texts.append(block.text("text"))
        elif kind == "tool_result":
            if texts:
                out.append(Message("user", "".join(texts)))
                texts = []
            call_id = block.text("tool_use_id")
            out.append(Message("tool", _texts(block, "content"), tool_call_id=call_id))
        else:
            raise bad_request(block.path("type"), "only text and tool_result are supported")
    if texts or not out:
        out.append(Message("user", "".join(texts)))
    return out


def _read_answer(message: Fields) -> Message:
    texts, calls = [], []
    for block in message.objects("content"):
        kind = block.text("type")
        if kind == "text":
            texts.append(block.text("text"))
        elif kind == "tool_use":
            block.object("input")  # a 400 unless it is one
            written = json.dumps(block.any("input") or {}, ensure_ascii=False)
            calls.append(ToolCall(block.text("id"), block.text("name"), written))
        else:
            raise bad_request(block.path("type"), "only text and tool_use are supported")
    return Message("assistant", "".join(texts), tuple(calls))


def _texts(fields: Fields, name: str) -> str:
    """A string, or text blocks, joined; empty where it is missing."""
    if isinstance(fields.any(name), str):
        return fields.text(name)
    texts = []
    for block in fields.objects(name):
        block.refuse("type", ("text",), "only text is supported")
        texts.append(block.text("text"))
    return "".join(texts)


# ---------------------------------------------------------------------- the answer


def answer(session: Session, ask: Ask, completions: list[Completion]) -> dict[str, Any]:
    """A `message`."""
    (completion,) = completions
    content: list[dict[str, Any]] = []
    if completion.message.content:
        content.append({"type": "text", "text": completion.message.content})
    for call in completion.message.tool_calls:
        content.append(_tool_use(call) | {"input": call.parsed()})
    return _head(ask, completion) | {
        "content": content,
        "stop_reason": _stop_reason(completion),
        "stop_sequence": completion.stop,
        "usage": _usage(completion),
    }


def events(session: Session, ask: Ask, completions: list[Completion]) -> Iterator[bytes]:
    """The answer as server-sent events, from `message_start` to `message_stop`."""
    (completion,) = completions
    start = _head(ask, completion) | {"content": [], "stop_reason": None, "stop_sequence": None}
    start["usage"] = _usage(completion) | {"output_tokens": 0}
    yield _event("message_start", message=start)
    blocks: list[tuple[dict[str, Any], list[dict[str, Any]]]] = []
    if completion.message.content:
        texts = [{"type": "text_delta", "text": p} for p in pieces(completion.message.content)]
        blocks.append(({"type": "text", "text": ""}, texts))
    for call in completion.message.tool_calls:
        parts = [{"type": "input_json_delta", "partial_json": p} for p in pieces(call.arguments)]
        blocks.append((_tool_use(call) | {"input": {}}, parts))
    for index, (block, deltas) in enumerate(blocks):
        yield _event("content_block_start", index=index, content_block=block)
        for delta in deltas:
            yield _event("content_block_delta", index=index, delta=delta)
        yield _event("content_block_stop", index=index)
    end = {"stop_reason": _stop_reason(completion), "stop_sequence": completion.stop}
    yield _event("message_delta", delta=end, usage=_usage(completion))
    yield _event("message_stop")


def _event(kind: str, **data: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind} | data)}\n\n".encode()


def _head(ask: Ask, completion: Completion) -> dict[str, Any]:
    return {
        "id": completion.request_id,
        "type": "message",
        "role": "assistant",
        "model": ask.options["model"],
    }


def _tool_use(call: ToolCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.call_id, "name": call.name}


def _stop_reason(completion: Completion) -> str:
    if completion.finish_reason == "length":
        return "max_tokens"
    if completion.message.tool_calls:
        return "tool_use"
    return "end_turn" if completion.stop is None else "stop_sequence"


def _usage(completion: Completion) -> dict[str, int]:
    response = completion.response
    return {"input_tokens": response.input_len, "output_tokens": response.output_len}
