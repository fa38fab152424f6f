"""The proxy's server: keys, limits, sessions over HTTP, and clients that are wrong or slow."""

import asyncio
import gzip
import json
import socket
import zlib

import aiohttp
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from proxy_agents import ScriptedEngine, make_tokenizer, sampled, serving

from megarl.config.schema import GenerationHyperparameters
from megarl.rollout.proxy.errors import ProxyError
from megarl.rollout.proxy.server import ADMIN_KEY, AgentProxy
from megarl.rollout.proxy.session import Limits

ADMIN = "the admin's key"
CHAT = "/v1/chat/completions"
ASK = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


async def post(http, proxy, path, key=None, **body):
    """Status and JSON of the answer."""
    headers = {} if key is None else bearer(key)
    async with http.post(proxy.base_url + path, headers=headers, **body) as answer:
        return answer.status, await answer.json()


def with_proxy(check, engine=None, **options):
    """Run `check(proxy, http)`."""

    async def main():
        options.setdefault("admin_key", ADMIN)
        async with (
            serving(engine or ScriptedEngine("a$"), **options) as proxy,
            aiohttp.ClientSession() as http,
        ):
            return await check(proxy, http)

    return asyncio.run(main())


def test_a_session_over_http_from_its_key_to_its_end():
    async def check(proxy, http):
        status, opened = await post(http, proxy, "/sessions", ADMIN)
        assert status == 200
        key, path = opened["api_key"], f"/sessions/{opened['session_id']}"
        status, answer = await post(http, proxy, CHAT, key, json=ASK)
        assert (status, answer["choices"][0]["message"]["content"]) == (200, "a")
        body = {"reward": 0.5, "completion_id": answer["id"]}
        assert (await post(http, proxy, path + "/reward", key, json=body))[0] == 200
        waiting = asyncio.create_task(proxy.next_ended(60))
        assert (await post(http, proxy, path + "/end", ADMIN))[0] == 200
        session = await waiting
        assert session.session_id == opened["session_id"]
        assert [c.reward for c in session.completions] == [0.5]
        assert session.completions[0].response.output_tokens == sampled("a$")
        for again in (CHAT, path + "/reward", path + "/end"):
            status, answer = await post(http, proxy, again, key, json=ASK)
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        assert (await post(http, proxy, path + "/end", ADMIN))[0] == 404

    with_proxy(check)


@pytest.mark.parametrize("key", [None, "", "wrong", "é", ADMIN])
def test_a_wrong_key_is_401(key):
    """The admin's key does not generate, and a session's key opens no other."""

    async def check(proxy, http):
        mine, other = proxy.open_session(), proxy.open_session()
        status, answer = await post(http, proxy, CHAT, key, json=ASK)
        assert (status, answer["error"]["type"]) == (401, "authentication_error")
        if key != ADMIN:
            assert (await post(http, proxy, "/sessions", key))[0] == 401
        assert (await post(http, proxy, "/sessions", mine.api_key))[0] == 401
        path = f"/sessions/{other.session_id}/end"
        assert (await post(http, proxy, path, mine.api_key))[0] == 401
        assert not other.is_ended

    with_proxy(check)


def test_openais_client_knows_a_wrong_key():
    async def check(proxy, http):
        async with openai.AsyncOpenAI(base_url=proxy.base_url, api_key="wrong") as client:
            with pytest.raises(openai.AuthenticationError, match="wrong, or its session"):
                await client.chat.completions.create(**ASK)

    with_proxy(check)


def test_the_admins_key_is_of_the_environment_or_there_is_none(monkeypatch, caplog):
    async def check(proxy, http):
        return [(await post(http, proxy, "/sessions", key))[0] for key in (ADMIN, "")]

    monkeypatch.delenv(ADMIN_KEY, raising=False)
    assert with_proxy(check, admin_key=None) == [401, 401]
    monkeypatch.setenv(ADMIN_KEY, ADMIN)
    assert with_proxy(check, admin_key=None) == [200, 401]
    assert ADMIN not in caplog.text


def test_limits_of_bodies_requests_and_sessions():
    class Waiting(ScriptedEngine):
        def __init__(self):
            super().__init__("a$")
            self.go, self.arrived = asyncio.Event(), asyncio.Semaphore(0)

        async def agenerate(self, req):
            self.arrived.release()
            await self.go.wait()
            return await super().agenerate(req)

    engine = Waiting()

    async def check(proxy, http):
        key = proxy.open_session().api_key
        big = b" " * (10 << 20)
        status, answer = await post(http, proxy, CHAT, key, data=big)
        assert (status, answer["error"]["code"]) == (413, "request_too_large")
        running = [asyncio.create_task(post(http, proxy, CHAT, key, json=ASK)) for _ in range(2)]
        for _ in running:
            await engine.arrived.acquire()
        status, answer = await post(http, proxy, CHAT, key, json=ASK)
        assert (status, answer["error"]["code"]) == (429, "rate_limit_exceeded")
        engine.go.set()
        other = proxy.open_session()
        assert (await post(http, proxy, CHAT, other.api_key, json=ASK))[0] == 200
        assert [(await task)[0] for task in running] == [200, 200]
        status, answer = await post(http, proxy, "/sessions", ADMIN)
        assert (status, answer["error"]["code"]) == (429, "too_many_sessions")

    with_proxy(check, engine, limits=Limits(max_concurrent_requests=2, max_sessions=2))


