"""OpenAI's `/v1/chat/completions`."""

import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

from megarl.rollout.proxy.errors import bad_request
from megarl.rollout.proxy.fields import Fields
from megarl.rollout.proxy.generate import MAX_SEED, Ask, read_enable_thinking, read_sampling
from megarl.rollout.proxy.messages import Message, Role, Setting, ToolCall
from megarl.rollout.proxy.session import Completion, Session

PIECE_CHARS = 64
"""Of a streamed answer. It is streamed when it is whole: tool calls are found in all of it."""

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_READ = (
    *("messages", "model", "tools", "tool_choice", "n", "stream", "stream_options"),
    *("temperature", "top_p", "top_k", "frequency_penalty", "seed", "stop"),
    *("max_tokens", "max_completion_tokens", "logprobs", "chat_template_kwargs"),
)
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "presence_penalty": ((0,), "this server has none"),
    "logit_bias": (({},), "this server has none"),
    "top_logprobs": ((0,), "only the sampled token's logprob is known"),
    "response_format": (({"type": "text"},), "only text is supported"),
    "functions": (([],), "deprecated: use tools"),
    "function_call": ((), "deprecated: use tool_choice"),
    "modalities": ((["text"],), "only text is supported"),
    "audio": ((), "only text is supported"),
    "prediction": ((), "this server has none"),
    "web_search_options": ((), "this server has none"),
}
_IGNORED = (
    *("user", "metadata", "store", "service_tier", "parallel_tool_calls", "reasoning_effort"),
    *("prompt_cache_key", "prompt_cache_retention", "safety_identifier", "verbosity"),
)
"""They do not change what is sampled here."""


def read(session: Session, body: Fields, enable_thinking: bool) -> Ask:
    """The request. ProxyError 400 for what is wrong, unknown or not supported."""
    body.only([*_READ, *_REFUSED, *_IGNORED])
    for name, (harmless, why) in _REFUSED.items():
        body.refuse(name, harmless, why)
    most = session.gconfig.max_tokens
    max_tokens = body.integer("max_completion_tokens", 1, 1 << 31)
    if max_tokens is None:
        max_tokens = body.integer("max_tokens", 1, 1 << 31)
    messages = [read_message(message) for message in body.objects("messages")]
    if not messages:
        raise bad_request("messages", "expected a list with a message at least")
    return Ask(
        messages=messages,
        setting=Setting(read_tools(body), read_enable_thinking(body, enable_thinking)),
        gconfig=read_sampling(session, body, most if max_tokens is None else max_tokens),
        num_choices=body.integer("n", 1, session.limits.max_choices) or 1,
        seed=body.integer("seed", 0, MAX_SEED),
        stream=body.flag("stream"),
        options={
            "logprobs": body.flag("logprobs"),
            "model": body.text("model", "default"),
            "include_usage": body.object("stream_options").flag("include_usage"),
        },
    )


def read_tools(body: Fields) -> tuple[str, ...]:
    """Each function as JSON. None of them with `tool_choice: none`."""
    body.refuse("tool_choice", ("auto", "none"), "only auto and none are supported")
    tools = []
    for tool in body.objects("tools"):
        if tool.text("type", "function") != "function":
            raise bad_request(tool.path("type"), "only function is supported")
        tools.append(tool_json(tool.object("function"), "parameters"))
    return () if body.any("tool_choice") == "none" else tuple(tools)


def tool_json(function: Fields, schema: str) -> str:
    """A function as JSON for templates; `schema` is the field with its arguments' schema."""
    written: dict[str, Any] = {"name": function.text("name")}
    if function.has("description"):
        written["description"] = function.text("description")
    function.object(schema)  # a 400 unless it is one
    written["parameters"] = function.any(schema) or {"type": "object", "properties": {}}
    return json.dumps({"type": "function", "function": written})


def read_message(message: Fields, kinds: Sequence[str] = ("text",)) -> Message:
    """Its content is a string, or parts of these types.

    Fields that a client's own objects have and no template reads are left out.
    """
    role = _ROLES.get(message.text("role"))
    if role is None:
        raise bad_request(message.path("role"), f"expected one of {', '.join(_ROLES)}")
    content = _read_content(message, kinds)
    calls = []
    if role == "assistant":
        message.refuse("function_call", (), "deprecated: use tool_calls")
        for call in message.objects("tool_calls"):
            function = call.object("function")
            calls.append(
                ToolCall(call.text("id"), function.text("name"), function.text("arguments"))
            )
    elif not message.has("content"):
        raise bad_request(message.path("content"), "expected a string or a list of parts")
    call_id = message.text("tool_call_id") if role == "tool" else ""
    return Message(role, content, tuple(calls), call_id, message.text("name", ""))


