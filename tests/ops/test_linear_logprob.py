"""`ops/linear_logprob.py` against log_softmax of the product in float64; ranks: tests/dist."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megarl.ops.linear_logprob import linear_logprob_entropy, linear_logprob_loss
from megarl.ops.logprob import token_logprob_entropy

TOKENS, HIDDEN, VOCAB, PADDED = 37, 24, 101, 104


def make(num_tokens=TOKENS, dtype=torch.float32, vocab=PADDED, hidden=HIDDEN):
    """hidden, weight, labels, weights of logp and of entropy in the loss. Logits up to about 8."""
    g = torch.Generator().manual_seed(num_tokens)
    return (
        torch.randn(num_tokens, hidden, generator=g).to(dtype),
        (2 / hidden**0.5 * torch.randn(vocab, hidden, generator=g)).to(dtype),
        torch.randint(0, min(vocab, VOCAB), (num_tokens,), generator=g),
        torch.randn(2, num_tokens, generator=g),
    )


def exact(hidden, weight, labels, weights, *, temperature=1.0, mask=None, vocab=VOCAB):
    """logp, entropy and the gradients of (weights * (logp, entropy)).sum(), in float64."""
    hidden, weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    temperature = torch.as_tensor(temperature, dtype=torch.float64).view(-1, 1)
    logp_all = torch.log_softmax((hidden @ weight.T)[:, :vocab] / temperature, dim=-1)
    logp = logp_all.gather(1, labels[:, None])[:, 0]
    entropy = -(logp_all.exp() * logp_all).sum(-1)
    if mask is not None:
        logp, entropy = torch.where(mask, logp, 0.0), torch.where(mask, entropy, 0.0)
    (weights[0] * logp + weights[1] * entropy).sum().backward()
    return logp.detach(), entropy.detach(), hidden.grad, weight.grad


def weighted(weights):
    """The loss of `exact`, for linear_logprob_loss."""

    def token_loss(logp, entropy, rows):
        a, b = weights[:, rows]
        return (a * logp + b * entropy).sum(), a, b

    return token_loss


def run(way, device, hidden, weight, labels, weights, **options):
    """logp, entropy, dhidden, dweight of one of the two ways."""
    hidden, weight = (x.detach().to(device).requires_grad_() for x in (hidden, weight))
    labels, weights = labels.to(device), weights.to(device)
    options = {"vocab_size": VOCAB, **options}
    for name in ("mask", "temperature"):
        if isinstance(options.get(name), torch.Tensor):
            options[name] = options[name].to(device)
    if way == "recompute":
        logp, entropy = linear_logprob_entropy(hidden, weight, labels, **options)
        (weights[0] * logp + weights[1] * entropy).sum().backward()
    else:
        loss, logp, entropy = linear_logprob_loss(
            hidden, weight, labels, weighted(weights), **options
        )
        loss.backward()
        assert not logp.requires_grad
        assert loss.item() == pytest.approx((weights[0] * logp + weights[1] * entropy).sum().item())
    return tuple(x.detach().cpu() for x in (logp, entropy, hidden.grad, weight.grad))


def relative(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


WAYS = ["recompute", "in-forward"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("chunk", [1, 8, 37, 1000])
def test_float32(backend, device, way, chunk):
    made = make()
    got = run(way, device, *made, chunk_tokens=chunk)
    want = exact(*made)
    for i in (0, 1):
        # Of a logit 24 products are summed, each to 2^-24 of at most 8.
        assert (got[i] - want[i]).abs().max() <= 1e-5
    for i in (2, 3):
        # Sums of rounded terms that cancel: to 1e-5 of the largest, not of each.
        assert (got[i] - want[i]).abs().max() <= 1e-5 * want[i].abs().max()


@pytest.mark.parametrize("way", WAYS)
def test_masks_and_temperatures_of_rows(backend, device, way):
    made = make()
    g = torch.Generator().manual_seed(1)
    mask = torch.rand(TOKENS, generator=g) < 0.5
    mask[8:16] = False  # the whole of a chunk
    temperature = 0.5 + torch.rand(TOKENS, generator=g)
    got = run(way, device, *made, chunk_tokens=8, mask=mask, temperature=temperature)
    want = exact(*made, mask=mask, temperature=temperature)
    for i in range(4):
        # As above, with logits up to twice as large.
        assert (got[i] - want[i]).abs().max() <= 2e-5 * max(1, want[i].abs().max())
    for i in (0, 1, 2):
        assert not got[i][~mask].any()
    assert not got[3][VOCAB:].any(), "padding of the vocabulary has a gradient"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("logits_dtype", [None, torch.float32])
def test_bfloat16(backend, device, way, logits_dtype):
    made = make(dtype=torch.bfloat16)
    got = run(way, device, *made, chunk_tokens=8, logits_dtype=logits_dtype)
    want = exact(*made)
    largest = (made[0].double() @ made[1].double().T).abs().max().item()
    # A rounded logit is off by 2^-9 of itself, and two are subtracted; products of bfloat16
    # are exact in float32.
    bound = 1e-5 if logits_dtype else 2**-8 * largest
    assert (got[0] - want[0]).abs().max() <= bound
    # The entropy's derivatives by logits sum to 0 and are at most about 1 together.
    assert (got[1] - want[1]).abs().max() <= bound
    assert got[2].dtype == got[3].dtype == torch.bfloat16
    for i in (2, 3):
        # dlogits and the result are rounded to 2^-9 each; so were the logits before, by up to
        # 2^-9 * 8, which is a relative error of probabilities.
        assert relative(got[i], want[i]) <= (2**-8 if logits_dtype else 2**-6)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("num_tokens", [0, 1])
def test_no_token_and_one(backend, device, way, num_tokens):
    made = make(num_tokens)
    got = run(way, device, *made, chunk_tokens=4)
    for x, want in zip(got, exact(*made), strict=True):
        assert x.shape == want.shape
        torch.testing.assert_close(x.double(), want, rtol=1e-5, atol=1e-5)  # as in test_float32


@pytest.mark.parametrize("way", WAYS)
def test_twice_is_bitwise_the_same(backend, device, way, monkeypatch):
    made = make()
    first = run(way, device, *made, chunk_tokens=5)
    monkeypatch.setenv("MEGARL_EMU_SEED", "12345")
    second = run(way, device, *made, chunk_tokens=5)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_values_are_those_of_the_unfused_op(backend, device):
    hidden, weight, labels, _ = (x.to(device) for x in make())
    options = {"vocab_size": VOCAB, "temperature": 0.7, "with_entropy": False}
    logp, entropy = linear_logprob_entropy(hidden, weight, labels, chunk_tokens=TOKENS, **options)
    want, _ = token_logprob_entropy(hidden @ weight.T, labels, **options)
    assert torch.equal(logp, want)
    assert not entropy.any()


# ---------------------------------------------------------------- the cost


class Watch(TorchDispatchMode):
    """Sizes of the tensors that are made, and how many matrix products."""

    def __init__(self):
        super().__init__()
        self.largest, self.products = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.largest = max(self.largest, out.untyped_storage().nbytes())
        self.products += func.overloadpacket.__name__ in ("mm", "addmm", "addmm_")
        return out


@pytest.mark.parametrize(("way", "products"), [("recompute", 4), ("in-forward", 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_one_chunk_of_logits_is_made(backend, device, way, products, dtype):
    """128 tokens in 8 chunks; [16, 4096] logits are twice the weight, the whole 16 times."""
    made = make(128, dtype, vocab=4096, hidden=8)
    saved = []

    def save(x):
        saved.append(x.untyped_storage().nbytes())
        return x

    with torch.autograd.graph.saved_tensors_hooks(save, lambda x: x), Watch() as watch:
        run(way, device, *made, chunk_tokens=16)
    # The float32 copy on the CPU of what bfloat16 products take.
    assert watch.largest <= 16 * 4096 * 4
    assert watch.products == 8 * products
    assert sum(saved) <= 3 * 4096 * 8 * dtype.itemsize


def test_without_gradients_only_the_logits_are_made():
    hidden, weight, labels, weights = make()
    with Watch() as watch:
        loss, _, _ = linear_logprob_loss(
            hidden, weight, labels, weighted(weights), vocab_size=VOCAB, chunk_tokens=10
        )
    assert watch.products == 4
    assert not loss.requires_grad


# ---------------------------------------------------------------- gradients


@pytest.mark.parametrize("frozen", [0, 1])
@pytest.mark.parametrize("way", WAYS)
def test_a_frozen_matrix_has_no_gradient(backend, device, way, frozen):
    hidden, weight, labels, weights = (x.to(device) for x in make())
    leaves = [hidden, weight]
    leaves[1 - frozen].requires_grad_()
    if way == "recompute":
        logp, entropy = linear_logprob_entropy(*leaves, labels, vocab_size=VOCAB, chunk_tokens=8)
        (weights[0] * logp + weights[1] * entropy).sum().backward()
    else:
        linear_logprob_loss(*leaves, labels, weighted(weights), vocab_size=VOCAB, chunk_tokens=8)[
            0
        ].backward()
    assert leaves[frozen].grad is None
    want = exact(*(x.detach().cpu() for x in (hidden, weight, labels, weights)))[3 - frozen]
    error = (leaves[1 - frozen].grad.cpu() - want).abs().max()
    assert error <= 1e-5 * want.abs().max()  # as in test_float32


def test_the_loss_may_be_any_function_of_a_token(backend, device):
    """A ratio to older logprobs, without entropy; scaled after the fact; chunks in order."""
    hidden, weight, labels, weights = (x.to(device) for x in make())
    old = weights[1] - 5
    seen = []

    def ratio(logp, entropy, rows):
        seen.append(rows)
        surrogate = weights[0, rows] * (logp - old[rows]).exp()
        return surrogate.sum(), surrogate, None

    leaves = [x.clone().requires_grad_() for x in (hidden, weight, hidden, weight)]
    loss, _, _ = linear_logprob_loss(
        *leaves[:2], labels, ratio, vocab_size=VOCAB, chunk_tokens=8, with_entropy=False
    )
    (3 * loss).backward()
    logp, _ = linear_logprob_entropy(*leaves[2:], labels, vocab_size=VOCAB, chunk_tokens=8)
    want = (weights[0] * (logp - old).exp()).sum()
    (3 * want).backward()
    assert loss.item() == pytest.approx(want.item(), rel=1e-6)  # float32 sums by chunks
    for got, by_autograd in zip(leaves[:2], leaves[2:], strict=True):
        # The same products; 3 is multiplied before them or after.
        torch.testing.assert_close(got.grad, by_autograd.grad, rtol=1e-5, atol=1e-5)
    assert [r.start for r in seen] + [TOKENS] == [0] + [r.stop for r in seen]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_into_main_grad(backend, device, way, tied):
    """Added in float32 to what is there; autograd's own gradient is a stand-in."""
    hidden, weight, labels, weights = (x.to(device) for x in make(dtype=torch.bfloat16))
    sums = []
    for chunk in (1, TOKENS):
        leaf = weight.clone().requires_grad_()
        leaf.main_grad, leaf.grad_added_to_main_grad = torch.ones(leaf.shape, device=device), False
        leaf.zero_out_wgrad = tied
        options = {"vocab_size": VOCAB, "chunk_tokens": chunk, "into_main_grad": True}
        if way == "recompute":
            logp, entropy = linear_logprob_entropy(hidden, leaf, labels, **options)
            (weights[0] * logp + weights[1] * entropy).sum().backward()
        else:
            linear_logprob_loss(hidden, leaf, labels, weighted(weights), **options)[0].backward()
        assert leaf.grad_added_to_main_grad
        assert leaf.grad.shape == leaf.shape
        assert not tied or not leaf.grad.any()
        sums.append(leaf.main_grad.cpu())
    # Equal dlogits, summed one after another or at once: in bfloat16 it would be 2^-9.
    torch.testing.assert_close(sums[0], sums[1], rtol=1e-5, atol=1e-5)
    want = exact(*(x.cpu() for x in (hidden, weight, labels, weights)))[3]
    assert relative(sums[0] - 1, want) <= 2**-6  # as in test_bfloat16


