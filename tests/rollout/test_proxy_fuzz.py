"""The proxy against clients that send anything: an answer or a 4xx in the API's form, always."""

import asyncio
import copy
import gzip
import json
import math

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from proxy_agents import ScriptedEngine, serving
from proxy_bodies import VALID

from megarl.rollout.proxy.session import Limits

ADMIN = "the admin's key"
TOOL_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
DOORS = tuple(VALID)
each_door = pytest.mark.parametrize("door", DOORS)
MOST_MESSAGE_CHARS = 1000


class Client:
    """Posts to a proxy, and looks at every answer that comes."""

    def __init__(self, proxy, http):
        self.proxy, self.http = proxy, http

    async def post(self, path, key=None, **body):
        """Status and body of an answer that is what it must be."""
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        headers |= body.pop("headers", {})
        url = self.proxy.base_url + path
        async with self.http.post(url, headers=headers, **body) as answer:
            text = await answer.text()
        check(path, answer.status, answer.content_type, text)
        return answer.status, text

    async def is_alive(self):
        """A session of its own gets an answer through every door, and can be ended."""
        session = self.proxy.open_session()
        for door, body in VALID.items():
            assert (await self.post(door, session.api_key, json=body))[0] == 200
        assert (await self.post("/v1/end", session.api_key))[0] == 200


def check(path, status, content_type, text):
    assert status == 200 or 400 <= status < 500, f"{status}: {text[:500]}"
    if content_type == "text/event-stream":
        events = [line for line in text.split("\n") if line.startswith("data: ")]
        assert events
        assert all(line == "data: [DONE]" or json.loads(line[6:]) for line in events)
        return
    assert content_type == "application/json"
    answer = json.loads(text, parse_constant=_no_constant)
    if status == 200:
        for door, kind in zip(DOORS, ("chat.completion", "response", "message"), strict=True):
            assert path != door or kind in (answer.get("object"), answer.get("type"))
        return
    if path.endswith("/messages"):
        assert set(answer) == {"type", "error"}
        assert answer["type"] == "error"
        error = answer["error"]
    else:
        assert set(answer) == {"error"}
        error = answer["error"]
        assert set(error) == {"message", "type", "param", "code"}
    assert error["type"]
    assert isinstance(error["message"], str)
    assert 0 < len(error["message"]) <= MOST_MESSAGE_CHARS, error["message"][:300]


def _no_constant(name):
    raise AssertionError(f"{name} is no JSON")


def with_client(body, **options):
    """Run `body(client)`, and see that the proxy is alive after it."""

    async def main():
        options.setdefault("admin_key", ADMIN)
        engine = ScriptedEngine("a$", TOOL_CALL + "$", "cut", "so END")
        async with serving(engine, **options) as proxy, aiohttp.ClientSession() as http:
            client = Client(proxy, http)
            found = await body(client)
            await client.is_alive()
            return found

    return asyncio.run(main())


@each_door
def test_the_bodies_that_are_mutated_are_valid(door):
    async def main(client):
        key = client.proxy.open_session().api_key
        for change in ({}, {"stream": True}):
            assert (await client.post(door, key, json=VALID[door] | change))[0] == 200

    with_client(main)


# ---------------------------------------------------------------- any body

LEAVES = st.sampled_from(
    [
        *(None, True, False, 0, 1, -1, 2, 1 << 31, 1 << 63, 10**30, -(10**30), 0.5, -0.0, 1e308),
        *(math.nan, math.inf, -math.inf, "", "a", "\0", "é" * 9, "text", "user", "tool", "auto"),
        *("function", "{", '{"a": 1}', "<|im_end|>", "{{ 1/0 }}", "\ud800", "x" * 5000, [], {}),
        *([[]], [{}], [None], {"type": "text"}, {"type": "text", "text": "a"}, {"a": {}}),
    ]
)
KEYS = sorted(
    {"role", "content", "type", "text", "name", "id", "x", "", "input", "\ud800"}.union(
        *(body for body in VALID.values())
    )
)
ANYTHING = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=3)
    ),
    max_leaves=6,
)


def _places(value, here=()):
    yield here
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from _places(value[key], (*here, key))


