"""Who holds which part of which HF tensor: the language of layouts and plans. Imports no torch.

Every tensor is seen as [rows, columns]; a vector is one row. A layout says, for each tensor, a
few boxes and the ranks that hold each. Tensors that are cut alike share their boxes, and those
held alike share their holders: a layout of 47,000 tensors over 256 ranks is some megabytes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Box(NamedTuple):
    """Rows [row, row_end) and columns [column, column_end) of a tensor."""

    row: int
    row_end: int
    column: int
    column_end: int

    @property
    def elements(self) -> int:
        return (self.row_end - self.row) * (self.column_end - self.column)

    def meet(self, other: "Box") -> "Box | None":
        """What lies in both; None if nothing does."""
        box = Box(
            max(self.row, other.row),
            min(self.row_end, other.row_end),
            max(self.column, other.column),
            min(self.column_end, other.column_end),
        )
        return box if box.row < box.row_end and box.column < box.column_end else None


Boxes = tuple[Box, ...]
Holders = tuple[tuple[int, ...], ...]
"""Ranks that hold each box of a tensor, ascending."""


class Tensor2D(NamedTuple):
    """The size of an HF tensor as it travels."""

    rows: int
    columns: int
    itemsize: int
    """Bytes an element."""

    @property
    def box(self) -> Box:
        return Box(0, self.rows, 0, self.columns)

    @property
    def num_bytes(self) -> int:
        return self.rows * self.columns * self.itemsize


def tensor_2d(shape: Sequence[int], itemsize: int) -> Tensor2D:
    """[a, b, c] is a * b rows of c; a vector is one row."""
    if len(shape) == 0:
        return Tensor2D(1, 1, itemsize)
    return Tensor2D(math.prod(shape[:-1]), shape[-1], itemsize)


@dataclass(frozen=True)
class Held:
    """One tensor in a layout: boxes that do not overlap, and the ranks of each."""

    boxes: Boxes
    holders: Holders


Layout = Mapping[str, Held]
"""HF name -> where it is. What no rank holds is in no box."""
