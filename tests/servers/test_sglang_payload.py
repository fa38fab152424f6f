"""What is asked of SGLang and how its answers are read, without a server."""

import pytest

from megarl.config.schema import GenerationHyperparameters
from megarl.errors import EngineError
from megarl.rollout.api import GenerateChunk, ModelRequest
from megarl.rollout.backends import make_client
from megarl.rollout.backends.sglang import SGLangClient, generate_payload, parse_generate
from megarl.rollout.backends.vllm import VLLMClient


def sampling_of(remaining=10, **options) -> dict:
    gconfig = GenerationHyperparameters(**options)
    payload = generate_payload(ModelRequest(input_ids=[1, 2], rid="r1"), gconfig, remaining)
    # Of all that /generate takes: no rid, no prompt logprobs, no likeliest tokens.
    sampling = payload.pop("sampling_params")
    assert payload == {"input_ids": [1, 2], "return_logprob": True}
    return sampling


def test_defaults_sample_the_whole_distribution():
    assert sampling_of() == {
        "max_new_tokens": 10,
        "min_new_tokens": 0,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "frequency_penalty": 0.0,
        "ignore_eos": False,
        "stop_token_ids": [],
    }


@pytest.mark.parametrize(
    ("options", "want"),
    [
        ({"greedy": True, "temperature": 0.7}, {"temperature": 0.0}),
        ({"temperature": 0.7}, {"temperature": 0.7}),
        ({"top_k": 5, "top_p": 0.9}, {"top_k": 5, "top_p": 0.9}),
        ({"stop": ["END"]}, {"stop": ["END"], "skip_special_tokens": True}),
        ({"stop_token_ids": [7]}, {"stop_token_ids": [7]}),
        ({"seed": 3}, {"sampling_seed": 3}),
        ({"min_new_tokens": 20}, {"min_new_tokens": 10}),  # SGLang refuses min > max
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


def test_stop_tokens_that_sglang_would_ignore_are_an_error():
    with pytest.raises(ValueError, match=r"stop_token_ids \[7\]"):
        sampling_of(ignore_eos=True, stop_token_ids=[7])


def answer(**changes) -> dict:
    meta = {
        "finish_reason": {"type": "stop", "matched": 7},
        "output_token_logprobs": [[-1, 5, None], [-0.5, 6, None], [0.0, 7, None]],
        "weight_versions": [
            {"version": "default", "start": 0, "end": 1},
            {"version": "12", "start": 1, "end": 3},
        ],
    }
    tokens = changes.pop("output_ids", [5, 6, 7])
    return {"output_ids": tokens, "meta_info": meta | changes}


def test_an_answer():
    chunk = GenerateChunk([5, 6, 7], [-1.0, -0.5, 0.0], [-1, 12, 12], "stop")
    assert parse_generate(answer()) == chunk


def test_an_answer_that_was_aborted_in_the_queue():
    """It has neither logprobs nor versions, and says why."""
    nothing = {
        "output_ids": [],
        "meta_info": {"finish_reason": {"type": "abort", "message": "Abort in waiting queue"}},
    }
    assert parse_generate(nothing) == GenerateChunk([], [], [], "abort")


def test_an_answer_that_was_aborted_halfway():
    reason = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    assert parse_generate(answer(finish_reason=reason)).stop_reason == "abort"


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"output_ids": [5, 6]}, "are not those of 2 tokens"),
        ({"output_ids": [5, 7, 6]}, r"\[5, 7, 6\] came with the logprobs of \[5, 6, 7\]"),
        ({"weight_versions": None}, "3 logprobs and 0 versions"),
        (
            {"weight_versions": [{"version": "1", "start": 1, "end": 4}]},
            "are not those of 3 tokens",
        ),
        ({"weight_versions": [{"version": "x", "start": 0, "end": 3}]}, "invalid literal"),
        ({"output_token_logprobs": None}, "0 logprobs"),
        # orjson writes nan as null.
        ({"output_token_logprobs": [[0, 5], [None, 6], [0, 7]]}, "token 1 of 3 has logprob None"),
        ({"output_token_logprobs": [[0, 5], [0, 6], [float("nan"), 7]]}, "token 2 of 3 .* nan"),
        ({"finish_reason": {"type": "error"}}, "'error' is none of"),
        (
            {"finish_reason": {"type": "abort", "status_code": 500, "message": "no room"}},
            "status 500: no room",  # not of a pause: asking again would not end
        ),
    ],
)
def test_a_wrong_answer_is_an_error(changes, match):
    with pytest.raises(EngineError, match=match):
        parse_generate(answer(**changes))


@pytest.mark.parametrize(
    "body", [{}, {"output_ids": [1]}, {"output_ids": [1], "meta_info": {"finish_reason": None}}, []]
)
def test_something_else_is_an_error(body):
    with pytest.raises(EngineError, match="not an answer"):
        parse_generate(body)


@pytest.mark.parametrize(("backend", "engine"), [("vllm", VLLMClient), ("sglang", SGLangClient)])
def test_the_client_of_a_backend(backend, engine):
    client = make_client(backend, "h:1", request_timeout_s=2.0, retries=3)
    assert type(client) is engine
    assert (client.address, client.request_timeout_s, client.retries) == ("http://h:1", 2.0, 3)
