"""Matrices as fp8 codes with a scale for each block of 128 x 128."""

import torch
from torch import Tensor

from megarl.ops.library import define, op

FP8_BLOCK = 128
FP8_MAX = 448.0
FP8_LEAST_AMAX = FP8_MAX * 2.0**-126
"""Blocks under it have the scale 2^-126, the least normal float32."""

_CHUNK_BYTES = 64 << 20
"""The reference alone: float32 copy of the matrix that is alive at one time."""


def quantize_fp8_blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of each block of 128 x 128 of a matrix.

        scale = max(amax, 448 * 2^-126) / 448,   amax = max |x| over the block
        code  = e4m3(x / scale),   x ~ code * scale

    The quotient is rounded to float32 as a division is, and its code to nearest even, so codes
    are those of `(x / scale).to(torch.float8_e4m3fn)`. A block of zeros has codes 0 and the scale
    2^-126, which dequantises to 0. vLLM's per_block_cast_to_fp8, after DeepGEMM's, instead takes
    amax to be at least 1e-4, which costs small weights their precision, and multiplies by
    1 / scale; its reading kernels, code * scale, read both. Nan in a block is nan throughout it;
    inf makes the scale inf, inf itself nan and all else 0.

    Args:
      x: [R, C] float32 or bfloat16, columns side by side. At the edges blocks are smaller.

    Returns:
      codes [R, C] float8_e4m3fn, scales [ceil(R / 128), ceil(C / 128)] float32.

    Raises:
      ValueError: `x` is not such a matrix.
    """
    if x.ndim != 2 or x.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"need [R, C] float32 or bfloat16, got {tuple(x.shape)} {x.dtype}")
    if x.shape[1] > 1 and x.stride(1) != 1:
        raise ValueError(f"columns must lie side by side, got strides {x.stride()}")
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    down, across = (-(-size // FP8_BLOCK) for size in x.shape)
    scales = torch.empty((down, across), dtype=torch.float32, device=x.device)
    op("quantize_fp8_blocks")(x.detach(), codes, scales)
    return codes.view(torch.float8_e4m3fn), scales


def _quantize(x: Tensor, codes: Tensor, scales: Tensor) -> None:
    """codes [R, C] uint8, scales as of quantize_fp8_blocks."""
    num_rows, width = x.shape
    across = scales.shape[1]
    if across == 0:
        return
    step = max(1, _CHUNK_BYTES // (4 * FP8_BLOCK * max(1, width)))
    for first in range(0, scales.shape[0], step):
        rows = slice(first * FP8_BLOCK, min((first + step) * FP8_BLOCK, num_rows))
        part = x[rows].float()
        down = -(-part.shape[0] // FP8_BLOCK)
        padding = (0, across * FP8_BLOCK - width, 0, down * FP8_BLOCK - part.shape[0])
        blocks = torch.nn.functional.pad(part, padding).view(down, FP8_BLOCK, across, FP8_BLOCK)
        amax = blocks.abs().amax(dim=(1, 3))
        # By a tensor: on CUDA torch divides by a number with its rounded inverse.
        scale = amax.clamp_min(FP8_LEAST_AMAX) / torch.tensor(FP8_MAX, device=amax.device)
        scales[first : first + step] = scale
        made = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn).view(torch.uint8)
        made = made.view(down * FP8_BLOCK, across * FP8_BLOCK)
        codes[rows] = made[: part.shape[0], :width]


define(
    "quantize_fp8_blocks(Tensor x, Tensor(a!) codes, Tensor(b!) scales) -> ()",
    _quantize,
)