def _mutated(draw, valid):
    def anything():
        return copy.deepcopy(draw(ANYTHING))  # a leaf that is mutated must not be the strategy's

    body = copy.deepcopy(valid)
    for _ in range(draw(st.integers(1, 3))):
        places = [place for place in _places(body) if place]
        if not places:
            break
        *path, last = draw(st.sampled_from(places))
        inside = body
        for key in path:
            inside = inside[key]
        choice = draw(st.sampled_from(["replace", "replace", "delete", "add", "repeat"]))
        if choice == "delete":
            del inside[last]
        elif choice == "add" and isinstance(inside, dict):
            inside[draw(st.sampled_from(KEYS))] = anything()
        elif choice == "repeat" and isinstance(inside, list):
            inside.insert(last, copy.deepcopy(inside[last]))
        else:
            inside[last] = anything()
    return body


@each_door
@settings(max_examples=12)
@given(data=st.data(), may_change_sampling=st.booleans())
def test_any_mutation_of_a_request_is_an_answer_or_a_4xx(door, data, may_change_sampling):
    bodies = [_mutated(data.draw, VALID[door]) for _ in range(20)]

    async def main(client):
        session = client.proxy.open_session(may_change_sampling=may_change_sampling)
        for body in bodies:
            await client.post(door, session.api_key, data=json.dumps(body).encode())
        assert session.num_requests == 0

    with_client(main, limits=Limits(client_timeout_s=60))


@settings(max_examples=10)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["/sessions", "/sessions/{}/reward", "/sessions/{}/end", "/v1/reward"]),
            ANYTHING
            | st.dictionaries(st.sampled_from(["reward", "completion_id"]), LEAVES, max_size=2),
            st.sampled_from(["own", "admin", "", "other", "é\ud800"]),
        ),
        min_size=20,
        max_size=20,
    )
)
def test_any_body_of_a_session_route_is_an_answer_or_a_4xx(asked):
    async def main(client):
        session, other = client.proxy.open_session(), client.proxy.open_session()
        await client.post(DOORS[0], session.api_key, json=VALID[DOORS[0]])
        keys = {"own": session.api_key, "admin": ADMIN, "other": other.api_key}
        for path, body, named in asked:
            key = keys.get(named, named).encode("utf-8", "surrogatepass").decode("latin-1")
            path = path.format(session.session_id)
            await client.post(path, key, data=json.dumps(body).encode())
        assert all(c.reward is None or math.isfinite(c.reward) for c in session.completions)

    with_client(main)


@each_door
@settings(max_examples=10)
@given(bodies=st.lists(st.binary(max_size=60), min_size=20, max_size=20))
def test_bytes_are_an_answer_or_a_4xx(door, bodies):
    async def main(client):
        key = client.proxy.open_session().api_key
        for body in bodies:
            assert (await client.post(door, key, data=body))[0] == 400

    with_client(main)


# ---------------------------------------------------------------- what is far off

NESTED = b'{"a":' * 50_000 + b"1" + b"}" * 50_000


@each_door
@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"max_tokens": -1, "max_completion_tokens": -1, "max_output_tokens": -1}, 400),
        ({"max_tokens": 1 << 80, "max_completion_tokens": 1 << 80, "max_output_tokens": 0}, 400),
        ({"messages": [], "input": []}, 400),
        ({"messages": None, "input": None}, 400),
        ({"messages": {"role": "user"}, "input": {"role": "user"}}, 400),
        ({"messages": [[]] * 1000, "input": [[]] * 1000}, 400),
        ({"n": 10**9}, 400),
        ({"temperature": -1}, 400),
        ({"tools": [{}] * 1000}, 400),
        ({"x" * 100_000: 1}, 400),
        ({"stream": "yes"}, 400),
    ],
    ids=lambda x: repr(x)[:30],
)
def test_numbers_and_shapes_that_are_far_off_are_4xx(door, change, status):
    async def main(client):
        key = client.proxy.open_session().api_key
        body = VALID[door] | {k: v for k, v in change.items() if k in VALID[door] or k[0] in "nx"}
        assert (await client.post(door, key, json=body))[0] == status

    with_client(main)


