"""`ops/logprob.py` against log_softmax in float64; over ranks: tests/dist."""

import pytest
import torch

from megarl.ops.logprob import token_logprob_entropy


def reference(logits, labels, temperature):
    logp_all = torch.log_softmax(logits.double() / temperature, dim=-1)
    entropy = -torch.special.xlogy(logp_all.exp(), logp_all.exp()).sum(-1)
    return logp_all.gather(1, labels[:, None])[:, 0], entropy


def make(num_tokens=37, vocab=101, scale=3.0, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    logits = (scale * torch.randn(num_tokens, vocab, generator=g)).to(dtype)
    return logits, torch.randint(0, vocab, (num_tokens,), generator=g)


@pytest.mark.parametrize("temperature", [0.1, 1.0, 2.0])
@pytest.mark.parametrize("scale", [0.0, 3.0, 1e4])
def test_values_against_float64(temperature, scale):
    logits, labels = make(scale=scale)
    logp, entropy = token_logprob_entropy(logits, labels, vocab_size=101, temperature=temperature)
    want_logp, want_entropy = reference(logits, labels, temperature)
    # A logit of size x is known to 2^-24 x in float32, and two of them are subtracted.
    bound = 1e-5 + 2**-22 * logits.abs().max().item() / temperature
    assert (logp - want_logp).abs().max() <= bound
    # Entropy is log Z - E[x]: the same cancellation.
    assert (entropy - want_entropy).abs().max() <= bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_gradient_against_autograd_in_float64(dtype, temperature):
    logits, labels = make(dtype=dtype)
    weights = torch.randn(2, logits.shape[0], generator=torch.Generator().manual_seed(1))
    mine = logits.clone().requires_grad_()
    logp, entropy = token_logprob_entropy(mine, labels, vocab_size=101, temperature=temperature)
    (weights[0] * logp + weights[1] * entropy).sum().backward()

    exact = logits.double().requires_grad_()
    logp_all = torch.log_softmax(exact / temperature, dim=-1)
    want_logp = logp_all.gather(1, labels[:, None])[:, 0]
    want_entropy = -(logp_all.exp() * logp_all).sum(-1)
    (weights[0].double() * want_logp + weights[1].double() * want_entropy).sum().backward()
    error = (mine.grad.double() - exact.grad).abs()
    # bfloat16 keeps 8 bits: half a unit in the last place is 2^-9 of the entry.
    relative = 2**-8 if dtype == torch.bfloat16 else 1e-5
    assert (error <= relative * exact.grad.abs() + 1e-6).all()


def test_padded_columns_count_nothing():
    logits, labels = make(vocab=10)
    padded = torch.cat([logits, torch.full((37, 6), 1e4)], dim=1).requires_grad_()
    logp, entropy = token_logprob_entropy(padded, labels, vocab_size=10)
    want_logp, want_entropy = token_logprob_entropy(logits, labels, vocab_size=10)
    assert torch.equal(logp, want_logp)
    assert torch.equal(entropy, want_entropy)
    (logp.sum() + entropy.sum()).backward()
    assert torch.equal(padded.grad[:, 10:], torch.zeros(37, 6))


def test_columns_of_minus_infinity_are_impossible_tokens():
    logits, _ = make(vocab=8)
    logits[:, 4:] = -torch.inf
    labels = torch.zeros(37, dtype=torch.int64)
    logp, entropy = token_logprob_entropy(logits, labels, vocab_size=8)
    want_logp, want_entropy = token_logprob_entropy(logits[:, :4], labels, vocab_size=4)
    torch.testing.assert_close(logp, want_logp)
    torch.testing.assert_close(entropy, want_entropy)


def test_chunks_of_rows_change_no_bit(monkeypatch):
    logits, labels = make(num_tokens=50)
    whole = token_logprob_entropy(logits, labels, vocab_size=101)
    monkeypatch.setattr("megarl.ops.logprob._CHUNK_BYTES", 7 * 4 * 101)
    cut = token_logprob_entropy(logits, labels, vocab_size=101)
    assert all(torch.equal(a, b) for a, b in zip(whole, cut, strict=True))


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_no_token_and_one_token(num_tokens):
    logits, labels = make(num_tokens=num_tokens)
    logp, entropy = token_logprob_entropy(logits, labels, vocab_size=101)
    assert logp.shape == entropy.shape == (num_tokens,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(3)}, r"\[T, V/tp\]"),
        ({"labels": torch.zeros(4, dtype=torch.int64)}, r"\(3, 5\) and \(4,\)"),
        ({"labels": torch.zeros(3)}, "int64"),
        ({"temperature": 0.0}, "temperature"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    arguments = {
        "logits": torch.zeros(3, 5),
        "labels": torch.zeros(3, dtype=torch.int64),
        "vocab_size": 5,
        "temperature": 1.0,
        **change,
    }
    with pytest.raises(ValueError, match=message):
        token_logprob_entropy(**arguments)
