"""A real SGLang server: what it answers, and what a push of weights does to its requests.

The reference is transformers on the same float32 weights: two implementations of the same
sums, in another order, which leaves about 2e-6 nats here.
"""

import asyncio
import concurrent.futures

import pytest
import torch
from sglang_server import running_sglang
from tiny_server import (
    LoopThread,
    byte_tokenizer,
    generate,
    hf_logprobs,
    named_weights,
    random_model,
)

from megarl.actor.weight_push import best_mode
from megarl.bridge.disk import DiskSender
from megarl.bridge.needs import decode
from megarl.bridge.push import Members, Pusher, Together
from megarl.bridge.sender import BroadcastSender
from megarl.config.schema import GenerationHyperparameters, InferenceEngineConfig
from megarl.errors import EngineError, WeightUpdateError
from megarl.rollout.api import ModelRequest
from megarl.rollout.backends.sglang import SGLangClient
from megarl.rollout.engine import RemoteInferenceEngine

TOLERANCE = 1e-4  # 50 times what is seen; a wrong weight or a stale cache is off by 0.1 and more
PROMPT = byte_tokenizer()("2 + 3 = ").input_ids
LONG_PROMPT = [(7 * i) % 251 for i in range(300)]
BUCKET_BYTES = 1 << 17  # the embedding fills half of one; five messages a push
TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def models():
    return random_model(1), random_model(2)


@pytest.fixture
def pusher(sglang_loop):
    pusher = make_pusher(sglang_loop)
    yield pusher
    pusher.close()


def make_pusher(loop, pause="keep", **options):
    together, members = Together(None), Members(loop)
    sender = BroadcastSender(
        members, together, bucket_bytes=BUCKET_BYTES, timeout_s=TIMEOUT_S, device="cpu", **options
    )
    return Pusher(members, sender, together, pause=pause, timeout_s=TIMEOUT_S)


def error_of(model, prompt, chunk, temperature=1.0) -> float:
    want = hf_logprobs(model, prompt, chunk.tokens, temperature)
    return max(abs(a - b) for a, b in zip(chunk.logprobs, want, strict=True))


def ask(loop, num_tokens, **options):
    gconfig = GenerationHyperparameters(**options)
    request = ModelRequest(input_ids=PROMPT)
    return loop.run(loop.clients[0].generate(request, gconfig, num_tokens))


def sample(loop, num_tokens, prompt=PROMPT, **options):
    return loop.run(generate(loop.clients[0], prompt, num_tokens, **options))


# ---------------------------------------------------------------- answers


def test_the_server_is_healthy_and_has_one_worker(sglang_loop):
    sglang_loop.run(sglang_loop.clients[0].health(5.0))
    assert sglang_loop.run(sglang_loop.clients[0].world_size()) == 1


@pytest.mark.parametrize("options", [{"greedy": True}, {"temperature": 0.7}, {"temperature": 1.0}])
def test_logprobs_are_those_of_the_pushed_weights(sglang_loop, pusher, models, options):
    for version, model in enumerate(models, start=3):
        stats = pusher.push(named_weights(model), version)
        chunk = sample(sglang_loop, 64, **options)
        assert error_of(model, PROMPT, chunk, options.get("temperature", 1.0)) < TOLERANCE
        assert chunk.versions == [version] * 64
        assert chunk.stop_reason == "length"
        assert sglang_loop.run(sglang_loop.clients[0].weight_version()) == version
        assert stats.num_bytes == sum(p.nbytes for _, p in named_weights(model))
        assert 0 < stats.pause_s < stats.total_s


def test_greedy_takes_the_likeliest_token(sglang_loop, pusher, models):
    pusher.push(named_weights(models[0]), 1)
    chunk = sample(sglang_loop, 16, greedy=True)
    with torch.no_grad():
        logits = models[0](torch.tensor([PROMPT + chunk.tokens])).logits[0]
    assert chunk.tokens == logits.argmax(-1)[len(PROMPT) - 1 : -1].tolist()


