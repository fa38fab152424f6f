"""The sender against servers that only keep what they get: order, ranks, failures."""

import re

import pytest
import torch
from fake_server import FakeServer
from tiny_server import LoopThread

from megarl.bridge.push import Members, Pusher, Together
from megarl.bridge.sender import BroadcastSender
from megarl.errors import WeightUpdateError
from megarl.rollout.backends.vllm import VLLMClient

TIMEOUT_S = 30.0
UPDATE = "/update_weights"


@pytest.fixture
def servers():
    """Two servers, of one worker and of two, and the loop of their clients."""
    loop = LoopThread([])
    fakes = [FakeServer(loop, workers=n) for n in (1, 2)]
    loop.clients = [
        VLLMClient(fake.address, request_timeout_s=TIMEOUT_S, retries=0) for fake in fakes
    ]
    yield loop, fakes
    for fake in fakes:
        fake.close()
    loop.close()


def make_pusher(loop, timeout_s=TIMEOUT_S):
    together, members = Together(None), Members(loop)
    sender = BroadcastSender(
        members, together, bucket_bytes=1 << 12, timeout_s=timeout_s, device="cpu"
    )
    return Pusher(members, sender, together, pause="keep", timeout_s=timeout_s)


def some_weights(seed: int) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(30, 20), (5,), (2000,), (7, 3), (64, 8)]  # the third is larger than a bucket
    return [(f"t{i}", torch.randn(s, generator=generator)) for i, s in enumerate(shapes)]


def test_every_worker_gets_every_tensor(servers):
    loop, fakes = servers
    pusher = make_pusher(loop)
    for version in (1, 2):
        weights = some_weights(version)
        stats = pusher.push(weights, version)
        assert stats.num_bytes >= sum(t.nbytes for _, t in weights)
        for fake in fakes:
            for held in fake.weights:
                assert list(held) == [name for name, _ in weights]
                assert all(torch.equal(held[name], tensor) for name, tensor in weights)
    pusher.close()


COMMAND = "/collective_rpc"
JOIN = ["/get_world_size", "/init_weight_transfer_engine", COMMAND]
SEND = ["/start_weight_update", *[UPDATE] * 3, COMMAND, "/finish_weight_update"]


def test_one_push_in_order(servers):
    loop, fakes = servers
    pusher = make_pusher(loop)
    pusher.push(some_weights(0), 12)
    for fake in fakes:
        assert fake.asked == [*JOIN, "/pause", *SEND, "/resume"]
        body = dict(zip(fake.asked, fake.bodies, strict=True))
        assert body["/pause"] == {"mode": "keep", "clear_cache": "true"}
        assert body["/finish_weight_update"] == {"weight_version": "12"}
    offsets = [fake.bodies[1]["init_info"]["rank_offset"] for fake in fakes]
    assert offsets == [1, 2]
    assert {fake.bodies[1]["init_info"]["world_size"] for fake in fakes} == {4}
    pusher.push(some_weights(1), 13)
    assert fakes[0].asked[-8:] == ["/pause", *SEND, "/resume"]  # over the same group
    pusher.close()


def test_the_trainer_packs_before_it_pauses(servers):
    loop, fakes = servers
    pusher = make_pusher(loop)
    seen = []

    class Weights:
        def __iter__(self):
            for name, tensor in some_weights(0):
                seen.append("/pause" in fakes[0].asked)
                yield name, tensor

    pusher.push(Weights(), 1)
    assert seen == [False, False, False, True, True]  # the third did not fit into bucket 0
    pusher.close()


