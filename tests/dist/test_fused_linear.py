"""Logprobs fused with the output layer: over ranks, and in the engine as good as without."""

import pytest
import torch
import torch.distributed as dist
from test_engine import LENGTHS, make_batch, make_engine, rows_of
from tiny_models import VOCAB, save_tiny_hf

from megarl import parallel as mesh_module
from megarl.config.schema import (
    MicroBatchSpec,
    OptimizerConfig,
    ParallelConfig,
    TrainEngineConfig,
)
from megarl.errors import ConfigError
from megarl.ops.linear_logprob import linear_logprob_entropy, linear_logprob_loss

TOKENS, HIDDEN, SHARD = 22, 16, 6  # the vocabulary is 11: the second shard has a padded row


def values(way, hidden, weight, group=None, sequence_parallel=False):
    """logp, entropy and both gradients, given whole hidden states and this rank's weight."""
    g = torch.Generator().manual_seed(5)
    labels = torch.randint(0, 11, (TOKENS,), generator=g)
    by_logp, by_entropy = torch.randn(2, TOKENS, generator=g)
    if sequence_parallel:
        hidden = hidden.chunk(2)[dist.get_rank()]
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    options = {
        "vocab_size": 11,
        "tp_group": group,
        "sequence_parallel": sequence_parallel,
        "chunk_tokens": 5,
    }
    if way == "recompute":
        logp, entropy = linear_logprob_entropy(hidden, weight, labels, **options)
        (by_logp * logp + by_entropy * entropy).sum().backward()
    else:

        def token_loss(logp, entropy, rows):
            a, b = by_logp[rows], by_entropy[rows]
            return (a * logp + b * entropy).sum(), a, b

        loss, logp, entropy = linear_logprob_loss(hidden, weight, labels, token_loss, **options)
        loss.backward()
    return logp.detach(), entropy.detach(), hidden.grad, weight.grad


def matrices():
    g = torch.Generator().manual_seed(3)
    hidden = torch.randn(TOKENS, HIDDEN, generator=g)
    return hidden, torch.randn(2 * SHARD, HIDDEN, generator=g)


def of_shard(way, sequence_parallel):
    hidden, weight = matrices()
    shard = weight.chunk(2)[dist.get_rank()]
    return values(way, hidden, shard, dist.group.WORLD, sequence_parallel)