def test_a_stop_token_ends_the_response_and_is_part_of_it(sglang_loop, pusher, models):
    pusher.push(named_weights(models[0]), 1)
    free = ask(sglang_loop, 24, greedy=True, ignore_eos=True)
    stop_id = free.tokens[5]
    first = free.tokens.index(stop_id)
    cut = ask(sglang_loop, 24, greedy=True, stop_token_ids=[stop_id])
    assert cut.stop_reason == "stop"
    assert cut.tokens == free.tokens[: first + 1]
    assert len(cut.logprobs) == len(cut.versions) == first + 1
    # Not before `min_new_tokens`: another token takes its place there.
    later = ask(sglang_loop, 24, greedy=True, stop_token_ids=[stop_id], min_new_tokens=first + 4)
    assert later.tokens[:first] == free.tokens[:first]
    assert later.tokens[first] != stop_id
    assert len(later.tokens) >= first + 4


def test_a_stop_string_ends_the_response(sglang_loop, pusher, models):
    pusher.push(named_weights(models[0]), 1)
    free = ask(sglang_loop, 64, greedy=True, ignore_eos=True)
    text = byte_tokenizer().decode(free.tokens, skip_special_tokens=True)
    letter = next(c for c in text if c.isascii() and c.isprintable())
    cut = ask(sglang_loop, 64, greedy=True, ignore_eos=True, stop=[letter])
    assert cut.stop_reason == "stop"
    assert free.tokens[: len(cut.tokens)] == cut.tokens
    assert letter in byte_tokenizer().decode(cut.tokens)


def test_a_prompt_beyond_the_model_is_refused(sglang_loop):
    with pytest.raises(EngineError, match=r"status 400.*context length"):
        sample(sglang_loop, 8, prompt=[65] * 4000)


# ---------------------------------------------------------------- pauses


def test_a_paused_server_is_healthy_and_answers_nobody(sglang_loop):
    client = sglang_loop.clients[0]
    sglang_loop.run(client.pause("keep"))
    waiting = sglang_loop.start(generate(client, PROMPT, 4))
    sglang_loop.run(client.health(5.0))
    with pytest.raises(concurrent.futures.TimeoutError):
        waiting.result(2)
    sglang_loop.run(client.resume())
    assert len(waiting.result(TIMEOUT_S).tokens) == 4


def start_long_request(loop, num_tokens):
    """A request that is being answered when this returns."""
    running = loop.start(generate(loop.clients[0], LONG_PROMPT, num_tokens))
    # Asked later and batched with it: when this has its 8 tokens, the other has some too.
    sample(loop, 8)
    assert not running.done()
    return running


def test_a_kept_request_goes_on_with_the_new_weights(sglang_loop, pusher, models):
    old, new = models
    pusher.push(named_weights(old), 7)
    running = start_long_request(sglang_loop, 600)
    pusher.push(named_weights(new), 8)
    chunk = running.result(TIMEOUT_S)

    switch = chunk.versions.index(8)
    assert 0 < switch < 600
    assert chunk.versions == [7] * switch + [8] * (600 - switch)
    for model, tokens in ((old, slice(0, switch)), (new, slice(switch, 600))):
        want = hf_logprobs(model, LONG_PROMPT, chunk.tokens)[tokens]
        got = chunk.logprobs[tokens]
        # After the switch only if the KV cache of the old weights was dropped.
        assert max(abs(a - b) for a, b in zip(got, want, strict=True)) < TOLERANCE


def test_an_aborted_request_returns_what_it_has(sglang_loop, models):
    pusher = make_pusher(sglang_loop, pause="abort")
    pusher.push(named_weights(models[0]), 7)
    running = start_long_request(sglang_loop, 600)
    pusher.push(named_weights(models[1]), 8)
    chunk = running.result(TIMEOUT_S)
    pusher.close()
    assert chunk.stop_reason == "abort"
    assert 0 < len(chunk.tokens) < 600
    assert set(chunk.versions) == {7}
    assert error_of(models[0], LONG_PROMPT, chunk) < TOLERANCE


