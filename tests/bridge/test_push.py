"""Weights into a real vLLM server, and what its requests see of it.

The reference is transformers on the same float32 weights: two implementations of the same
sums, in another order, which leaves about 2e-6 nats here.
"""

import pytest
import torch
from tiny_server import generate, hf_logprobs, named_weights, random_model

from megarl.bridge.disk import DiskSender
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
def sender(vllm_loop):
    sender = make_sender(vllm_loop)
    yield sender
    sender.close()


def make_sender(vllm_loop, pause="keep"):
    return BroadcastSender(
        vllm_loop, bucket_bytes=BUCKET_BYTES, pause=pause, timeout_s=60.0, device="cpu"
    )


def error_of(model, prompt, chunk, temperature=1.0) -> float:
    want = hf_logprobs(model, prompt, chunk.tokens, temperature)
    return max(abs(a - b) for a, b in zip(chunk.logprobs, want, strict=True))


def test_a_disk_push_brings_the_weights(vllm_loop, models, tmp_path):
    """Also as the first push into a server that was started without weights."""
    sender = DiskSender(vllm_loop, folder=tmp_path / "weights", pause="keep", timeout_s=60.0)
    sender.connect()
    for version, model in enumerate(models):
        stats = sender.push(named_weights(model), version)
        chunk = vllm_loop.run(generate(vllm_loop.clients[0], PROMPT, 32))
        assert error_of(model, PROMPT, chunk) < TOLERANCE
        assert chunk.versions == [version] * 32
        assert [f.name for f in (tmp_path / "weights").iterdir()] == [f"version_{version}"]
        assert stats.num_bytes == sum(p.nbytes for _, p in named_weights(model))
        assert 0 < stats.pause_s < stats.total_s


@pytest.mark.parametrize("options", [{"greedy": True}, {"temperature": 0.7}, {"temperature": 1.0}])
def test_logprobs_are_those_of_the_pushed_weights(vllm_loop, sender, models, options):
    for version, model in enumerate(models, start=3):
        stats = sender.push(named_weights(model), version)
        chunk = vllm_loop.run(generate(vllm_loop.clients[0], PROMPT, 64, **options))
        assert error_of(model, PROMPT, chunk, options.get("temperature", 1.0)) < TOLERANCE
        assert chunk.versions == [version] * 64
        assert chunk.stop_reason == "length"
        assert vllm_loop.run(vllm_loop.clients[0].weight_version()) == version
        assert stats.num_bytes >= sum(p.nbytes for _, p in named_weights(model))
        assert 0 < stats.pause_s < stats.total_s


def test_greedy_takes_the_likeliest_token(vllm_loop, sender, models):
    sender.push(named_weights(models[0]), 1)
    chunk = vllm_loop.run(generate(vllm_loop.clients[0], PROMPT, 16, greedy=True))
    with torch.no_grad():
        logits = models[0](torch.tensor([PROMPT + chunk.tokens])).logits[0]
    assert chunk.tokens == logits.argmax(-1)[len(PROMPT) - 1 : -1].tolist()


def test_the_server_casts_to_its_own_dtype(vllm_loop, sender, models):
    halves = [(name, p.to(torch.bfloat16)) for name, p in named_weights(models[0])]
    sender.push(halves, 1)
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


def test_a_kept_request_goes_on_with_the_new_weights(vllm_loop, sender, models):
    old, new = models
    sender.push(named_weights(old), 7)
    running = start_long_request(vllm_loop, 600)
    sender.push(named_weights(new), 8)
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
    sender = make_sender(vllm_loop, pause="abort")
    sender.push(named_weights(models[0]), 7)
    running = start_long_request(vllm_loop, 600)
    sender.push(named_weights(models[1]), 8)
    chunk = running.result(120)
    sender.close()
    assert chunk.stop_reason == "abort"
    assert 0 < len(chunk.tokens) < 600
    assert set(chunk.versions) == {7}
    assert error_of(models[0], LONG_PROMPT, chunk) < TOLERANCE


def test_no_cached_prefix_survives_a_push(vllm_loop, sender, models):
    for version, model in enumerate((*models, models[0])):
        sender.push(named_weights(model), version)
        for _ in range(2):  # the second time from the cache
            chunk = vllm_loop.run(generate(vllm_loop.clients[0], LONG_PROMPT, 16))
            assert error_of(model, LONG_PROMPT, chunk) < TOLERANCE


def test_a_wrong_shape_is_an_error_and_the_server_goes_on(vllm_loop, sender, models, vllm_server):
    old, new = models
    sender.push(named_weights(old), 1)
    odd = "model.layers.1.mlp.up_proj.weight"
    broken = [(name, p[:-1] if name == odd else p) for name, p in named_weights(new)]
    with pytest.raises(WeightUpdateError, match=f"{vllm_server.address}.*update_weights"):
        sender.push(broken, 2)
    # Neither the old weights nor the new ones: the server must not call them version 1 or 2.
    chunk = vllm_loop.run(generate(vllm_loop.clients[0], PROMPT, 8))
    assert chunk.versions == [-1] * 8

    sender.push(named_weights(new), 3)
    chunk = vllm_loop.run(generate(vllm_loop.clients[0], PROMPT, 32))
    assert error_of(new, PROMPT, chunk) < TOLERANCE
    assert chunk.versions == [3] * 32


def test_a_trainer_that_fails_halfway_leaves_a_server_that_works(vllm_loop, sender, models):
    sender.push(named_weights(models[0]), 1)

    def failing():
        yield from named_weights(models[1])[:20]
        raise RuntimeError("the trainer's own error")

    with pytest.raises(RuntimeError, match="the trainer's own error") as failure:
        sender.push(failing(), 2)
    assert not getattr(failure.value, "__notes__", [])  # nothing more went wrong
    assert vllm_loop.run(generate(vllm_loop.clients[0], PROMPT, 4)).versions == [-1] * 4
    sender.push(named_weights(models[1]), 3)
    chunk = vllm_loop.run(generate(vllm_loop.clients[0], PROMPT, 32))
    assert error_of(models[1], PROMPT, chunk) < TOLERANCE


def test_workers_tell_what_they_were_given(vllm_loop, sender, models):
    sent = {}
    sender.push(named_weights(models[0]), 1, digests=sent)
    assert set(sent) == {name for name, _ in named_weights(models[0])}
    assert vllm_loop.run(vllm_loop.clients[0].weight_digests()) == [sent]
    other = {}
    sender.push(named_weights(models[1]), 2, digests=other)
    assert vllm_loop.run(vllm_loop.clients[0].weight_digests()) == [other]
    assert all(sent[name] != other[name] for name in sent)
    sender.push(named_weights(models[0]), 3)
    with pytest.raises(EngineError, match="no digests were asked for"):
        vllm_loop.run(vllm_loop.clients[0].weight_digests())