def test_an_end_gives_up_what_runs_and_a_client_that_leaves_records_nothing():
    class Never(ScriptedEngine):
        def __init__(self):
            super().__init__()
            self.arrived, self.cancelled = asyncio.Semaphore(0), asyncio.Semaphore(0)

        async def agenerate(self, req):
            self.arrived.release()
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled.release()

    engine = Never()

    async def check(proxy, http):
        session = proxy.open_session()
        leaving = asyncio.create_task(post(http, proxy, CHAT, session.api_key, json=ASK))
        await engine.arrived.acquire()
        leaving.cancel()
        await engine.cancelled.acquire()
        staying = asyncio.create_task(post(http, proxy, CHAT, session.api_key, json=ASK | {"n": 3}))
        for _ in range(3):
            await engine.arrived.acquire()
        proxy.end(session.session_id)
        status, answer = await staying
        assert (status, answer["error"]["code"]) == (401, "session_ended")
        for _ in range(3):
            await engine.cancelled.acquire()
        assert session.completions == []

    with_proxy(check, engine)


def test_an_idle_session_makes_room():
    async def check(proxy, http):
        idle = proxy.open_session(is_from_http=True)
        proxy.open_session()
        with pytest.raises(ProxyError, match="there are 2 sessions"):
            proxy.open_session()
        idle.last_used_s -= 61
        with pytest.raises(ProxyError, match="there are 2 sessions"):  # it is not taken yet
            proxy.open_session()
        assert await proxy.next_ended(0) is idle
        proxy.open_session()
        assert idle.is_ended
        assert (await post(http, proxy, CHAT, idle.api_key, json=ASK))[0] == 401

    with_proxy(check, limits=Limits(max_sessions=2, idle_timeout_s=60))


def test_an_idle_session_ends_while_nothing_else_happens():
    async def check(proxy, http):
        session = proxy.open_session(is_from_http=True)
        assert await proxy.next_ended(120) is session
        assert session.is_ended

    with_proxy(check, limits=Limits(idle_timeout_s=0.05))


def test_a_client_that_does_not_read_loses_its_connection():
    """Its answer is larger than all buffers: the server cannot end it, and says nothing else."""
    body = json.dumps(ASK | {"stream": True, "logprobs": True, "n": 64}).encode()

    async def check(proxy, http):
        session, loop = proxy.open_session(), asyncio.get_running_loop()
        host, port = proxy.base_url.removeprefix("http://").split(":")
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
        key = f"Authorization: Bearer {session.api_key}\r\n\r\n"
        with socket.socket() as client:
            client.setblocking(False)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            await loop.sock_connect(client, (host, int(port)))
            await loop.sock_sendall(client, (head + key).encode() + body)
            while not session.completions or proxy._runner.server.connections:  # noqa: ASYNC110
                await asyncio.sleep(0.05)  # the proxy tells nobody
            assert session.num_requests == 0
            read = bytearray()
            try:
                while part := await loop.sock_recv(client, 1 << 20):
                    read += part
            except ConnectionResetError:
                pass
        assert read.startswith(b"HTTP/1.1 200")
        assert read.count(b"HTTP/1.1") == 1
        assert b"data: [DONE]" not in read

    with_proxy(check, ScriptedEngine("a " * 1500 + "$"), limits=Limits(client_timeout_s=0.2))


@pytest.mark.parametrize(
    ("encoding", "encode"),
    [("gzip", gzip.compress), ("deflate", zlib.compress), ("Identity", bytes)],
)
def test_bodies_may_be_encoded(encoding, encode):
    async def check(proxy, http):
        headers = bearer(proxy.open_session().api_key) | {"Content-Encoding": encoding}
        body = encode(json.dumps(ASK).encode())
        async with http.post(proxy.base_url + CHAT, headers=headers, data=body) as answer:
            assert answer.status == 200

    with_proxy(check)


