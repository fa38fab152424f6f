"""A fleet of real servers: vLLM, a vLLM that names no versions, SGLang; pushes, and kill -9.

Weights go by disk, which all of them can; the reference is transformers on the same float32
weights.
"""

import asyncio
import concurrent.futures
from contextlib import ExitStack

import pytest
import torch
from tiny_server import (
    byte_tokenizer,
    end_tree,
    hf_logprobs,
    named_weights,
    random_model,
    running_server,
)

from megarl.bridge.disk import DiskSender
from megarl.bridge.push import Members, Pusher, Together
from megarl.config.schema import GenerationHyperparameters, InferenceEngineConfig
from megarl.errors import EngineTimeout
from megarl.rollout.api import ModelRequest, RolloutWorkflow
from megarl.rollout.backends import make_client
from megarl.rollout.engine import RemoteInferenceEngine
from megarl.rollout.server_state import State
from megarl.rollout.workflows.rlvr import to_trajectory

TOLERANCE = 1e-4  # 50 times what is seen; a wrong weight or a stale cache is off by 0.1 and more
TIMEOUT_S = 300.0
NUM_VERSIONS = 4
PART_TOKENS = 160
PROMPT = byte_tokenizer()("2 + 3 = ").input_ids


@pytest.fixture(scope="module")
def models():
    return [random_model(seed) for seed in range(1, 1 + NUM_VERSIONS)]


@pytest.fixture(scope="module")
def vllm_pair(tmp_path_factory):
    """Two vLLM servers; the second has no route whose answers name versions."""
    with ExitStack() as stack, concurrent.futures.ThreadPoolExecutor(2) as pool:
        starts = [
            pool.submit(
                stack.enter_context,
                running_server(tmp_path_factory.mktemp("vllm"), names_versions=names_versions),
            )
            for names_versions in (True, False)
        ]
        yield [start.result(TIMEOUT_S) for start in starts]


@pytest.fixture
def make_engine():
    engines = []

    def make(addresses, **options):
        config = InferenceEngineConfig(max_tokens_per_request=PART_TOKENS, **options)
        clients = [
            make_client("vllm", address, request_timeout_s=TIMEOUT_S, retries=0)
            for address in addresses
        ]
        engine = RemoteInferenceEngine(config, clients, batch_size=24, comeback_s=TIMEOUT_S)
        engine.initialize()
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.cancel_episodes()
        engine.destroy()


def make_pusher(engine, folder, pause):
    together, members = Together(None), Members(engine)
    sender = DiskSender(members, together, folder=folder, timeout_s=60.0)
    return Pusher(members, sender, together, pause=pause, timeout_s=60.0)


def worst_error(models, prompt, response):
    """Of every token's logprob, from HF's with the weights of the version it is labelled with."""
    versions = response.output_versions
    by_version = {v: hf_logprobs(models[v], prompt, response.output_tokens) for v in set(versions)}
    want = [by_version[v][i] for i, v in enumerate(versions)]
    return max(abs(a - b) for a, b in zip(response.output_logprobs, want, strict=True))


