"""Real Megatron ranks, the sharded bridge, real vLLM servers: whose weights do they serve?

The reference is transformers on the same float32 weights; the bound on logprobs is that of
tests/bridge/test_push.py.
"""

import concurrent.futures
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import psutil
import pytest
import torch
from ranks import RankGroup
from test_engine import make_engine
from tiny_models import save_tiny_hf
from tiny_server import LoopThread, end_tree, generate, hf_logprobs, running_server

from megarl import parallel as mesh_module
from megarl.bridge import sharded
from megarl.bridge.forecast import forecast
from megarl.bridge.push import Members, Pusher, Together
from megarl.config.schema import ParallelConfig, RolloutParallelConfig
from megarl.errors import WeightUpdateError
from megarl.model.weights import LocalTensors
from megarl.rollout.backends.vllm import VLLMClient

pytestmark = [pytest.mark.server]

# Sums in another order, on both sides in float32.
TOLERANCE = 1e-4
TIMEOUT_S = 120.0
SIZES = {
    "vocab": 320,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "head_dim": 32,  # the smallest that vLLM's CPU attention has
    "intermediate_size": 96,
    "max_position_embeddings": 2048,
    "pad_token_id": 256,
    "eos_token_id": 258,
}


def client_of(address):
    return VLLMClient(address, request_timeout_s=TIMEOUT_S, retries=1)


def make_pusher(engine, loop, *, timeout_s=TIMEOUT_S, overlap=False):
    together, members = Together(engine.mesh.cpu_group), Members(loop)
    sender = sharded.ShardedSender(
        members,
        LocalTensors(engine.chunks, engine.spec, engine.mesh),
        together,
        bucket_bytes=1 << 16,
        timeout_s=timeout_s,
        device="cpu",
        overlap=overlap,
    )
    return Pusher(members, sender, together, pause="keep", timeout_s=timeout_s)


def with_engine(folder, parallel, addresses, action, *args):
    """`action` on a rank that has an engine and, if it is rank 0, clients."""
    engine, loop = make_engine(folder, parallel), None
    try:
        if engine.mesh.rank == 0:
            loop = LoopThread([client_of(address) for address in addresses])
        return action(engine, loop, *args)
    finally:
        if loop is not None:
            loop.close()
        mesh_module.destroy()


def push_twice(engine, loop, overlap):
    """Bytes that this rank sent, and the plan's; the second push uses the group again."""
    pusher = make_pusher(engine, loop, overlap=overlap)
    with torch.no_grad():
        for parameter in engine.chunks[0].parameters():
            parameter.add_(1.0)  # version 1 must not be what the server has in the end
    pusher.push([], 1)
    with torch.no_grad():
        for parameter in engine.chunks[0].parameters():
            parameter.sub_(1.0)
    stats = pusher.push([], 2)
    pusher.close()
    plan = pusher.sender.plan
    return (
        stats.num_bytes,
        plan.bytes_out_of_sources().tolist(),
        plan.bytes_into_workers().tolist(),
        plan.bytes_needed(),
        plan.num_rounds,
        pusher.sender.num_in_place,
    )


def check_logprobs(address, model, version):
    """The server's logprobs of what it samples, against transformers'."""
    prompt = list(range(3, 20))
    loop = LoopThread([client_of(address)])
    try:
        chunk = loop.run(generate(loop.clients[0], prompt, 32))
    finally:
        loop.close()
    want = hf_logprobs(model, prompt, chunk.tokens)
    assert max(abs(a - b) for a, b in zip(chunk.logprobs, want, strict=True)) < TOLERANCE
    assert set(chunk.versions) == {version}


