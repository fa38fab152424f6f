"""Boxes of many tensors into one bucket of bytes and back.

A box is part of a tensor, seen as [rows, columns]. In the bucket its elements lie one behind the
other, row after row, from a multiple of 16 bytes on; what lies between two boxes is not touched.
A table of boxes is made once a plan and used for every sync: one launch a bucket on CUDA, with
16-byte accesses wherever a box allows them.

    table = PackTable([Box(q, rows=(0, 512), dtype=torch.bfloat16), Box(norm)])
    table.pack(bucket)          # on the sender; fp32 parameters travel as bf16
    PackTable(mine).unpack(bucket)   # on the receiver: as many boxes, of the same shapes
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from megarl.ops.library import define, op

ALIGNMENT_BYTES = 16
_TILE_BYTES = 1 << 15
"""Of the side with the larger elements: what a block of threads moves at once."""
_MOST_UNITS = 1 << 31
_COPY, _NARROW, _WIDEN = 0, 1, 2  # BoxCast in csrc/include/megarl/pack.h
_CASTS = {(torch.float32, torch.bfloat16): _NARROW, (torch.bfloat16, torch.float32): _WIDEN}


@dataclass(frozen=True, eq=False)
class Box:
    """Rows [a, b) and columns [c, d) of a tensor, and its dtype in the bucket.

    A tensor is seen as [prod(shape[:-1]), shape[-1]], a vector as one row. Without `rows` and
    `columns` a box is the whole tensor, which may have any strides.

    Give the tensor that owns the memory, such as the parameter: then a parameter whose memory
    was replaced is found when the table is used. Of a view, only the view's own memory is known.
    """

    tensor: Tensor
    rows: tuple[int, int] | None = None
    columns: tuple[int, int] | None = None
    dtype: torch.dtype | None = None
    """None is the tensor's. float32 and bfloat16 become each other, to nearest even, nan staying
    nan; any other dtype stays as it is, bit by bit."""

    def view(self) -> Tensor:
        """What of the tensor is in the box: [rows, columns], or the tensor's shape if all is.

        Raises:
          ValueError: the rows and columns are not there, or not all rows lie equally far apart.
        """
        tensor = self.tensor.detach()
        if self.rows is None and self.columns is None:
            return tensor
        try:
            matrix = tensor.view(prod(tensor.shape[:-1]), tensor.shape[-1] if tensor.ndim else 1)
        except RuntimeError as error:
            raise ValueError(
                f"no rows at equal distances in {tuple(tensor.shape)} with strides "
                f"{tensor.stride()}; box a view of it instead"
            ) from error
        for axis, extent in ((0, self.rows), (1, self.columns)):
            if extent is None:
                continue
            start, end = extent
            if not 0 <= start <= end <= matrix.shape[axis]:
                raise ValueError(
                    f"{('rows', 'columns')[axis]} {extent} of a tensor of {tuple(matrix.shape)}"
                )
            matrix = matrix.narrow(axis, start, end - start)
        return matrix


class PackTable:
    """Where boxes lie in a bucket, and the device's copy of that.

    The table holds raw pointers. It keeps its tensors alive, and they must stay where they are.

    Dimensions that lie one behind the other are merged; then each index of those before the last
    two is a piece. Of a transposed matrix a piece is a column: legal, and slow.
    """

    offsets: tuple[int, ...]
    """First byte of each box in the bucket."""
    num_bytes: int
    """Of a bucket, a multiple of 16."""

    def __init__(
        self,
        boxes: Sequence[Box],
        *,
        offsets: Sequence[int] | None = None,
        alignment: int = ALIGNMENT_BYTES,
        is_dense: bool = False,
    ) -> None:
        """Boxes in their order in the bucket.

        Args:
          boxes: all on one device.
          offsets: where they begin, multiples of 16, if not one behind the other; a receiver may
            then take some boxes of a bucket and leave the rest.
          alignment: of offsets that are not given, in bytes.
          is_dense: offsets are multiples of a box's element in the bucket, not of 16.

        Raises:
          ValueError: a box is not in its tensor, a cast is not one of Box.dtype, devices or
            offsets do not fit, or a box has 2^31 units of 1 to 16 bytes.
        """
        if alignment < ALIGNMENT_BYTES or alignment % ALIGNMENT_BYTES:
            raise ValueError(f"alignment must be a multiple of 16 bytes, got {alignment}")
        self._views = [box.view() for box in boxes]
        self._casts = [_cast(box, index) for index, box in enumerate(boxes)]
        itemsizes = list(map(_bucket_itemsize, self._views, self._casts))
        sizes = [view.numel() * size for view, size in zip(self._views, itemsizes, strict=True)]
        steps = itemsizes if is_dense else [ALIGNMENT_BYTES] * len(sizes)
        self.offsets, self.num_bytes = _place(sizes, offsets, alignment, steps)
        devices = {view.device for view in self._views}
        if len(devices) > 1:
            raise ValueError(f"one device is needed, got {sorted(map(str, devices))}")
        self._device = devices.pop() if devices else None
        owners = {id(box.tensor): (i, box.tensor) for i, box in enumerate(boxes) if sizes[i]}
        self._owners = [(i, tensor, tensor.data_ptr()) for i, tensor in owners.values()]
        each = zip(self._views, self._casts, self.offsets, strict=True)
        pieces = [piece for index, box in enumerate(each) for piece in _pieces(index, *box)]
        self._pieces = sorted(pieces, key=lambda piece: piece.offset)
        self._end = max((piece.offset + piece.bucket_bytes for piece in pieces), default=0)
        self._spans = [(piece.pointer, piece.end) for piece in self._pieces]
        self._knows_apart = False
        rows, first_tiles = _table(self._pieces)
        self._num_tiles = first_tiles[-1]
        # Copied with a wait: any stream may use the table afterwards.
        self._boxes = torch.tensor(rows, dtype=torch.int64).view(-1, 8).to(self._device)
        self._first_tiles = torch.tensor(first_tiles, dtype=torch.int64).to(self._device)

    def pack(self, bucket: Tensor) -> None:
        """Copy the boxes into `bucket`, which is [>= num_bytes] uint8, 16-byte aligned.

        Raises:
          ValueError: the bucket is too small, not contiguous uint8, not aligned, on another
            device or in the boxes' own memory; or a tensor was allocated anew.
        """
        self._check(bucket)
        if self._num_tiles == 0:
            return
        op("pack_boxes")(
            *(self._views, self.offsets, self._casts, self._boxes, self._first_tiles),
            *(self._num_tiles, self._end, bucket),
        )

    def unpack(self, bucket: Tensor) -> None:
        """Copy `bucket` into the boxes; all else in their tensors stays.

        Raises:
          ValueError: as for `pack`, or an element of a tensor is in two boxes, or twice in one.
        """
        self._check(bucket)
        if self._num_tiles == 0:
            return
        if not self._knows_apart:
            _check_apart(self._pieces)
            self._knows_apart = True
        op("unpack_boxes")(
            *(bucket, self.offsets, self._casts, self._boxes, self._first_tiles),
            *(self._num_tiles, self._end, self._views),
        )

    def _check(self, bucket: Tensor) -> None:
        if bucket.dtype != torch.uint8 or bucket.ndim != 1 or not bucket.is_contiguous():
            raise ValueError(
                f"a bucket must be [bytes] uint8, contiguous, got {tuple(bucket.shape)} "
                f"{bucket.dtype} with strides {bucket.stride()}"
            )
        if bucket.numel() < self.num_bytes:
            raise ValueError(f"a bucket of {bucket.numel()} bytes for {self.num_bytes}")
        if self._device is not None and bucket.device != self._device:
            raise ValueError(f"a bucket on {bucket.device} for boxes on {self._device}")
        start, end = bucket.data_ptr(), bucket.data_ptr() + bucket.numel()
        if start % ALIGNMENT_BYTES:
            raise ValueError(f"a bucket must begin at a multiple of 16 bytes, got {start:#x}")
        for index, tensor, pointer in self._owners:
            if tensor.data_ptr() != pointer:
                raise ValueError(
                    f"the tensor of box {index} was allocated anew ({pointer:#x} before, "
                    f"{tensor.data_ptr():#x} now): make a new table"
                )
        if any(a < end and b > start for a, b in self._spans):
            raise ValueError("the bucket is memory of a box")


# ---------------------------------------------------------------- making a table


class _Piece(NamedTuple):
    """Rows at one distance: what a row of the table says. All but `rows` and `columns` in bytes."""

    box: int
    cast: int
    pointer: int
    offset: int
    row_stride: int
    rows: int
    columns: int
    """Elements; bytes for a copy."""

    @property
    def itemsizes(self) -> tuple[int, int]:
        """Of the tensor and in the bucket."""
        return {_COPY: (1, 1), _NARROW: (4, 2), _WIDEN: (2, 4)}[self.cast]

    @property
    def row_bytes(self) -> int:
        return self.columns * self.itemsizes[0]

    @property
    def bucket_bytes(self) -> int:
        return self.rows * self.columns * self.itemsizes[1]

    @property
    def end(self) -> int:
        """One past its last byte in the tensor."""
        return self.pointer + (self.rows - 1) * self.row_stride + self.row_bytes

    def unit_log2(self) -> int:
        """Of the most elements that one access can move; 0 is always possible."""
        for log2 in range(4 if self.cast == _COPY else 3, 0, -1):
            unit = 1 << log2
            wide, narrow = (min(ALIGNMENT_BYTES, unit * size) for size in self.itemsizes)
            is_aligned = self.pointer % wide == 0 and self.offset % narrow == 0
            # With several rows each must begin aligned, on both sides.
            if is_aligned and (
                self.rows == 1 or (self.row_stride % wide == 0 and self.columns % unit == 0)
            ):
                return log2
        return 0


def _cast(box: Box, index: int) -> int:
    """How the box's dtype changes on its way into the bucket."""
    tensor, dtype = box.tensor, box.dtype or box.tensor.dtype
    if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
        raise ValueError(f"box {index} is not plain memory: {tensor.layout}, or a lazy conjugate")
    if dtype == tensor.dtype:
        return _COPY
    if (tensor.dtype, dtype) not in _CASTS:
        raise ValueError(f"box {index} would be cast from {tensor.dtype} to {dtype}")
    if tensor.data_ptr() % tensor.element_size():
        raise ValueError(f"box {index} begins within an element: {tensor.data_ptr():#x}")
    return _CASTS[tensor.dtype, dtype]


