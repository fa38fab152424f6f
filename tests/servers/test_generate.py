"""A real vLLM server answers what the payloads ask for."""

import asyncio

import pytest
from tiny_server import byte_tokenizer, generate

from megarl.config.schema import GenerationHyperparameters
from megarl.errors import EngineError
from megarl.rollout.api import ModelRequest

PROMPT = byte_tokenizer()("2 + 3 = ").input_ids


def ask(vllm_loop, num_tokens, **options):
    gconfig = GenerationHyperparameters(**options)
    request = ModelRequest(input_ids=PROMPT)
    return vllm_loop.run(vllm_loop.clients[0].generate(request, gconfig, num_tokens))


def test_the_server_is_healthy_and_has_one_worker(vllm_loop):
    vllm_loop.run(vllm_loop.clients[0].health())
    assert vllm_loop.run(vllm_loop.clients[0].world_size()) == 1


def test_megarls_plugin_is_in_the_server(vllm_loop):
    assert vllm_loop.run(vllm_loop.clients[0].has_agent())


def test_a_seed_repeats_a_sample(vllm_loop):
    first, second = (ask(vllm_loop, 24, seed=7, ignore_eos=True) for _ in range(2))
    assert first.tokens == second.tokens
    assert ask(vllm_loop, 24, seed=8, ignore_eos=True).tokens != first.tokens


def test_seeded_prompts_of_more_tokens_than_a_step_takes_do_not_end_the_engine(vllm_loop):
    """vLLM 0.32 schedules 2048 tokens a step, and on a CPU cannot rewind a cut prompt's seed."""

    async def all_at_once():
        async with asyncio.TaskGroup() as tasks:
            asked = []
            for seed in range(60):
                gconfig = GenerationHyperparameters(seed=seed)
                request = ModelRequest(input_ids=[*PROMPT * 6, seed])
                asked.append(vllm_loop.clients[0].generate(request, gconfig, 2))
            answers = [tasks.create_task(one) for one in asked]
        return [task.result() for task in answers]

    assert len(PROMPT) * 6 * 60 > 2048
    assert all(chunk.tokens for chunk in vllm_loop.run(all_at_once()))


def test_greedy_is_the_same_every_time(vllm_loop):
    first, second = (ask(vllm_loop, 24, greedy=True, ignore_eos=True) for _ in range(2))
    assert first.tokens == second.tokens


def test_a_stop_token_ends_the_response_and_is_part_of_it(vllm_loop):
    free = ask(vllm_loop, 24, greedy=True, ignore_eos=True)
    assert free.stop_reason == "length"
    stop_id = free.tokens[5]
    cut = ask(vllm_loop, 24, greedy=True, ignore_eos=True, stop_token_ids=[stop_id])
    assert cut.stop_reason == "stop"
    assert cut.tokens == free.tokens[: free.tokens.index(stop_id) + 1]
    assert len(cut.logprobs) == len(cut.versions) == len(cut.tokens)


def test_a_stop_string_ends_the_response(vllm_loop):
    free = ask(vllm_loop, 64, seed=1, ignore_eos=True)
    text = byte_tokenizer().decode(free.tokens, skip_special_tokens=True)
    letter = next(c for c in text if c.isascii() and c.isprintable())
    cut = ask(vllm_loop, 64, seed=1, ignore_eos=True, stop=[letter])
    assert cut.stop_reason == "stop"
    assert free.tokens[: len(cut.tokens)] == cut.tokens
    assert letter in byte_tokenizer().decode(cut.tokens)


def test_the_logprob_is_of_what_was_sampled_from(vllm_loop):
    """Of the likeliest token alone; raw_logprobs would give its share of all tokens."""
    chunk = ask(vllm_loop, 16, top_k=1, ignore_eos=True)
    assert chunk.logprobs == [0.0] * 16


def test_a_prompt_beyond_the_model_is_refused(vllm_loop):
    with pytest.raises(EngineError, match="status 400"):
        vllm_loop.run(generate(vllm_loop.clients[0], [65] * 4000, 8))
