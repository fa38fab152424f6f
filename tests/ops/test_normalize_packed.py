"""`ops/advantages.py`'s normalisation against sums without rounding."""

import math

import pytest
import torch
from guard import guarded
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megarl.algorithms.normalization import normalize
from megarl.ops.advantages import cu_seqlens_of_rows, normalize_packed
from megarl.ops.library import op

GRPO = {
    **{"mean_level": "group", "mean_leave1out": False, "std_level": "group"},
    **{"std_unbiased": True, "eps": 1e-5},
}
OPTIONS = [
    {"mean_level": mean, "mean_leave1out": leave, "std_level": std, "std_unbiased": unbiased}
    for mean in ("batch", "group", "none")
    for leave in (False, True)
    for std in ("batch", "group", "none")
    for unbiased in (False, True)
]


def make_groups(lengths, num_groups, seed=0):
    """x, mask, cu_seqlens, group_ids, num_groups: a group's sequences lie anywhere.

    A few tokens before and after them are of no sequence.
    """
    g = torch.Generator().manual_seed(seed)
    bounds = torch.tensor([3, *lengths]).cumsum(0)
    num_tokens = int(bounds[-1]) + 5
    mask = torch.rand(num_tokens, generator=g) < 0.7
    x = torch.where(mask, torch.randn(num_tokens, generator=g) + 3, torch.nan)
    ids = torch.randint(0, num_groups, (len(lengths),), generator=g)
    return x, mask, bounds, ids, num_groups


def exact_normalize(
    x, mask, bounds, ids, num_groups, *, mean_level, mean_leave1out, std_level, std_unbiased, eps
):
    """[T] float64, from the definition; sums without rounding."""
    group_of = {}
    for i in range(len(ids)):
        for t in range(int(bounds[i]), int(bounds[i + 1])):
            if mask[t]:
                group_of[t] = int(ids[i])
    values = {t: x[t].item() for t in group_of}
    members = {
        "batch": {k: list(group_of) for k in range(num_groups)},
        "group": {k: [t for t, of in group_of.items() if of == k] for k in range(num_groups)},
    }
    stds, totals = {}, {}
    for k in set(group_of.values()):
        if std_level != "none":
            of = [values[t] for t in members[std_level][k]]
            mean = math.fsum(of) / len(of)
            squares = math.fsum((v - mean) ** 2 for v in of)
            stds[k] = math.sqrt(squares / max(1, len(of) - int(std_unbiased)))
        if mean_level != "none":
            of = [values[t] for t in members[mean_level][k]]
            totals[k] = (math.fsum(of), len(of))
    out = torch.zeros(len(mask), dtype=torch.float64)
    for t, k in group_of.items():
        mean = 0.0
        if mean_level != "none":
            total, count = totals[k]
            if mean_leave1out:
                mean = (total - values[t]) / (count - 1) if count > 1 else 0.0
            else:
                mean = total / count
        std = stds.get(k, 0.0)
        out[t] = (values[t] - mean) / (std + eps if std else 1.0)
    return out


def on(device, batch):
    return [x.to(device) if isinstance(x, torch.Tensor) else x for x in batch]


def assert_normalized(got, want):
    """One rounding to float32; before it, the error of sums of a few thousand doubles."""
    assert got.dtype == torch.float32
    assert ((got.cpu().double() - want).abs() <= 2**-24 * want.abs() + 1e-11).all()


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(map(str, o.values())))
def test_normalize(backend, device, options):
    """Group 4 has no sequence, an empty sequence is in a group, one group has one token."""
    x, mask, bounds, _, _ = make_groups([5, 0, 1, 40, 3], 5)
    mask[bounds[2]] = True
    x[bounds[2]] = 0.7
    batch = (x, mask, bounds, torch.tensor([0, 3, 1, 3, 0]), 5)
    got = normalize_packed(*on(device, batch), eps=1e-3, **options)
    assert_normalized(got, exact_normalize(*batch, eps=1e-3, **options))


@pytest.mark.parametrize("level", ["batch", "group"])
@pytest.mark.parametrize("leave1out", [False, True])
def test_normalize_long_sequences(backend, device, level, leave1out):
    batch = make_groups([0, 1, 31, 32, 33, 255, 256, 257, 5000], 3)
    options = GRPO | {"mean_level": level, "std_level": level, "mean_leave1out": leave1out}
    got = normalize_packed(*on(device, batch), **options)
    assert_normalized(got, exact_normalize(*batch, **options))


