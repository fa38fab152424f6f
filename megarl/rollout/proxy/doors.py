"""The protocols that the server speaks."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from megarl.rollout.proxy import anthropic_messages, openai_chat, openai_responses
from megarl.rollout.proxy.fields import Fields
from megarl.rollout.proxy.generate import Ask
from megarl.rollout.proxy.session import Completion, Session


@dataclass(frozen=True)
class Door:
    """One endpoint; `path` is below /v1."""

    path: str
    read: Callable[[Session, Fields, bool], Ask]
    answer: Callable[[Session, Ask, list[Completion]], dict[str, Any]]
    events: Callable[[Session, Ask, list[Completion]], Iterator[bytes]]


DOORS = tuple(
    Door(path, module.read, module.answer, module.events)
    for path, module in (
        ("/chat/completions", openai_chat),
        ("/responses", openai_responses),
        ("/messages", anthropic_messages),
    )
)
