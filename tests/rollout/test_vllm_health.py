"""Whether a vLLM server's engine makes tokens, by its counter and by a token of our own."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from megarl.errors import EngineTimeout
from megarl.rollout.backends import vllm
from megarl.rollout.backends.vllm import VLLMClient
from megarl.rollout.client import ServerFailed

LIMIT_S = 120.0


@asynccontextmanager
async def client_of(metrics):
    """A client of a server whose /metrics are the next of `metrics`; what it was asked for."""
    asked = []

    async def answer(request):
        asked.append(request.path)
        if request.path == "/metrics":
            return web.Response(text=next(metrics))
        return web.json_response({"choices": []})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0]
    client = VLLMClient(f"{host}:{port}", request_timeout_s=LIMIT_S, retries=0)
    try:
        async with asyncio.timeout(LIMIT_S):
            yield client, asked
    finally:
        await client.close()
        await runner.cleanup()


def counter(values):
    for value in values:
        yield f'# HELP x\nvllm:generation_tokens_total{{engine="0"}} {value}\n'


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(vllm, "_COUNTER_POLL_S", 0.01)


def test_a_busy_server_is_asked_for_no_token_of_its_own():
    async def main():
        async with client_of(counter([7.0, 7.0, 7.0, 8.0])) as (client, asked):
            await client.check_engine(LIMIT_S)
            assert asked == ["/metrics"] * 4

    asyncio.run(main())


def test_a_counter_that_began_again_has_moved():
    async def main():
        async with client_of(counter([7.0, 0.0])) as (client, asked):
            await client.check_engine(LIMIT_S)
            assert len(asked) == 2

    asyncio.run(main())


def test_a_counter_that_stands_still_is_an_engine_that_hangs():
    async def main():
        async with client_of(counter([7.0] * 1000)) as (client, asked):
            with pytest.raises(EngineTimeout, match=r"no token within 0\.2 s"):
                await client.check_engine(0.2)
            assert set(asked) == {"/metrics"}
            await client.make_token(LIMIT_S)
            assert asked[-1] == vllm.GENERATE_PATH

    asyncio.run(main())


def test_a_server_without_a_counter_cannot_be_told_from_a_busy_one():
    async def main():
        async with client_of(iter(["# HELP x\n"])) as (client, asked):
            await client.check_engine(LIMIT_S)
            assert asked == ["/metrics"]

    asyncio.run(main())


def test_a_counter_of_letters_is_the_servers_fault():
    async def main():
        async with client_of(counter(["many"])) as (client, _):
            with pytest.raises(ServerFailed, match=r"http://127.*not an answer: ValueError"):
                await client.check_engine(LIMIT_S)

    asyncio.run(main())
