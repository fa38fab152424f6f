"""The sender against servers that only keep what they get: order, ranks, failures."""

import re
import time

import pytest
import torch
from fake_server import FakeServer
from tiny_server import LoopThread

from megarl.bridge.sender import BroadcastSender
from megarl.errors import WeightUpdateError
from megarl.rollout.client import ServerClient

TIMEOUT_S = 30.0
UPDATE = "/update_weights"


@pytest.fixture
def servers():
    """Two servers, of one worker and of two, and the loop of their clients."""
    loop = LoopThread([])
    fakes = [FakeServer(loop, workers=n) for n in (1, 2)]
    loop.clients = [
        ServerClient(fake.address, request_timeout_s=TIMEOUT_S, retries=0) for fake in fakes
    ]
    yield loop, fakes
    for fake in fakes:
        fake.close()
    loop.close()


def make_sender(loop, timeout_s=TIMEOUT_S):
    return BroadcastSender(
        loop, bucket_bytes=1 << 12, pause="keep", timeout_s=timeout_s, device="cpu"
    )


def some_weights(seed: int) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(30, 20), (5,), (2000,), (7, 3), (64, 8)]  # the third is larger than a bucket
    return [(f"t{i}", torch.randn(s, generator=generator)) for i, s in enumerate(shapes)]


def test_every_worker_gets_every_tensor(servers):
    loop, fakes = servers
    sender = make_sender(loop)
    for version in (1, 2):
        weights = some_weights(version)
        stats = sender.push(iter(weights), version)
        assert stats.num_bytes >= sum(t.nbytes for _, t in weights)
        for fake in fakes:
            for held in fake.weights:
                assert list(held) == [name for name, _ in weights]
                assert all(torch.equal(held[name], tensor) for name, tensor in weights)
    sender.close()


def test_one_push_in_order(servers):
    loop, fakes = servers
    sender = make_sender(loop)
    sender.connect()
    sender.push(some_weights(0), 12)
    for fake in fakes:
        control = ["/get_world_size", "/init_weight_transfer_engine", "/pause"]
        update = ["/start_weight_update", *[UPDATE] * 3, "/finish_weight_update", "/resume"]
        assert fake.asked == control + update
        body = dict(zip(fake.asked, fake.bodies, strict=True))
        assert body["/pause"] == {"mode": "keep", "clear_cache": "true"}
        assert body["/finish_weight_update"] == {"weight_version": "12"}
    offsets = [fake.bodies[1]["init_info"]["rank_offset"] for fake in fakes]
    assert offsets == [1, 2]
    assert {fake.bodies[1]["init_info"]["world_size"] for fake in fakes} == {4}
    sender.close()


def test_the_trainer_packs_before_it_pauses(servers):
    loop, fakes = servers
    sender = make_sender(loop)
    seen = []

    def weights():
        for name, tensor in some_weights(0):
            seen.append("/pause" in fakes[0].asked)
            yield name, tensor

    sender.push(weights(), 1)
    assert seen == [False, False, False, True, True]  # the third did not fit into bucket 0
    sender.close()


@pytest.mark.parametrize(
    "path", ["/pause", "/start_weight_update", UPDATE, "/finish_weight_update", "/resume"]
)
def test_a_server_that_refuses_is_named_and_all_are_resumed(servers, path):
    loop, fakes = servers
    # A server that refuses a bucket takes no part in its transfer.
    sender = make_sender(loop, timeout_s=2.0)
    sender.connect()
    fakes[1].failing[path] = 503
    # It comes first: the other one may fail for want of its part in the transfer.
    cause = re.escape(f"{fakes[1].address}: POST {path}: status 503: no")
    with pytest.raises(WeightUpdateError, match=f"servers asked to [^:]*: {cause}"):
        sender.push(some_weights(0), 1)
    for fake in fakes:
        assert fake.asked[-1] == "/resume"

    fakes[1].failing.clear()
    sender.push(some_weights(1), 2)
    assert all(torch.equal(fakes[1].weights[1][name], t) for name, t in some_weights(1))
    sender.close()


def test_after_a_failure_no_server_claims_a_version(servers):
    loop, fakes = servers
    sender = make_sender(loop, timeout_s=2.0)
    sender.push(some_weights(0), 1)
    fakes[1].failing[UPDATE] = 503
    with pytest.raises(WeightUpdateError):
        sender.push(some_weights(1), 2)
    for fake in fakes:
        assert fake.asked[-2:] == ["/update_weight_version", "/resume"]
        assert fake.bodies[-2] == {"new_version": "-1"}


def test_a_server_that_does_not_join_is_named(servers):
    loop, fakes = servers
    fakes[1].failing["/init_weight_transfer_engine"] = 501
    sender = make_sender(loop, timeout_s=2.0)
    started = time.monotonic()
    with pytest.raises(WeightUpdateError, match=fakes[1].address):
        sender.connect()
    assert time.monotonic() - started < TIMEOUT_S


def test_a_server_that_is_gone_is_named(servers):
    loop, fakes = servers
    sender = make_sender(loop, timeout_s=2.0)
    sender.connect()
    fakes[1].close()
    with pytest.raises(WeightUpdateError, match=fakes[1].address):
        sender.push(some_weights(0), 1)
    assert fakes[0].asked[-1] == "/resume"


def test_no_weights_is_an_error(servers):
    loop, fakes = servers
    sender = make_sender(loop)
    with pytest.raises(ValueError, match="version 3: no weights"):
        sender.push([], 3)
    assert "/pause" not in fakes[0].asked
    sender.close()