# ---------------------------------------------------------------- errors

BAD = {
    "labels": ({"labels": torch.zeros(3, dtype=torch.int64)}, r"hidden \(37, 24\).*labels \(3,\)"),
    "label type": ({"labels": torch.zeros(TOKENS)}, "int64 labels, got torch.float32"),
    "width": ({"weight": torch.zeros(PADDED, 5)}, r"weight \(104, 5\)"),
    "dtypes": ({"weight": torch.zeros(PADDED, HIDDEN).bfloat16()}, "torch.bfloat16"),
    "half": ({"hidden": torch.zeros(TOKENS, HIDDEN).half()}, "torch.float16"),
    "mask": ({"mask": torch.zeros(TOKENS)}, r"mask must be \(37,\) torch.bool"),
    "temperature": ({"temperature": 0.0}, "temperature must be > 0, got 0.0"),
    "temperatures": ({"temperature": torch.ones(3)}, r"temperature .*\(3,\)"),
    "chunk": ({"chunk_tokens": 0}, "chunk_tokens must be >= 1, got 0"),
    "vocabulary": ({"vocab_size": 0}, "vocab_size must be >= 1, got 0"),
    "logits": ({"logits_dtype": torch.bfloat16}, "logits_dtype .*torch.bfloat16"),
    "device": ({"labels": torch.zeros(TOKENS, dtype=torch.int64, device="meta")}, "one device"),
    "main_grad": ({"into_main_grad": True}, r"weight.main_grad \(104, 24\), got None"),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("way", WAYS)
def test_wrong_arguments_are_named(case, way):
    change, message = BAD[case]
    hidden, weight, labels, weights = make()
    tensors = {"hidden": hidden, "weight": weight.requires_grad_(), "labels": labels}
    if way == "in-forward":
        tensors["token_loss"] = weighted(weights)
    function = linear_logprob_entropy if way == "recompute" else linear_logprob_loss
    with pytest.raises(ValueError, match=message):
        function(**{**tensors, "vocab_size": VOCAB, **change})


BAD_LOSSES = {
    "loss": (lambda p, h, rows: (p, p, None), r"loss must be \(\) torch.float32"),
    "logp": (lambda p, h, rows: (p.sum(), p[:-1], None), r"dloss/dlogp must be \(37,\)"),
    "type": (lambda p, h, rows: (p.sum(), p.double(), None), "torch.float64"),
    "entropy": (lambda p, h, rows: (p.sum(), p, p), "with_entropy=False"),
}


@pytest.mark.parametrize("case", BAD_LOSSES)
def test_wrong_results_of_the_loss_are_named(case):
    token_loss, message = BAD_LOSSES[case]
    hidden, weight, labels, _ = make()
    with pytest.raises(ValueError, match=message):
        linear_logprob_loss(
            hidden, weight, labels, token_loss, vocab_size=VOCAB, with_entropy=False
        )
