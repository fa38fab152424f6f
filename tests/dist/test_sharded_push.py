"""Real Megatron ranks into real vLLM workers, each byte once: the servers compute HF's numbers."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from test_engine import make_engine
from tiny_models import save_tiny_hf
from tiny_server import LoopThread, end_tree, generate, hf_logprobs, running_server

from megarl import parallel as mesh_module
from megarl.bridge import sharded
from megarl.bridge.forecast import forecast
from megarl.config.schema import ParallelConfig, RolloutParallelConfig
from megarl.errors import WeightUpdateError
from megarl.model.weights import LocalTensors
from megarl.rollout.client import ServerClient

pytestmark = [pytest.mark.server]

TIMEOUT_S = 120.0
# Sums in another order, on both sides in float32.
TOLERANCE = 1e-4
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
    return ServerClient(address, request_timeout_s=TIMEOUT_S, retries=1)


def push_twice(folder, parallel, addresses):
    """Bytes that this rank sent, of the plan, and seconds; the second push uses the group again."""
    engine = make_engine(folder, parallel)
    loop = None
    try:
        if engine.mesh.rank == 0:
            loop = LoopThread([client_of(address) for address in addresses])
        sender = sharded.ShardedSender(
            loop,
            LocalTensors(engine.chunks, engine.spec, engine.mesh),
            cpu_group=engine.mesh.cpu_group,
            bucket_bytes=1 << 16,
            pause="keep",
            timeout_s=TIMEOUT_S,
            device="cpu",
        )
        for version in (1, 2):
            stats = sender.push([], version)
        sender.close()
        plan = sender.plan
        return (
            stats.num_bytes,
            plan.bytes_out_of_sources().tolist(),
            plan.bytes_into_workers().tolist(),
            plan.num_rounds,
        )
    finally:
        if loop is not None:
            loop.close()
        mesh_module.destroy()


def push_into_a_dying_server(folder, parallel, addresses, pid):
    """The error of this rank, and seconds until it came; the server dies as sending begins."""
    engine = make_engine(folder, parallel)
    loop = None
    send_all = sharded.send_all

    def kill_and_send(*args):
        if engine.mesh.rank == 0:
            end_tree(pid)
        return send_all(*args)

    try:
        if engine.mesh.rank == 0:
            loop = LoopThread([client_of(address) for address in addresses])
        sender = sharded.ShardedSender(
            loop,
            LocalTensors(engine.chunks, engine.spec, engine.mesh),
            cpu_group=engine.mesh.cpu_group,
            bucket_bytes=1 << 16,
            pause="keep",
            timeout_s=20.0,
            device="cpu",
        )
        sender.connect()
        sharded.send_all = kill_and_send
        started = time.monotonic()
        with pytest.raises(WeightUpdateError) as caught:
            sender.push([], 3)
        return str(caught.value), time.monotonic() - started
    finally:
        sharded.send_all = send_all
        if loop is not None:
            loop.close()
        mesh_module.destroy()


def check_logprobs(address, model):
    """The server's logprobs of what it samples, against transformers'."""
    prompt = list(range(3, 20))
    loop = LoopThread([client_of(address)])
    try:
        chunk = loop.run(generate(loop.clients[0], prompt, 32))
    finally:
        loop.close()
    want = hf_logprobs(model, prompt, chunk.tokens)
    assert max(abs(a - b) for a, b in zip(chunk.logprobs, want, strict=True)) < TOLERANCE
    assert set(chunk.versions) == {2}


def check_a_death(group, folder, parallel, running):
    """Of the second of two servers, in the middle of a push: every rank hears of it, and soon."""
    addresses = [server.address for server in running]
    results = group.run(push_into_a_dying_server, folder, parallel, addresses, running[1].pid)
    for text, seconds in results:
        assert "trainer ranks asked to send weights" in text
        assert seconds < 200  # some limits of 20 and 40 s one after the other, not for ever


@pytest.mark.parametrize(
    ("family", "tied", "parallel", "world", "tps"),
    [
        ("qwen3", True, ParallelConfig(tp=2, pp=2), 4, (2,)),
        ("qwen3_moe", False, ParallelConfig(tp=2, ep=2, etp=1), 2, (2,)),
        ("llama", False, ParallelConfig(pp=2), 2, (1, 1)),
    ],
)
def test_servers_have_the_new_weights(ranks, tmp_path, family, tied, parallel, world, tps):
    folder = tmp_path / "hf"
    folder.mkdir()
    model = save_tiny_hf(folder, family, tied=tied, **SIZES)
    servers = []
    for i, tp in enumerate(tps):
        (tmp_path / f"server{i}").mkdir()
        servers.append(running_server(tmp_path / f"server{i}", tp=tp, config=model.config))
    with ThreadPoolExecutor(len(tps)) as pool:
        running = list(pool.map(lambda server: server.__enter__(), servers))
        try:
            addresses = [server.address for server in running]
            results = ranks(world).run(push_twice, folder, parallel, addresses)
            for address in addresses:
                check_logprobs(address, model)
            if tps == (1, 1):
                check_a_death(ranks(world), folder, parallel, running)
        finally:
            list(pool.map(lambda server: server.__exit__(None, None, None), servers))
    sent = [result[0] for result in results]
    _, planned, into_workers, rounds = results[0]
    # Each byte leaves the trainer once, in more than one round.
    assert sent == planned
    assert sum(sent) == sum(p.nbytes for p in model.parameters())
    assert rounds > 1
    # What was forecast of a server is what a real one asked for.
    expected = forecast(
        model.config.to_dict(),
        parallel,
        world,
        RolloutParallelConfig(dp=len(tps), tp=tps[0]),
        itemsize=4,
        bucket_bytes=1 << 16,
    )
    assert sum(into_workers) / len(into_workers) == expected.optimal_into_worker
    if tps == (1, 1):
        assert into_workers == [sum(sent)] * 2
    else:
        # A worker of two takes half of what is cut, and all of what is not.
        assert len(into_workers) == 2
        assert all(sum(sent) / 2 <= into < 0.75 * sum(sent) for into in into_workers)