def test_many_members_and_many_groups(backend, device):
    """More sequences of a group than a block has threads, and numbers by sequence."""
    g = torch.Generator().manual_seed(3)
    ids = torch.cat([torch.zeros(600, dtype=torch.int64), torch.randint(1, 9, (40,), generator=g)])
    ids = ids[torch.randperm(640, generator=g)]
    x = torch.randn(640, generator=g)
    batch = (x, torch.ones(640).bool(), torch.arange(641), ids, 9)
    got = normalize_packed(*on(device, batch), **GRPO)
    assert_normalized(got, exact_normalize(*batch, **GRPO))


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    value=st.floats(-(2.0**100), 2.0**100, width=32),
    sizes=st.lists(st.integers(1, 300), min_size=1, max_size=4),
    leave1out=st.booleans(),
    levels=st.sampled_from(
        [(a, b) for a in ("batch", "group") for b in ("batch", "group", "none")]
    ),
)
def test_equal_values_become_exactly_zero(backend, device, value, sizes, leave1out, levels):
    """Two tokens at least a group: alone and left out, a token keeps its value."""
    bounds = torch.tensor([0, *(n + 1 for n in sizes)]).cumsum(0)
    x = torch.full((int(bounds[-1]),), value)
    batch = (x, torch.ones_like(x).bool(), bounds, torch.arange(len(sizes)), len(sizes))
    options = GRPO | {
        "mean_level": levels[0],
        "std_level": levels[1],
        "mean_leave1out": leave1out,
    }
    got = normalize_packed(*on(device, batch), **options)
    assert torch.equal(got.cpu(), torch.zeros_like(x))


@pytest.mark.parametrize(
    ("change", "want"),
    [({}, 0.0), ({"mean_leave1out": True}, 0.7), ({"mean_level": "none"}, 0.7)],
)
def test_a_member_alone_is_not_divided_by_eps(backend, device, change, want):
    batch = (torch.tensor([0.7]), torch.tensor([True]), torch.arange(2), torch.tensor([1]), 2)
    got = normalize_packed(*on(device, batch), **(GRPO | change))
    assert got.item() == torch.tensor(want).item()


def over_replicas(function, num):
    """function(replica, all_reduce) of each, one after the other, and the sums they were given.

    Run again for each sum: only when all replicas have said what they add is it known.
    """
    sums = []
    while True:
        said = [[] for _ in range(num)]
        results = []
        for k in range(num):

            def all_reduce(x, mine=said[k]):
                mine.append(x.clone())
                return sums[len(mine) - 1] if len(mine) <= len(sums) else x

            results.append(function(k, all_reduce))
        if len(sums) == len(said[0]):
            return results, sums
        sums.append(sum(mine[len(sums)] for mine in said))


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 1000),
    levels=st.tuples(st.sampled_from(["batch", "group"]), st.sampled_from(["batch", "group"])),
    leave1out=st.booleans(),
)
def test_any_split_over_replicas_gives_the_same(backend, device, seed, levels, leave1out):
    lengths = [5, 1, 0, 20, 7, 3, 9]
    x, mask, bounds, ids, num_groups = make_groups(lengths, 3, seed)
    home = torch.randint(0, 3, (7,), generator=torch.Generator().manual_seed(seed))
    options = GRPO | {
        "mean_level": levels[0],
        "std_level": levels[1],
        "mean_leave1out": leave1out,
    }
    rows = [torch.arange(bounds[i], bounds[i + 1]) for i in range(7)]

    def share(which):
        mine = [i for i in range(7) if which in (None, home[i])]
        at = torch.cat([rows[i] for i in mine] or [torch.arange(0)])
        part_bounds = torch.tensor([0, *(lengths[i] for i in mine)]).cumsum(0)
        return at, (x[at], mask[at], part_bounds, ids[mine], num_groups)

    def function(which, all_reduce):
        at, part = share(which)
        return at, normalize_packed(*on(device, part), **options, all_reduce=all_reduce).cpu()

    parts, sums = over_replicas(function, 3)
    (whole,), whole_sums = over_replicas(lambda _, reduce: function(None, reduce), 1)
    assert [s.shape for s in sums] == [(2, 3), (3,)]
    for a, b in zip(sums, whole_sums, strict=True):
        # float64: the order of at most 45 terms differs
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    got = torch.zeros(len(x))
    for at, values in parts:
        got[at] = values
    want = torch.zeros(len(x))
    want[whole[0]] = whole[1]
    torch.testing.assert_close(got, want, rtol=2**-22, atol=1e-11)


@pytest.mark.parametrize("std_level", ["batch", "none"])
def test_the_same_as_normalize_of_padded_rows(backend, device, std_level):
    g = torch.Generator().manual_seed(4)
    x, mask = torch.randn(6, 15, generator=g), torch.rand(6, 15, generator=g) < 0.6
    ids = torch.tensor([2, 0, 2, 1, 1, 0])
    options = GRPO | {"std_level": std_level}
    want = normalize(x, mask, ids[:, None].expand(6, 15), 3, **options)
    flat = (x.flatten(), mask.flatten(), cu_seqlens_of_rows(x), ids, 3)
    got = normalize_packed(*on(device, flat), **options).cpu().view(6, 15)
    # Sums of another order, then one rounding.
    torch.testing.assert_close(got, want, rtol=2**-22, atol=1e-11)


