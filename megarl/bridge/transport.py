"""Runs a plan: boxes from trainer ranks to workers, and among workers, round by round.

In the weight group trainer ranks come first, then the workers. All that one trainer rank sends
to one worker, and is needed by the same set of workers, is one message a round: the entry passes
it on as it came. Two rounds are under way at a time, so packing and loading overlap with the
network, and memory is bounded by two buckets. A round is packed by one launch, from a table of
its boxes that is worked out once a plan; rounds.py says what lies where. Imports torch and numpy
only: this file also runs inside the servers.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megarl.bridge.boxes import Box
from megarl.bridge.group import Exchange, Parcel, WeightGroup
from megarl.bridge.partial import PartialTensor
from megarl.bridge.plan import Plan
from megarl.bridge.rounds import DIGEST_BYTES, Round, check_seals, rounds_of, seal
from megarl.ops import pack

_PARTIAL_BYTES = 1 << 24
"""A tensor of which this much need not be there is not made in whole."""


class _Buckets:
    """Two, used in turns, made when first asked for."""

    def __init__(self, rounds: Sequence[Round], device: torch.device | str) -> None:
        self._num_bytes = max((r.num_bytes for r in rounds), default=0)
        self._device = torch.device(device)
        self._two: list[Tensor | None] = [None, None]

    def of(self, index: int, num_bytes: int) -> Tensor:
        """[num_bytes] uint8 for the round that is the `index`-th one here."""
        bucket = self._two[index % 2]
        if bucket is None:
            bucket = torch.empty(self._num_bytes, dtype=torch.uint8, device=self._device)
            self._two[index % 2] = bucket
        return bucket[:num_bytes]

    def forget(self) -> None:
        """After a failure what is still under way may yet read and write them."""
        self._two = [None, None]


# ---------------------------------------------------------------- at a trainer rank


Sources = Callable[[str, Box], Sequence[pack.Box]]
"""What a box of an HF tensor is made of on this rank, in the order of its rows. The boxes' tensors
are the parameters themselves; their dtype is that on the wire."""


class Outgoing:
    """What one trainer rank sends of a plan: made once, used for every push.

    Holds two buckets from the first push on, and about 3 KB a box: at 671B parameters on 256
    ranks some 5,600 boxes a rank, 17 MB.

    Raises:
      ValueError: `sources` does not have all of a box; names it.
    """

    def __init__(self, plan: Plan, rank: int, sources: Sources, device: torch.device | str) -> None:
        self.rounds = rounds_of(plan.of_source(rank))
        self.num_bytes = sum(m.num_bytes for r in self.rounds for m in r.messages)
        """A push, without digests."""
        self.digest_bytes = DIGEST_BYTES * sum(len(r.messages) for r in self.rounds)
        self._sources = sources
        self.buckets = _Buckets(self.rounds, device)
        self._tables: list[pack.PackTable] = []
        self._pointers: dict[int, tuple[Tensor, int]] = {}
        self._make_tables()

    def refresh(self) -> None:
        """New tables if a parameter's memory is another one since they were made."""
        if any(tensor.data_ptr() != pointer for tensor, pointer in self._pointers.values()):
            self._make_tables()

    def _make_tables(self) -> None:
        self._tables, self._pointers = [], {}
        for round_ in self.rounds:
            boxes: list[pack.Box] = []
            offsets: list[int] = []
            for item in round_.items():
                offset = item.start
                for box in self._sources(item.name, item.box):
                    boxes.append(box)
                    offsets.append(offset)
                    offset += box.view().numel() * (box.dtype or box.tensor.dtype).itemsize
                    self._pointers.setdefault(id(box.tensor), (box.tensor, box.tensor.data_ptr()))
                if offset != item.start + item.num_bytes:
                    raise ValueError(
                        f"{item.name}: {offset - item.start} of {item.num_bytes} bytes of "
                        f"{item.box} are on this rank"
                    )
            self._tables.append(pack.PackTable(boxes, offsets=offsets, is_dense=True))

    def packed(self, index: int) -> Tensor:
        """The bucket of the `index`-th round, with digests; that of round index - 2 is gone."""
        round_ = self.rounds[index]
        bucket = self.buckets.of(index, round_.num_bytes)
        self._tables[index].pack(bucket)
        for _, part in round_.parts(bucket):
            seal(part)
        return bucket


