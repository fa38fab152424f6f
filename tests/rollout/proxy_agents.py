"""What the proxy's tests share: a real tokenizer with a chat template, and a scripted engine."""

import asyncio
import contextlib

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megarl.config.schema import GenerationHyperparameters
from megarl.rollout.api import ModelResponse
from megarl.rollout.proxy.server import AgentProxy

END = "<|im_end|>"
TEMPLATE = """
{%- if tools %}<|im_start|>system
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{{ call.function | tojson }}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""


def make_tokenizer(chat_template=TEMPLATE):
    """Bytes, and pairs of letters: what a model samples letter by letter, it encodes in pairs."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    small = "abcdefghijklmnopqrstuvwxyz"
    pairs = [(a, b) for a in small for b in small]
    vocab = {token: i for i, token in enumerate([*letters, *(a + b for a, b in pairs)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", END])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)
    fast.chat_template = chat_template
    return fast


TOKENIZER = make_tokenizer()
EOS = TOKENIZER.eos_token_id


def sampled(text):
    """Tokens of `text`, a letter each, `$` at its end being the end token."""
    body = text.removesuffix("$")
    tokens = [t for c in body for t in TOKENIZER.encode(c, add_special_tokens=False)]
    return tokens + [EOS] * text.endswith("$")


class ScriptedEngine:
    """Answers request i with `answers[i]` (the last one again and again) under version 10 + i.

    A token's logprob is -token / 512. An answer that is an exception is raised.
    """

    def __init__(self, *answers):
        self.answers, self.requests, self.responses = list(answers), [], []

    async def agenerate(self, req):
        number = len(self.requests)
        self.requests.append(req)
        answer = self.answers[min(number, len(self.answers) - 1)]
        if isinstance(answer, Exception):
            raise answer
        await asyncio.sleep(0)
        tokens = sampled(answer)[: req.gconfig.max_new_tokens]
        is_whole = tokens[-1] == EOS or any(s in answer for s in req.gconfig.stop or [])
        response = ModelResponse(
            input_tokens=list(req.input_ids),
            output_tokens=tokens,
            output_logprobs=[-token / 512 for token in tokens],
            output_versions=[10 + number] * len(tokens),
            stop_reason="stop" if is_whole else "length",
        )
        self.responses.append(response)
        return response

    def get_version(self):
        return 0


@contextlib.asynccontextmanager
async def serving(engine, *, tokenizer=TOKENIZER, gconfig=None, **options):
    """A proxy that listens, closed at the end; all of it within two minutes."""
    gconfig = gconfig or GenerationHyperparameters(max_tokens=100_000)
    proxy = AgentProxy(engine, tokenizer, gconfig, **options)
    await proxy.start()
    try:
        async with asyncio.timeout(120):
            yield proxy
    finally:
        await proxy.close()