def _bucket_itemsize(view: Tensor, cast: int) -> int:
    return {_COPY: view.element_size(), _NARROW: 2, _WIDEN: 4}[cast]


def _place(
    sizes: Sequence[int], offsets: Sequence[int] | None, alignment: int, steps: Sequence[int]
) -> tuple[tuple[int, ...], int]:
    """Offsets of boxes of so many bytes, in steps of so many, and the size of the bucket."""
    if offsets is None:
        places, end = [], 0
        for size in sizes:
            places.append(end)
            end += -(-size // alignment) * alignment
        return tuple(places), end
    if len(offsets) != len(sizes) or any(x < 0 or x % steps[i] for i, x in enumerate(offsets)):
        of = max(steps, default=ALIGNMENT_BYTES)
        raise ValueError(f"offsets of {len(sizes)} boxes must be multiples of {of}, got {offsets}")
    end = 0
    for offset, size in sorted(zip(offsets, sizes, strict=True)):
        if size and offset < end:
            raise ValueError(f"boxes overlap in the bucket at byte {offset}")
        end = max(end, offset + size)
    return tuple(offsets), -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _pieces(index: int, view: Tensor, cast: int, offset: int) -> Iterator[_Piece]:
    """A box as rows at one distance, in the bucket's order."""
    if view.numel() == 0:
        return
    itemsize = view.element_size()
    merged: list[tuple[int, int]] = []  # size and stride in elements, from the outside
    for size, stride in zip(view.shape, view.stride(), strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1] == size * stride:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    columns = merged.pop()[0] if merged and merged[-1][1] == 1 else 1
    rows, row_stride = merged.pop() if merged else (1, columns)
    num_bytes = rows * columns * _bucket_itemsize(view, cast)
    starts = [0]
    for size, stride in merged:
        starts = [start + i * stride for start in starts for i in range(size)]
    for k, start in enumerate(starts):
        yield _Piece(
            *(index, cast, view.data_ptr() + start * itemsize, offset + k * num_bytes),
            *(row_stride * itemsize, rows, columns * (itemsize if cast == _COPY else 1)),
        )


def _table(pieces: Sequence[_Piece]) -> tuple[list[list[int]], list[int]]:
    """PackedBox rows, and the first tile of each followed by the number of tiles."""
    rows, first_tiles = [], [0]
    for piece in pieces:
        log2 = piece.unit_log2()
        units = piece.rows * (piece.columns >> log2)
        if units >= _MOST_UNITS:
            raise ValueError(
                f"box {piece.box} has {units} units of {1 << log2}, 2^31 or more: cut it"
            )
        tile_units = _TILE_BYTES // (max(piece.itemsizes) << log2)
        rows.append([*piece[2:7], piece.cast, log2, tile_units])
        first_tiles.append(first_tiles[-1] + max(1, -(-units // tile_units)))
    return rows, first_tiles


def _check_apart(pieces: Sequence[_Piece]) -> None:
    """Raise ValueError if a byte of a tensor is in two rows of boxes."""
    cluster: list[_Piece] = []  # whose spans touch
    end = 0
    for piece in sorted(pieces, key=lambda piece: piece.pointer):
        if piece.pointer >= end:
            _check_cluster(cluster)
            cluster = []
        cluster.append(piece)
        end = max(end, piece.end)
    _check_cluster(cluster)


def _check_cluster(cluster: Sequence[_Piece]) -> None:
    if not any(len(cluster) > 1 or piece.row_stride < piece.row_bytes for piece in cluster):
        return
    starts = torch.cat([p.pointer + torch.arange(p.rows) * p.row_stride for p in cluster])
    counts = torch.tensor([piece.rows for piece in cluster])
    lengths = torch.tensor([piece.row_bytes for piece in cluster]).repeat_interleave(counts)
    owners = torch.tensor([piece.box for piece in cluster]).repeat_interleave(counts)
    starts, order = starts.sort()
    overlaps = (starts + lengths[order])[:-1] > starts[1:]
    if overlaps.any():
        first = int(overlaps.nonzero()[0])
        a, b = owners[order[first]].item(), owners[order[first + 1]].item()
        raise ValueError(f"boxes {a} and {b} overlap in their tensor: it cannot be unpacked into")


# ---------------------------------------------------------------- torch references


def _slot(bucket: Tensor, view: Tensor, offset: int, cast: int) -> Tensor:
    """What the bucket has of a box, in the box's shape."""
    dtype = {_COPY: view.dtype, _NARROW: torch.bfloat16, _WIDEN: torch.float32}[cast]
    return bucket[offset:][: view.numel() * dtype.itemsize].view(dtype).view(view.shape)


def _copy_bits(to: Tensor, source: Tensor) -> None:
    """As integers where the dtypes are the same: a copy of floats may change nan."""
    of_size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = of_size.get(to.element_size()) if to.dtype == source.dtype else None
    if bits is not None:
        to, source = to.view(bits), source.view(bits)
    to.copy_(source)


def _pack(
    views: list[Tensor],
    offsets: list[int],
    casts: list[int],
    boxes: Tensor,
    first_tiles: Tensor,
    num_tiles: int,
    num_bytes: int,
    bucket: Tensor,
) -> None:
    """Boxes into the bucket; the kernels read `boxes` instead of the views."""
    for view, offset, cast in zip(views, offsets, casts, strict=True):
        _copy_bits(_slot(bucket, view, offset, cast), view)


def _unpack(
    bucket: Tensor,
    offsets: list[int],
    casts: list[int],
    boxes: Tensor,
    first_tiles: Tensor,
    num_tiles: int,
    num_bytes: int,
    views: list[Tensor],
) -> None:
    for view, offset, cast in zip(views, offsets, casts, strict=True):
        _copy_bits(view, _slot(bucket, view, offset, cast))


_TABLE = (
    "int[] offsets, int[] casts, Tensor boxes, Tensor first_tiles, int num_tiles, int num_bytes"
)
define(f"pack_boxes(Tensor[] views, {_TABLE}, Tensor(a!) bucket) -> ()", _pack)
define(f"unpack_boxes(Tensor bucket, {_TABLE}, Tensor(a!)[] views) -> ()", _unpack)
