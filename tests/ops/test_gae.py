"""`ops/advantages.py`'s GAE against sequential loops in float64.

Not covered: races between warps that no order of whole threads shows.
"""

import pytest
import torch
from guard import guarded

from megarl.algorithms import advantages as algorithm
from megarl.ops.advantages import cu_seqlens_of_rows, gae
from megarl.ops.library import op

LENGTHS = [0, 1, 31, 32, 33, 255, 256, 257, 5000]
BEFORE, AFTER = 3, 5  # tokens of no sequence; sequences then begin at every alignment
DISCOUNTS = [0.0, 0.5, 0.95, 1.0]


def make(lengths=LENGTHS, density=0.6, seed=0):
    """rewards, values, mask, cu_seqlens, no_eos; nan wherever nothing may be read."""
    g = torch.Generator().manual_seed(seed)
    bounds = torch.tensor([BEFORE, *lengths]).cumsum(0)
    num_tokens = int(bounds[-1]) + AFTER
    mask = torch.rand(num_tokens, generator=g) < density
    no_eos = torch.arange(len(lengths)) % 3 > 0
    rewards = torch.where(mask, torch.randn(num_tokens, generator=g), torch.nan)
    values = torch.randn(num_tokens, generator=g)
    is_used = mask.clone()
    for begin, end, cut in zip(bounds[:-1], bounds[1:], no_eos, strict=True):
        steps = mask[begin:end].nonzero()[:, 0]
        if cut and len(steps) and begin + steps[-1] + 1 < end:
            is_used[begin + steps[-1] + 1] = True
    return rewards, torch.where(is_used, values, torch.nan), mask, bounds, no_eos


def exact_gae(rewards, values, mask, bounds, no_eos, gamma, lam):
    """A [T], A + V [T], and the sum of what was added up, without its signs, [T]."""
    r, v, m = rewards.tolist(), values.tolist(), mask.tolist()
    out = [[0.0] * len(m) for _ in range(3)]
    for i, (begin, end) in enumerate(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)):
        steps = [t for t in range(begin, end) if m[t]]
        value = v[steps[-1] + 1] if steps and no_eos[i] and steps[-1] + 1 < end else 0.0
        advantage = size = 0.0
        for t in reversed(steps):
            advantage = r[t] + gamma * value - v[t] + gamma * lam * advantage
            size = abs(r[t]) + gamma * abs(value) + abs(v[t]) + gamma * lam * size
            value = v[t]
            out[0][t], out[1][t], out[2][t] = advantage, advantage + value, size
    return [torch.tensor(x, dtype=torch.float64) for x in out]


def assert_gae(backend, got, want):
    """Kernels add in float64 and round once; the reference's float32 drifts as a walk does."""
    *exact, size = want
    for x, y in zip(got, exact, strict=True):
        allowed = 1e-5 * size if backend == "reference" else 2**-24 * y.abs() + 1e-13 * size
        assert x.dtype == torch.float32
        assert ((x.cpu().double() - y).abs() <= allowed).all()


@pytest.mark.parametrize("gamma", DISCOUNTS)
@pytest.mark.parametrize("lam", DISCOUNTS)
def test_gae(backend, device, gamma, lam):
    batch = make()
    got = gae(*(x.to(device) for x in batch), gamma=gamma, lam=lam)
    assert_gae(backend, got, exact_gae(*batch, gamma, lam))
    outside = ~batch[2]
    outside[:BEFORE] = outside[-AFTER:] = True
    for x in got:
        assert (x.cpu()[outside] == 0).all()


@pytest.mark.parametrize("density", [0.0, 0.002, 0.05, 1.0])
def test_gae_of_any_density(backend, device, density):
    """Nothing, runs of whole warps and tiles without a masked token, and everything."""
    batch = make(density=density, seed=1)
    got = gae(*(x.to(device) for x in batch), gamma=0.99, lam=0.97)
    assert_gae(backend, got, exact_gae(*batch, 0.99, 0.97))


@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("last", [0, 1023, 1024, 1025, 2998, 2999])
def test_the_value_after_a_cut(backend, device, last, is_cut):
    """At every place of the last masked token in the tiles; the state after 2999 is not known."""
    batch = list(make([3000], density=1.0))
    batch[2] = torch.arange(batch[2].numel()) <= BEFORE + last
    batch[4] = torch.tensor([is_cut])
    got = gae(*(x.to(device) for x in batch), gamma=0.99, lam=0.97)
    assert_gae(backend, got, exact_gae(*batch, 0.99, 0.97))


def test_128k_tokens(backend, device):
    if backend == "reference":
        pytest.skip("float32, one step at a time: minutes")
    batch = make([131072], density=0.9)
    got = gae(*(x.to(device) for x in batch), gamma=1.0, lam=0.9999)
    assert_gae(backend, got, exact_gae(*batch, 1.0, 0.9999))


@pytest.mark.parametrize("shape", [(6, 15), (1, 1), (3, 0), (0, 4), (0, 0)])
def test_padded_rows_are_sequences(backend, device, shape):
    g = torch.Generator().manual_seed(2)
    rewards, values = torch.randn(2, *shape, generator=g)
    mask = torch.rand(shape, generator=g) < 0.6
    no_eos = torch.rand(shape[0], generator=g) < 0.5
    bounds = cu_seqlens_of_rows(mask)
    flat = (rewards.flatten(), values.flatten(), mask.flatten(), bounds, no_eos)
    got = gae(*(x.to(device) for x in flat), gamma=0.9, lam=0.8)
    if mask.numel():
        want = algorithm.gae(rewards, values, mask, no_eos, gamma=0.9, lam=0.8)
    else:
        want = torch.zeros(2, *shape)
    for x, y in zip(got, want, strict=True):
        # 15 steps of float32 there
        torch.testing.assert_close(x.cpu().view(shape), y, rtol=1e-5, atol=1e-5)


