"""`ops/fp8.py` against a division and a cast of torch, code by code."""

import pytest
import torch
from guard import guarded

from megarl.ops.fp8 import quantize_fp8_blocks
from megarl.ops.library import op

F32, BF16 = torch.float32, torch.bfloat16
LEAST_AMAX = 448 * 2.0**-126
SHAPES = [(128, 128), (1, 1), (127, 129), (130, 255), (300, 264), (3, 520)]


def exact(x):
    """Codes and scales, block after block."""
    rows, columns = x.shape
    codes = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-rows // 128), -(-columns // 128))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            here = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
            block = x[here].float()
            scales[i, j] = block.abs().max().clamp_min(LEAST_AMAX) / 448
            codes[here] = (block / scales[i, j]).to(torch.float8_e4m3fn)
    return codes, scales


def assert_same(x, device):
    """Scales bit by bit, and codes, the sign of zeros among them; any nan is as good as another."""
    codes, scales = quantize_fp8_blocks(x.to(device))
    want_codes, want_scales = exact(x)
    assert codes.shape == x.shape
    assert codes.dtype == torch.float8_e4m3fn
    torch.testing.assert_close(scales.cpu(), want_scales, rtol=0, atol=0, equal_nan=True)
    got, want = codes.cpu(), want_codes
    is_nan = want.float().isnan()
    assert torch.equal(got.float().isnan(), is_nan)
    assert torch.equal(got.view(torch.uint8)[~is_nan], want.view(torch.uint8)[~is_nan])
    return got, scales.cpu()


def random(shape, dtype, seed=0, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(shape, generator=g)).to(dtype)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_values(backend, device, shape, dtype):
    codes, scales = assert_same(random(shape, dtype), device)
    x = random(shape, dtype).float()
    wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: shape[0], : shape[1]]
    # Three bits of mantissa: half of 2^-3 of a code, or half of the least code, 2^-9.
    error = (codes.float() * wide - x).abs()
    assert (error <= 2**-4 * x.abs() + 2**-10 * wide).all()


@pytest.mark.parametrize("exponent", [-140, -126, -120, -81, -72, -71, -40, 0, 40, 100, 118, 126])
def test_every_size_of_scale(backend, device, exponent):
    """Scales under 2^-80 take a step more, and those near the ends are subnormal or inf."""
    for seed in range(2):
        x = random((128, 256), torch.float64, seed)
        assert_same((x * 2.0**exponent / 4).float(), device)


def test_every_bfloat16(backend, device):
    """Blocks with 448 in them have the scale 1: a code is its number's."""
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(BF16)
    values = values[values.float().abs() <= 448]
    width = 128 * -(-len(values) // (128 * 127))
    x = torch.full((128, width), 448.0, dtype=BF16)
    x[1:].view(-1)[: len(values)] = values
    codes, scales = assert_same(x, device)
    assert (scales == 1).all()
    assert len(codes.view(torch.uint8).unique()) == 254  # all but the two nan
    assert_same(x.float(), device)


def test_numbers_between_two_codes(backend, device):
    """Ties, and the floats on both sides of them: they go to even, and only they."""
    codes = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (codes[1:] + codes[:-1]) / 2
    inf = torch.full_like(ties, torch.inf)
    near = torch.cat([ties, ties.nextafter(inf), ties.nextafter(-inf)])
    x = torch.cat([near, -near, torch.full((12,), 448.0)]).view(6, 128)
    _, scales = assert_same(x, device)
    assert (scales == 1).all()


@pytest.mark.parametrize("exponent", [0, -71, -73, -95, -115, 100])
def test_quotients_near_a_tie(backend, device, exponent):
    """A scale with all bits of its mantissa: x * (1 / scale) would give other codes for some."""
    ties = torch.tensor([1.0625, 1.1875, 3.375, 17.0, 2.0**-10, 9 * 2.0**-7])
    blocks, by_inverse = [], 0
    for amax in (2.0**exponent * torch.linspace(1, 2, 200)).tolist():
        scale = torch.tensor(amax) / 448
        x = (ties * scale).repeat(21)
        x = torch.stack([x, x.nextafter(torch.zeros(())), x.nextafter(torch.ones(()))])
        block = torch.cat([torch.full((3, 2), amax), x], dim=1)
        by_inverse += (
            ((block * (1 / scale)).to(torch.float8_e4m3fn).view(torch.uint8))
            != (block / scale).to(torch.float8_e4m3fn).view(torch.uint8)
        ).sum()
        blocks.append(block)
    assert by_inverse > 0
    assert_same(torch.cat(blocks, dim=1), device)


def test_zeros_nan_and_inf(backend, device):
    x = random((256, 384), F32)
    x[:128, :128] = 0
    x[5, 7] = -0.0
    x[100, 130] = torch.nan
    x[200, 300] = torch.inf
    x[201, 301] = -torch.inf
    codes, scales = assert_same(x, device)
    assert scales[0, 0] == 2.0**-126
    assert (codes[:128, :128].float() == 0).all()
    assert codes.view(torch.uint8)[5, 7] == 0x80
    assert codes[:128, 128:256].float().isnan().all()
    assert scales[1, 2] == torch.inf
    assert codes[128:, 256:].float().isnan().sum() == 2


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_rows_apart_and_odd_starts(backend, device, dtype):
    odd, even = random((200, 301), dtype).to(device), random((200, 304), dtype).to(device)
    views = [odd[:, :296], odd[:, 1:], even[3:, 8:264], even[:, 1:297], even[::2], even[:1]]
    for view in [*views, even.t()[:1, :0]]:
        codes, scales = quantize_fp8_blocks(view)
        want_codes, want_scales = exact(view.cpu())
        assert torch.equal(codes.cpu().view(torch.uint8), want_codes.view(torch.uint8))
        assert torch.equal(scales.cpu(), want_scales)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_nothing(backend, device, shape):
    codes, scales = quantize_fp8_blocks(torch.zeros(shape, device=device))
    assert codes.shape == shape
    assert scales.shape == (-(-shape[0] // 128), -(-shape[1] // 128))


def test_the_same_bits_every_time(backend, device, monkeypatch):
    x = random((130, 300), BF16).to(device)
    runs = []
    for seed in range(3):
        monkeypatch.setenv("MEGARL_EMU_SEED", str(seed))
        codes, scales = quantize_fp8_blocks(x)
        runs.append((codes.view(torch.uint8), scales))
    for codes, scales in runs[1:]:
        assert torch.equal(codes, runs[0][0])
        assert torch.equal(scales, runs[0][1])


@pytest.mark.parametrize("at", ["end", "start"])
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("shape", [(1, 1), (2, 8), (129, 136), (3, 131), (128, 128)])
def test_no_access_outside_of_the_buffers(emulated, at, dtype, shape):
    rows, columns = shape
    gap = 8
    x = guarded(random((rows, columns + gap), dtype)[:, :columns], at)
    codes = guarded(torch.zeros(shape, dtype=torch.uint8), at)
    scales = guarded(torch.zeros(-(-rows // 128), -(-columns // 128)), at)
    op("quantize_fp8_blocks")(x, codes, scales)
    want_codes, want_scales = exact(x)
    assert torch.equal(codes, want_codes.view(torch.uint8))
    assert torch.equal(scales, want_scales)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(4), r"\(4,\) torch.float32"),
        (torch.zeros(4, 4, dtype=torch.float16), "torch.float16"),
        (torch.zeros(4, 5).t(), r"strides \(1, 5\)"),
    ],
)
def test_wrong_arguments_are_named(x, message):
    with pytest.raises(ValueError, match=message):
        quantize_fp8_blocks(x)