@pytest.fixture
def start_servers(tmp_path):
    """`servers.dp` servers of one model; ended with the test."""
    contexts = []

    def start(config, servers, extra_args=()):
        made = []
        one = replace(servers, dp=1)
        for i in range(servers.dp):
            (tmp_path / f"server{i}").mkdir()
            options = {"parallel": one, "config": config, "extra_args": extra_args}
            made.append(running_server(tmp_path / f"server{i}", **options))
        contexts.extend(made)
        with ThreadPoolExecutor(servers.dp) as pool:
            return list(pool.map(lambda server: server.__enter__(), made))

    yield start
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda server: server.__exit__(None, None, None), contexts))


@pytest.fixture
def model(request, tmp_path):
    """A random model and its folder."""
    family, tied = request.param
    folder = tmp_path / "hf"
    folder.mkdir()
    return save_tiny_hf(folder, family, tied=tied, **SIZES), folder


EXPERT_PARALLEL = ("--enable-expert-parallel",)


@pytest.mark.parametrize(
    ("model", "parallel", "world", "servers", "extra_args", "overlap"),
    [
        (("qwen3", True), {"tp": 2, "pp": 2}, 4, {"tp": 2}, (), False),
        (("qwen3_moe", False), {"tp": 2, "ep": 2, "etp": 1}, 2, {"tp": 2}, (), True),
        (("qwen3_moe", False), {"pp": 2}, 2, {"tp": 2}, EXPERT_PARALLEL, False),
        (("llama", False), {"tp": 2}, 2, {"pp": 2}, (), False),
        (("llama", False), {"tp": 2, "pp": 2}, 4, {"dp": 2}, (), False),
        (("qwen3_moe", False), {"tp": 2, "ep": 2, "etp": 1}, 2, {"dp": 2}, (), False),
    ],
    indirect=["model"],
    ids=[
        *("tp2 pp2 to tp2", "moe tp2 ep2 to tp2", "moe to ep2", "tp2 to pp2"),
        *("tp2 pp2 to two", "moe tp2 ep2 to two"),
    ],
)
def test_servers_have_the_new_weights(
    ranks, start_servers, model, parallel, world, servers, extra_args, overlap
):
    model, folder = model
    parallel, servers = ParallelConfig(**parallel), RolloutParallelConfig(**servers)
    addresses = [server.address for server in start_servers(model.config, servers, extra_args)]
    results = ranks(world).run(with_engine, folder, parallel, addresses, push_twice, overlap)
    if not extra_args:
        # vLLM 0.32's CPU kernel of experts is not told which are the worker's own: with expert
        # parallelism the first request ends it (a segfault in cpu_fused_moe).
        for address in addresses:
            check_logprobs(address, model, 2)
    sent = [result[0] for result in results]
    _, planned, into_workers, needed, rounds, num_in_place = results[0]
    assert num_in_place == 0  # vLLM computes with packed copies on a CPU
    # Each byte leaves the trainer once, in more than one round.
    assert sent == planned
    assert sum(sent) == sum(p.nbytes for p in model.parameters()) == needed
    assert rounds > 1
    # What was forecast of a server is what a real one asked for.
    expected = forecast(
        model.config.to_dict(),
        parallel,
        world,
        servers,
        itemsize=4,
        bucket_bytes=1 << 16,
        server_ep=2 if extra_args else 1,
    )
    assert sum(into_workers) / len(into_workers) == expected.optimal_into_worker
    assert len(into_workers) == servers.world_size
    if servers.dp == 2:
        assert into_workers == [sum(sent)] * 2
    else:
        # A worker of two takes half of what is cut, and all of what is not.
        assert all(sum(sent) / 2.5 <= into < 0.75 * sum(sent) for into in into_workers)


# ---------------------------------------------------------------- faults


class Meanwhile:
    """Something that happens once, on one trainer rank, when it is about to send."""

    def __init__(self, engine, rank, action):
        self._is_mine, self._action = engine.mesh.rank == rank, action
        self.num_sends = 0

    def __enter__(self):
        self._send_all = sharded.send_all
        sharded.send_all = self._send
        return self

    def __exit__(self, *_):
        sharded.send_all = self._send_all

    def _send(self, *args):
        self.num_sends += 1
        if self._is_mine and self.num_sends == 1:
            self._action(*args)
        return self._send_all(*args)


