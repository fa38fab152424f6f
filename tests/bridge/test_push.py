"""Weights into a real vLLM server, and what its requests see of it.

The reference is transformers on the same float32 weights: two implementations of the same
sums, in another order, which leaves about 2e-6 nats here.
"""

import concurrent.futures

import pytest
import torch
from tiny_server import generate, hf_logprobs, named_weights, random_model

from megarl.bridge.disk import DiskSender
from megarl.bridge.push import Members, Pusher, Together
from megarl.bridge.sender import BroadcastSender
from megarl.errors import EngineError, WeightUpdateError

TOLERANCE = 1e-4  # 50 times what is seen; a wrong weight or a stale cache is off by 0.1 and more
PROMPT = list(range(65, 97))
LONG_PROMPT = [(7 * i) % 251 for i in range(300)]  # more than two blocks of the prefix cache
BUCKET_BYTES = 1 << 17  # the embedding fills half of one; five messages a push


@pytest.fixture(scope="module")
def models():
    return random_model(1), random_model(2)


@pytest.fixture
def pusher(vllm_loop):
    pusher = make_pusher(vllm_loop)
    yield pusher
    pusher.close()


def make_pusher(vllm_loop, pause="keep", **options):
    together, members = Together(None), Members(vllm_loop)
    sender = BroadcastSender(
        members, together, bucket_bytes=BUCKET_BYTES, timeout_s=60.0, device="cpu", **options
    )
    return Pusher(members, sender, together, pause=pause, timeout_s=60.0)


def error_of(model, prompt, chunk, temperature=1.0) -> float:
    want = hf_logprobs(model, prompt, chunk.tokens, temperature)
    return max(abs(a - b) for a, b in zip(chunk.logprobs, want, strict=True))


def test_a_disk_push_brings_the_weights(vllm_loop, models, tmp_path):
    """Also as the first push into a server that was started without weights."""
    together, members = Together(None), Members(vllm_loop)
    sender = DiskSender(members, together, folder=tmp_path / "weights", timeout_s=60.0)
    pusher = Pusher(members, sender, together, pause="keep", timeout_s=60.0)
    for version, model in enumerate(models):
        stats = pusher.push(named_weights(model), version)
        chunk = vllm_loop.run(generate(vllm_loop.clients[0], PROMPT, 32))
        assert error_of(model, PROMPT, chunk) < TOLERANCE
        assert chunk.versions == [version] * 32
        assert [f.name for f in (tmp_path / "weights").iterdir()] == [f"version_{version}"]
        assert stats.num_bytes == sum(p.nbytes for _, p in named_weights(model))
        assert 0 < stats.pause_s < stats.total_s


@pytest.mark.parametrize("options", [{"greedy": True}, {"temperature": 0.7}, {"temperature": 1.0}])
def test_logprobs_are_those_of_the_pushed_weights(vllm_loop, pusher, models, options):
    for version, model in enumerate(models, start=3):
        stats = pusher.push(named_weights(model), version)
        chunk = vllm_loop.run(generate(vllm_loop.clients[0], PROMPT, 64, **options))
        assert error_of(model, PROMPT, chunk, options.get("temperature", 1.0)) < TOLERANCE
        assert chunk.versions == [version] * 64
        assert chunk.stop_reason == "length"
        assert vllm_loop.run(vllm_loop.clients[0].weight_version()) == version
        assert stats.num_bytes >= sum(p.nbytes for _, p in named_weights(model))
        assert 0 < stats.pause_s < stats.total_s


def test_greedy_takes_the_likeliest_token(vllm_loop, pusher, models):
    pusher.push(named_weights(models[0]), 1)
    chunk = vllm_loop.run(generate(vllm_loop.clients[0], PROMPT, 16, greedy=True))
    with torch.no_grad():
        logits = models[0](torch.tensor([PROMPT + chunk.tokens])).logits[0]
    assert chunk.tokens == logits.argmax(-1)[len(PROMPT) - 1 : -1].tolist()


def test_the_server_casts_to_its_own_dtype(vllm_loop, pusher, models):
    halves = [(name, p.to(torch.bfloat16)) for name, p in named_weights(models[0])]
    pusher.push(halves, 1)
    chunk = vllm_loop.run(generate(vllm_loop.clients[0], PROMPT, 32))
    rounded = random_model(1)
    with torch.no_grad():
        for (_, parameter), (_, half) in zip(named_weights(rounded), halves, strict=True):
            parameter.copy_(half)
    assert error_of(rounded, PROMPT, chunk) < TOLERANCE


def start_long_request(vllm_loop, num_tokens):
    """A request that is being answered when this returns."""
    client = vllm_loop.clients[0]
    running = vllm_loop.start(generate(client, LONG_PROMPT, num_tokens))
    # Asked later and batched with it: when this has its 8 tokens, the other has some too.
    vllm_loop.run(generate(client, PROMPT, 8))
    assert not running.done()
    return running


