"""The weight group, its ranks as threads of this process: it needs no default group."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from megarl.bridge.group import connect, listen, open_group

TIMEOUT_S = 60.0


def open_threads(threads, world_size, timeout_s=TIMEOUT_S):
    """All ranks of a group; rank 0 first."""
    store = listen("127.0.0.1", timeout_s)

    def join(rank):
        own = store if rank == 0 else connect("127.0.0.1", store.port, timeout_s)
        return open_group(own, rank, world_size, "cpu", timeout_s)

    return list(threads.map(join, range(world_size)))


@pytest.fixture
def threads():
    with ThreadPoolExecutor(4) as pool:
        yield pool


def test_every_rank_receives_what_rank_0_sends(threads):
    groups = open_threads(threads, 3)
    sent = torch.randint(0, 255, (1 << 20,), dtype=torch.uint8)

    def transfer(group):
        buffer = sent.clone() if group.rank == 0 else torch.zeros_like(sent)
        group.broadcast(buffer).wait()
        return buffer

    for _ in range(2):
        assert all(torch.equal(buffer, sent) for buffer in threads.map(transfer, groups))
    assert not dist.is_initialized()
    for group in groups:
        group.leave()


def test_a_rank_that_does_not_join_is_named():
    store = listen("127.0.0.1", TIMEOUT_S)
    connect("127.0.0.1", store.port, TIMEOUT_S).set("rank2", "here")
    with pytest.raises(TimeoutError, match=r"group of 4: ranks \[1, 3\] did not join"):
        open_group(store, 0, 4, "cpu", 0.1)


def test_waiting_for_ranks_can_be_given_up():
    started = time.monotonic()
    with pytest.raises(TimeoutError, match=r"ranks \[1\]"):
        open_group(listen("127.0.0.1", TIMEOUT_S), 0, 2, "cpu", TIMEOUT_S, give_up=lambda: True)
    assert time.monotonic() - started < TIMEOUT_S / 2


def test_a_transfer_ends_when_the_others_do_not_take_part(threads):
    _, receiver = open_threads(threads, 2, timeout_s=0.5)
    with pytest.raises(TimeoutError, match=r"rank 0, the trainer did not take part within 0.5 s"):
        receiver.broadcast(torch.zeros(1 << 20, dtype=torch.uint8)).wait()
    receiver.leave()


def test_leaving_returns_at_once_and_is_harmless_twice(threads):
    groups = open_threads(threads, 2, timeout_s=5.0)
    pending = groups[1].broadcast(torch.zeros(1 << 20, dtype=torch.uint8))
    started = time.monotonic()
    groups[1].leave()
    groups[1].leave()
    assert time.monotonic() - started < 2.0  # gloo itself would wait for the 5 s
    groups[0].leave()
    with pytest.raises((TimeoutError, RuntimeError)):
        pending.wait()
    leavers = [t for t in threading.enumerate() if t.name == "megarl-weight-group-leave"]
    for leaver in leavers:
        leaver.join(30)
    assert not any(leaver.is_alive() for leaver in leavers)


def test_only_the_given_address_is_listened_on():
    store = listen("127.0.0.1", TIMEOUT_S)
    with pytest.raises((RuntimeError, dist.DistNetworkError)):
        connect("127.0.0.2", store.port, 0.2)
