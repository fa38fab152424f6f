"""Tool calls in a model's text, in the form that Hermes and Qwen models write.

<tool_call>
{"name": "add", "arguments": {"a": 1}}
</tool_call>
"""

import json
import uuid
from collections.abc import Iterator
from typing import Any

from megarl.rollout.proxy.messages import ToolCall

_BEGIN, _END = "<tool_call>", "</tool_call>"
_END_OF_THOUGHT = "</think>"
_MAX_DEPTH = 128
"""Of a call's values. Anthropic's client 2.11 raises on arguments that are deeper than 250."""


def split_tool_calls(text: str) -> tuple[str, tuple[ToolCall, ...]]:
    """The text around the calls, and the calls.

    A call in the model's thoughts is none. What stands between the tags and is no object with
    a name and arguments, or is one that an agent's client cannot send back, stays in the text,
    for the agent to see what the model wrote.
    """
    thought, end, said = text.rpartition(_END_OF_THOUGHT)
    calls: list[ToolCall] = []
    rest, after = [], 0
    for start, stop in call_spans(said):
        call = _read(said[start:stop])
        if call is not None:
            calls.append(call)
            rest.append(said[after : start - len(_BEGIN)])
            after = stop + len(_END)
    if not calls:
        return text, ()
    return (thought + end + "".join(rest) + said[after:]).strip(), tuple(calls)


def call_spans(text: str) -> Iterator[tuple[int, int]]:
    """Start and stop of what stands between each opening tag and the next closing one.

    No letter is read twice: a model that writes nothing but opening tags must not hold up the
    loop, in which all episodes run.
    """
    at = 0
    while (begin := text.find(_BEGIN, at)) >= 0:
        start = begin + len(_BEGIN)
        stop = text.find(_END, start)
        if stop < 0:
            return
        yield start, stop
        at = stop + len(_END)


def _read(text: str) -> ToolCall | None:
    try:
        call: Any = json.loads(text)
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return None
        arguments = call.get("arguments", {})
        if not isinstance(arguments, dict) or _is_deep(arguments):
            return None
        # Clients refuse NaN and what stands for it, and half a surrogate pair has no UTF-8.
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        (call["name"] + written).encode()
    except (ValueError, RecursionError):
        return None
    return ToolCall(f"call_{uuid.uuid4().hex[:24]}", call["name"], written)


def _is_deep(value: Any) -> bool:
    """Whether lists and objects nest deeper than _MAX_DEPTH."""
    level = [value]
    for _ in range(_MAX_DEPTH):
        inner = (x.values() if isinstance(x, dict) else x for x in level)
        level = [x for values in inner for x in values if isinstance(x, dict | list)]
        if not level:
            return False
    return True
