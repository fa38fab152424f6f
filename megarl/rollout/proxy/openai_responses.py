"""OpenAI's `/v1/responses`: text and function tools. A request brings its whole conversation."""

import json
import time
from collections.abc import Iterator
from typing import Any

from megarl.rollout.proxy.errors import bad_request
from megarl.rollout.proxy.fields import Fields
from megarl.rollout.proxy.generate import Ask, read_enable_thinking, read_sampling
from megarl.rollout.proxy.messages import Message, Setting, ToolCall
from megarl.rollout.proxy.openai_chat import pieces, read_message, tool_json
from megarl.rollout.proxy.session import Completion, Session

_READ = (
    *("input", "instructions", "model", "tools", "tool_choice", "stream"),
    *("max_output_tokens", "temperature", "top_p", "text", "chat_template_kwargs"),
)
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "previous_response_id": ((), "no conversation is kept: send all of it as input"),
    "conversation": ((), "no conversation is kept: send all of it as input"),
    "background": ((False,), "this server has none"),
    "prompt": ((), "this server has none"),
    "top_logprobs": ((0,), "this server has none here"),
    "truncation": (("disabled",), "this server does not cut conversations"),
}
_IGNORED = (
    *("user", "metadata", "store", "service_tier", "parallel_tool_calls", "reasoning"),
    *("include", "prompt_cache_key", "safety_identifier", "stream_options"),
)


def read(session: Session, body: Fields, enable_thinking: bool) -> Ask:
    """The request. ProxyError 400 for what is wrong, unknown or not supported."""
    body.only([*_READ, *_REFUSED, *_IGNORED])
    for name, (harmless, why) in _REFUSED.items():
        body.refuse(name, harmless, why)
    body.object("text").refuse("format", ({"type": "text"},), "only text is supported")
    messages = []
    if body.has("instructions"):
        messages.append(Message("system", body.text("instructions")))
    if isinstance(body.any("input"), str):
        messages.append(Message("user", body.text("input")))
    else:
        messages += _read_items(body.objects("input"))
    if not body.any("input"):
        raise bad_request("input", "expected a string, or a list with an item at least")
    max_tokens = body.integer("max_output_tokens", 1, 1 << 31)
    return Ask(
        messages=messages,
        setting=Setting(_read_tools(body), read_enable_thinking(body, enable_thinking)),
        gconfig=read_sampling(session, body, max_tokens),
        stream=body.flag("stream"),
        options={"model": body.text("model", "default")},
    )


def _read_tools(body: Fields) -> tuple[str, ...]:
    body.refuse("tool_choice", ("auto", "none"), "only auto and none are supported")
    tools = []
    for tool in body.objects("tools"):
        if tool.text("type") != "function":
            raise bad_request(tool.path("type"), "only function is supported")
        tools.append(tool_json(tool, "parameters"))
    return () if body.any("tool_choice") == "none" else tuple(tools)


def _read_items(items: list[Fields]) -> list[Message]:
    """Calls belong to the answer before them: a template has them in one message."""
    messages: list[Message] = []
    is_open = False
    for item in items:
        kind = item.text("type", "message")
        if kind == "function_call":
            call = ToolCall(item.text("call_id"), item.text("name"), item.text("arguments"))
            before = messages.pop() if is_open else Message("assistant", "")
            calls = (*before.tool_calls, call)
            messages.append(Message("assistant", before.content, calls))
        elif kind == "function_call_output":
            output = item.text("output")
            messages.append(Message("tool", output, tool_call_id=item.text("call_id")))
        elif kind == "message":
            messages.append(read_message(item, ("input_text", "output_text", "text")))
        else:
            raise bad_request(item.path("type"), "only messages and function calls are supported")
        is_open = messages[-1].role == "assistant"
    return messages


# ---------------------------------------------------------------------- the answer


def answer(session: Session, ask: Ask, completions: list[Completion]) -> dict[str, Any]:
    """A `response`."""
    (completion,) = completions
    response = completion.response
    is_cut = completion.finish_reason == "length"
    given, made = response.input_len, response.output_len
    return _head(ask, completion) | {
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": _items(completion),
        "usage": {
            "input_tokens": given,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": made,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": given + made,
        },
    }


def events(session: Session, ask: Ask, completions: list[Completion]) -> Iterator[bytes]:
    """The answer as server-sent events, from `response.created` to its end."""
    whole = answer(session, ask, completions)
    begun = whole | {"status": "in_progress", "output": [], "usage": None}
    begun["incomplete_details"] = None
    numbered = [("response.created", {"response": begun})]
    for index, item in enumerate(whole["output"]):
        numbered += _item_events(index, item)
    numbered.append((f"response.{whole['status']}", {"response": whole}))
    for number, (kind, data) in enumerate(numbered):
        written = json.dumps({"type": kind, "sequence_number": number} | data)
        yield f"event: {kind}\ndata: {written}\n\n".encode()


def _item_events(index: int, item: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    place: dict[str, Any] = {"output_index": index}
    at: dict[str, Any] = place | {"item_id": item["id"]}
    if item["type"] == "message":
        (part,) = item["content"]
        empty = item | {"status": "in_progress", "content": []}
        yield "response.output_item.added", place | {"item": empty}
        at["content_index"] = 0
        yield "response.content_part.added", at | {"part": part | {"text": ""}}
        for piece in pieces(part["text"]):
            yield "response.output_text.delta", at | {"delta": piece, "logprobs": []}
        yield "response.output_text.done", at | {"text": part["text"], "logprobs": []}
        yield "response.content_part.done", at | {"part": part}
    else:
        empty = item | {"status": "in_progress", "arguments": ""}
        yield "response.output_item.added", place | {"item": empty}
        arguments = item["arguments"]
        for piece in pieces(arguments):
            yield "response.function_call_arguments.delta", at | {"delta": piece}
        done = {"name": item["name"], "arguments": arguments}
        yield "response.function_call_arguments.done", at | done
    yield "response.output_item.done", place | {"item": item}


def _items(completion: Completion) -> list[dict[str, Any]]:
    message, out = completion.message, []
    status = "incomplete" if completion.finish_reason == "length" else "completed"
    if message.content or not message.tool_calls:
        part = {"type": "output_text", "text": message.content, "annotations": []}
        out.append(
            {
                "type": "message",
                "id": f"msg_{completion.request_id}",
                "status": status,
                "role": "assistant",
                "content": [part],
            }
        )
    for call in message.tool_calls:
        out.append(
            {
                "type": "function_call",
                "id": f"fc_{call.call_id}",
                "status": status,
                "call_id": call.call_id,
                "name": call.name,
                "arguments": call.arguments,
            }
        )
    return out


def _head(ask: Ask, completion: Completion) -> dict[str, Any]:
    return {
        "id": completion.request_id,
        "object": "response",
        "created_at": int(time.time()),
        "model": ask.options["model"],
        "error": None,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "temperature": ask.gconfig.temperature,
        "top_p": ask.gconfig.top_p,
    }
