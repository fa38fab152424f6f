"""An inference server that only answers: vLLM's generate route with scripted tokens and delays.

    python benchmarks/scripted_server.py --delay-s 0.5      prints its port

Every answer is written once, at the start; a request costs a search for its end, its first
prompt token and its token limit. So the client is what a benchmark against it measures. Imports
nothing but Python's own.

    POST /inference/v1/generate   max_tokens tokens of version 0, after `delay_of` its prompt's
                                  first token; as server-sent events spread over this time where
                                  the body says `"stream": true`
    GET  /stats                   what it took since the last time: CPU seconds, requests, and
                                  how late the answers were
    anything else                 200, `{}`
"""

import argparse
import asyncio
import json
import re
import time
from functools import cache

GENERATE = b"POST /inference/v1/generate "
_LENGTH = re.compile(rb"(?i)\r\ncontent-length: *(\d+)")
_FIRST_TOKEN = re.compile(rb'"token_ids": ?\[(\d+)')
_MAX_TOKENS = re.compile(rb'"max_tokens": ?(\d+)')
_GOLDEN = 0.6180339887498949


def delay_of(prompt_token: int, mean_s: float) -> float:
    """Seconds in [0.5, 1.5) of the mean, spread evenly over prompts; the client knows them, too."""
    return mean_s * (0.5 + prompt_token * _GOLDEN % 1.0)


@cache
def answer_of(num_tokens: int, tokens_per_event: int) -> tuple[bytes, ...]:
    """An HTTP answer as vLLM 0.32 writes it, in the parts in which it is sent.

    0 tokens an event is one JSON body, in one part.
    """
    tokens = [(7919 * i) % 32000 for i in range(num_tokens)]

    def part(begin: int, end: int) -> bytes:
        content = [
            {
                "token": f"token_id:{token}",
                "logprob": -0.1234567890123 - (i % 97) / 89,
                "bytes": None,
                "top_logprobs": [],
            }
            for i, token in enumerate(tokens[begin:end], begin)
        ]
        is_last = end >= num_tokens
        choice = {
            "index": 0,
            "logprobs": {"content": content},
            "finish_reason": "length" if is_last else None,
            "token_ids": tokens[begin:end],
        }
        if is_last:  # vLLM tells the versions of all tokens with the last of them
            choice["weight_versions"] = [{"version": "0", "start": 0, "end": num_tokens}]
        return json.dumps({"request_id": "0" * 32, "choices": [choice]}).encode()

    if not tokens_per_event:
        return (_http(b"application/json", part(0, num_tokens)),)
    events = [
        b"data: " + part(begin, begin + tokens_per_event) + b"\n\n"
        for begin in range(0, num_tokens, tokens_per_event)
    ]
    events[-1] += b"data: [DONE]\n\n"
    chunks = [b"%x\r\n%b\r\n" % (len(event), event) for event in events]
    chunks[0] = (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n" + chunks[0]
    )
    chunks[-1] += b"0\r\n\r\n"
    return tuple(chunks)


def _http(kind: bytes, body: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n"
    return head % (kind, len(body)) + body


class Stats:
    """Since the last `take`."""

    def __init__(self) -> None:
        self.late_s: list[float] = []
        self._cpu_s = time.process_time()

    def take(self) -> bytes:
        late, cpu_s = sorted(self.late_s), time.process_time()
        found = {
            "requests": len(late),
            "cpu_s": cpu_s - self._cpu_s,
            "late_p50_s": late[len(late) // 2] if late else 0.0,
            "late_p99_s": late[99 * len(late) // 100] if late else 0.0,
        }
        self.late_s, self._cpu_s = [], cpu_s
        return _http(b"application/json", json.dumps(found).encode())


class Connection(asyncio.Protocol):
    """One request after another; their heads and bodies may come in any number of pieces."""

    def __init__(self, stats: Stats, delay_s: float, tokens_per_event: int) -> None:
        self._stats, self._delay_s, self._tokens_per_event = stats, delay_s, tokens_per_event
        self._loop = asyncio.get_running_loop()
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (head := self._received.find(b"\r\n\r\n")) >= 0:
            length = _LENGTH.search(self._received, 0, head + 2)
            end = head + 4 + (int(length[1]) if length else 0)
            if len(self._received) < end:
                return
            request, self._received = self._received[:end], self._received[end:]
            self._answer(request, head)

    def _answer(self, request: bytes, head: int) -> None:
        if not request.startswith(GENERATE):
            is_stats = request.startswith(b"GET /stats ")
            answer = self._stats.take() if is_stats else _http(b"application/json", b"{}")
            self._transport.write(answer)
            return
        token, most = _FIRST_TOKEN.search(request, head), _MAX_TOKENS.search(request, head)
        assert token is not None, "a request without a prompt"
        assert most is not None, "a request without a limit"
        is_stream = request.find(b'"stream": true', head) >= 0
        parts = answer_of(int(most[1]), self._tokens_per_event if is_stream else 0)
        delay_s = delay_of(int(token[1]), self._delay_s)
        self._write(parts, 0, time.monotonic() + delay_s, delay_s / len(parts))

    def _write(self, parts: tuple[bytes, ...], index: int, due: float, apart_s: float) -> None:
        """Part `index` and those after it, `apart_s` from each other, the last when it is due."""
        while True:
            at = due - (len(parts) - 1 - index) * apart_s
            if time.monotonic() < at:
                self._loop.call_at(at, self._write, parts, index, due, apart_s)
                return
            self._transport.write(parts[index])
            index += 1
            if index == len(parts):
                self._stats.late_s.append(time.monotonic() - due)
                return


async def serve(delay_s: float, tokens_per_event: int) -> None:
    stats = Stats()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: Connection(stats, delay_s, tokens_per_event), "127.0.0.1", 0, backlog=8192
    )
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--delay-s", type=float, default=0.0, help="mean")
    parser.add_argument("--tokens-per-event", type=int, default=1, help="of a streamed answer")
    arguments = parser.parse_args()
    asyncio.run(serve(arguments.delay_s, arguments.tokens_per_event))