def send_all(group: WeightGroup, plan: Plan, outgoing: Outgoing) -> int:
    """What this trainer rank has to send of its present weights; returns the plan's bytes.

    Raises:
      TimeoutError, RuntimeError: a worker did not take its message.
    """
    under_way: list[Exchange] = []
    outgoing.refresh()
    try:
        for index, round_ in enumerate(outgoing.rounds):
            if len(under_way) == 2:
                under_way.pop(0).wait()
            sends = [
                Parcel(plan.num_sources + message.entry, part, f"round {round_.number}")
                for message, part in round_.parts(outgoing.packed(index))
            ]
            under_way.append(group.exchange(sends, []))
        for exchange in under_way:
            exchange.wait()
    except BaseException:
        outgoing.buckets.forget()
        raise
    return outgoing.num_bytes


# ---------------------------------------------------------------- at a worker


class Incoming:
    """What one worker receives of a plan: made once, used for every push. Holds two buckets."""

    def __init__(self, plan: Plan, worker: int, device: torch.device | str) -> None:
        self.plan, self.worker, self.device = plan, worker, torch.device(device)
        self.rounds = rounds_of(plan.of_worker(worker))
        self.num_bytes = sum(m.num_bytes for r in self.rounds for m in r.messages)
        """A push, without digests."""
        self.buckets = _Buckets(self.rounds, device)


class Arrived(NamedTuple):
    """A round that has come, checked against its digests."""

    ordinal: int
    """Its place in Incoming.rounds."""
    round: Round
    bucket: Tensor

    def boxes(self) -> Iterator[tuple[str, Box, Tensor]]:
        """HF name, box and its [num_bytes] uint8, a view of the bucket."""
        for item in self.round.items():
            yield item.name, item.box, self.bucket[item.start : item.start + item.num_bytes]

    def on(self, device: torch.device | str) -> "Arrived":
        """A copy in memory of its own, which no later round overwrites."""
        return self._replace(bucket=self.bucket.to(device, copy=True))


class _Receiving:
    """One round at a worker."""

    def __init__(self, group: WeightGroup, incoming: Incoming, index: int, bucket: Tensor) -> None:
        self._group, self._index, self._bucket = group, index, bucket
        self._round, self._worker = incoming.rounds[index], incoming.worker
        self._first_worker = incoming.plan.num_sources
        self._from_sources = group.exchange([], list(self._parcels(of_entry=True)))
        self._from_workers = group.exchange([], list(self._parcels(of_entry=False)))
        self._passed_on: Exchange | None = None

    def _parcels(self, *, of_entry: bool) -> Iterator[Parcel]:
        for message, part in self._round.parts(self._bucket):
            if (message.entry == self._worker) == of_entry:
                peer = message.source if of_entry else self._first_worker + message.entry
                yield Parcel(peer, part, f"round {self._round.number}")

    def pass_on(self) -> None:
        """Once it came from the trainer, to the others that need it."""
        self._from_sources.wait()
        sends = [
            Parcel(self._first_worker + other, part, f"round {self._round.number}")
            for message, part in self._round.parts(self._bucket)
            if message.entry == self._worker
            for other in message.others
        ]
        self._passed_on = self._group.exchange(sends, [])

    def take(self) -> Arrived:
        """This round, once all of it has come."""
        self._from_workers.wait()
        check_seals(self._round, self._bucket)
        return Arrived(self._index, self._round, self._bucket)

    def end(self) -> None:
        if self._passed_on is not None:
            self._passed_on.wait()


def receive_rounds(
    group: WeightGroup, incoming: Incoming, *, keep: bool = False
) -> Iterator[Arrived]:
    """What this worker needs, a round at a time.

    Args:
      keep: each round has memory of its own. Otherwise it is overwritten after the next one
        was asked for; `Arrived.on` makes a copy, on a GPU's host for example.

    Raises:
      CorruptionError: a message is not what was sent; names its round and ranks.
      TimeoutError, RuntimeError: a rank did not send.
    """

    def fresh(_: int, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=incoming.device)

    try:
        yield from _receive(group, incoming, fresh if keep else incoming.buckets.of)
    except BaseException:
        incoming.buckets.forget()
        raise


