"""Tool calls in a model's text, in the form that Hermes and Qwen models write.

<tool_call>
{"name": "add", "arguments": {"a": 1}}
</tool_call>
"""

import json
import re
import uuid
from typing import Any

from megarl.rollout.proxy.messages import ToolCall

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_END_OF_THOUGHT = "</think>"


def split_tool_calls(text: str) -> tuple[str, tuple[ToolCall, ...]]:
    """The text around the calls, and the calls.

    A call in the model's thoughts is none. What stands between the tags and is no object with
    a name and arguments stays in the text, for the agent to see what the model wrote.
    """
    thought, end, said = text.rpartition(_END_OF_THOUGHT)
    calls: list[ToolCall] = []

    def take(match: re.Match[str]) -> str:
        call = _read(match.group(1))
        if call is None:
            return match.group(0)
        calls.append(call)
        return ""

    rest = _CALL.sub(take, said)
    if not calls:
        return text, ()
    return (thought + end + rest).strip(), tuple(calls)


def _read(text: str) -> ToolCall | None:
    try:
        call: Any = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return None
    written = json.dumps(arguments, ensure_ascii=False)
    return ToolCall(f"call_{uuid.uuid4().hex[:24]}", call["name"], written)
