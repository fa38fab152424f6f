"""`ops/policy_loss.py` against a float64 loop over sequences; papers: tests/algorithms.

Not covered: races between warps that no order of whole threads shows, and the workspace of a
captured CUDA graph.
"""

import math

import pytest
import torch
from guard import guarded
from policy_cases import CLIPS, KLS, OBJECTIVES, WEIGHTS, exact, expected, make

from megarl.algorithms import losses
from megarl.algorithms.losses import Correction
from megarl.ops import library
from megarl.ops.library import op
from megarl.ops.policy_loss import policy_loss


def run(tokens, num_tokens, device="cpu", **options):
    """loss and metrics by name, and dlogp; on the CPU."""
    tokens = {k: x.to(device) for k, x in tokens.items()}
    leaf = tokens["logp"].clone().requires_grad_()
    out = policy_loss(
        **{**tokens, "logp": leaf},
        num_tokens=torch.tensor(float(num_tokens), device=device),
        **options,
    )
    out.loss.backward()
    return {
        k: x.detach().cpu() for k, x in {"loss": out.loss, **out.metrics}.items()
    }, leaf.grad.cpu()


def assert_close(got, want, backend):
    """Sums to `relative` of the sum of their terms' sizes, gradients to that of the largest."""
    # A gap of logprobs is rounded to 2^-24 of itself, exp adds 2 units in the last place, and two
    # or three factors follow: 5e-7 of a term. The reference also adds up in float32, by sequence.
    relative = 2e-5 if backend == "reference" else 1e-6
    (sums, grad), (want_grad, want_sums, sizes) = got, want
    assert sums.keys() == want_sums.keys()
    for name, value in sums.items():
        assert value.dtype == torch.float32
        assert abs(value.item() - want_sums[name]) <= relative * sizes[name], name
    assert (grad - want_grad).abs().max() <= relative * want_grad.abs().max()


@pytest.mark.parametrize("kl_name", KLS)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_combination(backend, device, objective, kl_name):
    tokens = make()
    index = list(OBJECTIVES).index(objective) + list(KLS).index(kl_name)
    for weight in range(len(WEIGHTS)):
        # The emulator takes 0.2 s a call: each weight with some of the objectives and KLs.
        if backend == "emu" and (weight + index) % 7:
            continue
        options, want = expected(objective, kl_name, weight)
        got = run(tokens, 2.5 * int(tokens["mask"].sum()), device, **options)
        assert_close(got, want, backend)
        assert (got[1][~tokens["mask"]] == 0).all()


def test_the_cases_see_every_branch():
    """Each metric is neither none nor all of its tokens somewhere, each weight drops some."""
    share = make()["mask"].sum() / (2.5 * make()["mask"].sum())
    for objective, name in [
        ("ppo", "clip_ratio"),
        ("ppo", "clip_high_ratio"),
        ("dual-clip", "dual_clip_ratio"),
        ("gspo", "clip_ratio"),
        ("gspo-dual-clip", "dual_clip_ratio"),
        ("cispo", "clip_ratio"),
    ]:
        assert 0 < expected(objective, "no-kl", 1)[1][1][name] < share
    for weight, options in enumerate(WEIGHTS):
        c = options.get("correction")
        if c and c.action == "mask":
            assert 0 < expected("ppo", "no-kl", weight)[1][1]["behave_masked"] < share, c


@pytest.mark.parametrize(("objective", "weight"), [("ppo", 2), ("ppo", 9), ("gspo", 2)])
def test_long_sequences_and_many_blocks(backend, device, objective, weight):
    """More threads a block, several stretches a thread, several blocks."""
    lengths = (4300, 5000)
    options, want = expected(objective, "k3", weight, lengths)
    tokens = make(lengths)
    assert_close(run(tokens, 2.5 * int(tokens["mask"].sum()), device, **options), want, backend)


