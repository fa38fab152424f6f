"""A vocabulary split over two ranks gives what one rank gives."""

import torch
import torch.distributed as dist

from megarl.ops.logprob import token_logprob_entropy

VOCAB, TOKENS = 11, 23  # odd: the second shard has a padded column


def make():
    g = torch.Generator().manual_seed(3)
    logits = 4 * torch.randn(TOKENS, VOCAB + 1, generator=g)
    logits[0, :6] = -torch.inf  # a row whose whole first shard is impossible
    labels = torch.randint(6, VOCAB, (TOKENS,), generator=g)
    return logits, labels


def value_and_gradient(logits, labels, group):
    logits = logits.clone().requires_grad_()
    logp, entropy = token_logprob_entropy(logits, labels, vocab_size=VOCAB, tp_group=group)
    (logp * torch.arange(TOKENS) + 0.5 * entropy).sum().backward()
    return logp.detach(), entropy.detach(), logits.grad


def run_shard():
    logits, labels = make()
    shard = logits.chunk(2, dim=1)[dist.get_rank()]
    return value_and_gradient(shard, labels, dist.group.WORLD)


def test_two_shards_equal_one(ranks):
    shards = ranks(2).run(run_shard)
    logits, labels = make()
    logp, entropy, gradient = value_and_gradient(logits, labels, None)
    for got_logp, got_entropy, _ in shards:
        # Sums over 11 float32 terms in another order.
        torch.testing.assert_close(got_logp, logp, rtol=0, atol=1e-5)
        torch.testing.assert_close(got_entropy, entropy, rtol=0, atol=1e-5)
    got = torch.cat([shard_gradient for _, _, shard_gradient in shards], dim=1)
    torch.testing.assert_close(got, gradient, rtol=1e-5, atol=1e-5)
    assert torch.equal(got[:, VOCAB:], torch.zeros(TOKENS, 1))