def receive_all(
    group: WeightGroup, plan: Plan, device: torch.device | str
) -> Iterator[tuple[str, Box, Tensor]]:
    """What this worker needs, as it comes: HF name, box, its [num_bytes] uint8.

    Each round has memory of its own, for as long as one of its boxes is held: `list` of this is
    all that a push brings.

    Raises:
      As receive_rounds.
    """
    incoming = Incoming(plan, group.rank - plan.num_sources, device)
    for arrived in receive_rounds(group, incoming, keep=True):
        yield from arrived.boxes()


def _receive(
    group: WeightGroup, incoming: Incoming, bucket_of: Callable[[int, int], Tensor]
) -> Iterator[Arrived]:
    previous: _Receiving | None = None
    for index, round_ in enumerate(incoming.rounds):
        current = _Receiving(group, incoming, index, bucket_of(index, round_.num_bytes))
        if previous is not None:
            yield previous.take()
            previous.end()
        current.pass_on()
        previous = current
    if previous is not None:
        yield previous.take()
        previous.end()


class Assembly:
    """Boxes of HF tensors, put together until a tensor has all that this worker needs.

    A tensor is given in its HF shape, of which only the needed boxes are ever written: the
    engine's own loader reads no others. Where they are one run of rows (or of a vector) in a
    large tensor, such as an embedding's, the rest is not even in memory.

    Args:
      named: HF name -> torch's name of the dtype, and shape.
    """

    def __init__(
        self,
        plan: Plan,
        named: Mapping[str, tuple[str, Sequence[int]]],
        device: torch.device | str,
    ) -> None:
        self._device, self._plan, self._named = device, plan, named
        self._missing: dict[str, int] = {}
        self._runs: dict[str, tuple[int, int]] = {}
        for t in plan:
            self._missing[t.name] = self._missing.get(t.name, 0) + t.box.elements
            first, end = _run(t.box, plan.tensors[t.name].columns)
            known = self._runs.get(t.name, (first, end))
            self._runs[t.name] = min(first, known[0]), max(end, known[1])
        self._open: dict[str, _OpenTensor] = {}

    def add(self, name: str, box: Box, data: Tensor) -> Tensor | None:
        """Put a box in its place; the tensor in its own shape once nothing of it is missing."""
        if name not in self._open:
            self._open[name] = self._make(name)
        whole = self._open[name]
        part = whole.part(box)
        if data.storage_offset() % part.itemsize:
            data = data.clone()
        part.copy_(data.view(part.dtype).view(part.shape))
        self._missing[name] -= box.elements
        if self._missing[name]:
            return None
        return self._open.pop(name).tensor(self._named[name][1])

    def _make(self, name: str) -> "_OpenTensor":
        size, dtype = self._plan.tensors[name], getattr(torch, self._named[name][0])
        first, end = self._runs[name]
        if (first + size.rows * size.columns - end) * size.itemsize < _PARTIAL_BYTES:
            first, end = 0, size.rows * size.columns
        data = torch.empty(end - first, dtype=dtype, device=self._device)
        return _OpenTensor(data, first, size.rows * size.columns, size.columns)

    def incomplete(self) -> list[str]:
        """Names of tensors of which something is missing."""
        return [name for name, count in self._missing.items() if count]


def _run(box: Box, columns: int) -> tuple[int, int]:
    """The elements from the box's first to its last, its own and those between."""
    return box.row * columns + box.column, (box.row_end - 1) * columns + box.column_end


class _OpenTensor(NamedTuple):
    """Elements from `first` on of a tensor of `numel`, as far as they are in memory."""

    data: Tensor
    first: int
    numel: int
    columns: int

    def part(self, box: Box) -> Tensor:
        shape = (box.row_end - box.row, box.column_end - box.column)
        start = box.row * self.columns + box.column - self.first
        return self.data.as_strided(shape, (self.columns, 1), start)

    def tensor(self, shape: Sequence[int]) -> Tensor:
        if self.data.numel() == self.numel:
            return self.data.view(list(shape))
        return PartialTensor.make(list(shape), self.first, self.data)
