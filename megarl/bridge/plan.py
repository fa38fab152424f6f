"""Which bytes go from which rank to which, so that none goes twice. Imports no torch.

A pure function of two layouts: the trainer's, and that of all workers of all servers together.

    source     each byte leaves the trainer once, from the holder with the least to send
    entry      it enters the servers at one of the workers that need it, the one with the least
               to pass on
    exchange   that worker passes it to the others that need it: replicas, and whoever holds
               the same part of a tensor
    round      transfers of one round are in memory together: at most `bucket_bytes` out of
               and into any rank

So a worker receives each byte it needs once, and the trainer's links carry each byte once,
however many servers there are.
"""

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from megarl.bridge.boxes import Box, Boxes, Held, Layout, Tensor2D

T = TypeVar("T")
Ints = NDArray[np.int64]


class Transfer(NamedTuple):
    """One box of one tensor, from a trainer rank to a worker, and from there to others."""

    round: int
    name: str
    box: Box
    source: int
    """Trainer rank."""
    entry: int
    """Worker."""
    others: tuple[int, ...]
    """Workers that the entry passes it to, in the round after."""
    num_bytes: int


@dataclass(frozen=True)
class Plan:
    """Transfers in the order of their rounds. Ranks of trainer and workers count separately."""

    tensors: Mapping[str, Tensor2D]
    """Of each name."""
    names: Sequence[str]
    boxes: Sequence[Box]
    needs: Sequence[tuple[int, ...]]
    """Sets of workers that need the same boxes."""
    table: Ints
    """[n, 7]: round, index of name, of box, source, entry, index of needs, bytes."""
    num_sources: int
    num_workers: int
    num_rounds: int

    def __len__(self) -> int:
        return len(self.table)

    def __iter__(self) -> Iterator[Transfer]:
        return self._transfers(self.table)

    def of_source(self, rank: int) -> Iterator[Transfer]:
        """What trainer rank `rank` sends."""
        return self._transfers(self.table[self.table[:, 3] == rank])

    def of_worker(self, rank: int) -> Iterator[Transfer]:
        """What worker `rank` receives, from the trainer or from another worker."""
        return self._transfers(self._rows_of_worker(rank))

    def _rows_of_worker(self, rank: int) -> Ints:
        concerned = np.array([rank in needs for needs in self.needs], dtype=bool)
        return self.table[concerned[self.table[:, 5]]]

    def _transfers(self, rows: Ints) -> Iterator[Transfer]:
        for when, name, box, source, entry, needs, num_bytes in rows.tolist():
            others = tuple(rank for rank in self.needs[needs] if rank != entry)
            yield Transfer(
                when, self.names[name], self.boxes[box], source, entry, others, num_bytes
            )

    # ------------------------------------------------------------------ on the way to a worker

    def part_of_worker(self, rank: int) -> bytes:
        """What `from_bytes` makes a plan of, which has the rows of `of_worker` alone."""
        table = self._rows_of_worker(rank)
        kept = {}
        for column, items in ((1, self.names), (2, self.boxes), (5, self.needs)):
            used, table[:, column] = np.unique(table[:, column], return_inverse=True)
            kept[column] = [items[i] for i in used.tolist()]
        head = {
            "names": kept[1],
            "tensors": [self.tensors[name] for name in kept[1]],
            "boxes": kept[2],
            "needs": kept[5],
            "sizes": [self.num_sources, self.num_workers, self.num_rounds],
        }
        return json.dumps(head).encode() + b"\n" + table.astype("<i8").tobytes()

    @staticmethod
    def from_bytes(data: bytes) -> "Plan":
        """ValueError if it is none."""
        text, _, rows = data.partition(b"\n")
        head = json.loads(text)
        tensors = [Tensor2D(*size) for size in head["tensors"]]
        num_sources, num_workers, num_rounds = head["sizes"]
        return Plan(
            tensors=dict(zip(head["names"], tensors, strict=True)),
            names=head["names"],
            boxes=[Box(*box) for box in head["boxes"]],
            needs=[tuple(needs) for needs in head["needs"]],
            table=np.frombuffer(rows, dtype="<i8").reshape(-1, 7).astype(np.int64),
            num_sources=num_sources,
            num_workers=num_workers,
            num_rounds=num_rounds,
        )

    # ------------------------------------------------------------------ bytes a push

    def bytes_needed(self) -> int:
        """Bytes of all tensors that are sent: with whole servers, what any push has to move."""
        return sum(self.tensors[name].num_bytes for name in self.names)

    def bytes_out_of_sources(self) -> Ints:
        """[num_sources] that each trainer rank sends."""
        return _sums(self.table[:, 3], self.table[:, 6], self.num_sources)

    def bytes_into_entries(self) -> Ints:
        """[num_workers] that each worker receives from the trainer."""
        return _sums(self.table[:, 4], self.table[:, 6], self.num_workers)

    def bytes_out_of_workers(self) -> Ints:
        """[num_workers] that each worker passes to others."""
        others = np.array([len(needs) - 1 for needs in self.needs], dtype=np.int64)
        weights = self.table[:, 6] * others[self.table[:, 5]]
        return _sums(self.table[:, 4], weights, self.num_workers)

    def bytes_into_workers(self) -> Ints:
        """[num_workers] that each worker receives, from whomever."""
        of_needs = _sums(self.table[:, 5], self.table[:, 6], len(self.needs))
        total = np.zeros(self.num_workers, dtype=np.int64)
        for needs, num_bytes in zip(self.needs, of_needs, strict=True):
            total[list(needs)] += num_bytes
        return total


