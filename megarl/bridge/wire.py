"""Named tensors in flat buffers: the bytes of a weight update.

A bucket is one message. Its buffer is uint8; tensor after tensor, each from the next multiple
of 16 bytes on, in the order of `names`. dtypes are torch's names without "torch.", so the
receiver needs no more than `names`, `dtypes`, `shapes` and the bytes. Imports torch only: this
file also runs inside the servers.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

ALIGNMENT_BYTES = 16
_CHUNK_BYTES = 96 << 10
"""Of a digest: what is made of it stays in a core's cache, and is too little for torch to share
out among threads, whose meeting after every chunk takes longer on a busy machine than the sum."""
_DEVICE_CHUNK_BYTES = 1 << 23
"""On a GPU: few launches, and 48 MB for what is made of it."""


@dataclass(frozen=True)
class Bucket:
    """One message. `buffer` is [num_bytes] uint8."""

    buffer: Tensor
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]


def buckets(
    weights: Iterable[tuple[str, Tensor]], limit_bytes: int, device: torch.device | str
) -> Iterator[Bucket]:
    """`weights`, consumed once and in order, as messages of at most `limit_bytes`.

    A tensor larger than the limit is a message of its own. At most two buffers exist: asking
    for bucket k + 2 overwrites bucket k, so k must have arrived by then, while k + 1 can be
    filled as k is being sent.

    Raises:
      ValueError: `limit_bytes` is below 1, or a name comes twice.
    """
    if limit_bytes < 1:
        raise ValueError(f"limit_bytes must be >= 1, got {limit_bytes}")
    spare: list[Tensor | None] = [None, None]
    seen: set[str] = set()
    fill = _Filling(device)
    for name, tensor in weights:
        if name in seen:
            raise ValueError(f"{name} comes twice")
        seen.add(name)
        num_bytes = _padded(tensor.nbytes)
        if fill.names and fill.used_bytes + num_bytes > limit_bytes:
            yield fill.bucket()
            spare = [spare[1], fill.buffer]
            fill = _Filling(device, spare[0])
        fill.add(name, tensor, max(limit_bytes, num_bytes))
    if fill.names:
        yield fill.bucket()


def unpack(
    buffer: Tensor, names: list[str], dtypes: list[str], shapes: list[list[int]]
) -> Iterator[tuple[str, Tensor]]:
    """The named tensors of a bucket, as views of `buffer`.

    Raises:
      ValueError: `buffer` is not as large as the message says.
    """
    needed_bytes = message_bytes(dtypes, shapes)
    if buffer.numel() != needed_bytes:
        raise ValueError(f"a message of {needed_bytes} bytes in {buffer.numel()}")
    start = 0
    for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
        num_bytes = _tensor_bytes(dtype, shape)
        yield name, buffer[start : start + num_bytes].view(_dtype(dtype)).view(shape)
        start += _padded(num_bytes)


def digest(tensor: Tensor) -> int:
    """A number that another order or value of the tensor's bytes does not have, by all odds.

    sum_i (i + 1) w_i mod 2^64 over its 4-byte words; the same on a CPU and on a GPU.
    """
    return int(digest_on_device(tensor)) % (1 << 64)


def digest_on_device(tensor: Tensor) -> Tensor:
    """`digest` as [] int64 (mod 2^64, with a sign), on the tensor's device, without a wait."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if flat.storage_offset() % 4:
        flat = flat.clone()
    num_whole = flat.numel() // 4 * 4
    words = flat[:num_whole].view(torch.int32)
    is_cpu = flat.device.type == "cpu"
    chunk = (_CHUNK_BYTES if is_cpu else _DEVICE_CHUNK_BYTES) // 4
    places = torch.arange(1, min(words.numel(), chunk) + 1, device=flat.device)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, words.numel(), chunk):
        part = words[start : start + chunk].long()
        in_chunk = places[: part.numel()]
        # There is no dot of integers on CUDA.
        total += torch.dot(part, in_chunk) if is_cpu else (part * in_chunk).sum()
        if start:
            total += start * part.sum()
    if num_whole < flat.numel():
        rest = torch.nn.functional.pad(flat[num_whole:], (0, num_whole + 4 - flat.numel()))
        total += (num_whole // 4 + 1) * rest.view(torch.int32)[0]
    return total


def message_bytes(dtypes: list[str], shapes: list[list[int]]) -> int:
    """Size of the buffer of a message."""
    return sum(_padded(_tensor_bytes(d, s)) for d, s in zip(dtypes, shapes, strict=True))


@dataclass
class _Filling:
    """A bucket being packed, in `buffer` if that one is large enough."""

    device: torch.device | str
    buffer: Tensor | None = None
    used_bytes: int = 0
    names: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)

    def add(self, name: str, tensor: Tensor, capacity_bytes: int) -> None:
        if self.buffer is None or (not self.names and self.buffer.numel() < capacity_bytes):
            self.buffer = torch.empty(capacity_bytes, dtype=torch.uint8, device=self.device)
        start, end = self.used_bytes, self.used_bytes + tensor.nbytes
        self.buffer[start:end].view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
        self.used_bytes = start + _padded(tensor.nbytes)
        self.names.append(name)
        self.dtypes.append(str(tensor.dtype).removeprefix("torch."))
        self.shapes.append(list(tensor.shape))

    def bucket(self) -> Bucket:
        assert self.buffer is not None, "a bucket without a tensor"
        return Bucket(self.buffer[: self.used_bytes], self.names, self.dtypes, self.shapes)


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _tensor_bytes(dtype: str, shape: list[int]) -> int:
    return prod(shape) * _dtype(dtype).itemsize


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no dtype of torch")
    return dtype