def _read_content(message: Fields, kinds: Sequence[str]) -> str:
    """A string, or the texts of parts of these types, joined."""
    if isinstance(message.any("content"), str):
        return message.text("content")
    texts = []
    for part in message.objects("content"):
        if part.text("type") not in kinds:
            raise bad_request(part.path("type"), f"only {', '.join(kinds)} is supported")
        texts.append(part.text("text"))
    return "".join(texts)


# ---------------------------------------------------------------------- the answer


def answer(session: Session, ask: Ask, completions: list[Completion]) -> dict[str, Any]:
    """A `chat.completion`."""
    choices = []
    for completion in completions:
        choice: dict[str, Any] = {
            "index": completion.index,
            "message": _message(completion.message),
            "finish_reason": completion.finish_reason,
            "logprobs": _logprobs(session, completion) if ask.options["logprobs"] else None,
        }
        choices.append(choice)
    return _head(ask, completions, "chat.completion") | {
        "choices": choices,
        "usage": usage(completions),
    }


def events(session: Session, ask: Ask, completions: list[Completion]) -> Iterator[bytes]:
    """The answer as server-sent `chat.completion.chunk`s, and `[DONE]`."""
    head = _head(ask, completions, "chat.completion.chunk")
    if ask.options["include_usage"]:
        head["usage"] = None

    def chunk(index: int, delta: dict[str, Any], **more: Any) -> bytes:
        choice = {"index": index, "delta": delta, "finish_reason": None, "logprobs": None} | more
        return event(head | {"choices": [choice]})

    for completion in completions:
        index = completion.index
        logprobs = _logprobs(session, completion) if ask.options["logprobs"] else None
        yield chunk(index, {"role": "assistant", "content": ""})
        for delta in _deltas(completion.message):
            yield chunk(index, delta, logprobs=logprobs)
            logprobs = None  # all of them came with the first part
        yield chunk(index, {}, finish_reason=completion.finish_reason, logprobs=logprobs)
    if ask.options["include_usage"]:
        yield event(head | {"choices": [], "usage": usage(completions)})
    yield b"data: [DONE]\n\n"


def _deltas(message: Message) -> Iterator[dict[str, Any]]:
    for piece in pieces(message.content):
        yield {"content": piece}
    for number, call in enumerate(message.tool_calls):
        named = {"name": call.name, "arguments": ""}
        first = {"index": number, "id": call.call_id, "type": "function", "function": named}
        yield {"tool_calls": [first]}
        for piece in pieces(call.arguments):
            yield {"tool_calls": [{"index": number, "function": {"arguments": piece}}]}


def event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def pieces(text: str) -> Iterator[str]:
    for start in range(0, len(text), PIECE_CHARS):
        yield text[start : start + PIECE_CHARS]


def usage(completions: list[Completion]) -> dict[str, Any]:
    """Tokens; the prompt once, however many choices it has."""
    prompt = completions[0].response.input_len
    made = sum(completion.response.output_len for completion in completions)
    return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}


def _head(ask: Ask, completions: list[Completion], kind: str) -> dict[str, Any]:
    return {
        "id": completions[0].request_id,
        "object": kind,
        "created": int(time.time()),
        "model": ask.options["model"],
    }


def _message(message: Message) -> dict[str, Any]:
    out: dict[str, Any] = {"role": "assistant", "content": message.content, "refusal": None}
    if message.tool_calls:
        out["content"] = message.content or None
        out["tool_calls"] = [
            {
                "id": call.call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.tool_calls
        ]
    return out


def _logprobs(session: Session, completion: Completion) -> dict[str, Any]:
    """Of every sampled token, those of tool calls and the end token included."""
    response = completion.response
    texts = session.template.decode_each(response.output_tokens)
    content = [
        {"token": text, "bytes": list(text.encode()), "logprob": logprob, "top_logprobs": []}
        for text, logprob in zip(texts, response.output_logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}
