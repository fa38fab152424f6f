"""The client against a server that misbehaves."""

import asyncio

import pytest
from fake_server import FakeServer
from tiny_server import LoopThread, free_port

from megarl.config.schema import GenerationHyperparameters
from megarl.errors import EngineError, EngineTimeout
from megarl.rollout.api import GenerateChunk, ModelRequest
from megarl.rollout.backends.vllm import VLLMClient
from megarl.rollout.servers import wait_healthy

PATH = "/inference/v1/generate"


def one_token(loop):
    request = ModelRequest(input_ids=[1])
    return loop.clients[0].generate(request, GenerationHyperparameters(), 1)


@pytest.fixture
def server():
    loop = LoopThread([])
    fake = FakeServer(loop)
    loop.clients = [VLLMClient(fake.address, request_timeout_s=30.0, retries=2)]
    yield loop, fake
    fake.close()
    loop.close()


def test_a_refusal_says_who_what_and_why(server):
    loop, fake = server
    fake.failing["/resume"] = 503
    with pytest.raises(EngineError, match=f"{fake.address}: POST /resume: status 503: no"):
        loop.run(loop.clients[0].resume())


def test_a_late_answer_says_who_what_and_how_long(server):
    loop, fake = server
    fake.hanging.add("/pause")
    with pytest.raises(EngineTimeout, match=f"{fake.address}: POST /pause: .*within 0.1 s"):
        loop.run(loop.clients[0].pause("keep", timeout_s=0.1))


def test_a_generation_is_asked_again_when_its_connection_breaks(server):
    loop, fake = server
    fake.dropped = 2
    assert loop.run(one_token(loop)) == GenerateChunk([7], [-0.5], [3], "length")
    assert loop.clients[0].num_retries == 2
    assert [body["token_ids"] for body in fake.bodies] == [[1]] * 3


def test_a_generation_is_asked_again_only_so_often(server):
    loop, fake = server
    fake.dropped = 3
    with pytest.raises(EngineError, match=f"{fake.address}: POST {PATH}"):
        loop.run(one_token(loop))
    assert len(fake.asked) == 3


def test_a_refused_generation_is_not_asked_again(server):
    loop, fake = server
    fake.failing[PATH] = 500
    with pytest.raises(EngineError, match="status 500"):
        loop.run(one_token(loop))
    assert len(fake.asked) == 1


def test_a_control_request_is_asked_once(server):
    loop, fake = server
    fake.dropped = 1
    with pytest.raises(EngineError, match=f"{fake.address}: POST /start_weight_update"):
        loop.run(loop.clients[0].start_update())
    assert fake.asked == ["/start_weight_update"]


def test_many_requests_are_under_way_at_a_time(server):
    """aiohttp's own limit is 100."""
    loop, fake = server
    fake.hanging.add(PATH)
    running = [loop.start(one_token(loop)) for _ in range(150)]

    async def all_arrived():
        while len(fake.asked) < 150:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    loop.run(asyncio.wait_for(all_arrived(), 30))
    for request in running:
        request.cancel()


def test_waiting_for_health_ends_with_the_process():
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(EngineError, match=f"{address}.*ended before it was ready: exit code 3"):
        asyncio.run(wait_healthy(address, 60, lambda: "exit code 3"))


def test_waiting_for_health_ends_after_its_limit():
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(EngineTimeout, match=f"{address}: not ready within 0.1 s"):
        asyncio.run(wait_healthy(address, 0.1))


def test_health(server):
    _, fake = server
    asyncio.run(wait_healthy(fake.address, 30))