@pytest.mark.parametrize("path", [*DOORS, "/sessions", "/v1/reward", "/v1/end"])
@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (b" " * (10 << 20), {}, 413),
        (gzip.compress(b" " * (100 << 20)), {"Content-Encoding": "gzip"}, 413),
        (b"no gzip", {"Content-Encoding": "gzip"}, 400),
        (gzip.compress(b"{}")[:-9], {"Content-Encoding": "gzip"}, 400),
        (b"{}", {"Content-Encoding": "br"}, 415),
        (b"{}", {"Content-Encoding": "zstd"}, 415),
        (b"{}", {"Content-Encoding": "gzip, br"}, 415),
        (NESTED, {}, 400),
        (b"\xff\xfe\x00", {}, 400),
        (b'{"a": ' + b"9" * 100_000 + b"}", {}, 400),
        (b"[1, 2", {"Content-Type": "text/plain"}, 400),
        (b"a=1&b=2", {"Content-Type": "application/x-www-form-urlencoded"}, 400),
        (b"--x--", {"Content-Type": "multipart/form-data; boundary=x"}, 400),
    ],
    ids=lambda x: repr(x)[:24],
)
def test_bodies_that_are_no_request_are_4xx(path, body, headers, status):
    async def main(client):
        session = client.proxy.open_session()
        key = ADMIN if path == "/sessions" else session.api_key
        assert (await client.post(path, key, data=body, headers=headers))[0] == status
        assert not session.is_ended

    with_client(main)


@settings(max_examples=30)
@given(
    path=st.lists(
        st.sampled_from([*"/%.?#&=;:@ ", "v1", "é", "\0", "sessions", "end", "%2e", "messages"])
    ).map("".join),
    method=st.sampled_from(["GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH", "X"]),
)
def test_any_path_and_method_is_a_4xx(path, method):
    """A request line that is none ends its connection, with a status of its own."""

    async def main(client):
        host, port = client.proxy.base_url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        line = f"{method} /{path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        writer.write(line.encode())
        status = int((await reader.readline()).split()[1])
        assert 400 <= status < 500, line
        await reader.read()
        writer.close()

    with_client(main)


# ---------------------------------------------------------------- time


def test_clients_that_never_end_their_request_hold_up_nobody():
    """Heads and bodies that stop half way, more of them than a session may have requests."""

    async def main(client):
        session = client.proxy.open_session()
        host, port = client.proxy.base_url.removeprefix("http://").split(":")
        head = f"POST {DOORS[0]} HTTP/1.1\r\nHost: x\r\n"
        key = f"Authorization: Bearer {session.api_key}\r\n"
        writers = []
        for index in range(80):
            _, writer = await asyncio.open_connection(host, int(port))
            begun = head if index % 2 else f"{head}{key}Content-Length: 100\r\n\r\n{{"
            writer.write(begun.encode())
            await writer.drain()
            writers.append(writer)
        await client.is_alive()
        async with asyncio.timeout(100):
            while session.num_requests:  # noqa: ASYNC110 - the proxy tells nobody
                await asyncio.sleep(0.05)
        assert (await client.post(DOORS[0], session.api_key, json=VALID[DOORS[0]]))[0] == 200
        for writer in writers:
            writer.close()

    with_client(main, limits=Limits(client_timeout_s=1.0))


def test_ends_and_rewards_of_a_session_while_it_is_asked():
    """Each request is answered, with what was sampled or with 401, in whatever order."""

    async def main(client):
        statuses = []
        for _ in range(10):
            session = client.proxy.open_session(is_from_http=True)
            path = f"/sessions/{session.session_id}"

            def asks(key=session.api_key, path=path):
                for door in DOORS:
                    yield client.post(door, key, json=VALID[door])
                    yield client.post(door, key, json=VALID[door] | {"stream": True})
                yield client.post("/v1/reward", key, json={"reward": 1})
                yield client.post("/v1/end", key)
                yield client.post(path + "/end", ADMIN)
                yield client.post(path + "/reward", ADMIN, json={"reward": 2})

            answers = await asyncio.gather(*asks())
            statuses += [status for status, _ in answers]
            assert session.is_ended
            ended = [text for status, text in answers[7:9] if status == 200]
            assert len(ended) == 1
            assert json.loads(ended[0])["completions"] <= len(session.completions)
            assert await client.proxy.next_ended(0) is session
            assert session.num_requests == 0
        assert set(statuses) <= {200, 400, 401, 404}

    with_client(main)