def corrupt(group, plan, outgoing):
    """The next bucket that is packed is not the one that leaves."""
    packed = outgoing.packed

    def packed_badly(index):
        outgoing.packed = packed
        bucket = packed(index)
        bucket[3] ^= 0x40  # of a float32 that makes another world
        return bucket

    outgoing.packed = packed_badly


def push_corrupted(engine, loop):
    pusher = make_pusher(engine, loop)
    with Meanwhile(engine, 1, corrupt) as meanwhile:
        pusher.push([], 3)
    pusher.close()
    return meanwhile.num_sends, loop.dropped if loop is not None else None


def push_and_die(engine, loop):
    pusher = make_pusher(engine, loop)
    pusher.push([], 4)
    with (
        Meanwhile(engine, 1, lambda *_: os._exit(9)),
        pytest.raises((WeightUpdateError, RuntimeError)),
    ):
        pusher.push([], 5)


def push_into_a_dying_server(engine, loop, pid):
    pusher = make_pusher(engine, loop)
    with Meanwhile(engine, 0, lambda *_: end_tree(pid)):
        stats = pusher.push([], 6)
    pusher.close()
    return stats.num_bytes, loop.dropped if loop is not None else None


def push_into_a_hung_server(engine, loop, pid):
    pusher = make_pusher(engine, loop, timeout_s=5.0)

    def stop(*_):
        for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            process.send_signal(signal.SIGSTOP)

    with Meanwhile(engine, 0, stop), pytest.raises(WeightUpdateError) as caught:
        pusher.push([], 7)
    return str(caught.value)


@pytest.mark.parametrize("model", [("llama", False)], indirect=True)
def test_faults_in_the_middle_of_a_push(ranks, start_servers, model, monkeypatch):
    """One after the other, on two servers: each ends in a healthy job or a clear error."""
    model, folder = model
    first, second = start_servers(model.config, RolloutParallelConfig(dp=2))
    addresses = [first.address, second.address]
    parallel = ParallelConfig(pp=2)
    group = ranks(2)

    # Bytes that are not those sent: found by the worker, and all is sent again.
    results = group.run(with_engine, folder, parallel, addresses, push_corrupted)
    assert results == [(2, {}), (2, None)]
    for address in addresses:
        check_logprobs(address, model, 3)

    # A trainer rank dies: the servers are well, and answer nobody until another trainer comes.
    mortal = RankGroup(2)
    with pytest.raises(AssertionError, match="rank 1 of 2 died"):
        mortal.run(with_engine, folder, parallel, addresses, push_and_die)
    asking = LoopThread([client_of(first.address)])
    asked = asking.start(generate(asking.clients[0], [5, 6, 7], 4))
    with pytest.raises(concurrent.futures.TimeoutError):
        asked.result(3)

    # A server dies: the other one has all of the new weights, and the job goes on.
    results = group.run(
        with_engine, folder, parallel, addresses, push_into_a_dying_server, second.pid
    )
    assert list(results[0][1]) == [second.address]
    assert sum(num_bytes for num_bytes, _ in results) == sum(p.nbytes for p in model.parameters())
    check_logprobs(first.address, model, 6)
    assert asked.result(TIMEOUT_S).versions == [6] * 4
    asking.close()

    # A server hangs, and it was the last one: an error on every rank, in bounded time.
    errors = group.run(
        with_engine, folder, parallel, [first.address], push_into_a_hung_server, first.pid
    )
    for text in errors:
        assert f"no server is left: {first.address}" in text
        assert "trainer ranks asked to send weights" in text
    for process in [psutil.Process(first.pid), *psutil.Process(first.pid).children(recursive=True)]:
        process.send_signal(signal.SIGCONT)
