"""RLVRWorkflow on an engine that gives one answer; columns and seeds of rows: test_rows.py."""

import asyncio

import torch

from megarl.config.schema import GenerationHyperparameters
from megarl.rollout.api import ModelResponse
from megarl.rollout.workflows.rlvr import RLVRWorkflow


class Tokenizer:
    """A token is a character."""

    def encode(self, text, add_special_tokens):
        assert not add_special_tokens
        return [ord(c) for c in text]

    def decode(self, ids, skip_special_tokens=False):
        return "".join(chr(i) for i in ids)

    def apply_chat_template(self, messages, *, add_generation_prompt, tokenize, enable_thinking):
        assert add_generation_prompt
        assert not tokenize
        return "".join(m["content"] for m in messages) + ("?" if enable_thinking else ":")


class Sampler:
    """Answers AB; every second answer was cut."""

    def __init__(self):
        self.requests = []

    async def agenerate(self, req):
        self.requests.append(req)
        cut = len(self.requests) % 2 == 0
        return ModelResponse(
            input_tokens=req.input_ids,
            output_tokens=[65, 66],
            output_logprobs=[-1.0, -2.0],
            output_versions=[3, 4],
            stop_reason="length" if cut else "stop",
        )

    def get_version(self):
        return 4


def rlvr(data, n_samples=3, seed=None, rewards=(0.0, 1.0, None)):
    calls, engine = [], Sampler()

    async def reward(prompt, completion, prompt_ids, completion_ids, **row):
        calls.append((prompt, completion, prompt_ids, completion_ids, row))
        return rewards[len(calls) - 1]

    gconfig = GenerationHyperparameters(n_samples=n_samples, seed=seed, max_new_tokens=4)
    workflow = RLVRWorkflow(reward, gconfig, Tokenizer(), enable_thinking=True)
    return asyncio.run(workflow.arun_episode(engine, data)), calls, engine.requests


def test_rlvr_scores_each_sample_and_drops_rejected_ones():
    batch, calls, requests = rlvr({"prompt": "hi", "answer": "2"})
    assert calls[0] == ("hi", "AB", [104, 105], [65, 66], {"answer": "2"})
    assert batch["rewards"].tolist() == [0.0, 1.0]
    assert batch["no_eos"].tolist() == [False, True]
    assert batch["logprobs"].tolist() == [[0, 0, -1, -2]] * 2
    assert batch["versions"].tolist() == [[-1, -1, 3, 4]] * 2
    assert batch["input_ids"].dtype == torch.int32
    assert len({r.rid for r in requests}) == 1
    assert {r.gconfig.n_samples for r in requests} == {1}
    assert rlvr({"prompt": "hi"}, rewards=(None,) * 3)[0] is None


def test_rlvr_applies_the_chat_template_and_seeds_each_sample():
    _, calls, requests = rlvr({"messages": [{"content": "yo"}], "row_id": 5}, seed=1)
    assert calls[0][0] == "yo?"
    seeds = [r.gconfig.seed for r in requests]
    again = [r.gconfig.seed for r in rlvr({"prompt": "yo", "row_id": 5}, seed=1)[2]]
    other = [r.gconfig.seed for r in rlvr({"prompt": "yo", "row_id": 6}, seed=1)[2]]
    assert seeds == again
    assert len({*seeds, *other}) == 6
