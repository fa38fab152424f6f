"""What is asked of vLLM and how its answers are read, without a server."""

import pytest

from megarl.config.schema import GenerationHyperparameters
from megarl.errors import EngineError
from megarl.rollout.api import ModelRequest
from megarl.rollout.backends.vllm import (
    GenerateChunk,
    generate_payload,
    parse_generate,
    parse_version,
)


def sampling_of(remaining=10, **options) -> dict:
    gconfig = GenerationHyperparameters(**options)
    payload = generate_payload(ModelRequest(input_ids=[1, 2]), gconfig, remaining)
    assert payload["token_ids"] == [1, 2]
    return payload["sampling_params"]


def test_defaults_sample_the_whole_distribution():
    assert sampling_of() == {
        "max_tokens": 10,
        "min_tokens": 0,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "frequency_penalty": 0.0,
        "ignore_eos": False,
        "stop_token_ids": [],
        "logprobs": 0,
        "detokenize": False,
    }


@pytest.mark.parametrize(
    ("options", "want"),
    [
        ({"greedy": True, "temperature": 0.7}, {"temperature": 0.0}),
        ({"temperature": 0.7}, {"temperature": 0.7}),
        ({"top_k": 5, "top_p": 0.9}, {"top_k": 5, "top_p": 0.9}),
        ({"stop": ["END"]}, {"stop": ["END"], "detokenize": True, "skip_special_tokens": True}),
        ({"stop_token_ids": [7]}, {"stop_token_ids": [7], "detokenize": False}),
        ({"seed": 3}, {"seed": 3}),
        ({"min_new_tokens": 20}, {"min_tokens": 10}),  # vLLM refuses min_tokens > max_tokens
    ],
)
def test_options(options, want):
    sampling = sampling_of(**options)
    assert {name: sampling[name] for name in want} == want


@pytest.mark.parametrize(("input_ids", "remaining"), [([], 1), ([1], 0)])
def test_nothing_to_generate_is_an_error(input_ids, remaining):
    with pytest.raises(ValueError, match="request r1: "):
        generate_payload(
            ModelRequest(input_ids=input_ids, rid="r1"), GenerationHyperparameters(), remaining
        )


def answer(**changes) -> dict:
    choice = {
        "token_ids": [5, 6, 7],
        "logprobs": {"content": [{"logprob": x} for x in (-1, -0.5, 0.0)]},
        "finish_reason": "stop",
        "weight_versions": [
            {"version": "default", "start": 0, "end": 1},
            {"version": "12", "start": 1, "end": 3},
        ],
    }
    return {"choices": [choice | changes]}


def test_an_answer():
    chunk = GenerateChunk([5, 6, 7], [-1.0, -0.5, 0.0], [-1, 12, 12], "stop")
    assert parse_generate(answer()) == chunk


def test_an_answer_that_was_aborted_before_its_first_token():
    nothing = answer(token_ids=[], logprobs=None, weight_versions=None, finish_reason="abort")
    assert parse_generate(nothing) == GenerateChunk([], [], [], "abort")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"token_ids": [5, 6]}, "are not those of 2 tokens"),
        ({"weight_versions": None}, "3 logprobs and 0 versions"),
        (
            {"weight_versions": [{"version": "1", "start": 1, "end": 4}]},
            "are not those of 3 tokens",
        ),
        ({"weight_versions": [{"version": "x", "start": 0, "end": 3}]}, "invalid literal"),
        ({"logprobs": None}, "0 logprobs"),
        (
            {"logprobs": {"content": [{"logprob": -9999.0}] * 3}},
            r"token 0 of 3 has logprob -9999.0",
        ),
        ({"finish_reason": "error"}, "'error' is none of"),
    ],
)
def test_a_wrong_answer_is_an_error(changes, match):
    with pytest.raises(EngineError, match=match):
        parse_generate(answer(**changes))


@pytest.mark.parametrize("body", [{}, {"choices": []}, {"choices": [{}, {}]}, {"choices": [{}]}])
def test_something_else_is_an_error(body):
    with pytest.raises(EngineError, match="not an answer"):
        parse_generate(body)


def test_versions():
    assert [parse_version(text) for text in ("default", "-1", "0", "31")] == [-1, -1, 0, 31]