def test_a_kept_request_goes_on_with_the_new_weights(vllm_loop, pusher, models):
    old, new = models
    pusher.push(named_weights(old), 7)
    running = start_long_request(vllm_loop, 600)
    pusher.push(named_weights(new), 8)
    chunk = running.result(120)

    switch = chunk.versions.index(8)
    assert 0 < switch < 600
    assert chunk.versions == [7] * switch + [8] * (600 - switch)
    for model, tokens in ((old, slice(0, switch)), (new, slice(switch, 600))):
        want = hf_logprobs(model, LONG_PROMPT, chunk.tokens)[tokens]
        got = chunk.logprobs[tokens]
        # After the switch only if the KV cache of the old weights was dropped.
        assert max(abs(a - b) for a, b in zip(got, want, strict=True)) < TOLERANCE


def test_an_aborted_request_returns_what_it_has(vllm_loop, models):
    pusher = make_pusher(vllm_loop, pause="abort")
    pusher.push(named_weights(models[0]), 7)
    running = start_long_request(vllm_loop, 600)
    pusher.push(named_weights(models[1]), 8)
    chunk = running.result(120)
    pusher.close()
    assert chunk.stop_reason == "abort"
    assert 0 < len(chunk.tokens) < 600
    assert set(chunk.versions) == {7}
    assert error_of(models[0], LONG_PROMPT, chunk) < TOLERANCE


def test_no_cached_prefix_survives_a_push(vllm_loop, pusher, models):
    for version, model in enumerate((*models, models[0])):
        pusher.push(named_weights(model), version)
        for _ in range(2):  # the second time from the cache
            chunk = vllm_loop.run(generate(vllm_loop.clients[0], LONG_PROMPT, 16))
            assert error_of(model, LONG_PROMPT, chunk) < TOLERANCE


def test_a_wrong_shape_is_an_error_and_the_server_goes_on(vllm_loop, pusher, models, vllm_server):
    old, new = models
    pusher.push(named_weights(old), 1)
    odd = "model.layers.1.mlp.up_proj.weight"
    broken = [(name, p[:-1] if name == odd else p) for name, p in named_weights(new)]
    waiting = start_long_request(vllm_loop, 600)
    with pytest.raises(WeightUpdateError, match=f"{vllm_server.address}.*update_weights"):
        pusher.push(broken, 2)
    # Neither the old weights nor the new ones: nobody is served from this mixture.
    assert vllm_loop.run(vllm_loop.clients[0].weight_version()) == -1
    asked = vllm_loop.start(generate(vllm_loop.clients[0], PROMPT, 8))
    with pytest.raises(concurrent.futures.TimeoutError):
        asked.result(3)
    assert not waiting.done()

    pusher.push(named_weights(new), 3)
    chunk = vllm_loop.run(generate(vllm_loop.clients[0], PROMPT, 32))
    assert error_of(new, PROMPT, chunk) < TOLERANCE
    assert chunk.versions == [3] * 32
    assert asked.result(120).versions == [3] * 8
    assert set(waiting.result(120).versions) == {1, 3}


def test_a_trainer_that_fails_once_halfway_sends_it_all_again(vllm_loop, pusher, models):
    pusher.push(named_weights(models[0]), 1)

    class Failing:
        times = 0

        def __iter__(self):
            yield from named_weights(models[1])[:20]
            self.times += 1
            if self.times == 1:
                raise RuntimeError("the trainer's own error")
            yield from named_weights(models[1])[20:]

    pusher.push(Failing(), 2)
    chunk = vllm_loop.run(generate(vllm_loop.clients[0], PROMPT, 32))
    assert error_of(models[1], PROMPT, chunk) < TOLERANCE
    assert chunk.versions == [2] * 32


def test_workers_tell_what_they_were_given(vllm_loop, models):
    sent = {}
    pusher = make_pusher(vllm_loop, digests=sent)
    pusher.push(named_weights(models[0]), 1)
    assert set(sent) == {name for name, _ in named_weights(models[0])}
    assert vllm_loop.run(vllm_loop.clients[0].weight_digests()) == [sent]
    first = dict(sent)
    pusher.push(named_weights(models[1]), 2)
    assert vllm_loop.run(vllm_loop.clients[0].weight_digests()) == [sent]
    assert all(sent[name] != first[name] for name in sent)
    pusher.close()
    pusher = make_pusher(vllm_loop)
    pusher.push(named_weights(models[0]), 3)
    with pytest.raises(EngineError, match="no digests were asked for"):
        vllm_loop.run(vllm_loop.clients[0].weight_digests())
    pusher.close()
