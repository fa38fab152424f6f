"""Tokens and settings of the policy loss, and a float64 loop over sequences that it must equal."""

import functools
import itertools
import math

import torch

from megarl.algorithms.losses import Correction

CLIPS = {"eps_clip_low": 0.2, "eps_clip_high": 0.28}
LENGTHS = (67, 0, 1, 33, 9, 190)
OBJECTIVES = {
    "ppo": {},
    "dual-clip": {"c_clip": 1.5},
    "gspo": {"level": "sequence"},
    "gspo-dual-clip": {"level": "sequence", "c_clip": 1.1},
    "cispo": {"objective": "cispo"},
}
KLS = {"no-kl": {}} | {k: {"kl_coef": 0.3, "kl_estimator": k} for k in ("k1", "k2", "k3")}
BOUNDS = {"upper": 1.4, "lower": 0.7}
WEIGHTS = [
    {"decoupled": False},
    {"decoupled": True},
    {"correction": Correction("token", "clamp", **BOUNDS)},
    *(
        {"correction": Correction("token", "mask", m, **BOUNDS)}
        for m in ("ratio", "k1", "k2", "k3")
    ),
    *(
        {"correction": Correction("sequence", "clamp", "ratio", a, **BOUNDS)}
        for a in ("mean", "sum")
    ),
    {"correction": Correction("sequence", "clamp", "ratio", "max", upper=5.0)},
    # Bounds under which one of LENGTHS is kept and another is dropped.
    *(
        {"correction": Correction("sequence", "mask", metric, agg, upper=upper, lower=lower)}
        for metric, agg, upper, lower in [
            ("ratio", "mean", 1.1, None),
            ("ratio", "sum", 20.0, 1e-9),
            ("ratio", "max", 4.0, None),
            ("k1", "mean", 0.02, -0.1),
            ("k1", "sum", 1.0, None),
            ("k1", "max", 1.2, None),
            ("k2", "mean", 0.2, None),
            ("k2", "sum", 8.0, 0.1),
            ("k2", "max", 1.1, 0.01),
            ("k3", "mean", 0.2, None),
            ("k3", "sum", 10.0, 0.1),
            ("k3", "max", 2.0, 0.01),
        ]
    ),
]


@functools.cache
def make(lengths=LENGTHS, seed=0):
    """Columns of float32, the mask and cu_seqlens; nothing is masked in the fifth sequence."""
    g = torch.Generator().manual_seed(seed)
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    num = int(bounds[-1])

    def noise():
        return 0.6 * torch.randn(num, generator=g)

    behaviour = -3 * torch.rand(num, generator=g)
    prox = behaviour + noise()
    mask = torch.rand(num, generator=g) < 0.7
    if len(lengths) > 4:
        mask[bounds[4] : bounds[5]] = False
    # So that the mean ratio of a sequence is not near 1, nor its mean advantage near 0.
    drift, lift = (
        torch.tensor(x).repeat(len(lengths))[: len(lengths)].repeat_interleave(bounds.diff())
        for x in ([0.3, -0.4, 0.5, 0.3], [0.3, 0.0, 0.0, -0.6])
    )
    return {
        "logp": prox + noise() + drift,
        "prox_logp": prox,
        "behaviour_logp": behaviour,
        "advantages": torch.randn(num, generator=g) + lift,
        "ref_logp": prox + noise(),
        "entropy": torch.rand(num, generator=g),
        "mask": mask,
        "cu_seqlens": bounds,
    }


def kl(kind, gap):
    value = {"k1": gap, "k2": gap.square() / 2, "k3": torch.expm1(-gap) + gap}[kind]
    return value.clamp(-10, 10)


def exact_weight(log_w, c):
    """w after bounds, of the masked tokens of one sequence."""
    if c is None:
        return log_w.exp()
    aggregate = {"mean": torch.mean, "sum": torch.sum, "max": torch.max}[c.agg]
    if c.metric == "ratio":
        if c.level == "sequence":
            log_w = aggregate(log_w).expand_as(log_w)
        measured = log_w.exp()
    else:
        measured = kl(c.metric, -log_w)
        if c.level == "sequence":
            measured = aggregate(measured).expand_as(log_w)
    if c.action == "clamp":
        return log_w.exp().clamp(c.lower or 0, c.upper)
    lower = -math.inf if c.lower is None else c.lower
    return torch.where((measured >= lower) & (measured <= c.upper), log_w.exp(), 0.0)


def exact(
    tokens,
    num_tokens,
    *,
    eps_clip_low,
    eps_clip_high,
    objective="ppo",
    c_clip=None,
    level="token",
    decoupled=True,
    correction=None,
    kl_coef=0.0,
    kl_estimator="k3",
):
    """dlogp, sums of terms by name ("loss" and the metrics), and sums of their sizes."""
    leaf = tokens["logp"].double().requires_grad_()
    columns = {k: x.double() for k, x in tokens.items() if x.is_floating_point()}
    terms = {}

    def add(name, x):
        terms.setdefault(name, []).append(x.double())

    for begin, end in itertools.pairwise(tokens["cu_seqlens"].tolist()):
        rows = begin + tokens["mask"][begin:end].nonzero()[:, 0]
        if not len(rows):
            continue
        logp = leaf[rows]
        prox, behaviour, a, ref, entropy = (
            columns[k][rows]
            for k in ("prox_logp", "behaviour_logp", "advantages", "ref_logp", "entropy")
        )
        log_ratio = logp - prox
        if level == "sequence":
            log_ratio, a = log_ratio.mean().expand_as(a), a.mean().expand_as(a)
        r = log_ratio.exp()
        held = r.detach().clamp(1 - eps_clip_low, 1 + eps_clip_high)
        if objective == "cispo":
            value, is_clipped = -a * held * logp, held != r.detach()
            is_dual = torch.zeros_like(is_clipped)
        else:
            is_clipped = -a * held > -a * r
            value = torch.where(is_clipped, -a * held, -a * r)
            is_dual = (a < 0) & (value > -c_clip * a) if c_clip else torch.zeros_like(is_clipped)
            value = torch.where(is_dual, -(c_clip or 0) * a, value)
            is_clipped = is_clipped & ~is_dual
        if decoupled:
            w = exact_weight(prox - behaviour, correction)
            value = value * w
            add("behave_weight", w)
            add("behave_weight_sq", w.square())
            add("behave_masked", w == 0)
            add("behave_kl", kl("k3", behaviour - prox))
        if kl_coef:
            add("ref_kl", kl(kl_estimator, logp - ref))
            value = value + kl_coef * terms["ref_kl"][-1]
        add("loss", value)
        add("importance_weight", r)
        add("clip_ratio", is_clipped)
        add("clip_high_ratio", is_clipped & (r > 1 + eps_clip_high))
        add("dual_clip_ratio", is_dual)
        add("kl", kl("k3", (behaviour if decoupled else prox) - logp))
        add("entropy", entropy)
    sums = {k: torch.cat(x).sum() / num_tokens for k, x in terms.items()}
    sizes = {k: torch.cat(x).abs().sum().item() / num_tokens for k, x in terms.items()}
    (grad,) = torch.autograd.grad(sums["loss"], leaf)
    return grad, {k: x.item() for k, x in sums.items()}, sizes


@functools.cache
def expected(objective, kl_name, weight, lengths=LENGTHS):
    options = {**CLIPS, **OBJECTIVES[objective], **KLS[kl_name], **WEIGHTS[weight]}
    tokens = make(lengths)
    # N counts the tokens of other micro-batches too.
    return options, exact(tokens, 2.5 * int(tokens["mask"].sum()), **options)