def test_no_sequence_and_no_token(backend, device):
    nothing = (torch.zeros(0), torch.zeros(0).bool(), torch.zeros(1).long(), torch.zeros(0).long())
    assert normalize_packed(*on(device, nothing), 2, **GRPO).shape == (0,)
    batch = (torch.ones(3), torch.ones(3).bool(), torch.zeros(3).long(), torch.zeros(2).long(), 1)
    assert not normalize_packed(*on(device, batch), **GRPO).any()


def test_the_same_bits_every_time(backend, device, monkeypatch):
    batch = on(device, make_groups([1500, 700, 1, 40], 2))
    runs = []
    for seed in range(3):
        monkeypatch.setenv("MEGARL_EMU_SEED", str(seed))
        runs.append(normalize_packed(*batch, **GRPO))
    assert all(torch.equal(runs[0], other) for other in runs[1:])


@pytest.mark.parametrize("at", ["end", "start"])
@pytest.mark.parametrize("length", [1, 5, 8, 1021, 1027])
def test_no_access_outside_of_the_buffers(emulated, at, length):
    """Buffers of exactly the tokens."""
    bounds, mask = torch.tensor([0, length // 2, length]), torch.ones(length).bool()
    x = torch.randn(length, generator=torch.Generator().manual_seed(0))
    columns = (x, mask, bounds, torch.zeros(2).long(), torch.arange(2), torch.tensor([0, 2]))
    *shared, members, offsets = (guarded(c, at) for c in columns)
    ones = [guarded(torch.ones(1).double(), at) for _ in range(3)]
    partials, sums = (guarded(torch.full((2, n), torch.nan).double(), at) for n in (2, 1))
    for centres, terms in ((None, x.double()), (ones[0], (x.double() - 1).square())):
        op("group_sums")(*shared, members, offsets, centres, partials, sums)
        # float64, at most 1027 terms
        torch.testing.assert_close(sums[:, 0], torch.stack([mask.sum(), terms.sum()]).double())
    for leave1out, want in ((False, x - 1), (True, 2 * x.double() - 1)):
        out = guarded(torch.full((length,), torch.nan), at)
        op("group_normalize")(*shared, *ones, leave1out, out)
        torch.testing.assert_close(out.double(), want.double(), rtol=2**-23, atol=2**-23)


def test_wrong_bounds_and_groups_stay_inside(backend, device):
    """On a GPU their values are not looked at before a launch."""
    if backend == "reference":
        pytest.skip("torch's indexing raises")
    bounds, ids = torch.tensor([-4, 3, 99], device=device), torch.tensor([-1, 1], device=device)
    x, out = (guarded(torch.ones(8)).to(device) for _ in range(2))
    mask = guarded(torch.ones(8).bool()).to(device)
    one = torch.ones(1, device=device).double()
    partials, sums = one.new_zeros(2, 2), one.new_ones(2, 1)
    members, offsets = torch.arange(2, device=device), torch.tensor([1, 1], device=device)
    for centres in (None, one):
        op("group_sums")(x, mask, bounds, ids, members, offsets, centres, partials, sums)
        assert partials[:, 0].tolist() == [3, 5]
        assert not sums.any()
    op("group_normalize")(x, mask, bounds, ids, one, one, one, False, out)
    assert out.isnan().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(5, 1)}, r"x must be \[5\] torch.float32, got \[5, 1\]"),
        ({"mask": torch.zeros(5).long()}, "mask must be"),
        ({"cu_seqlens": torch.tensor([0.0, 5.0])}, "cu_seqlens must be"),
        ({"cu_seqlens": torch.tensor([0, 7])}, r"ascend in \[0, 5\]"),
        ({"group_ids": torch.zeros(2).long()}, r"group_ids must be \[1\]"),
        ({"group_ids": torch.tensor([2])}, r"group_ids must be in \[0, 2\), got 2 to 2"),
        ({"group_ids": torch.tensor([-1])}, r"group_ids must be in \[0, 2\)"),
        ({"group_ids": torch.zeros(1, device="meta").long()}, "one device"),
        ({"mean_level": "token"}, "mean_level must be batch, group or none, got 'token'"),
        ({"std_level": "token"}, "std_level must be"),
    ],
)
def test_wrong_arguments_of_normalize_are_named(change, message):
    arguments = {
        **{"x": torch.zeros(5), "mask": torch.ones(5).bool(), "cu_seqlens": torch.tensor([0, 5])},
        **{"group_ids": torch.zeros(1).long(), "num_groups": 2},
        **GRPO,
    }
    with pytest.raises(ValueError, match=message):
        normalize_packed(**(arguments | change))


def test_results_stay_on_the_device_of_the_arguments(backend, device):
    """A tensor made on the default device instead would be a meta tensor, and raise."""
    batch = on(device, make_groups([9, 3], 2))
    with torch.device("meta"):
        got = normalize_packed(*batch, **GRPO)
    assert got.device.type == device.type
    # An op with one meta tensor among its arguments does nothing, without an error.
    assert torch.equal(got, normalize_packed(*batch, **GRPO))