@pytest.mark.parametrize(("path", "kind"), [(CHAT, None), ("/v1/messages", "error")])
def test_an_encoding_that_is_not_known_is_told_in_the_apis_form(path, kind):
    async def check(proxy, http):
        headers = bearer(proxy.open_session().api_key) | {"Content-Encoding": "br"}
        async with http.post(proxy.base_url + path, headers=headers, data=b"\x0b") as answer:
            told = await answer.json()
        assert (answer.status, told.get("type")) == (415, kind)
        assert told["error"]["type"] == "invalid_request_error"
        assert "only gzip and deflate, got 'br'" in told["error"]["message"]

    with_proxy(check)


def test_a_slow_client_is_given_up():
    async def check(proxy, http):
        session = proxy.open_session()
        host, port = proxy.base_url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n"
        writer.write(f"{head}Authorization: Bearer {session.api_key}\r\n\r\n{{".encode())
        answer = await reader.readline()
        assert b" 408 " in answer
        writer.close()
        assert session.num_requests == 0
        assert (await post(http, proxy, CHAT, session.api_key, json=ASK))[0] == 200

    with_proxy(check, limits=Limits(client_timeout_s=0.2))


NESTED = b"[" * 200_000


@pytest.mark.parametrize(
    ("body", "match"),
    [
        (b"", "not valid JSON"),
        (json.dumps(ASK).encode()[:-3], "not valid JSON"),
        (b"\xff\xfe{}", "not valid JSON"),
        (NESTED, "nested too deeply"),
        (b'{"messages": ' + NESTED, "nested too deeply"),
        (b'{"seed": ' + b"9" * 10_000 + b"}", "not valid JSON"),
        (b"[]", "expected an object, got list"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "not valid Unicode"),
        (b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}', "must be in"),
        (b'{"messages": [{"role": "user", "content": "x"}], "n": 1e400}', "expected an integer"),
        (b'{"messages": "hi"}', "expected a list, got str"),
        (b'{"messages": [7]}', r"expected an object, got int"),
    ],
)
def test_bodies_that_are_no_request_are_400(body, match):
    async def check(proxy, http):
        status, answer = await post(http, proxy, CHAT, proxy.open_session().api_key, data=body)
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
        assert match in answer["error"]["message"]
        assert len(answer["error"]["message"]) < 500

    with_proxy(check)


@pytest.mark.parametrize("body", [{}, {"reward": "1"}, {"reward": None}, {"reward": True}, [1]])
def test_rewards_are_numbers(body):
    async def check(proxy, http):
        session = proxy.open_session()
        path = f"/sessions/{session.session_id}/reward"
        assert (await post(http, proxy, path, session.api_key, json=body))[0] == 400
        status, answer = await post(http, proxy, path, session.api_key, json={"reward": 1})
        assert (status, "no completion yet" in answer["error"]["message"]) == (400, True)
        await post(http, proxy, CHAT, session.api_key, json=ASK)
        wrong = {"reward": 1, "completion_id": "x"}
        assert (await post(http, proxy, path, session.api_key, json=wrong))[0] == 404
        raw = b'{"reward": Infinity}'
        assert (await post(http, proxy, path, session.api_key, data=raw))[0] == 400
        assert not session.has_reward

    with_proxy(check)


def test_unknown_paths_and_methods_are_told_in_openais_form():
    async def check(proxy, http):
        for path in ("/", "/v1/embeddings", "/sessions/x", "/v1/../../etc/passwd"):
            status, answer = await post(http, proxy, path, ADMIN)
            assert (status, answer["error"]["type"]) == (404, "not_found_error")
        async with http.get(proxy.base_url + CHAT) as answer:
            assert (answer.status, "error" in await answer.json()) == (405, True)

    with_proxy(check)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "function"]), inner)
    ),
    max_leaves=8,
)
FIELDS = (
    *("messages", "tools", "n", "stream", "stop", "seed", "temperature", "logprobs", "model"),
    *("stream_options", "max_tokens", "tool_choice", "chat_template_kwargs", "top_p", "x"),
)


@settings(max_examples=8)
@given(st.lists(st.tuples(st.sampled_from(FIELDS), ANYTHING), min_size=25, max_size=25))
def test_any_value_of_any_field_is_an_answer_or_a_400(changes):
    async def check(proxy, http):
        key = proxy.open_session().api_key
        for field, value in changes:
            body = json.dumps(ASK | {field: value}).encode()
            headers = bearer(key)
            async with http.post(proxy.base_url + CHAT, headers=headers, data=body) as answer:
                text = await answer.text()
                assert answer.status in (200, 400), (field, value, text)
        assert (await post(http, proxy, CHAT, key, json=ASK))[0] == 200

    with_proxy(check)


def test_a_tokenizer_without_a_template_is_refused():
    with pytest.raises(ValueError, match="no chat template"):
        AgentProxy(ScriptedEngine(), make_tokenizer(None), GenerationHyperparameters())
