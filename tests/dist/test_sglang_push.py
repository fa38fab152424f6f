"""Real Megatron ranks, the sharded bridge, a real SGLang server: whose weights does it serve?

The reference is transformers on the same float32 weights; the bound on logprobs is that of
tests/servers/test_sglang.py.
"""

import pytest
from sglang_server import running_sglang
from test_engine import make_engine
from test_sharded_push import SIZES, TIMEOUT_S, make_pusher, push_twice
from tiny_models import save_tiny_hf
from tiny_server import LoopThread, generate, hf_logprobs

from megarl import parallel as mesh_module
from megarl.bridge.forecast import forecast
from megarl.config.schema import ParallelConfig, RolloutParallelConfig
from megarl.errors import EngineError
from megarl.rollout.backends.sglang import SGLangClient

pytestmark = [pytest.mark.server]

TOLERANCE = 1e-4
PROMPT = list(range(3, 20))
NUM_TOKENS = 400  # a second of generation: not done before what the test does meanwhile


def client_of(address):
    return SGLangClient(address, request_timeout_s=TIMEOUT_S, retries=1)


def with_engine(folder, parallel, address, action, *args):
    """`action` on a rank that has an engine and, if it is rank 0, a client."""
    engine, loop = make_engine(folder, parallel), None
    try:
        if engine.mesh.rank == 0:
            loop = LoopThread([client_of(address)])
        return action(engine, loop, *args)
    finally:
        if loop is not None:
            loop.close()
        mesh_module.destroy()


def push_while_busy(engine, loop):
    """A push under a request, whose answer is returned; before it, one that is not allowed."""
    pusher = make_pusher(engine, loop)
    pusher.push([], 3)
    refusal, running = "", None
    if loop is not None:
        client = loop.clients[0]
        running = loop.start(generate(client, PROMPT, NUM_TOKENS))
        loop.run(generate(client, PROMPT, 4))
        assert not running.done()
        try:
            loop.run(client.command("land", pusher.sender._group_name))
        except EngineError as error:
            refusal = str(error)
        assert not running.done()
    # The group was given up by the refusal: it is made again.
    pusher.push([], 4)
    pusher.close()
    return refusal, running.result(TIMEOUT_S) if running is not None else None


def error_of(model, chunk):
    want = hf_logprobs(model, PROMPT, chunk.tokens)
    return max(abs(a - b) for a, b in zip(chunk.logprobs, want, strict=True))


@pytest.mark.parametrize(
    ("family", "parallel", "overlap"),
    [
        ("qwen3", ParallelConfig(tp=2, pp=2), False),
        ("qwen3_moe", ParallelConfig(tp=2, ep=2, etp=1), True),
    ],
)
def test_a_server_of_two_workers_has_the_new_weights(ranks, tmp_path, family, parallel, overlap):
    folder = tmp_path / "hf"
    folder.mkdir()
    model = save_tiny_hf(folder, family, tied=family == "qwen3", **SIZES)
    with running_sglang(tmp_path, tp=2, config=model.config) as server:
        run = (with_engine, folder, parallel, server.address)
        world = parallel.tp * parallel.pp
        results = ranks(world).run(*run, push_twice, overlap)
        loop = LoopThread([client_of(server.address)])
        try:
            chunk = loop.run(generate(loop.clients[0], PROMPT, 32))
        finally:
            loop.close()
        busy = ranks(world).run(*run, push_while_busy) if not overlap else None

    assert error_of(model, chunk) < TOLERANCE
    assert set(chunk.versions) == {2}
    sent = [result[0] for result in results]
    _, planned, into_workers, needed, rounds, num_in_place = results[0]
    # The second push went straight into the parameters of the model that serves.
    assert num_in_place == 2
    # Each byte leaves the trainer once, in more than one round.
    assert sent == planned
    assert sum(sent) == sum(p.nbytes for p in model.parameters()) == needed
    assert rounds > 1
    # SGLang's loaders take what was forecast of a server that splits as the trainer does.
    expected = forecast(
        model.config.to_dict(),
        parallel,
        world,
        RolloutParallelConfig(tp=2),
        itemsize=4,
        bucket_bytes=1 << 16,
    )
    assert sum(into_workers) / 2 == expected.optimal_into_worker
    if busy is not None:
        refusal, kept = busy[0]
        assert "worker 0: RuntimeError: the server is not paused" in refusal
        assert "worker 1: RuntimeError: the server is not paused" in refusal
        assert error_of(model, kept) < TOLERANCE
        assert {kept.versions[0], kept.versions[-1]} == {3, 4}