@pytest.mark.server
@pytest.mark.parametrize("pause", ["keep", "abort"])
def test_every_token_is_labelled_with_the_weights_that_sampled_it(
    vllm_pair, sglang_server, models, make_engine, tmp_path, pause
):
    sglang = sglang_server.address.replace("http://", "sglang://")
    engine = make_engine([*(server.address for server in vllm_pair), sglang])
    pusher = make_pusher(engine, tmp_path / "weights", pause)
    gconfig = GenerationHyperparameters(max_new_tokens=480, ignore_eos=True)
    started = asyncio.Event()

    async def ask_all():
        requests = [ModelRequest(input_ids=[*PROMPT, i], gconfig=gconfig) for i in range(24)]
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(engine.agenerate(request)) for request in requests]
            started.set()
        return [task.result() for task in asked]

    pusher.push(named_weights(models[0]), 0)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        running = pool.submit(engine.run, ask_all(), TIMEOUT_S)
        engine.run(asyncio.wait_for(started.wait(), TIMEOUT_S), TIMEOUT_S)
        for version in range(1, NUM_VERSIONS):
            # Some tokens of each version: one more request on each server, as long as it takes.
            engine.run(one_on_each(engine), TIMEOUT_S)
            pusher.push(named_weights(models[version]), version)
        responses = running.result(TIMEOUT_S)
    pusher.close()
    assert all(response.output_len == 480 for response in responses)
    labels = [set(response.output_versions) for response in responses]
    assert any(len(label) > 1 for label in labels), "no response was interrupted"
    assert all(r.output_versions == sorted(r.output_versions) for r in responses)
    errors = [worst_error(models, [*PROMPT, i], r) for i, r in enumerate(responses)]
    assert max(errors) < TOLERANCE


async def one_on_each(engine):
    gconfig = GenerationHyperparameters(ignore_eos=True)
    request = ModelRequest(input_ids=PROMPT, gconfig=gconfig)
    async with asyncio.TaskGroup() as tasks:
        for client in engine.fleet.clients:
            tasks.create_task(client.generate(request, gconfig, 40))


def test_a_server_without_the_route_is_asked_by_another(vllm_pair, models, make_engine, tmp_path):
    engine = make_engine([vllm_pair[1].address])
    pusher = make_pusher(engine, tmp_path / "weights", "keep")
    pusher.push(named_weights(models[1]), 1)
    (client,) = engine.clients
    stop = engine.run(ask(engine, 24, greedy=True, ignore_eos=True), TIMEOUT_S)
    assert client._names_versions is False
    assert set(stop.output_versions) == {1}
    assert worst_error(models, PROMPT, stop) < TOLERANCE
    stop_id = stop.output_tokens[5]
    cut = engine.run(ask(engine, 24, greedy=True, stop_token_ids=[stop_id]), TIMEOUT_S)
    assert cut.stop_reason == "stop"
    assert cut.output_tokens == stop.output_tokens[: stop.output_tokens.index(stop_id) + 1]
    first, second = (
        engine.run(ask(engine, 24, seed=7, ignore_eos=True), TIMEOUT_S) for _ in range(2)
    )
    assert first.output_tokens == second.output_tokens
    engine.run(client.make_token(60.0), TIMEOUT_S)
    pusher.close()


def test_an_engine_that_hangs_is_noticed(vllm_pair, models, make_engine, tmp_path, monkeypatch):
    """Its HTTP process goes on: /health is good, and no token comes."""
    monkeypatch.setattr("megarl.rollout.backends.vllm._COUNTER_POLL_S", 0.2)
    engine = make_engine([vllm_pair[0].address])
    pusher = make_pusher(engine, tmp_path / "weights", "keep")
    pusher.push(named_weights(models[1]), 1)
    (client,) = engine.clients
    made = engine.run(client._tokens_made(60.0), TIMEOUT_S)
    engine.run(client.make_token(60.0), TIMEOUT_S)
    engine.run(ask(engine, 24, ignore_eos=True), TIMEOUT_S)
    assert engine.run(client._tokens_made(60.0), TIMEOUT_S) == made + 1 + 24

    async def check_while_it_is_asked():
        check = asyncio.create_task(client.check_engine(60.0))
        while not check.done():
            await ask(engine, 24, ignore_eos=True)
        await check

    engine.run(check_while_it_is_asked(), TIMEOUT_S)
    engine.pause_generation("keep")  # an engine that makes no tokens
    try:
        engine.run(client.health(60.0), TIMEOUT_S)
        with pytest.raises(EngineTimeout, match="no token within 2 s"):
            engine.run(client.check_engine(2.0), TIMEOUT_S)
        with pytest.raises(EngineTimeout, match="POST /inference/v1/generate: no answer within 2"):
            engine.run(client.make_token(2.0), TIMEOUT_S)
    finally:
        engine.continue_generation()
    engine.run(client.make_token(60.0), TIMEOUT_S)
    pusher.close()


