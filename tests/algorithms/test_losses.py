"""`algorithms/losses.py` against a scalar float64 loop written from the papers."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms.losses import Correction, policy_loss, sft_loss
from megarl.config.schema import PPOActorConfig
from megarl.errors import ConfigError

LENGTHS = [9, 1, 14, 5, 20]
CLIPS = {"eps_clip_low": 0.2, "eps_clip_high": 0.28}


def make_tokens(seed=0, spread=0.6):
    g = torch.Generator().manual_seed(seed)
    num = sum(LENGTHS)

    def noise():
        return spread * torch.randn(num, generator=g, dtype=torch.float64)

    behaviour = -3 * torch.rand(num, generator=g, dtype=torch.float64)
    prox = behaviour + noise()
    mask = torch.rand(num, generator=g) < 0.7
    mask[LENGTHS[0]] = False  # the sequence of one token has no masked token
    return {
        "logp": prox + noise(),
        "prox_logp": prox,
        "behaviour_logp": behaviour,
        "advantages": torch.randn(num, generator=g, dtype=torch.float64),
        "mask": mask,
        "cu_seqlens": torch.tensor([0, *itertools.accumulate(LENGTHS)]),
        "ref_logp": prox + noise(),
    }


def kl(kind, p, q):
    d = p - q
    value = {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[kind]
    return max(-10.0, min(10.0, value))


def reference(
    tokens,
    *,
    level,
    decoupled,
    correction,
    c_clip,
    kl_coef,
    kl_estimator,
    objective="ppo",
    held_at=None,
    **clips,
):
    """One token at a time. Slow on purpose: no shared code.

    held_at: logprobs in the ratios of cispo, which are not differentiated; None is `tokens`'.
    """
    held_at = tokens["logp"].tolist() if held_at is None else held_at.tolist()
    columns = {k: v.tolist() for k, v in tokens.items()}
    bounds = columns.pop("cu_seqlens")
    total, count = 0.0, sum(columns["mask"])
    for start, stop in itertools.pairwise(bounds):
        rows = [i for i in range(start, stop) if columns["mask"][i]]
        if not rows:
            continue
        gaps = {i: columns["logp"][i] - columns["prox_logp"][i] for i in rows}
        advantages = {i: columns["advantages"][i] for i in rows}
        if level == "sequence":
            gaps = dict.fromkeys(rows, sum(gaps.values()) / len(rows))
            advantages = dict.fromkeys(rows, sum(advantages.values()) / len(rows))
        weights = {i: columns["prox_logp"][i] - columns["behaviour_logp"][i] for i in rows}
        for i in rows:
            r, a = math.exp(gaps[i]), advantages[i]
            low, high = 1 - clips["eps_clip_low"], 1 + clips["eps_clip_high"]
            value = max(-a * r, -a * min(max(r, low), high))
            if objective == "cispo":
                weight = math.exp(held_at[i] - columns["prox_logp"][i])
                value = -min(max(weight, low), high) * a * columns["logp"][i]
            if c_clip is not None and a < 0:
                value = min(value, -c_clip * a)
            if decoupled:
                value *= weight_of(i, weights, correction)
            if kl_coef:
                value += kl_coef * kl(kl_estimator, columns["logp"][i], columns["ref_logp"][i])
            total += value
    return total / count


def weight_of(i, log_weights, c):
    if c is None:
        return math.exp(log_weights[i])
    values = list(log_weights.values())
    aggregate = {"mean": sum(values) / len(values), "sum": sum(values), "max": max(values)}
    if c.metric == "ratio":
        shared = aggregate[c.agg] if c.level == "sequence" else log_weights[i]
        weight = measured = math.exp(shared)
    else:
        weight = math.exp(log_weights[i])
        estimates = [kl(c.metric, 0.0, x) for x in values]
        at_level = {
            "mean": sum(estimates) / len(estimates),
            "sum": sum(estimates),
            "max": max(estimates),
        }
        measured = at_level[c.agg] if c.level == "sequence" else kl(c.metric, 0.0, log_weights[i])
    lower = -math.inf if c.lower is None else c.lower
    if c.action == "clamp":
        return min(max(weight, lower), c.upper)
    return weight if lower <= measured <= c.upper else 0.0


PLAIN = {
    "level": "token",
    "decoupled": False,
    "correction": None,
    "c_clip": None,
    "kl_coef": 0.0,
    "kl_estimator": "k3",
}
VARIANTS = {
    "ppo": {},
    "gspo": {"level": "sequence"},
    "dual-clip": {"c_clip": 1.5},
    "decoupled": {"decoupled": True},
    "decoupled-gspo": {"decoupled": True, "level": "sequence"},
    "cispo": {"objective": "cispo"},
    "cispo-without-lower-bound": {"objective": "cispo", "eps_clip_low": 1.0},
    "cispo-decoupled-kl": {
        **{"objective": "cispo", "decoupled": True, "kl_coef": 0.3},
        "correction": Correction(upper=1.4, lower=0.7),
    },
    "kl-k1": {"kl_coef": 0.3, "kl_estimator": "k1"},
    "kl-k2": {"kl_coef": 0.3, "kl_estimator": "k2"},
    "kl-k3": {"kl_coef": 0.3, "kl_estimator": "k3"},
} | {
    f"{level}-{action}-{metric}-{agg}": {
        "decoupled": True,
        "correction": Correction(level, action, metric, agg, upper=1.4, lower=0.7),
    }
    for level, action, metric, agg in [
        ("token", "mask", "ratio", "mean"),
        ("token", "clamp", "ratio", "mean"),
        ("sequence", "mask", "ratio", "mean"),
        ("sequence", "clamp", "ratio", "sum"),
        ("sequence", "mask", "ratio", "max"),
        ("token", "mask", "k1", "mean"),
        ("token", "mask", "k2", "mean"),
        ("sequence", "mask", "k3", "sum"),
        ("sequence", "mask", "k2", "max"),
    ]
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("seed", range(3))
def test_value_and_gradient_match_the_papers(variant, seed):
    options = {**PLAIN, **CLIPS, **VARIANTS[variant]}
    tokens = make_tokens(seed)
    num_tokens = tokens["mask"].sum()
    logp = tokens["logp"].clone().requires_grad_()
    got = policy_loss(**{**tokens, "logp": logp}, num_tokens=num_tokens, **options)
    # float32 sums of 49 terms of size about 1.
    assert got.loss.item() == pytest.approx(reference(tokens, **options), rel=1e-5, abs=1e-6)

    got.loss.backward()
    assert not logp.grad[~tokens["mask"]].any()
    step = 1e-6
    for i in tokens["mask"].nonzero()[::7, 0].tolist():
        ends = []
        for sign in (1, -1):
            moved = tokens["logp"].clone()
            moved[i] += sign * step
            ends.append(reference({**tokens, "logp": moved}, held_at=tokens["logp"], **options))
        # A central difference of step 1e-6 in float64 is good to about 1e-8.
        slope = (ends[0] - ends[1]) / (2 * step)
        assert logp.grad[i].item() == pytest.approx(slope, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
@given(cuts=st.sets(st.integers(1, len(LENGTHS) - 1)))
def test_micro_batches_add_up(variant, cuts):
    """The contract the engine leans on: cutting between sequences changes nothing."""
    options = {**PLAIN, **CLIPS, **VARIANTS[variant]}
    tokens = make_tokens()
    num_tokens = tokens["mask"].sum()
    starts = tokens["cu_seqlens"]

    def loss_and_grad(edges):
        logp = tokens["logp"].clone().requires_grad_()
        total, metrics = 0.0, {}
        for first, last in itertools.pairwise(edges):
            rows = slice(int(starts[first]), int(starts[last]))
            part = {k: v[rows] for k, v in tokens.items() if k not in ("cu_seqlens", "logp")}
            bounds = starts[first : last + 1] - starts[first]
            out = policy_loss(
                logp[rows], **part, cu_seqlens=bounds, num_tokens=num_tokens, **options
            )
            total = total + out.loss
            for name, value in out.metrics.items():
                metrics[name] = metrics.get(name, 0.0) + value.item()
        total.backward()
        return total.detach(), logp.grad, metrics

    whole = loss_and_grad([0, len(LENGTHS)])
    cut = loss_and_grad([0, *sorted(cuts), len(LENGTHS)])
    # float32 sums in another order.
    torch.testing.assert_close(cut[0], whole[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(cut[1], whole[1], rtol=1e-5, atol=1e-7)
    assert cut[2] == pytest.approx(whole[2], rel=1e-4, abs=1e-5)


def test_a_decoupled_loss_keeps_its_behaviour_weight_without_a_correction():
    one = torch.ones(1)
    out = policy_loss(
        torch.zeros(1),
        torch.zeros(1),
        torch.tensor([-math.log(3.0)]),
        one,
        one.bool(),
        torch.tensor([0, 1]),
        num_tokens=torch.tensor(1),
        decoupled=True,
        correction=None,
        **CLIPS,
    )
    assert out.loss.item() == pytest.approx(-3.0)
    assert out.metrics["behave_weight"].item() == pytest.approx(3.0)


def test_gradient_is_zero_exactly_where_clipped():
    # r = 2 everywhere: past 1 + eps_high, so only a negative advantage keeps its gradient.
    logp = torch.full((2,), math.log(2.0), requires_grad=True)
    out = policy_loss(
        logp,
        torch.zeros(2),
        torch.zeros(2),
        torch.tensor([1.0, -1.0]),
        torch.ones(2, dtype=torch.bool),
        torch.tensor([0, 2]),
        num_tokens=torch.tensor(2),
        decoupled=False,
        **CLIPS,
    )
    out.loss.backward()
    torch.testing.assert_close(logp.grad, torch.tensor([0.0, 1.0]))  # -A r / N = 1 * 2 / 2
    assert out.metrics["clip_ratio"].item() == 0.5


def test_every_token_keeps_its_gradient_under_cispo():
    # r = 2, 1 and 1/2 between the bounds 0.8 and 1.28, and an advantage of either sign.
    logp = torch.tensor([2.0, 1.0, 0.5, 2.0, 0.5]).log().requires_grad_()
    advantages = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0])
    out = policy_loss(
        logp,
        torch.zeros(5),
        torch.zeros(5),
        advantages,
        torch.ones(5, dtype=torch.bool),
        torch.tensor([0, 5]),
        num_tokens=torch.tensor(5),
        objective="cispo",
        decoupled=False,
        **CLIPS,
    )
    out.loss.backward()
    weights = torch.tensor([1.28, 1.0, 0.8, 1.28, 0.8])
    torch.testing.assert_close(logp.grad, -weights * advantages / 5)
    assert out.metrics["clip_ratio"].item() == pytest.approx(4 / 5)
    assert out.metrics["clip_high_ratio"].item() == pytest.approx(2 / 5)


@pytest.mark.parametrize("decoupled", [False, True])
def test_metrics_are_means_over_the_masked_tokens(decoupled):
    tokens = make_tokens()
    bounds = Correction(upper=1.4, lower=0.7)
    got = policy_loss(
        **tokens,
        num_tokens=tokens["mask"].sum(),
        **CLIPS,
        c_clip=1.5,
        decoupled=decoupled,
        correction=bounds,
        kl_coef=0.1,
        kl_estimator="k2",
        entropy=-tokens["logp"],
    ).metrics
    sums = dict.fromkeys(got, 0.0)
    names = ("logp", "prox_logp", "behaviour_logp", "advantages", "ref_logp", "mask")
    for logp, prox, behaviour, a, ref, keep in zip(
        *(tokens[name].tolist() for name in names), strict=True
    ):
        if not keep:
            continue
        r = math.exp(logp - prox)
        dual = a < 0 and r > 1.5
        sums["importance_weight"] += r
        sums["clip_ratio"] += (a > 0 and r > 1.28) or (a < 0 and r < 0.8)
        sums["clip_high_ratio"] += a > 0 and r > 1.28
        sums["dual_clip_ratio"] += dual
        sums["entropy"] -= logp
        sums["kl"] += kl("k3", behaviour if decoupled else prox, logp)
        sums["ref_kl"] += kl("k2", logp, ref)
        if decoupled:
            weight = math.exp(prox - behaviour)
            dropped = not 0.7 <= weight <= 1.4
            sums["behave_weight"] += 0.0 if dropped else weight
            sums["behave_weight_sq"] += 0.0 if dropped else weight**2
            sums["behave_masked"] += dropped
            sums["behave_kl"] += kl("k3", behaviour, prox)
    count = int(tokens["mask"].sum())
    want = {name: total / count for name, total in sums.items()}
    assert all(want.values())  # each of them is seen at work
    # float32 sums of 49 terms
    assert {k: x.item() for k, x in got.items()} == pytest.approx(want, rel=1e-4)


def test_the_gradient_reaches_logp_only():
    tokens = make_tokens()
    columns = {k: x.requires_grad_() for k, x in tokens.items() if x.is_floating_point()}
    options = {"decoupled": True, "correction": Correction(action="clamp"), "kl_coef": 0.1}
    policy_loss(**tokens, num_tokens=tokens["mask"].sum(), **CLIPS, **options).loss.backward()
    assert [name for name, x in columns.items() if x.grad is not None] == ["logp"]


def test_values_under_a_false_mask_may_be_nan():
    tokens = make_tokens()
    options = {**PLAIN, **VARIANTS["sequence-mask-ratio-mean"], **CLIPS, "kl_coef": 0.1}
    num_tokens = tokens["mask"].sum()
    want = policy_loss(**tokens, num_tokens=num_tokens, **options).loss
    holes = {
        k: torch.where(tokens["mask"], v, torch.nan)
        for k, v in tokens.items()
        if k not in ("mask", "cu_seqlens")
    }
    holes["logp"].requires_grad_()
    got = policy_loss(**{**tokens, **holes}, num_tokens=num_tokens, **options).loss
    assert torch.equal(got, want)
    got.backward()
    assert holes["logp"].grad.isfinite().all()


def test_clamping_what_is_not_a_ratio_is_refused():
    with pytest.raises(ValueError, match="not metric 'k2'"):
        Correction(action="clamp", metric="k2")


def test_sft_loss_is_the_mean_negative_logprob():
    logp = torch.tensor([-1.0, -2.0, torch.nan, -4.0], requires_grad=True)
    mask = torch.tensor([True, True, False, True])
    loss = sft_loss(logp, mask, num_tokens=torch.tensor(6)).loss
    assert loss.item() == pytest.approx(7 / 6)
    loss.backward()
    torch.testing.assert_close(logp.grad, torch.tensor([-1 / 6, -1 / 6, 0.0, -1 / 6]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"advantages": torch.zeros(3)}, r"\[T\]"),
        ({"mask": torch.ones(2)}, "mask must be bool"),
        ({"eps_clip_low": 1.0}, "eps_clip_low"),
        ({"c_clip": 0.5}, "c_clip > 1"),
        ({"kl_coef": 0.1}, "needs ref_logp"),
        ({"kl_coef": -0.1}, "must be >= 0"),
        ({"objective": "reinforce"}, "objective must be ppo or cispo"),
        ({"level": "batch"}, "level token or sequence"),
        ({"objective": "cispo", "eps_clip_low": 1.5}, "eps_clip_low"),
        ({"objective": "cispo", "c_clip": 3.0}, "no dual clip"),
        ({"objective": "cispo", "level": "sequence"}, "no sequence's ratio"),
        ({"entropy": torch.zeros(3)}, r"\[T\]"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    arguments = dict.fromkeys(("logp", "prox_logp", "behaviour_logp", "advantages"), torch.zeros(2))
    arguments |= {
        "mask": torch.ones(2, dtype=torch.bool),
        "cu_seqlens": torch.tensor([0, 2]),
        "num_tokens": torch.tensor(2),
        **CLIPS,
        **change,
    }
    with pytest.raises(ValueError, match=message):
        policy_loss(**arguments)


CISPO = {"objective": "cispo", "path": "model"}


@pytest.mark.parametrize(
    "change",
    [
        {"c_clip": 3.0},
        {"importance_sampling_level": "sequence"},
        {"eps_clip": 1.0},
        {"eps_clip": 1.5, "eps_clip_higher": 4.0},
        {"objective": "ppo", "eps_clip": 1.0, "eps_clip_higher": 4.0},
    ],
)
def test_a_config_that_the_objective_has_no_meaning_for_is_refused(change):
    with pytest.raises(ConfigError, match=r"objective: cispo|eps_clip: must be in \[0, 1\)"):
        PPOActorConfig(**{**CISPO, **change})


def test_a_config_of_cispo_may_have_no_lower_bound():
    assert PPOActorConfig(**CISPO, eps_clip=1.0, eps_clip_higher=4.0).eps_clip == 1
