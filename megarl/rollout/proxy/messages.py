"""A chat as every door of the proxy gives it, and how two of them are compared."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True)
class ToolCall:
    """`arguments` is the JSON text of an object."""

    call_id: str
    name: str
    arguments: str

    def parsed(self) -> Any:
        """The arguments as values; the text itself if it is no JSON."""
        try:
            return json.loads(self.arguments)
        except (ValueError, RecursionError):
            return self.arguments


@dataclass(frozen=True)
class Message:
    """What a template reads. Parts of a content are joined, None is an empty one."""

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it: arguments are an object, not its JSON."""
        out: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            out["tool_calls"] = [
                {
                    "id": call.call_id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.parsed()},
                }
                for call in self.tool_calls
            ]
        if self.tool_call_id:
            out["tool_call_id"] = self.tool_call_id
        if self.name:
            out["name"] = self.name
        return out


@dataclass(frozen=True)
class Setting:
    """What stands before the first message: another one makes another conversation."""

    tools: tuple[str, ...] = ()
    """Each the JSON of `{"type": "function", "function": {...}}`."""
    enable_thinking: bool = False

    def tools_for_template(self) -> list[dict[str, Any]] | None:
        return [json.loads(tool) for tool in self.tools] or None


def histories(setting: Setting, messages: Sequence[Message]) -> Iterator[bytes]:
    """A digest for each prefix of `messages`, the empty one first.

    Two are equal if a model reads the same in both. Arguments of tool calls are compared as
    values: clients parse and write them again. So the white space in them does not count.
    """
    digest = hashlib.sha256(repr(setting).encode()).digest()
    yield digest
    for message in messages:
        text = json.dumps(message.for_template(), sort_keys=True)
        digest = hashlib.sha256(digest + text.encode()).digest()
        yield digest
