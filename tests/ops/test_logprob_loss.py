"""`ops/logprob_loss.py` against a float64 formula from the logits on.

Not covered: the hardware's bulk copies and cluster barriers, which the emulator only imitates.
"""

import itertools

import pytest
import torch
from guard import guarded

from megarl.algorithms.losses import Correction
from megarl.ops.library import op
from megarl.ops.logprob import pack_keep_mask
from megarl.ops.logprob_loss import logprob_policy_loss

SETTINGS = {
    "ppo": {},
    "dual clip": {"c_clip": 1.5},
    "cispo": {"objective": "cispo"},
    "not decoupled": {"decoupled": False},
    "masked weights": {"correction": Correction(upper=1.1, lower=0.9)},
    "k1": {"kl_coef": 0.1, "kl_estimator": "k1"},
    "k2": {"kl_coef": 0.1, "kl_estimator": "k2"},
    "k3": {"kl_coef": 0.1, "kl_estimator": "k3"},
}


def make(num_tokens=29, vocab=101, dtype=torch.float32, seed=0, padding=0):
    """Logits, and columns near their logprobs, so that some ratios are clipped and some not."""
    g = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(num_tokens, vocab, generator=g)).to(dtype)
    labels = torch.randint(0, vocab, (num_tokens,), generator=g)
    logp = torch.log_softmax(logits.float(), 1).gather(1, labels[:, None])[:, 0]
    prox, behaviour, ref = (logp + 0.2 * torch.randn(num_tokens, generator=g) for _ in range(3))
    return {
        "logits": torch.nn.functional.pad(logits, (0, padding), value=50.0),
        "labels": labels,
        "prox_logp": prox,
        "behaviour_logp": behaviour,
        "advantages": torch.randn(num_tokens, generator=g),
        "mask": torch.rand(num_tokens, generator=g) < 0.8,
        "cu_seqlens": torch.tensor([0, num_tokens // 2, num_tokens]),
        "ref_logp": ref,
        "num_tokens": torch.tensor(17.0),
    }


def exact(case, *, vocab, temperature=1.0, keep=None, **settings):
    """Loss and gradient to the logits in float64, for token-level settings."""
    leaf = case["logits"].double().requires_grad_()
    x = leaf[:, :vocab] / torch.as_tensor(temperature, dtype=torch.float64).view(-1, 1)
    if keep is not None:
        x = torch.where(keep[:, :vocab], x, -torch.inf)
    logp = torch.log_softmax(x, 1).gather(1, case["labels"][:, None])[:, 0]
    prox, behaviour, advantages, ref = (
        case[name].double() for name in ("prox_logp", "behaviour_logp", "advantages", "ref_logp")
    )
    ratio = (logp - prox).exp()
    bounded = ratio.clamp(0.8, 1.3)
    if settings.get("objective") == "cispo":
        loss = -bounded.detach() * advantages * logp
    else:
        loss = torch.maximum(-advantages * ratio, -advantages * bounded)
        if c := settings.get("c_clip"):
            loss = torch.where(advantages < 0, torch.minimum(loss, -c * advantages), loss)
    if settings.get("decoupled", True):
        weight = (prox - behaviour).exp()
        if correction := settings.get("correction"):
            inside = (weight >= correction.lower) & (weight <= correction.upper)
            weight = torch.where(inside, weight, 0.0)
        loss = loss * weight
    if settings.get("kl_coef"):
        gap = logp - ref
        kl = {"k1": gap, "k2": gap**2 / 2, "k3": (-gap).exp() - 1 + gap}
        loss = loss + settings["kl_coef"] * kl[settings["kl_estimator"]]
    total = torch.where(case["mask"], loss, 0.0).sum() / case["num_tokens"].double()
    (grad,) = torch.autograd.grad(total, leaf)
    return total.item(), torch.nan_to_num(grad)


def run(case, device, *, vocab, scale=1.0, **settings):
    """Loss, metrics, gradient."""
    on_device = {name: x.to(device) for name, x in case.items()}
    leaf = on_device.pop("logits").clone().requires_grad_()
    logits = leaf.clone()
    columns = ("labels", "prox_logp", "behaviour_logp", "advantages", "mask", "cu_seqlens")
    out = logprob_policy_loss(
        logits,
        *(on_device.pop(name) for name in columns),
        vocab_size=vocab,
        eps_clip_low=0.2,
        eps_clip_high=0.3,
        **on_device,
        **settings,
    )
    (out.loss * scale).backward()
    return out.loss.item(), out.metrics, leaf.grad.cpu()


def assert_gradient(got, want):
    # bfloat16: half a unit in the last place is 2^-9 of an entry, and the entry itself is known
    # to 1e-5, which may move it over a rounding edge. float32: logp is known to 1e-5 only, and
    # the ratio with it; 1 - p cancels.
    relative = 2**-8 if got.dtype == torch.bfloat16 else 3e-5
    error = (got.double() - want).abs()
    assert (error <= relative * want.abs() + 1e-6).all(), error.max()


@pytest.mark.parametrize("cluster", [0, 1])
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_and_gradient(backend, device, name, dtype, cluster):
    case, settings = make(dtype=dtype, padding=3), SETTINGS[name]
    loss, metrics, grad = run(case, device, vocab=101, cluster=cluster, **settings)
    want_loss, want_grad = exact(case, vocab=101, **settings)
    assert loss == pytest.approx(want_loss, abs=2e-5)
    assert_gradient(grad, want_grad)
    assert (grad[:, 101:] == 0).all()
    assert (grad[~case["mask"]] == 0).all()
    assert 0 < metrics["entropy"].item() < 5
    if name == "ppo":
        assert 0 < metrics["clip_ratio"].item() < 1


@pytest.mark.parametrize("cluster", [0, 4, 2, 1])
def test_a_whole_vocabulary(backend, device, cluster):
    """Shares of 38 KB and more: several bulk copies a block."""
    case = make(3, 151936, dtype=torch.bfloat16)
    _, _, grad = run(case, device, vocab=151936, cluster=cluster)
    _, want = exact(case, vocab=151936)
    assert_gradient(grad, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 7, 8, 64, 97, 1003])
def test_widths_and_unaligned_rows(backend, device, dtype, vocab):
    case = make(5, vocab, dtype=dtype)
    _, _, grad = run(case, device, vocab=vocab)
    _, want = exact(case, vocab=vocab)
    assert_gradient(grad, want)


def test_temperatures_and_kept_columns(backend, device):
    case = make()
    keep = torch.rand(29, 101, generator=torch.Generator().manual_seed(2)) < 0.3
    keep[torch.arange(29), case["labels"]] = True
    temperature = torch.tensor([0.5, 1.0, 2.0])[torch.arange(29) % 3]
    _, _, grad = run(
        case,
        device,
        vocab=101,
        temperature=temperature.to(device),
        keep=pack_keep_mask(keep).to(device),
    )
    _, want = exact(case, vocab=101, temperature=temperature, keep=keep)
    assert_gradient(grad, want)


def test_a_scaled_loss_scales_the_gradient(backend, device):
    case = make(dtype=torch.bfloat16)
    _, _, once = run(case, device, vocab=101)
    _, _, thrice = run(case, device, vocab=101, scale=4.0)
    assert torch.equal(thrice, once * 4)  # a power of 2 does not round


def test_masked_rows_are_not_read(backend, device):
    case = make()
    clean = run(case, device, vocab=101)
    for name in ("logits", "prox_logp", "behaviour_logp", "advantages", "ref_logp"):
        case[name][~case["mask"]] = torch.nan
    broken = run(case, device, vocab=101)
    assert broken[0] == clean[0]
    assert torch.equal(broken[2], clean[2])


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_few_rows(backend, device, num_tokens):
    case = make(num_tokens)
    loss, _, grad = run(case, device, vocab=101)
    want_loss, want = exact(case, vocab=101)
    assert loss == pytest.approx(want_loss, abs=2e-5)
    assert_gradient(grad, want)


def test_the_same_bits_every_time(backend, device, monkeypatch):
    case = make(9, 4001, dtype=torch.bfloat16, padding=7)
    results = []
    for seed in range(3):
        monkeypatch.setenv("MEGARL_EMU_SEED", str(seed))
        results.append(run(case, device, vocab=4001))
    for other in results[1:]:
        assert other[0] == results[0][0]
        assert torch.equal(other[2], results[0][2])


@pytest.mark.parametrize("at", ["end", "start"])
@pytest.mark.parametrize(
    ("dtype", "width", "cluster"),
    itertools.product([torch.float32, torch.bfloat16], [5, 64, 4096 + 8], [1, 2, 8]),
)
def test_no_access_outside_of_the_buffers(emulated, dtype, width, cluster, at):
    case = make(3, width, dtype=dtype)
    names = ("labels", "mask", "prox_logp", "advantages", "behaviour_logp", "ref_logp")
    columns = {name: guarded(case[name], at) for name in names}
    logits = guarded(case["logits"], at)
    logp, entropy = (guarded(torch.empty(3), at) for _ in range(2))
    op("logprob_loss")(
        *(logits, columns["labels"], guarded(torch.ones(1), at), columns["mask"], None, width),
        *(columns["prox_logp"], columns["advantages"], None, columns["ref_logp"]),
        guarded(torch.tensor([17.0]), at),
        *(0.8, 1.3, 0.0, 0.1, 3, 0, cluster),
        *(logp, entropy, logits),
    )
    settings = {"decoupled": False, "kl_coef": 0.1, "kl_estimator": "k3"}
    assert_gradient(logits, exact(case, vocab=width, **settings)[1])
    scale = guarded(torch.tensor([2.0]), at)
    flat = guarded(torch.arange(37, dtype=dtype), at)
    op("scale_unless_one")(scale, flat)
    assert torch.equal(flat, 2 * torch.arange(37, dtype=dtype))


def test_one_backward_alone(backend, device):
    case = make()
    leaf = case.pop("logits").requires_grad_()
    out = logprob_policy_loss(
        leaf.clone(), vocab_size=101, eps_clip_low=0.2, eps_clip_high=0.3, **case
    )
    out.loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward"):
        out.loss.backward()


def test_without_a_gradient_the_logits_stay(backend, device):
    case = make()
    logits = case["logits"].clone()
    with torch.no_grad():
        out = logprob_policy_loss(vocab_size=101, eps_clip_low=0.2, eps_clip_high=0.3, **case)
    assert torch.equal(case["logits"], logits)
    assert out.loss.item() == pytest.approx(exact(case, vocab=101)[0], abs=2e-5)


def test_wrong_arguments_are_named():
    case = make() | {"mask": torch.ones(29)}
    with pytest.raises(ValueError, match="mask must be"):
        logprob_policy_loss(vocab_size=101, eps_clip_low=0.2, eps_clip_high=0.3, **case)
