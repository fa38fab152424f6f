"""The clients against servers that answer anything: a valid answer or a short EngineError."""

import asyncio
import copy
import gzip
import json
import math
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from misbehaving_server import (
    FORMS,
    LOGPROBS,
    TOKENS,
    ask,
    ask_answer,
    asked_of,
    each_form,
    http,
    says,
)

from megarl.errors import EngineError, EngineTimeout
from megarl.rollout.api import GenerateChunk
from megarl.rollout.client import Refused, ServerFailed


@each_form
def test_a_valid_answer_is_taken_as_it_is(form):
    chunk = ask_answer(form, form.valid)
    assert chunk == GenerateChunk(TOKENS, LOGPROBS, [3, 3, 4], "stop")


# ---------------------------------------------------------------- what is no answer

HTML = b"<html><body>" + b"<p>Bad Gateway</p>" * 1000 + b"</body></html>"
BIG = b"x" * (10 << 20)
NESTED = b"[" * 100_000 + b"]" * 100_000

REPLIES = {
    "nothing at all": b"",
    "no HTTP": b"hello\r\n\r\n",
    "an SSH banner": b"SSH-2.0-OpenSSH_9.6\r\n",
    "half a status line": b"HTTP/1.1 2",
    "half a head": b"HTTP/1.1 200 OK\r\nContent-Ty",
    "a header line without end": b"HTTP/1.1 200 OK\r\nX-Long: " + b"x" * (1 << 20),
    "headers without end": b"HTTP/1.1 200 OK\r\n" + b"X-More: y\r\n" * 100_000,
    "a negative length": http(b"{}", Content_Length=-5),
    "a length of letters": http(b"{}", Content_Length="many"),
    "chunks of no size": http(b"zz\r\n{}\r\n", Content_Length=None, Transfer_Encoding="chunked"),
    "a chunk too large": http(
        b"f" * 40 + b"\r\n", Content_Length=None, Transfer_Encoding="chunked"
    ),
    "an empty body": http(b""),
    "an empty body, no length": http(b"", Content_Length=None),
    "white space": http(b" \n "),
    "a body of text": http(b"all is well", content_type="text/plain"),
    "HTML, and 200": http(HTML, content_type="text/html"),
    "HTML, and 500": http(HTML, status="500 Internal Server Error", content_type="text/html"),
    "500 of 10 MB": http(BIG, status="500 Internal Server Error"),
    "500 of an error of 10 MB": http(
        json.dumps({"error": {"message": BIG.decode()}}).encode(), status="500 Oops"
    ),
    "500, nested": http(NESTED, status="500 Oops"),
    "500 of invalid UTF-8": http(b"\xff\xfe\xfa" * 99, status="500 Oops"),
    "503, nothing": http(b"", status="503 Service Unavailable"),
    "204": b"HTTP/1.1 204 No Content\r\n\r\n",
    "an unknown status": http(b"{}", status="799 What"),
    "a status of letters": b"HTTP/1.1 abc OK\r\n\r\n",
    "a redirect to nowhere": http(b"", status="307 Go", Location="http://127.0.0.1:1/"),
    "a redirect to a file": http(b"", status="307 Go", Location="file:///etc/passwd"),
    "a redirect to no URL": http(b"", status="307 Go", Location="http://[::"),
    "an endless redirect": http(b"", status="307 Go", Location="/inference/v1/generate"),
    "10 MB of no JSON": http(BIG),
    "10 MB of JSON": http(b"[" + b"1," * (5 << 20) + b"1]"),
    "nested JSON": http(NESTED),
    "nested objects": http(b'{"a":' * 50_000 + b"1" + b"}" * 50_000),
    "invalid UTF-8": http(b'{"choices": "\xff"}'),
    "UTF-16": http('{"choices": []}'.encode("utf-16")),
    "a number too long": http(b"9" * 10_000),
    "gzip that is none": http(b"hello", Content_Encoding="gzip"),
    "null": http(b"null"),
    "true": http(b"true"),
    "a number": http(b"7"),
    "a string": http(b'"choices"'),
    "a list": http(b"[]"),
    "an empty object": http(b"{}"),
    "an error, and 200": http(b'{"error": {"message": "no such model"}}'),
}