def test_gae_writes_its_sequences_alone(backend, device):
    batch = [x.to(device) for x in make([7, 0, 1030])]
    advantages, returns = torch.full((2, batch[2].numel()), torch.nan, device=device)
    op("gae")(*batch, 0.9, 0.9, advantages, returns)
    for x in (advantages, returns):
        assert x[:BEFORE].isnan().all()
        assert x[-AFTER:].isnan().all()
        assert not x[BEFORE:-AFTER].isnan().any()


def test_the_same_bits_every_time(backend, device, monkeypatch):
    batch = [x.to(device) for x in make([1500, 2700, 1])]
    runs = []
    for seed in range(3):
        monkeypatch.setenv("MEGARL_EMU_SEED", str(seed))
        runs.append(gae(*batch, gamma=0.99, lam=0.95))
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


@pytest.mark.parametrize("at", ["end", "start"])
@pytest.mark.parametrize("length", [1, 5, 8, 1021, 1027])
def test_no_access_outside_of_the_buffers(emulated, at, length):
    """Buffers of exactly the tokens, aligned where they start and where they end at a page."""
    bounds, no_eos = torch.tensor([0, length // 2, length]), torch.ones(2).bool()
    rewards, values = torch.randn(2, length, generator=torch.Generator().manual_seed(0))
    batch = (rewards, values, torch.ones(length).bool(), bounds, no_eos)
    out = [guarded(torch.full((length,), torch.nan), at) for _ in range(2)]
    op("gae")(*(guarded(x, at) for x in batch), 0.9, 0.9, *out)
    assert_gae("emu", out, exact_gae(*batch, 0.9, 0.9))


@pytest.mark.parametrize("which", range(5))
def test_any_one_buffer_may_be_unaligned(backend, device, which):
    """Vectors of 16 bytes then have no place: mask of 4 bytes, two columns read, two written."""
    batch = make([2050, 9], density=0.9)
    num_tokens = batch[2].numel()
    got = [torch.full((num_tokens,), torch.nan, device=device) for _ in range(2)]
    columns = [*(x.to(device) for x in (batch[2], *batch[:2])), *got]
    moved = torch.zeros(num_tokens + 1, dtype=columns[which].dtype, device=device)[1:]
    moved.copy_(columns[which])
    columns[which] = moved
    mask, rewards, values, *got = columns
    op("gae")(rewards, values, mask, *(x.to(device) for x in batch[3:]), 0.9, 0.9, *got)
    inside = slice(BEFORE, -AFTER)
    want = [x[inside] for x in exact_gae(*batch, 0.9, 0.9)]
    assert_gae(backend, [x[inside] for x in got], want)


def test_wrong_bounds_stay_inside(backend, device):
    """On a GPU their values are not looked at before a launch."""
    if backend == "reference":
        pytest.skip("torch's indexing raises")
    columns = [guarded(torch.ones(8)).to(device) for _ in range(4)]
    mask = guarded(torch.ones(8).bool()).to(device)
    bounds, no_eos = torch.tensor([-4, 3, 99]), torch.ones(2).bool()
    op("gae")(*(*columns[:2], mask, bounds.to(device), no_eos.to(device)), 1.0, 1.0, *columns[2:])
    assert columns[2].tolist() == [2, 1, 0, 4, 3, 2, 1, 0]
    assert columns[3].tolist() == [3, 2, 1, 5, 4, 3, 2, 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rewards": torch.zeros(4)}, r"rewards must be \[5\] torch.float32, got \[4\]"),
        ({"values": torch.zeros(5).double()}, r"values must be .* got \[5\] torch.float64"),
        ({"mask": torch.zeros(5)}, "mask must be"),
        ({"cu_seqlens": torch.tensor([0, 5], dtype=torch.int32)}, "cu_seqlens must be"),
        ({"cu_seqlens": torch.zeros(0).long()}, "cu_seqlens must be"),
        ({"cu_seqlens": torch.tensor([0, 6])}, r"ascend in \[0, 5\], got \[0, 6\]"),
        ({"cu_seqlens": torch.tensor([-1, 5])}, r"ascend in \[0, 5\]"),
        ({"cu_seqlens": torch.tensor([4, 2])}, r"ascend in \[0, 5\]"),
        ({"no_eos": torch.ones(2).bool()}, r"no_eos must be \[1\]"),
        ({"no_eos": torch.ones(1, device="meta").bool()}, "one device"),
        ({"gamma": 1.1}, r"gamma and lam must be in \[0, 1\]"),
        ({"lam": -0.1}, r"gamma and lam must be in \[0, 1\]"),
    ],
)
def test_wrong_arguments_of_gae_are_named(change, message):
    arguments = {
        **{"rewards": torch.zeros(5), "values": torch.zeros(5), "mask": torch.ones(5).bool()},
        **{"cu_seqlens": torch.tensor([0, 5]), "no_eos": torch.ones(1).bool()},
        **{"gamma": 1.0, "lam": 1.0},
    }
    with pytest.raises(ValueError, match=message):
        gae(**(arguments | change))


def test_results_stay_on_the_device_of_the_arguments(backend, device):
    """A tensor made on the default device instead would be a meta tensor, and raise."""
    batch = [x.to(device) for x in make([9, 3])]
    with torch.device("meta"):
        made = gae(*batch, gamma=1.0, lam=1.0)
        bounds = cu_seqlens_of_rows(batch[2].view(1, -1))
    assert {x.device.type for x in (*made, bounds)} == {device.type}
