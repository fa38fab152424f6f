"""Servers that answer anything: sockets on the loopback that send what a script says.

Byte by byte where that matters. A new form of answer is an entry of FORMS.
"""

import asyncio
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from megarl.config.schema import GenerationHyperparameters
from megarl.errors import EngineError
from megarl.rollout.api import GenerateChunk, ModelRequest
from megarl.rollout.backends.sglang import SGLangClient
from megarl.rollout.backends.vllm import VLLMClient
from megarl.rollout.client import ServerClient

WAIT_S = 120.0
REMAINING = 8
TOKENS = [5, 6, 319]
LOGPROBS = [-0.5, -1.25, 0.0]
MOST_MESSAGE_CHARS = 1500
_HIGHEST = 1e-3
"""Of a logprob: a server rounds, too."""


@dataclass(frozen=True)
class Form:
    """How one kind of server answers."""

    client: type[ServerClient]
    valid: Any
    """An answer of TOKENS."""
    encode: Callable[[Any], bytes]
    """Body of an answer."""
    content_type: str = "application/json"


FORMS = {
    "vllm": Form(
        VLLMClient,
        {
            "request_id": "r",
            "choices": [
                {
                    "index": 0,
                    "token_ids": TOKENS,
                    "logprobs": {"content": [{"token": "t", "logprob": x} for x in LOGPROBS]},
                    "weight_versions": [
                        {"version": "3", "start": 0, "end": 2},
                        {"version": "4", "start": 2, "end": 3},
                    ],
                    "finish_reason": "stop",
                }
            ],
        },
        lambda answer: json.dumps(answer).encode(),
    ),
    "sglang": Form(
        SGLangClient,
        {
            "text": "",
            "output_ids": TOKENS,
            "meta_info": {
                "output_token_logprobs": [
                    [x, t, None] for x, t in zip(LOGPROBS, TOKENS, strict=True)
                ],
                "weight_versions": [
                    {"version": "3", "start": 0, "end": 2},
                    {"version": "4", "start": 2, "end": 3},
                ],
                "finish_reason": {"type": "stop", "matched": 319},
            },
        },
        lambda answer: json.dumps(answer).encode(),
    ),
}
each_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


class Server:
    """Answers every request by `script(self, writer)`, and then closes the connection."""

    def __init__(self, script):
        self.script, self.num_asked, self.num_sent = script, 0, 0
        self._running = set()

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        self.address = f"http://{host}:{port}"
        return self

    async def __aexit__(self, *_):
        self._server.close()
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _serve(self, reader, writer):
        self._running.add(asyncio.current_task())
        self.num_asked += 1
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"(?i)content-length: (\d+)", head)
            await reader.readexactly(int(length[1]) if length else 0)
            await self.script(self, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the client has gone, as it may, or the test is over
        finally:
            writer.close()
            self._running.discard(asyncio.current_task())

    async def send(self, writer, data):
        """In parts, so that what is counted was taken off our hands."""
        for start in range(0, len(data), 1 << 16):
            writer.write(data[start : start + (1 << 16)])
            await writer.drain()
            self.num_sent += len(data[start : start + (1 << 16)])


def http(body, *, status="200 OK", content_type="application/json", **headers):
    """A whole HTTP answer. A header's value None leaves it out."""
    fields = {"Content-Type": content_type, "Content-Length": len(body)}
    fields |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"{name}: {value}" for name, value in fields.items() if value is not None]
    return "\r\n".join([f"HTTP/1.1 {status}", *lines, "", ""]).encode() + body


def says(*parts):
    """A script: these bytes, and the connection ends."""

    async def script(server, writer):
        for part in parts:
            await server.send(writer, part)

    return script


async def asked_of(form, script, *, timeout_s=WAIT_S, retries=0):
    """What `generate` gives, chunk or EngineError, once it was found to be what it must be."""
    async with Server(script) as server, asyncio.timeout(2 * WAIT_S):
        client = form.client(server.address, request_timeout_s=timeout_s, retries=retries)
        request = ModelRequest(input_ids=[1, 2], rid="r1")
        try:
            chunk = await client.generate(request, GenerationHyperparameters(), REMAINING)
        except EngineError as error:
            text = str(error)
            assert server.address in text, f"does not say which server: {text[:200]}"
            assert len(text) <= MOST_MESSAGE_CHARS, f"{len(text)} characters: {text[:200]}"
            return error, server
        finally:
            await client.close()
    check(chunk)
    return chunk, server


def ask(form, script, **options):
    return asyncio.run(asked_of(form, script, **options))[0]


def ask_answer(form, answer):
    body = form.encode(answer)
    return ask(form, says(http(body, content_type=form.content_type)))


def check(chunk):
    assert isinstance(chunk, GenerateChunk)
    assert len(chunk.tokens) == len(chunk.logprobs) == len(chunk.versions) <= REMAINING
    for token, logprob, version in zip(chunk.tokens, chunk.logprobs, chunk.versions, strict=True):
        assert type(token) is int
        assert 0 <= token < 1 << 31
        assert type(logprob) is float
        assert math.isfinite(logprob)
        assert logprob <= _HIGHEST
        assert type(version) is int
        assert -1 <= version < 1 << 31
    assert chunk.stop_reason in ("stop", "length", "abort")
    assert chunk.tokens or chunk.stop_reason == "abort"