@pytest.mark.parametrize("way", ["recompute", "in-forward"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_two_shards_equal_one(ranks, way, sequence_parallel):
    first, second = ranks(2).run(of_shard, way, sequence_parallel)
    want = values(way, *matrices())
    hidden = first[2]
    if sequence_parallel:
        hidden = torch.cat([first[2], second[2]])
    else:
        assert torch.equal(hidden, second[2])
    got = (*first[:2], hidden, torch.cat([first[3], second[3]]))
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)  # float32 sums in another order
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


# ---------------------------------------------------------------- the engine

SGD = {
    "optimizer": OptimizerConfig(type="sgd", lr=1.0, weight_decay=0.0, gradient_clipping=0.0),
    "use_distributed_optimizer": False,
}
FUSED = {"fused_linear_logprob": True, "fused_linear_chunk_tokens": 7}


def loss(outputs):
    """Per token, with the entropy; the mask leaves out more than the last tokens."""
    mask, advantage = outputs.columns["counts"], outputs.columns["advantages"]
    assert mask.numel() > 0, "called without a token"
    terms = outputs.logp.exp() * advantage + 0.1 * outputs.entropy
    entropy = torch.where(mask, outputs.entropy.detach(), 0.0).sum() / outputs.num_tokens
    return torch.where(mask, terms, 0.0).sum() / outputs.num_tokens, {"entropy": entropy}


def batch_of(mesh):
    batch = make_batch(0)
    g = torch.Generator().manual_seed(9)
    batch["advantages"] = torch.randn(batch["mask"].shape, generator=g)
    batch["counts"] = batch["mask"] & (torch.rand(batch["mask"].shape, generator=g) < 0.7)
    return rows_of(batch, mesh)


def one_step(folder, parallel, options, **how):
    """Metrics, logprobs and logits before, weights after."""
    engine = make_engine(folder, parallel, **options)
    try:
        batch = batch_of(engine.mesh)
        logp, logits = engine.forward(batch), engine.logits(batch)
        num_tokens = int(batch["counts"].sum())
        keys = ("counts", "advantages")
        metrics = engine.train_batch(batch, loss, keys=keys, num_tokens=num_tokens, **how)
        weights = {name: tensor.clone() for name, tensor in engine.export}
        return metrics, logp, logits, weights
    finally:
        mesh_module.destroy()


def plain_and_fused(folder, parallel, options):
    masked = {"mask_key": "counts"}
    return [
        one_step(folder, parallel, options),
        one_step(folder, parallel, options, **masked),
        one_step(folder, parallel, FUSED | options),
        one_step(folder, parallel, FUSED | options, **masked, per_token=True),
    ]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """tied -> a model; the vocabulary of the untied one is odd."""
    made = {}
    for tied in (True, False):
        made[tied] = tmp_path_factory.mktemp(f"tied_{tied}")
        save_tiny_hf(made[tied], "qwen3", tied=tied, vocab=VOCAB if tied else VOCAB + 1)
    return made


LAYOUTS = {
    "plain": (1, ParallelConfig(), {}),
    "tp2sp": (2, ParallelConfig(tp=2), {}),
    # Chunks of one token: of the padding to an even number one is alone.
    "tp2": (
        2,
        ParallelConfig(tp=2),
        {"sequence_parallel": False, "fused_linear_chunk_tokens": 1},
    ),
    "cp2": (2, ParallelConfig(cp=2), {}),
    "pp2": (2, ParallelConfig(pp=2), {}),
    "pp2vpp2": (2, ParallelConfig(pp=2, vpp=2), {}),
}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_of_the_engine_is_the_same(ranks, folders, layout, tied):
    world_size, parallel, options = LAYOUTS[layout]
    for results in ranks(world_size).run(
        plain_and_fused, str(folders[tied]), parallel, SGD | options
    ):
        (metrics, logp, logits, weights), *others = results
        assert metrics["grad_norm"] > 0.01
        for other_metrics, other_logp, other_logits, other_weights in others:
            # float32 sums in another order, here and below.
            assert other_metrics == pytest.approx(metrics, rel=1e-5)
            torch.testing.assert_close(other_logp, logp, rtol=0, atol=1e-5)
            assert len(other_logits) == len(logits)
            for x, y in zip(other_logits, logits, strict=True):
                assert torch.equal(x, y)
            assert list(other_weights) == list(weights)
            for name, want in weights.items():
                # With lr 1 a difference of weights is one of gradients, whose norm is above 0.01.
                torch.testing.assert_close(
                    other_weights[name], want, rtol=1e-5, atol=2e-6, msg=name
                )


def metrics_of(folder, options):
    return [
        one_step(folder, ParallelConfig(), options | more, per_token=True)[0]
        for more in ({}, FUSED)
    ]


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_gradients_reduced_while_the_backward_pass_runs(ranks, folders, tied):
    """dp 2, the distributed optimizer, one micro-batch after another."""
    options = {"overlap_grad_reduce": True, "mb_spec": MicroBatchSpec(n_mbs=2)}
    for plain, fused in ranks(2).run(metrics_of, str(folders[tied]), options):
        assert fused == pytest.approx(plain, rel=1e-5)  # float32 sums in another order


def test_bfloat16_tracks_the_unfused(ranks, folders):
    (plain, fused) = ranks(1).run(metrics_of, str(folders[True]), {"dtype": "bfloat16"})[0]
    # The same logits, of which the products are rounded alike; weight's gradient is summed in
    # float32 where it was rounded to 2^-9 once a micro-batch.
    assert fused["loss"] == pytest.approx(plain["loss"], rel=1e-3)
    assert fused["grad_norm"] == pytest.approx(plain["grad_norm"], rel=2**-8)


def calls_of_the_loss(folder, fused, **how):
    """Of each call: tokens, cu_seqlens, whether logp is 0 under the mask or anywhere else."""
    options = FUSED if fused else {}
    engine = make_engine(folder, ParallelConfig(), **options, mb_spec=MicroBatchSpec())
    calls = []

    def seen(outputs):
        logp, counts = outputs.logp, outputs.columns["counts"]
        zeros = (not logp[~counts].any(), not logp[counts].all())
        calls.append((logp.numel(), outputs.cu_seqlens.tolist(), *zeros))
        return loss(outputs)

    try:
        keys = ("counts", "advantages")
        engine.train_batch(batch_of(engine.mesh), seen, keys=keys, num_tokens=9, **how)
        return calls
    finally:
        mesh_module.destroy()


def with_mask(folder, fused, per_token):
    return calls_of_the_loss(folder, fused, mask_key="counts", per_token=per_token)


def without_mask(folder):
    return calls_of_the_loss(folder, True, per_token=True)


@pytest.mark.parametrize(
    ("fused", "per_token"), [(False, True), (True, False), (True, True)], ids=str
)
def test_tokens_outside_of_the_mask_are_skipped(ranks, folders, fused, per_token):
    calls = ranks(1).run(with_mask, str(folders[True]), fused, per_token)[0]
    assert (len(calls) > 1) == (fused and per_token)
    assert all(outside and not inside for _, _, outside, inside in calls)


def test_the_loss_is_called_on_chunks_of_tokens(ranks, folders):
    calls = ranks(1).run(without_mask, str(folders[True]))[0]
    assert sum(number for number, *_ in calls) == sum(LENGTHS)
    assert max(number for number, *_ in calls) <= FUSED["fused_linear_chunk_tokens"]
    bounds = [cu for _, cu, *_ in calls]
    assert all(cu[0] == 0 and sorted(cu) == cu for cu in bounds)
    assert [cu[-1] for cu in bounds] == [number for number, *_ in calls]
    of_sequences = [sum(cu[i + 1] - cu[i] for cu in bounds) for i in range(len(LENGTHS))]
    assert sorted(of_sequences) == sorted(LENGTHS)
    # Without a mask more than the last tokens are computed.
    assert not all(outside for _, _, outside, _ in calls)


def test_wrong_options_are_named(ranks, folders):
    with pytest.raises(ConfigError, match="fused_linear_chunk_tokens: must be > 0, got 0"):
        TrainEngineConfig(path="", fused_linear_chunk_tokens=0)
    assert (
        "mask_key 'elsewhere' is not one of keys ('counts',"
        in ranks(1).run(error_of_mask_key, str(folders[True]))[0]
    )


def error_of_mask_key(folder):
    try:
        calls_of_the_loss(folder, True, mask_key="elsewhere")
    except ValueError as error:
        return str(error)