def ask(engine, num_tokens, **options):
    gconfig = GenerationHyperparameters(max_new_tokens=num_tokens, **options)
    return engine.agenerate(ModelRequest(input_ids=PROMPT, gconfig=gconfig))


class Continue(RolloutWorkflow):
    """A long response; the reward is the row's number."""

    async def arun_episode(self, engine, data):
        gconfig = GenerationHyperparameters(max_new_tokens=400, ignore_eos=True)
        request = ModelRequest(input_ids=[*PROMPT, data["number"]], gconfig=gconfig)
        return to_trajectory(await engine.agenerate(request), data["number"])


class Rows:
    batch_size = 24

    def __init__(self):
        self.taken = 0

    def __next__(self):
        self.taken += self.batch_size
        return [{"number": i} for i in range(self.taken - self.batch_size, self.taken)]


def test_a_server_is_killed_while_it_generates(models, make_engine, tmp_path, monkeypatch):
    """Every row ends once, nothing of it is wrong, and the server is used again after a push."""
    monkeypatch.setattr("megarl.rollout.fleet.HEALTH_INTERVAL_S", 0.5)
    with ExitStack() as stack, concurrent.futures.ThreadPoolExecutor(2) as pool:
        starts = [
            pool.submit(stack.enter_context, running_server(make_folder(tmp_path / name)))
            for name in "ab"
        ]
        kept, killed = (start.result(TIMEOUT_S) for start in starts)
        engine = make_engine([kept.address, killed.address])
        pusher = make_pusher(engine, tmp_path / "weights", "keep")
        pusher.push(named_weights(models[0]), 0)
        engine.start_health_watch()
        batch = pool.submit(engine.prepare_batch, Rows(), Continue())
        target = next(c for c in engine.fleet.clients if c.address == killed.address)
        engine.run(some_running(engine, target), TIMEOUT_S)
        end_tree(killed.pid, politely=False)
        rows = batch.result(TIMEOUT_S)
        assert rows["rewards"].tolist() == list(range(24))
        assert engine.export_stats()["servers_lost"] == 1
        assert engine.export_stats()["rejected"] == 0
        check_rows(rows, models[0])

        again = stack.enter_context(running_server(make_folder(tmp_path / "c"), port=killed.port))
        assert again.address == killed.address
        engine.run(until(lambda: len(engine.clients) == 2), TIMEOUT_S)
        back = next(c for c in engine.clients if c.address == killed.address)
        assert engine.fleet.state_of(back) is State.STALE
        for _ in range(4):
            engine.run(ask(engine, 4), TIMEOUT_S)
        assert not engine.fleet._servers[back].running
        pusher.push(named_weights(models[1]), 1)
        assert engine.fleet.state_of(back) is State.READY
        engine.set_version(1)
        check_rows(engine.prepare_batch(Rows(), Continue()), models[1])
        pusher.close()


def make_folder(path):
    path.mkdir()
    return path


async def some_running(engine, client):
    async with asyncio.timeout(TIMEOUT_S):
        while not engine.fleet._servers[client].running:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.05)
    await asyncio.sleep(0.5)  # into its tokens


async def until(condition):
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.05)


def check_rows(rows, model):
    """Logprobs are HF's, of all sampled tokens."""
    for ids, mask, logprobs in zip(
        rows["input_ids"], rows["loss_mask"].bool(), rows["logprobs"], strict=True
    ):
        num_given = int(mask.int().argmax())
        num_tokens = num_given + int(mask.sum())
        tokens = ids[:num_tokens].tolist()
        want = torch.tensor(hf_logprobs(model, tokens[:num_given], tokens[num_given:]))
        assert (logprobs[num_given:num_tokens] - want).abs().max() < TOLERANCE