def test_the_engine_asks_for_the_rest_of_aborted_requests(sglang_server, models):
    """More requests than run at a time, so that some are aborted in the queue, without a token."""
    client = SGLangClient(sglang_server.address, request_timeout_s=TIMEOUT_S, retries=1)
    engine = RemoteInferenceEngine(InferenceEngineConfig(), [client], batch_size=1)
    engine.initialize()
    pusher = make_pusher(engine, pause="abort")
    gconfig = GenerationHyperparameters(max_new_tokens=100, ignore_eos=True)

    async def ask_all():
        requests = [ModelRequest(input_ids=[*PROMPT, i], gconfig=gconfig) for i in range(40)]
        return await asyncio.gather(*(engine.agenerate(request) for request in requests))

    try:
        pusher.push(named_weights(models[0]), 1)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            running = pool.submit(engine.run, ask_all(), TIMEOUT_S)
            sampled = engine.run(generate(client, PROMPT, 2), TIMEOUT_S)
            pusher.push(named_weights(models[1]), 2)
            responses = running.result(TIMEOUT_S)
    finally:
        pusher.close()
        engine.destroy()
    assert sampled.versions == [1, 1]
    assert all(response.output_len == 100 for response in responses)
    switches = [response.output_versions.count(1) for response in responses]
    assert any(0 < n < 100 for n in switches)
    assert any(n == 0 for n in switches)
    for i, (response, switch) in enumerate(zip(responses, switches, strict=True)):
        assert response.output_versions == [1] * switch + [2] * (100 - switch)
        for model, part in ((models[0], slice(0, switch)), (models[1], slice(switch, 100))):
            want = hf_logprobs(model, [*PROMPT, i], response.output_tokens)[part]
            got = response.output_logprobs[part]
            assert all(abs(a - b) < TOLERANCE for a, b in zip(got, want, strict=True))


# ---------------------------------------------------------------- pushes


def test_a_disk_push_brings_the_weights(sglang_loop, models, tmp_path):
    together, members = Together(None), Members(sglang_loop)
    sender = DiskSender(members, together, folder=tmp_path / "weights", timeout_s=TIMEOUT_S)
    pusher = Pusher(members, sender, together, pause="keep", timeout_s=TIMEOUT_S)
    for version, model in enumerate(models):
        pusher.push(named_weights(model), version)
        chunk = sample(sglang_loop, 32)
        assert error_of(model, PROMPT, chunk) < TOLERANCE
        assert chunk.versions == [version] * 32


def test_no_cached_prefix_survives_a_push(sglang_loop, pusher, models):
    for version, model in enumerate((*models, models[0])):
        pusher.push(named_weights(model), version)
        for _ in range(2):  # the second time from the cache
            chunk = sample(sglang_loop, 16, prompt=LONG_PROMPT)
            assert error_of(model, LONG_PROMPT, chunk) < TOLERANCE


def test_tensors_that_leave_a_gap_in_a_bucket(sglang_loop, pusher, models):
    """SGLang takes tensor after tensor; it has no name for the odd ones and skips them."""
    weights = []
    for i, (name, tensor) in enumerate(named_weights(models[0])):
        weights += [(name, tensor), (f"odd.{i}", torch.ones(i % 5 + 1, dtype=torch.bfloat16))]
    pusher.push(weights, 1)
    assert error_of(models[0], PROMPT, sample(sglang_loop, 32)) < TOLERANCE


def test_a_wrong_shape_is_an_error_and_the_next_push_repairs_it(
    sglang_loop, pusher, models, sglang_server
):
    old, new = models
    pusher.push(named_weights(old), 1)
    # Of a matrix that is too short SGLang's loader on a CPU takes what is there.
    odd = "model.layers.1.input_layernorm.weight"
    broken = [(name, p[:-1] if name == odd else p) for name, p in named_weights(new)]
    waiting = start_long_request(sglang_loop, 600)
    with pytest.raises(WeightUpdateError, match=f"{sglang_server.address}.*partially updated"):
        pusher.push(broken, 2)
    # Neither the old weights nor the new ones: nobody is served from this mixture.
    assert sglang_loop.run(sglang_loop.clients[0].weight_version()) == -1
    asked = sglang_loop.start(generate(sglang_loop.clients[0], PROMPT, 8))
    with pytest.raises(concurrent.futures.TimeoutError):
        asked.result(3)
    assert not waiting.done()

    pusher.push(named_weights(new), 3)
    chunk = sample(sglang_loop, 32)
    assert error_of(new, PROMPT, chunk) < TOLERANCE
    assert chunk.versions == [3] * 32
    assert asked.result(TIMEOUT_S).versions == [3] * 8
    kept = waiting.result(TIMEOUT_S)
    assert {kept.versions[0], kept.versions[-1]} == {1, 3}