@each_form
@pytest.mark.parametrize("reply", REPLIES.values(), ids=REPLIES)
def test_what_is_no_answer_is_a_short_error_that_names_the_server(form, reply):
    assert isinstance(ask(form, says(reply), timeout_s=20.0), EngineError)


FAULTS = {
    "a status of 400": (http(b"{}", status="400 Bad"), False),
    "a body too large to ask": (http(b"{}", status="413 Much"), False),
    "a wrong key": (http(b"{}", status="401 Who"), True),
    "another page": (http(HTML, content_type="text/html"), True),
    "too many of us": (http(b"", status="429 Slow"), True),
    "an engine that died": (http(b"", status="500 Oops"), True),
    "an empty object": (http(b"{}"), True),
}


@each_form
@pytest.mark.parametrize(("reply", "is_servers"), FAULTS.values(), ids=FAULTS)
def test_whose_fault_an_answer_is(form, reply, is_servers):
    """What is the server's own fault is asked of another one."""
    error = ask(form, says(reply))
    assert isinstance(error, Refused)
    assert isinstance(error, ServerFailed) == is_servers


@each_form
def test_logprobs_of_nan_are_the_servers_fault(form):
    text = form.encode(form.valid).replace(b"-1.25", b"NaN")
    assert b"NaN" in text
    assert isinstance(ask(form, says(http(text))), ServerFailed)


