"""`ops/logprob.py` against log_softmax in float64; over ranks: tests/dist.

Not covered: races between warps that no order of whole threads shows, which compute-sanitizer
is for (benchmarks/kernels.py on a GPU).
"""

import pytest
import torch
from guard import guarded

from megarl.ops.library import op
from megarl.ops.logprob import pack_keep_mask, token_logprob_entropy


def exact(logits, labels, temperature=1.0, keep=None):
    """logp, entropy in float64, and the logits they were made of."""
    leaf = logits.detach().double().requires_grad_()
    x = leaf / torch.as_tensor(temperature, dtype=torch.float64).view(-1, 1)
    if keep is not None:
        x = torch.where(keep, x, -torch.inf)
    logp_all = torch.log_softmax(x, dim=-1)
    finite = torch.where(torch.isinf(logp_all), 0.0, logp_all)
    entropy = -(logp_all.exp() * finite).sum(-1)
    return logp_all.gather(1, labels[:, None])[:, 0], entropy, leaf


def make(num_tokens=37, vocab=101, scale=3.0, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    logits = (scale * torch.randn(num_tokens, vocab, generator=g)).to(dtype)
    return logits, torch.randint(0, vocab, (num_tokens,), generator=g)


def bound(logits, temperature):
    # A logit of size x is known to 2^-24 x in float32, and two of them are subtracted.
    return 1e-5 + 2**-22 * logits[~logits.isinf()].abs().max().item() / temperature


@pytest.mark.parametrize("temperature", [0.1, 1.0, 2.0])
@pytest.mark.parametrize("scale", [0.0, 3.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values(backend, device, temperature, scale, dtype):
    logits, labels = make(scale=scale, dtype=dtype)
    logp, entropy = token_logprob_entropy(
        logits.to(device), labels.to(device), vocab_size=101, temperature=temperature
    )
    want_logp, want_entropy, _ = exact(logits, labels, temperature)
    assert (logp.cpu() - want_logp).abs().max() <= bound(logits.float(), temperature)
    # Differences of logits, which are exact to 2^-24 of themselves, weigh at most 1.
    assert (entropy.cpu() - want_entropy).abs().max() <= 1e-5


def test_a_whole_vocabulary(backend, device):
    """Many vectors a thread, and more than one block a row in the gradient."""
    logits, labels = make(2, 151936, dtype=torch.bfloat16)
    logits, labels = logits.to(device).requires_grad_(), labels.to(device)
    logp, entropy = token_logprob_entropy(logits, labels, vocab_size=151936)
    (logp.sum() + entropy.sum()).backward()
    want_logp, want_entropy, leaf = exact(logits.cpu(), labels.cpu())
    (want_logp.sum() + want_entropy.sum()).backward()
    assert (logp.detach().cpu() - want_logp).abs().max() <= 1e-5
    assert (entropy.detach().cpu() - want_entropy).abs().max() <= 1e-5
    assert_gradient(logits.grad, leaf.grad)


def assert_gradient(got, want, weight=1.0):
    """To rounding: float32 1e-5, bfloat16 one unit in the last place (2^-7 at most)."""
    relative = 2**-8 if got.dtype == torch.bfloat16 else 1e-5
    # Where 1 - p cancels, what is left is known to 1e-7 of the factor before it.
    error = (got.cpu().double() - want).abs()
    assert (error <= relative * want.abs() + 1e-6 * weight).all(), error.max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [3.0, 1e4])
@pytest.mark.parametrize("in_place", [False, True])
def test_gradient(backend, device, dtype, scale, in_place):
    """Temperatures by row; an odd width, so rows begin at every alignment."""
    logits, labels = make(dtype=dtype, scale=scale)
    g = torch.Generator().manual_seed(1)
    weights = torch.randn(2, len(labels), generator=g)
    temperature = torch.tensor([0.1, 1.0, 2.0])[torch.arange(len(labels)) % 3]
    leaf = logits.to(device).requires_grad_()
    mine = leaf.clone()
    logp, entropy = token_logprob_entropy(
        mine,
        labels.to(device),
        vocab_size=101,
        temperature=temperature.to(device),
        grad_in_place=in_place,
    )
    (weights[0].to(device) * logp + weights[1].to(device) * entropy).sum().backward()
    want_logp, want_entropy, want = exact(logits, labels, temperature)
    (weights[0].double() * want_logp + weights[1].double() * want_entropy).sum().backward()
    # A factor 1 / temperature is at most 10, weights are at most 3.
    assert_gradient(leaf.grad, want.grad, weight=30)
    assert in_place == torch.equal(mine, leaf.grad)


def test_without_entropy(backend, device):
    logits, labels = make()
    leaf = logits.to(device).requires_grad_()
    logp, entropy = token_logprob_entropy(
        leaf, labels.to(device), vocab_size=101, with_entropy=False
    )
    assert not entropy.any()
    logp.sum().backward()
    want, _, exact_leaf = exact(logits, labels)
    want.sum().backward()
    assert (logp.detach().cpu() - want).abs().max() <= 1e-5
    assert_gradient(leaf.grad, exact_leaf.grad)


@pytest.mark.parametrize("vocab", [1, 7, 8, 9, 96, 1000])
def test_padded_columns_count_nothing(backend, device, vocab):
    logits, labels = make(vocab=vocab)
    padded = torch.cat([logits, torch.full((37, 6), 1e4)], dim=1).to(device).requires_grad_()
    labels = labels.to(device)
    logp, entropy = token_logprob_entropy(padded, labels, vocab_size=vocab)
    want_logp, want_entropy, _ = exact(logits, labels.cpu())
    assert (logp.detach().cpu() - want_logp).abs().max() <= 1e-5
    assert (entropy.detach().cpu() - want_entropy).abs().max() <= 1e-5
    (logp.sum() + entropy.sum()).backward()
    assert (padded.grad[:, vocab:] == 0).all()


def test_masked_rows_are_not_read(backend, device):
    logits, labels = make()
    mask = torch.arange(37) % 3 > 0
    broken = torch.where(mask[:, None], logits, torch.nan).to(device).requires_grad_()
    logp, entropy = token_logprob_entropy(
        broken, labels.to(device), vocab_size=101, mask=mask.to(device)
    )
    want_logp, want_entropy, leaf = exact(logits, labels)
    (want_logp + want_entropy)[mask].sum().backward()
    (logp + entropy).sum().backward()
    assert (logp[~mask] == 0).all()
    assert (entropy[~mask] == 0).all()
    assert (broken.grad[~mask] == 0).all()
    assert (logp.detach().cpu() - want_logp)[mask].abs().max() <= 1e-5
    assert_gradient(broken.grad, leaf.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kept_columns_alone_have_a_probability(backend, device, dtype):
    logits, labels = make(vocab=203, dtype=dtype)
    keep = torch.rand(37, 203, generator=torch.Generator().manual_seed(2)) < 0.3
    keep[torch.arange(37), labels] = True
    leaf = logits.to(device).requires_grad_()
    logp, entropy = token_logprob_entropy(
        leaf, labels.to(device), vocab_size=203, keep=pack_keep_mask(keep).to(device)
    )
    want_logp, want_entropy, exact_leaf = exact(logits, labels, keep=keep)
    assert (logp.detach().cpu() - want_logp).abs().max() <= 1e-5
    assert (entropy.detach().cpu() - want_entropy).abs().max() <= 1e-5
    (logp + 0.5 * entropy).sum().backward()
    (want_logp + 0.5 * want_entropy).sum().backward()
    assert (leaf.grad.cpu()[~keep] == 0).all()
    assert_gradient(leaf.grad, torch.nan_to_num(exact_leaf.grad))


@pytest.mark.parametrize("tp", [2, 4])
def test_shards_give_the_same(backend, device, tp):
    """A whole shard of -inf among them, and one that is padding."""
    logits, labels = make(vocab=64)
    width = 64 // tp
    logits[:, :width] = -torch.inf
    logits = torch.cat([logits, torch.full((37, width), 7.0)], dim=1)
    labels = width + labels % (64 - width)
    inverse, parts = torch.ones(1), torch.zeros(tp + 1, 37, 4, device=device)
    for k in range(tp + 1):
        shard = logits[:, k * width : (k + 1) * width].contiguous().to(device)
        valid = 0 if k == tp else width
        op("logprob_stats")(
            *(shard, labels.to(device), inverse.to(device), None, None, k * width, valid),
            True,
            parts[k],
        )
    logp, entropy = torch.empty(37, device=device), torch.empty(37, device=device)
    log_z = torch.empty(37, 2, device=device)
    op("logprob_combine")(parts, None, True, logp, entropy, log_z)
    want_logp, want_entropy, _ = exact(logits[:, :64], labels)
    assert (logp.cpu() - want_logp).abs().max() <= 1e-5
    assert (entropy.cpu() - want_entropy).abs().max() <= 1e-5
    grad = torch.full((37, width), torch.nan, device=device)
    minus_inf = logits[:, :width].contiguous().to(device)
    ones = torch.ones(37, device=device)
    op("logprob_grad")(
        *(minus_inf, labels.to(device), inverse.to(device), None, None, 0, width),
        *(log_z, entropy, ones, ones, grad),
    )
    assert (grad == 0).all()


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_few_rows(backend, device, num_tokens):
    logits, labels = make(num_tokens)
    leaf = logits.to(device).requires_grad_()
    logp, entropy = token_logprob_entropy(leaf, labels.to(device), vocab_size=101)
    (logp + entropy).sum().backward()
    want, _, _ = exact(logits, labels)
    assert logp.shape == (num_tokens,)
    torch.testing.assert_close(logp.detach().cpu(), want.detach().float(), atol=1e-5, rtol=0)


def test_the_same_bits_every_time(backend, device, monkeypatch):
    logits, labels = make(9, 4001, dtype=torch.bfloat16)
    runs = []
    for seed in range(3):
        monkeypatch.setenv("MEGARL_EMU_SEED", str(seed))
        leaf = logits.to(device).requires_grad_()
        logp, entropy = token_logprob_entropy(leaf, labels.to(device), vocab_size=4001)
        (logp + entropy).sum().backward()
        runs.append((logp.detach(), entropy.detach(), leaf.grad))
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("at", ["end", "start"])
@pytest.mark.parametrize("width", [1, 5, 8, 67, 4096 + 3])
def test_no_access_outside_of_the_buffers(emulated, dtype, at, width):
    logits, labels = make(3, width, dtype=dtype)
    keep = pack_keep_mask(torch.ones(3, width, dtype=torch.bool))
    shard = [guarded(x, at) for x in (logits, labels, torch.ones(1), torch.ones(3).bool(), keep)]
    parts, log_z = (guarded(torch.empty(3, n), at) for n in (4, 2))
    op("logprob_stats")(*shard, 0, width, True, parts)
    logp, entropy = (guarded(torch.empty(3), at) for _ in range(2))
    op("logprob_combine")(parts.view(1, 3, 4), None, True, logp, entropy, log_z)
    grad = guarded(logits, at)
    op("logprob_grad")(*shard, 0, width, log_z, entropy, logp, entropy, grad)
    want, _, _ = exact(logits, labels)
    assert (logp - want).abs().max() <= 1e-5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": torch.zeros(5, dtype=torch.int32)}, "int64 labels"),
        ({"labels": torch.zeros(4, dtype=torch.int64)}, r"labels \[T\]"),
        ({"logits": torch.zeros(5, 8, dtype=torch.float16)}, "float32 or bfloat16"),
        ({"logits": torch.zeros(8, 5).t()}, "side by side"),
        ({"mask": torch.ones(5)}, "mask must be"),
        ({"keep": torch.ones(5, 2, dtype=torch.int32)}, "keep must be"),
        ({"temperature": 0.0}, "temperature must be > 0"),
        ({"temperature": torch.ones(4)}, "temperature must be a number"),
        ({"mask": torch.ones(5, dtype=torch.bool, device="meta")}, "one device"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    arguments = {"logits": torch.zeros(5, 8), "labels": torch.zeros(5, dtype=torch.int64)}
    arguments |= {"vocab_size": 8, **change}
    with pytest.raises(ValueError, match=message):
        token_logprob_entropy(arguments.pop("logits"), arguments.pop("labels"), **arguments)


def test_compiled_code_takes_the_op(backend):
    """torch.compile traces through without a graph break."""
    logits, labels = make()

    @torch.compile(fullgraph=True, backend="eager")
    def logp_of(x):
        parts = torch.zeros(37, 4)
        op("logprob_stats")(x, labels, torch.ones(1), None, None, 0, 101, False, parts)
        return parts

    want = torch.zeros(37, 4)
    op("logprob_stats")(logits, labels, torch.ones(1), None, None, 0, 101, False, want)
    assert torch.equal(logp_of(logits), want)