def low_level(tokens, num_tokens, *, eps_clip_low, eps_clip_high, blocks=3, place=lambda x: x, **o):
    """dlogp, metrics, loss and workspace of the op itself, all memory by `place`."""
    c = o.get("correction") or Correction(upper=math.inf)
    settings = (
        *(eps_clip_low, eps_clip_high, ["ppo", "cispo"].index(o.get("objective", "ppo"))),
        *(o.get("c_clip") or 0.0, o.get("level") == "sequence", o.get("decoupled", True)),
        *(c.level == "sequence", c.action == "clamp", ["ratio", "k1", "k2", "k3"].index(c.metric)),
        *(["mean", "sum", "max"].index(c.agg), -math.inf if c.lower is None else c.lower),
        *(c.upper, o.get("kl_coef", 0.0), int(o.get("kl_estimator", "k3")[1])),
    )
    order = ("logp", "prox_logp", "behaviour_logp", "advantages", "ref_logp", "entropy")
    columns = [place(tokens[k]) for k in (*order, "mask", "cu_seqlens")]
    workspace = place(torch.zeros(1 + 12 * blocks, dtype=torch.float64))
    nan = [torch.full(shape, torch.nan) for shape in (tokens["logp"].shape, (11,), ())]
    dlogp, metrics, loss = (place(x) for x in nan)
    normaliser = place(torch.tensor(float(num_tokens)))
    op("policy_loss")(*columns, normaliser, *settings, workspace, dlogp, metrics, loss)
    return dlogp, metrics, loss, workspace


@pytest.mark.parametrize("objective", ["ppo", "gspo"])
@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_few_blocks_take_turns(emulated, objective, blocks):
    """Grids smaller than the work: as with over 1024 sequences or 262144 tokens."""
    lengths = (300, 20, 500, 1, 77)
    options, (want, want_sums, sizes) = expected(objective, "k2", 3, lengths)
    tokens = make(lengths)
    dlogp, _, loss, workspace = low_level(
        tokens, 2.5 * int(tokens["mask"].sum()), blocks=blocks, **options
    )
    assert workspace.view(torch.int64)[0] == 0, "the counter, for the next launch"
    assert (dlogp - want).abs().max() <= 1e-6 * want.abs().max()  # as in assert_close
    assert abs(loss.item() - want_sums["loss"]) <= 1e-6 * sizes["loss"]


@pytest.mark.parametrize("namespace", ["megarl", "megarl_emu"])
@pytest.mark.parametrize("at", ["end", "start"])
@pytest.mark.parametrize("objective", ["ppo", "gspo"])
@pytest.mark.parametrize("lengths", [(1,), (5, 0, 2), (255, 2), (256,), (300, 213)])
def test_no_access_outside_of_the_buffers(declared, namespace, at, objective, lengths):
    options, (want, want_sums, sizes) = expected(objective, "k1", 2, lengths)
    tokens = make(lengths)
    with library.ops_of(namespace):
        dlogp, _, loss, _ = low_level(
            tokens, 2.5 * int(tokens["mask"].sum()), place=lambda x: guarded(x, at), **options
        )
    assert (dlogp - want).abs().max() <= 1e-6 * want.abs().max()  # as in assert_close
    assert abs(loss.item() - want_sums["loss"]) <= 1e-6 * sizes["loss"]


@pytest.mark.parametrize("namespace", ["megarl", "megarl_emu"])
@pytest.mark.parametrize("bounds", [[0, 5, 9], [1, 5, 10], [-7, 5, 10], [0, 5, 11], [0, 90, 9]])
def test_sequences_that_are_not_all_of_the_tokens_give_nan(declared, namespace, bounds):
    """A GPU is not waited for to find out; the caller's check of the loss does."""
    tokens = {**make((4, 6)), "cu_seqlens": torch.tensor(bounds)}
    options = {**CLIPS, "level": "sequence"}
    with library.ops_of(namespace):
        _, metrics, loss, _ = low_level(tokens, 10, place=guarded, **options)
    assert loss.isnan()
    assert metrics.isnan().all()


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("weight", [0, 1, 7])
def test_the_same_bits_every_time(backend, device, monkeypatch, objective, weight):
    lengths = (40, 300, 3, 500)
    options, _ = expected(objective, "k3", weight, lengths)
    runs = []
    for seed in range(3):
        monkeypatch.setenv("MEGARL_EMU_SEED", str(seed))
        runs.append(run(make(lengths), 100, device, **options))
    for sums, grad in runs[1:]:
        assert torch.equal(grad, runs[0][1])
        assert all(torch.equal(x, runs[0][0][k]) for k, x in sums.items())


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("weight", [0, 1, 2, 10, 18])
def test_values_under_a_false_mask_are_not_used(backend, device, objective, weight):
    options, _ = expected(objective, "k3", weight)
    tokens, mask = make(), make()["mask"]
    holes = {
        k: torch.where(mask, x, torch.nan) if x.is_floating_point() else x
        for k, x in tokens.items()
    }
    want_sums, want = run(tokens, 100, device, **options)
    sums, grad = run(holes, 100, device, **options)
    assert torch.equal(grad, want)
    assert (grad[~mask] == 0).all()
    assert all(torch.equal(x, want_sums[k]) for k, x in sums.items())


def column(*values):
    return torch.tensor(values, dtype=torch.float32)