def _sums(index: Ints, values: Ints, size: int) -> Ints:
    sums = np.zeros(size, dtype=np.int64)
    np.add.at(sums, index, values)
    return sums


class _Cell(NamedTuple):
    """A box that its holders hold whole, and its needers need whole."""

    box: int
    """Index among the plan's boxes."""
    source: int
    """Index among the trainer's boxes of the tensor."""
    needs: int
    """Index among the plan's sets of workers."""
    elements: int


_LEAST_BYTES = 1 << 16
"""Of a piece that is cut for the load's sake: smaller ones cost more than they weigh."""


class _Cutter:
    """Cuts tensors into cells, once for all that are cut and held alike."""

    def __init__(self, passed_bytes: int) -> None:
        self._passed_bytes = passed_bytes
        """Most that one piece makes its entry pass on, in all; pieces of 64 KiB may."""
        self.boxes: list[Box] = []
        self.needs: list[tuple[int, ...]] = []
        self._box_index: dict[Box, int] = {}
        self._needs_index: dict[tuple[int, ...], int] = {}
        self._cells: dict[tuple[Boxes, int, int, int, int], list[_Cell]] = {}

    def cells(self, sources: Boxes, target: Held, piece_bytes: int, itemsize: int) -> list[_Cell]:
        # A layout keeps what is the same as one object, and longer than this one lives.
        key = (sources, id(target.boxes), id(target.holders), piece_bytes, itemsize)
        if key not in self._cells:
            self._cells[key] = list(self._cut(sources, target, piece_bytes, itemsize))
        return self._cells[key]

    def _cut(
        self, sources: Boxes, target: Held, piece_bytes: int, itemsize: int
    ) -> Iterator[_Cell]:
        for lies_in, box in _atoms(target.boxes):
            needs = tuple(sorted({rank for i in lies_in for rank in target.holders[i]}))
            fair = self._passed_bytes // max(1, len(needs) - 1)
            most_elements = max(1, min(piece_bytes, max(_LEAST_BYTES, fair)) // itemsize)
            covered = 0
            for i, source in enumerate(sources):
                common = box.meet(source)
                if common is None:
                    continue
                covered += common.elements
                for piece in _pieces(common, most_elements):
                    yield _Cell(
                        _place(piece, self.boxes, self._box_index),
                        i,
                        _place(needs, self.needs, self._needs_index),
                        piece.elements,
                    )
            if covered != box.elements:
                raise ValueError(f"{box} is needed, of which the trainer holds {covered} elements")


def _place(item: T, items: list[T], index: dict[T, int]) -> int:
    """Where `item` stands among `items`, at whose end it is put if it is new."""
    if item not in index:
        index[item] = len(items)
        items.append(item)
    return index[item]


def _atoms(boxes: Boxes) -> Iterator[tuple[tuple[int, ...], Box]]:
    """Boxes that may overlap, as boxes that do not, each with the indices of those it lies in."""
    rows = sorted({edge for box in boxes for edge in (box.row, box.row_end)})
    for row, row_end in itertools.pairwise(rows):
        inside = [i for i, box in enumerate(boxes) if box.row <= row and row_end <= box.row_end]
        columns = sorted({c for i in inside for c in (boxes[i].column, boxes[i].column_end)})
        for column, column_end in itertools.pairwise(columns):
            lies_in = tuple(
                i for i in inside if boxes[i].column <= column and column_end <= boxes[i].column_end
            )
            if lies_in:
                yield lies_in, Box(row, row_end, column, column_end)


def _pieces(box: Box, most_elements: int) -> Iterator[Box]:
    """The box in runs of whole rows of at most `most_elements`, or in parts of a row."""
    width, num_rows = box.column_end - box.column, box.row_end - box.row
    if width > most_elements:
        for row in range(box.row, box.row_end):
            for column in range(box.column, box.column_end, most_elements):
                yield Box(row, row + 1, column, min(column + most_elements, box.column_end))
        return
    parts = -(-num_rows // (most_elements // width))
    edges = [box.row + k * num_rows // parts for k in range(parts + 1)]
    for row, row_end in itertools.pairwise(edges):
        yield Box(row, row_end, box.column, box.column_end)


def make_plan(
    tensors: Mapping[str, Tensor2D],
    trainer: Layout,
    workers: Layout,
    *,
    num_sources: int,
    num_workers: int,
    bucket_bytes: int,
    piece_bytes: int | None = None,
) -> Plan:
    """The transfers that bring every box of `workers` to all its holders.

    Args:
      tensors: HF name -> size. Tensors that no worker holds are not sent.
      trainer: where they are; ranks in [0, num_sources).
      workers: where they are needed, by all servers together; ranks in [0, num_workers).
      bucket_bytes: most bytes out of a trainer rank, and into a worker, in one round.
      piece_bytes: larger boxes are cut, so that the load can be spread; None is a fraction of
        what a rank sends, and at least 64 KiB. What many workers need is cut smaller still, so
        that no piece is much of what an entry passes on.

    Raises:
      ValueError: something is needed that no trainer rank holds.
    """
    names = [name for name in tensors if name in workers]
    if missing := [name for name in workers if name not in tensors or name not in trainer]:
        raise ValueError(f"needed by servers, unknown to the trainer: {sorted(missing)[:5]}")
    total = sum(tensors[name].num_bytes for name in names)
    if piece_bytes is None:
        piece_bytes = max(_LEAST_BYTES, min(bucket_bytes // 4, total // (32 * num_sources)))
    piece_bytes = min(piece_bytes, bucket_bytes)
    cutter = _Cutter(_passed_on(tensors, workers) // (32 * num_workers))
    load_out = [0] * num_sources
    # Bytes that a worker passes on, and that it is given by the trainer. What comes in is the
    # same whoever is the entry, so the first counts, and the second where there is none.
    load_on = [(0, 0)] * num_workers
    rows = []
    # Where there is no choice comes first; what may come from many ranks fills the gaps.
    freedom = {name: min(map(len, trainer[name].holders)) for name in names}
    for index in sorted(range(len(names)), key=lambda i: freedom[names[i]]):
        source_held, target = trainer[names[index]], workers[names[index]]
        itemsize = tensors[names[index]].itemsize
        try:
            cells = cutter.cells(source_held.boxes, target, piece_bytes, itemsize)
        except ValueError as error:
            raise ValueError(f"{names[index]}: {error}") from error
        for cell in cells:
            num_bytes = cell.elements * itemsize
            source = min(source_held.holders[cell.source], key=load_out.__getitem__)
            needs = cutter.needs[cell.needs]
            entry = min(needs, key=load_on.__getitem__)
            load_out[source] += num_bytes
            passed, given = load_on[entry]
            load_on[entry] = (passed + (len(needs) - 1) * num_bytes, given + num_bytes)
            rows.append((index, cell.box, source, entry, cell.needs, num_bytes))
    table = np.array(rows, dtype=np.int64).reshape(-1, 6)
    table = _interleaved(table)
    rounds = _rounds(table, cutter.needs, num_sources, num_workers, bucket_bytes)
    order = np.argsort(rounds, kind="stable")
    return Plan(
        tensors={name: tensors[name] for name in names},
        names=names,
        boxes=cutter.boxes,
        needs=cutter.needs,
        table=np.column_stack([rounds, table])[order],
        num_sources=num_sources,
        num_workers=num_workers,
        num_rounds=int(rounds.max()) + 1 if len(rounds) else 0,
    )


def _passed_on(tensors: Mapping[str, Tensor2D], workers: Layout) -> int:
    """Bytes that all workers together pass on; fewer than that where boxes overlap."""
    return sum(
        box.elements * tensors[name].itemsize * (len(ranks) - 1)
        for name, held in workers.items()
        for box, ranks in zip(held.boxes, held.holders, strict=True)
    )


def _interleaved(table: Ints) -> Ints:
    """Rows so ordered that every source has sent the same share of its bytes at any time.

    In the order of tensors, the stages of a pipeline would send one after the other.
    """
    by_source = np.argsort(table[:, 2], kind="stable")
    sources, num_bytes = table[by_source, 2], table[by_source, 5]
    sent = np.cumsum(num_bytes)
    starts = np.searchsorted(sources, sources, side="left")
    before = sent - num_bytes
    of_source = np.bincount(sources, weights=num_bytes) if len(sources) else np.zeros(1)
    share = (before - before[starts]) / np.maximum(of_source[sources], 1) if len(sources) else sent
    return table[by_source[np.argsort(share, kind="stable")]]


def _rounds(
    table: Ints,
    needs: Sequence[tuple[int, ...]],
    num_sources: int,
    num_workers: int,
    bucket_bytes: int,
) -> Ints:
    """[n] the round of each row: the first that has room at its source and at all it is for.

    Rounds of one rank do not decrease along the table, so all ranks go through it in order.
    """
    out_round, out_used = [0] * num_sources, [0] * num_sources
    in_round, in_used = [0] * num_workers, [0] * num_workers
    rounds = []
    columns = (table[:, k].tolist() for k in (2, 4, 5))
    for source, which, num_bytes in zip(*columns, strict=True):
        ranks = needs[which]
        when = out_round[source] + (out_used[source] + num_bytes > bucket_bytes)
        for rank in ranks:
            first = in_round[rank] + (in_used[rank] + num_bytes > bucket_bytes)
            if first > when:
                when = first
        if out_round[source] < when:
            out_round[source], out_used[source] = when, 0
        out_used[source] += num_bytes
        for rank in ranks:
            if in_round[rank] < when:
                in_round[rank], in_used[rank] = when, 0
            in_used[rank] += num_bytes
        rounds.append(when)
    return np.array(rounds, dtype=np.int64)
