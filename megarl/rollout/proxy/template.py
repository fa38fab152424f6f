"""Messages to tokens, where a part of the conversation has tokens already.

    prompt 1       answer 1        between               answer 2
    template       sampled         template, from        sampled
                   verbatim        the end of answer 1

Decoding and encoding again what was sampled may give other tokens. Their logprobs would
belong to nothing, and the server's cache would not know them.
"""

import uuid
from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError

from megarl.rollout.proxy.errors import ProxyError
from megarl.rollout.proxy.fields import clean
from megarl.rollout.proxy.messages import Message, Setting


class ChatTemplate:
    """The chat template of a tokenizer.

    Raises:
      ValueError: the tokenizer has none.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError("the tokenizer has no chat template: agents speak in messages")
        self._tokenizer = tokenizer

    def prompt(self, setting: Setting, messages: Sequence[Message]) -> list[int]:
        """Tokens of a whole chat, ready for the next answer. ProxyError if it is refused."""
        written = self._write(setting, [message.for_template() for message in messages])
        return self._encode(written)

    def after_answer(
        self,
        setting: Setting,
        messages: Sequence[Message],
        index: int,
        sampled: Sequence[int],
        *,
        has_ended: bool,
    ) -> list[int] | None:
        """What follows the answer `messages[index]`, whose tokens are `sampled`.

        The chat is written with a mark for the answer's text; what stands behind the mark
        follows it. An end token that was sampled is not written a second time; an answer that
        was cut gets the one that the template writes.

        Args:
          has_ended: the answer stopped by itself, at an end token or a stop string.

        Returns:
          None if the template cannot write such an answer, or does not write its text.
        """
        mark = f"answer{uuid.uuid4().hex}"
        chat = [message.for_template() for message in messages]
        chat[index] = {"role": "assistant", "content": mark}
        try:
            written = self._write(setting, chat)
        except ProxyError:
            return None
        _, found, rest = written.rpartition(mark)
        if not found:
            return None
        if has_ended and sampled:
            end: str = self._tokenizer.decode([sampled[-1]], skip_special_tokens=False)
            rest = _without_first(end, rest)
        return self._encode(rest)

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens)
        return text

    def decode_each(self, tokens: Sequence[int]) -> list[str]:
        """The text of each token by itself."""
        return [self._tokenizer.decode([token], skip_special_tokens=False) for token in tokens]

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _write(self, setting: Setting, chat: list[dict[str, Any]]) -> str:
        try:
            written: str = self._tokenizer.apply_chat_template(
                chat,
                tools=setting.tools_for_template(),
                tokenize=False,
                add_generation_prompt=True,
                enable_thinking=setting.enable_thinking,
            )
        except (TemplateError, TypeError, ValueError, LookupError) as error:
            # A template is a program over the messages: what it cannot handle is their fault.
            raise ProxyError(
                400, f"messages: the chat template refuses them: {error}", param="messages"
            ) from error
        # Arguments and schemas are JSON in JSON: their escapes are read only here.
        clean(written, "messages")
        return written


def _without_first(end: str, text: str) -> str:
    """`text` behind `end`, if it begins with that. A template may write white space before it."""
    before, found, after = text.partition(end) if end.strip() else (text, "", "")
    return after if found and not before.strip() else text.removeprefix(end)