def of_columns(num=None, **columns):
    """One sequence; what is not given is 0."""
    num = num or len(next(iter(columns.values())))
    names = ("logp", "prox_logp", "behaviour_logp", "advantages", "ref_logp", "entropy")
    tokens = {name: torch.zeros(num) for name in names}
    ends = {"mask": torch.ones(num, dtype=torch.bool), "cu_seqlens": torch.tensor([0, num])}
    return {**tokens, **ends, **columns}


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("eps", [0.0, 0.2])
def test_where_both_sides_are_equal_the_gradient_is_whole(backend, device, objective, eps):
    """On-policy r = 1 exactly, even where 1 is the bound; and advantages of 0."""
    advantages = column(1.0, -1.0, 2.0, 0.0)
    tokens = of_columns(logp=column(-1, -2, -3, -4), prox_logp=column(-1, -2, -3, -4))
    tokens["advantages"] = advantages
    options = {**OBJECTIVES[objective], "eps_clip_low": eps, "eps_clip_high": eps}
    sums, grad = run(tokens, 4, device, decoupled=False, **options)
    mean = advantages.mean().expand(4) if "gspo" in objective else advantages
    assert torch.equal(grad, -mean / 4)
    assert sums["clip_ratio"] == 0
    assert sums["importance_weight"] == 1
    assert sums["kl"] == 0


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_the_clamp_of_the_kl_has_no_gradient(backend, device, kind):
    gaps = column(-2000.0, -50.0, -11.0, -0.5, 0.0, 0.5, 9.0, 9.999, 10.5, 50.0)
    tokens = of_columns(logp=gaps, prox_logp=gaps)
    sums, grad = run(tokens, 10, device, decoupled=False, kl_coef=1.0, kl_estimator=kind, **CLIPS)
    exact_gaps = gaps.double().requires_grad_()
    value = {
        "k1": exact_gaps,
        "k2": exact_gaps.square() / 2,
        "k3": torch.expm1(-exact_gaps.clamp(min=-20)) + exact_gaps,
    }[kind]
    is_inside = value.abs() <= 10
    (slope,) = torch.autograd.grad(value.sum(), exact_gaps)
    # expm1 of an argument up to 10 is good to 2 units in the last place.
    torch.testing.assert_close(
        grad, torch.where(is_inside, slope, 0.0).float() / 10, rtol=1e-6, atol=0
    )
    assert (grad[~is_inside] == 0).all()
    want = value.detach().clamp(-10, 10).mean().item()
    assert sums["ref_kl"].item() == pytest.approx(want, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_ratio_that_overflows_is_seen(backend, device, objective):
    """A gap of 100 nats; the caller's check of loss and gradient norm stops the run."""
    for sign in (1.0, -1.0):
        tokens = of_columns(logp=column(100.0, 100.0), advantages=column(sign, sign))
        options = {**CLIPS, **OBJECTIVES[objective], "decoupled": False}
        sums, grad = run(tokens, 2, device, **options)
        leaf = tokens["logp"].clone().requires_grad_()
        want = losses.policy_loss(**{**tokens, "logp": leaf}, num_tokens=torch.tensor(2), **options)
        want.loss.backward()
        assert sums["importance_weight"].isinf()
        assert torch.equal(sums["loss"].isfinite(), want.loss.isfinite())
        assert torch.equal(grad.isfinite(), leaf.grad.isfinite())
        assert grad.isfinite().all() == (objective == "cispo")


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_logprob_of_minus_infinity_says_nothing_of_the_weight(backend, device, level):
    inf = math.inf
    tokens = of_columns(advantages=column(1.0, 1.0), behaviour_logp=column(-inf, 0.0))
    sums, grad = run(tokens, 2, device, correction=Correction(level), **CLIPS)
    assert sums["behave_weight"] == 1
    assert torch.equal(grad, column(-0.5, -0.5))


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_nothing_under_the_mask(backend, device, level):
    tokens = {**make(), "mask": torch.zeros_like(make()["mask"])}
    options = {**CLIPS, "level": level, "correction": WEIGHTS[10]["correction"]}
    sums, grad = run(tokens, 7, device, **options)
    assert not grad.any()
    assert not any(x.item() for x in sums.values())
    # No token anywhere: 0 / 0, and still no gradient.
    sums, grad = run(tokens, 0, device, **options)
    assert not grad.any()
    assert sums["loss"].isnan()


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("lengths", [(), (0, 0), (1,)])
def test_few_tokens(backend, device, level, lengths):
    tokens = {**make(lengths)}
    tokens["mask"] = torch.ones_like(tokens["mask"])
    options = {**CLIPS, **KLS["k2"], "level": level, "decoupled": False}
    sums, grad = run(tokens, 2, device, **options)
    assert grad.shape == (sum(lengths),)
    if sum(lengths):
        assert grad.all()
        assert_close((sums, grad), exact(tokens, 2, **options), backend)
    else:
        assert not any(x.item() for x in sums.values())


def test_the_gradient_reaches_logp_only_and_is_scaled(backend, device):
    tokens = {k: x.to(device) for k, x in make().items()}
    columns = {k: x.clone() for k, x in tokens.items()}
    for x in columns.values():
        if x.is_floating_point():
            x.requires_grad_()
    options = {**CLIPS, "correction": WEIGHTS[2]["correction"], **KLS["k2"]}
    out = policy_loss(**columns, num_tokens=torch.tensor(100.0, device=device), **options)
    # As Megatron's schedule does; the metrics must not see it.
    before = {k: x.clone() for k, x in out.metrics.items()}
    loss = out.loss
    loss *= 3.0
    loss.backward()
    assert [k for k, x in columns.items() if x.grad is not None] == ["logp"]
    assert not any(x.requires_grad for x in out.metrics.values())
    assert all(torch.equal(x, before[k]) for k, x in out.metrics.items())
    _, want = run(make(), 100, device, **options)
    # One product more.
    torch.testing.assert_close(columns["logp"].grad.cpu(), 3 * want, rtol=2e-7, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_dtypes_and_strides(backend, device, dtype):
    """Columns are read as float32, contiguous; a count may be an integer."""
    tokens = make()
    want_sums, want = run(tokens, 100, device, **CLIPS)
    doubled = {
        k: x.to(dtype).repeat_interleave(2)[::2] if x.is_floating_point() else x
        for k, x in tokens.items()
    }
    doubled = {k: x.to(device) for k, x in doubled.items()}
    leaf = doubled["logp"].requires_grad_()
    spread = doubled["mask"].repeat_interleave(3)[::3]
    out = policy_loss(
        **{**doubled, "mask": spread}, num_tokens=torch.tensor(100, device=device), **CLIPS
    )
    (grad,) = torch.autograd.grad(out.loss, leaf)
    assert grad.dtype == dtype
    assert torch.equal(grad.float().cpu(), want)
    assert torch.equal(out.loss.detach().cpu(), want_sums["loss"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"advantages": torch.zeros(3)}, r"\[T\]"),
        ({"entropy": torch.zeros(3)}, r"\[T\]"),
        ({"logp": torch.zeros(2, dtype=torch.int64)}, "must be floats"),
        ({"mask": torch.ones(2)}, "mask must be bool"),
        ({"eps_clip_low": 1.0}, "eps_clip_low"),
        ({"c_clip": 0.5}, "c_clip > 1"),
        ({"objective": "cispo", "level": "sequence"}, "no sequence's ratio"),
        ({"kl_coef": 0.1}, "needs ref_logp"),
        ({"kl_estimator": "k4"}, "kl_estimator"),
        ({"cu_seqlens": torch.tensor([0, 2], dtype=torch.int32)}, r"\[n \+ 1\] int64"),
        ({"cu_seqlens": torch.zeros(0, dtype=torch.int64)}, r"\[n \+ 1\] int64"),
        ({"cu_seqlens": torch.tensor([0, 1])}, r"from 0 to 2 tokens, got \(0, 1\)"),
        ({"cu_seqlens": torch.tensor([1, 2])}, r"from 0 to 2 tokens, got \(1, 2\)"),
        ({"num_tokens": torch.ones(2)}, r"num_tokens must be \[\]"),
        ({"num_tokens": torch.ones((), device="meta")}, "one device"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    arguments = dict.fromkeys(("logp", "prox_logp", "behaviour_logp", "advantages"), torch.zeros(2))
    arguments |= {
        "mask": torch.ones(2, dtype=torch.bool),
        "cu_seqlens": torch.tensor([0, 2]),
        "num_tokens": torch.tensor(2.0),
        **CLIPS,
        **change,
    }
    with pytest.raises(ValueError, match=message):
        policy_loss(**arguments)


def test_compiled_code_takes_the_op():
    """torch.compile traces through without a graph break."""
    options, _ = expected("gspo", "k3", 7)
    tokens = make()

    @torch.compile(fullgraph=True, backend="eager")
    def loss_of(logp):
        return low_level({**tokens, "logp": logp}, 100, **options)[0]

    want = low_level(tokens, 100, **options)[0]
    assert torch.equal(loss_of(tokens["logp"]), want)