@pytest.mark.parametrize(
    "path", ["/pause", "/start_weight_update", UPDATE, "/finish_weight_update", "/resume"]
)
def test_a_server_that_refuses_and_is_well_is_named(servers, path):
    loop, fakes = servers
    # A server that refuses a bucket takes no part in its transfer.
    pusher = make_pusher(loop, timeout_s=2.0)
    fakes[1].failing[path] = 503
    # It comes first: the other one may fail for want of its part in the transfer.
    cause = re.escape(f"{fakes[1].address}: POST {path}: status 503: no")
    with pytest.raises(WeightUpdateError, match=f"servers asked to [^:]*: {cause}"):
        pusher.push(some_weights(0), 1)
    assert fakes[1].asked.count(path) == 2  # once more, for all were well
    assert loop.clients[1].address == fakes[1].address
    assert not loop.dropped
    if path == "/resume":  # the other one had gone on: it stops again before it gets anything
        again = fakes[0].asked[fakes[0].asked.index("/resume") :]
        assert again.index("/pause") < again.index(UPDATE)

    fakes[1].failing.clear()
    pusher.push(some_weights(1), 2)
    assert all(torch.equal(fakes[1].weights[1][name], t) for name, t in some_weights(1))
    assert all(fake.asked[-1] == "/resume" for fake in fakes)
    pusher.close()


def test_after_a_failure_no_server_claims_a_version_or_goes_on(servers):
    loop, fakes = servers
    pusher = make_pusher(loop, timeout_s=2.0)
    pusher.push(some_weights(0), 1)
    fakes[1].failing[UPDATE] = 503
    with pytest.raises(WeightUpdateError):
        pusher.push(some_weights(1), 2)
    for fake in fakes:
        assert fake.asked[-1] == "/update_weight_version"
        assert fake.bodies[-1] == {"new_version": "-1"}
        assert fake.asked[fake.asked.index("/resume") + 1 :].count("/resume") == 0


def test_a_bucket_that_failed_once_is_sent_again(servers):
    loop, fakes = servers
    pusher = make_pusher(loop, timeout_s=2.0)
    fakes[1].failing_once[UPDATE] = 500
    stats = pusher.push(some_weights(0), 1)
    for fake in fakes:
        for held in fake.weights:
            assert all(torch.equal(held[name], tensor) for name, tensor in some_weights(0))
        assert fake.asked[-2:] == ["/finish_weight_update", "/resume"]
        assert fake.asked.count("/pause") == fake.asked.count("/resume") == 1
    assert stats.num_bytes < 2 * sum(t.nbytes + 16 for _, t in some_weights(0))
    assert not loop.dropped
    pusher.close()


@pytest.mark.parametrize("when", ["before", "between"])
def test_a_server_that_is_gone_is_dropped_and_the_others_get_all(servers, when):
    loop, fakes = servers
    pusher = make_pusher(loop, timeout_s=2.0)
    if when == "between":
        pusher.push(some_weights(0), 1)
    fakes[1].close()
    pusher.push(some_weights(2), 2)
    assert list(loop.dropped) == [fakes[1].address]
    assert [client.address for client in loop.clients] == [fakes[0].address]
    assert all(torch.equal(fakes[0].weights[0][name], t) for name, t in some_weights(2))
    assert fakes[0].asked[-2:] == ["/finish_weight_update", "/resume"]
    pusher.push(some_weights(3), 3)
    assert all(torch.equal(fakes[0].weights[0][name], t) for name, t in some_weights(3))
    pusher.close()


@pytest.mark.parametrize("path", ["/pause", "/start_weight_update", UPDATE])
def test_a_server_that_hangs_is_dropped(servers, path, monkeypatch):
    loop, fakes = servers
    monkeypatch.setattr("megarl.rollout.backends.vllm.CONTROL_TIMEOUT_S", 0.5)
    pusher = make_pusher(loop, timeout_s=1.0)
    fakes[1].hangs_from = path
    pusher.push(some_weights(0), 1)
    assert list(loop.dropped) == [fakes[1].address]
    assert all(torch.equal(fakes[0].weights[0][name], t) for name, t in some_weights(0))
    assert fakes[0].asked[-1] == "/resume"
    pusher.close()


def test_without_a_server_the_push_is_an_error(servers):
    loop, fakes = servers
    pusher = make_pusher(loop, timeout_s=2.0)
    for fake in fakes:
        fake.close()
    with pytest.raises(WeightUpdateError, match=r"no server is left: .*after: trainer ranks"):
        pusher.push(some_weights(0), 1)


def test_no_weights_is_an_error(servers):
    loop, fakes = servers
    pusher = make_pusher(loop)
    with pytest.raises(WeightUpdateError, match="version 3: no weights"):
        pusher.push([], 3)
    assert "/pause" not in fakes[0].asked
    pusher.close()