def test_a_trainer_that_fails_once_halfway_sends_it_all_again(sglang_loop, pusher, models):
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
    chunk = sample(sglang_loop, 32)
    assert error_of(models[1], PROMPT, chunk) < TOLERANCE
    assert chunk.versions == [2] * 32


# ---------------------------------------------------------------- megarl's plugin


def test_workers_tell_what_they_were_given(sglang_loop, models):
    sent = {}
    pusher = make_pusher(sglang_loop, digests=sent)
    for version, model in enumerate(models, start=1):
        pusher.push(named_weights(model), version)
        assert set(sent) == {name for name, _ in named_weights(model)}
        assert sglang_loop.run(sglang_loop.clients[0].weight_digests()) == [sent]
    pusher.close()
    with pytest.raises(EngineError, match="no digests were asked for"):
        sglang_loop.run(sglang_loop.clients[0].weight_digests())


def test_the_way_of_weights_is_chosen_by_what_a_server_can(sglang_loop, models, tmp_path):
    """With megarl's plugin from shard to shard, without it by SGLang's own routes."""
    assert best_mode(sglang_loop, TIMEOUT_S) == "sharded"
    with running_sglang(tmp_path, plugins="none") as plain:
        loop = LoopThread([SGLangClient(plain.address, request_timeout_s=TIMEOUT_S, retries=1)])
        try:
            assert best_mode(loop, TIMEOUT_S) == "broadcast"
            pusher = make_pusher(loop)
            pusher.push(named_weights(models[0]), 1)
            assert error_of(models[0], PROMPT, sample(loop, 32)) < TOLERANCE
            pusher.close()
        finally:
            loop.close()


def checksums(loop):
    """SGLang's own, of what the worker holds."""
    return loop.run(loop.clients[0]._post("/weights_checker", {"action": "checksum"}, TIMEOUT_S))


def test_a_trace_finds_all_tensors_and_changes_none(sglang_loop, pusher, models):
    pusher.push(named_weights(models[0]), 1)
    before = checksums(sglang_loop)
    tensors = [[name, list(p.shape), "float32"] for name, p in named_weights(models[0])]
    asked = sglang_loop.clients[0].command("trace", {"tensors": tensors})
    (answer,) = sglang_loop.run(asked)
    needs = decode(answer, [name for name, _, _ in tensors])
    for name, shape, _ in tensors:  # one worker needs all of it
        rows, columns = (shape[0], shape[1]) if len(shape) == 2 else (1, shape[0])
        assert [tuple(box)[:4] for box in needs[name]] == [(0, rows, 0, columns)], name
    assert before["ranks"]
    assert checksums(sglang_loop) == before
    assert error_of(models[0], PROMPT, sample(sglang_loop, 32)) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("dance", {}, "KeyError: 'dance'"),
        ("land", {"group_name": ""}, "join comes first"),
        ("join", {"port": "x"}, "TypeError"),
        ("trace", {"tensors": [["model.norm.weight", [3], "float32"]]}, "AssertionError"),
    ],
)
def test_a_command_that_fails_is_told_and_ends_nothing(sglang_loop, name, arguments, words):
    client = sglang_loop.clients[0]
    with pytest.raises(EngineError, match=f"{client.address}: {name}: worker 0: .*{words}"):
        sglang_loop.run(client.command(name, arguments))
    assert len(sample(sglang_loop, 2).tokens) == 2


def test_a_command_that_cannot_be_read_ends_nothing(sglang_loop):
    asked = {"action": "megarl:{"}
    answer = sglang_loop.run(sglang_loop.clients[0]._post("/weights_checker", asked, TIMEOUT_S))
    assert "JSONDecodeError" in answer["message"]
    assert len(sample(sglang_loop, 2).tokens) == 2


def test_a_server_of_data_parallel_replicas_is_refused(sglang_loop):
    class Replicated(SGLangClient):
        async def _request(self, *args, **kwargs):
            return {**await super()._request(*args, **kwargs), "dp_size": 2}

    client = Replicated(sglang_loop.clients[0].address, request_timeout_s=TIMEOUT_S, retries=0)
    loop = LoopThread([client])
    try:
        with pytest.raises(EngineError, match=f"{client.address}: a server of pp 1 and dp 2"):
            loop.run(client.world_size())
    finally:
        loop.close()