@each_form
def test_an_answer_cut_anywhere_is_an_error(form):
    whole = http(form.encode(form.valid), content_type=form.content_type)
    body_starts = whole.index(b"\r\n\r\n") + 4
    for end in (9, body_starts, body_starts + 1, (body_starts + len(whole)) // 2, len(whole) - 1):
        assert isinstance(ask(form, says(whole[:end])), EngineError), end


@each_form
def test_json_cut_anywhere_is_an_error(form):
    body = form.encode(form.valid)
    for end in range(0, len(body), 7):
        cut = http(body[:end], content_type=form.content_type)
        assert isinstance(ask(form, says(cut)), EngineError), end


# ---------------------------------------------------------------- time and memory


async def _slow_head(server, writer):
    writer.write(b"HTTP/1.1 200 OK\r\n")
    while True:
        writer.write(b"X-More: y\r\n")
        await writer.drain()
        await asyncio.sleep(0.05)


async def _slow_body(server, writer):
    writer.write(http(b" ", Content_Length=1 << 20))
    while True:
        writer.write(b" ")
        await writer.drain()
        await asyncio.sleep(0.05)


async def _silent(server, writer):
    await asyncio.Event().wait()


@each_form
@pytest.mark.parametrize("script", [_slow_head, _slow_body, _silent])
def test_a_slow_server_is_given_up_after_the_requests_own_limit(form, script):
    """A byte now and then does not move the limit. It is not asked again: it may still be busy."""
    error, server = asyncio.run(asked_of(form, script, timeout_s=0.5, retries=3))
    assert isinstance(error, EngineTimeout)
    assert "no answer within 0.5 s" in str(error)
    assert server.num_asked == 1


def _status_bytes(key):
    found = re.search(rf"^{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    return 1024 * int(found[1])


def peak_bytes(body):
    """Resident bytes that `body()` took at most beyond what there was before."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = _status_bytes("VmRSS")
    body()
    return _status_bytes("VmHWM") - before


@each_form
@pytest.mark.parametrize("is_told", [True, False])
def test_a_body_without_end_is_not_read_to_its_end(form, is_told):
    async def script(server, writer):
        await server.send(writer, http(b"[", Content_Length=200 << 20 if is_told else None))
        for _ in range(200):
            await server.send(writer, b" " * (1 << 20))

    found = []
    peak = peak_bytes(lambda: found.append(asyncio.run(asked_of(form, script))))
    ((error, server),) = found
    assert isinstance(error, EngineError)
    assert server.num_sent < 100 << 20
    assert peak < 300 << 20


@each_form
def test_a_compressed_body_counts_as_what_it_unfolds_to(form):
    bomb = gzip.compress(b" " * (600 << 20), compresslevel=1)
    found = []
    reply = says(http(bomb, Content_Encoding="gzip"))
    peak = peak_bytes(lambda: found.append(ask(form, reply)))
    assert isinstance(found[0], EngineError)
    assert peak < 300 << 20


# ---------------------------------------------------------------- what an answer says


def at(answer, *path):
    for key in path:
        answer = answer[key]
    return answer


PLACES = {
    "vllm": {
        "tokens": ("choices", 0, "token_ids"),
        "logprobs": ("choices", 0, "logprobs", "content"),
        "logprob": ("choices", 0, "logprobs", "content", 1, "logprob"),
        "spans": ("choices", 0, "weight_versions"),
        "stop": ("choices", 0, "finish_reason"),
    },
    "sglang": {
        "tokens": ("output_ids",),
        "logprobs": ("meta_info", "output_token_logprobs"),
        "logprob": ("meta_info", "output_token_logprobs", 1, 0),
        "spans": ("meta_info", "weight_versions"),
        "stop": ("meta_info", "finish_reason", "type"),
    },
}


def changed(name, where, value):
    """The valid answer with `value` at a place."""
    answer = copy.deepcopy(FORMS[name].valid)
    *path, last = PLACES[name][where]
    at(answer, *path)[last] = value
    return answer


def span(version, start, end):
    return {"version": version, "start": start, "end": end}


WRONG = [
    *(("logprob", x) for x in (math.nan, math.inf, -math.inf, None, "-1", True, [], {}, -9999.0)),
    *(("logprob", x) for x in (10**400, 5.0, 1e300)),
    *(("tokens", [5, x, 319]) for x in (-1, 1 << 31, 1 << 80, 6.0, 1.5, "6", None, True, [6])),
    *(("tokens", x) for x in ([], [5], [5, 6], [*TOKENS, 7], TOKENS * 9, "abc", 7, {}, True)),
    *(("logprobs", x) for x in (None, [], [1], "abc", {}, 7, [None] * 3, [[]] * 3, [{}] * 3)),
    *(("spans", x) for x in (None, [], "3", 7, [7], [None], [{}])),
    ("spans", [span("3", 0, 2)]),
    ("spans", [span("3", 0, 4)]),
    ("spans", [span("3", 0, 1), span("4", 2, 3)]),
    ("spans", [span("3", 0, 2), span("4", 1, 3)]),
    ("spans", [span("3", 1, 3)]),
    ("spans", [span("3", 0, 30_000_000)]),
    ("spans", [span("3", 0, -1), span("4", 0, 3)]),
    ("spans", [span("3", 0.0, 3.0)]),
    ("spans", [span("3", "0", "3")]),
    ("spans", [span("9" * 12, 0, 3)]),
    ("spans", [span("three", 0, 3)]),
    ("spans", [span("", 0, 3)]),
    ("spans", [span("-7", 0, 3)]),
    ("spans", [span(None, 0, 3)]),
    ("spans", [span([3], 0, 3)]),
    ("spans", [span("x" * (1 << 20), 0, 3)]),
    ("spans", [span("3", 0, 3), *[span("4", 3, 3)] * 100_000, span("3", 4, 4)]),
    *(("stop", x) for x in ("", "eos", None, 7, ["stop"], {"type": "stop"}, "x" * (1 << 20))),
]


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(("where", "value"), WRONG, ids=lambda x: repr(x)[:40])
def test_a_wrong_value_is_an_error(name, where, value):
    found = []
    answer = changed(name, where, value)
    peak = peak_bytes(lambda: found.append(ask_answer(FORMS[name], answer)))
    assert isinstance(found[0], EngineError)
    assert peak < 150 << 20


@each_form
def test_of_a_key_that_stands_twice_the_last_is_checked(form):
    body = form.encode(form.valid)
    for wrong in (b"-1", b"null", b'"x"'):
        key = b'"token_ids": ' if b"token_ids" in body else b'"output_ids": '
        twice = body.replace(key, key + b"[" + wrong + b"], " + key, 1)
        assert ask(form, says(http(twice))).tokens == TOKENS
        inner = body.replace(b"[5, 6, 319]", b"[5, 6, 319], " + key + b"[" + wrong + b"]", 1)
        assert isinstance(ask(form, says(http(inner))), EngineError)


@each_form
def test_more_tokens_than_asked_for_are_an_error(form):
    answer = json.loads(json.dumps(form.valid).replace("[5, 6, 319]", str(TOKENS * 3)))
    text = json.dumps(answer).replace('"end": 3', '"end": 9')
    answer = json.loads(text)
    for place in (PLACES["vllm"], PLACES["sglang"]):
        try:
            scored = at(answer, *place["logprobs"])
        except (KeyError, TypeError):
            continue
        scored *= 3
    error = ask_answer(form, answer)
    assert isinstance(error, EngineError)
    assert "9 tokens came, asked for 8" in str(error)


def _keys_of(value):
    if isinstance(value, dict):
        return set(value).union(*(_keys_of(x) for x in value.values()))
    return set().union(*(_keys_of(x) for x in value)) if isinstance(value, list) else set()


_KEYS = set().union(*(_keys_of(form.valid) for form in FORMS.values()))


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["stop", "length", "abort", "3", "default", 10**400, -9999.0, 1 << 31]),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(sorted(_KEYS)), inner)
    ),
    max_leaves=10,
)


def _paths(value, here=()):
    yield here
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from _paths(value[key], (*here, key))


def _mutated(draw, answer):
    """`answer` with something left out, put in twice, swapped or replaced."""
    answer = copy.deepcopy(answer)
    for _ in range(draw(st.integers(1, 3))):
        paths = [path for path in _paths(answer) if path] if isinstance(answer, dict) else []
        if not paths:
            return answer
        *path, last = draw(st.sampled_from(paths))
        inside = at(answer, *path)
        choice = draw(st.sampled_from(["replace", "nudge", "delete", "repeat"]))
        if choice == "delete":
            del inside[last]
        elif choice == "repeat" and isinstance(inside, list):
            inside.insert(last, inside[last])
        elif choice == "nudge" and type(inside[last]) in (int, float):
            inside[last] += draw(st.sampled_from([-1, 1, 0.5, 1 << 31, -1e9, math.nan]))
        else:
            inside[last] = draw(ANYTHING)
    return answer


@pytest.mark.parametrize("name", FORMS)
@settings(max_examples=30)
@given(data=st.data())
def test_any_mutation_of_a_valid_answer_is_checked(name, data):
    """Twenty answers an example: a loop and its sockets cost more than they do."""
    form = FORMS[name]
    answers = [_mutated(data.draw, form.valid) for _ in range(20)]

    async def main():
        for answer in answers:
            body = form.encode(answer)
            await asked_of(form, says(http(body, content_type=form.content_type)))

    asyncio.run(main())


@each_form
@settings(max_examples=50)
@given(data=st.data())
def test_any_damaged_byte_is_checked(form, data):
    whole = bytearray(http(form.encode(form.valid), content_type=form.content_type))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(whole) - 1))
        whole[place] = data.draw(st.integers(0, 255))
    ask(form, says(bytes(whole)), timeout_s=2.0)
