"""Runs a plan: boxes from trainer ranks to workers, and among workers, round by round.

In the weight group trainer ranks come first, then the workers. All that one trainer rank sends
to one worker, and is needed by the same set of workers, is one message a round: the entry passes
it on as it came. Two rounds are under way at a time, so packing and loading overlap with the
network, and memory is bounded by two buckets. Each message ends with a digest of itself.
Imports torch and numpy only: this file also runs inside the servers.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megarl.bridge.boxes import Box
from megarl.bridge.group import Exchange, Parcel, WeightGroup
from megarl.bridge.plan import Plan, Transfer
from megarl.bridge.wire import digest

DIGEST_BYTES = 8


class CorruptionError(RuntimeError):
    """A message is not what was sent."""


class Message(NamedTuple):
    """Boxes, side by side in this order, from a trainer rank to workers."""

    source: int
    entry: int
    others: tuple[int, ...]
    items: list[tuple[str, Box]]
    num_bytes: int
    """Without the digest."""


def messages(transfers: Iterable[Transfer]) -> Iterator[list[Message]]:
    """One list a round that there is anything in, each in the order that all ranks agree on."""
    rounds: dict[int, dict[tuple[int, int, tuple[int, ...]], list[Transfer]]] = {}
    for t in transfers:
        key = (t.source, t.entry, t.others)
        rounds.setdefault(t.round, defaultdict(list))[key].append(t)
    for when in sorted(rounds):
        yield [
            Message(*key, [(t.name, t.box) for t in found], sum(t.num_bytes for t in found))
            for key, found in sorted(rounds[when].items())
        ]


def send_all(
    group: WeightGroup,
    plan: Plan,
    pack: Callable[[str, Box, Tensor], None],
    device: torch.device | str,
) -> int:
    """What this trainer rank has to send; returns the bytes.

    Args:
      pack: writes a box of an HF tensor into [num_bytes] uint8.

    Raises:
      TimeoutError, RuntimeError: a worker did not take its message.
    """
    under_way: list[Exchange] = []
    num_bytes = 0
    for index, round_ in enumerate(messages(plan.of_source(group.rank))):
        if len(under_way) == 2:
            under_way.pop(0).wait()
        sends = []
        for message in round_:
            buffer = torch.empty(message.num_bytes + DIGEST_BYTES, dtype=torch.uint8, device=device)
            start = 0
            for name, box in message.items:
                end = start + box.elements * plan.tensors[name].itemsize
                pack(name, box, buffer[start:end])
                start = end
            _seal(buffer)
            num_bytes += message.num_bytes
            sends.append(Parcel(plan.num_sources + message.entry, buffer, f"round {index}"))
        under_way.append(group.exchange(sends, []))
    for exchange in under_way:
        exchange.wait()
    return num_bytes


class _Round:
    """One round at a worker."""

    def __init__(
        self, group: WeightGroup, plan: Plan, index: int, round_: list[Message], device: str
    ) -> None:
        self._group, self._plan, self._index = group, plan, index
        self._worker = group.rank - plan.num_sources
        self._round = round_
        self._buffers = [
            torch.empty(m.num_bytes + DIGEST_BYTES, dtype=torch.uint8, device=device)
            for m in round_
        ]
        self._from_sources = group.exchange([], list(self._parcels(of_entry=True)))
        self._from_workers = group.exchange([], list(self._parcels(of_entry=False)))
        self._passed_on: Exchange | None = None

    def _parcels(self, *, of_entry: bool) -> Iterator[Parcel]:
        for message, buffer in zip(self._round, self._buffers, strict=True):
            if (message.entry == self._worker) != of_entry:
                continue
            first = self._plan.num_sources
            peer = message.source if of_entry else first + message.entry
            yield Parcel(peer, buffer, f"round {self._index}")

    def pass_on(self) -> None:
        """Once it came from the trainer, to the others that need it."""
        self._from_sources.wait()
        sends = [
            Parcel(self._plan.num_sources + other, buffer, f"round {self._index}")
            for message, buffer in zip(self._round, self._buffers, strict=True)
            if message.entry == self._worker
            for other in message.others
        ]
        self._passed_on = self._group.exchange(sends, [])

    def take(self) -> Iterator[tuple[str, Box, Tensor]]:
        """The boxes of this round, once all have come."""
        self._from_workers.wait()
        for message, buffer in zip(self._round, self._buffers, strict=True):
            _check_seal(buffer, message)
            start = 0
            for name, box in message.items:
                end = start + box.elements * self._plan.tensors[name].itemsize
                yield name, box, buffer[start:end]
                start = end

    def end(self) -> None:
        if self._passed_on is not None:
            self._passed_on.wait()


def receive_all(
    group: WeightGroup, plan: Plan, device: torch.device | str
) -> Iterator[tuple[str, Box, Tensor]]:
    """What this worker needs, as it comes: HF name, box, its [num_bytes] uint8.

    The buffer may be overwritten after the next one was asked for.

    Raises:
      CorruptionError: a message is not what was sent; names its round and ranks.
      TimeoutError, RuntimeError: a rank did not send.
    """
    worker = group.rank - plan.num_sources
    rounds = enumerate(messages(plan.of_worker(worker)))
    previous: _Round | None = None
    for index, round_ in rounds:
        current = _Round(group, plan, index, round_, str(device))
        if previous is not None:
            yield from previous.take()
            previous.end()
        current.pass_on()
        previous = current
    if previous is not None:
        yield from previous.take()
        previous.end()


class Assembly:
    """Boxes of HF tensors, put together until a tensor has all that this worker needs.

    A tensor is made in its HF shape, of which only the needed boxes are ever written: the
    engine's own loader reads no others.

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
        for t in plan:
            self._missing[t.name] = self._missing.get(t.name, 0) + t.box.elements
        self._open: dict[str, Tensor] = {}

    def add(self, name: str, box: Box, data: Tensor) -> Tensor | None:
        """Put a box in its place; the tensor in its own shape once nothing of it is missing."""
        if name not in self._open:
            size, dtype = self._plan.tensors[name], getattr(torch, self._named[name][0])
            self._open[name] = torch.empty(
                (size.rows, size.columns), dtype=dtype, device=self._device
            )
        whole = self._open[name]
        part = whole[box.row : box.row_end, box.column : box.column_end]
        if data.storage_offset() % whole.itemsize:
            data = data.clone()
        part.copy_(data.view(whole.dtype).view(part.shape))
        self._missing[name] -= box.elements
        if self._missing[name]:
            return None
        return self._open.pop(name).view(list(self._named[name][1]))

    def incomplete(self) -> list[str]:
        """Names of tensors of which something is missing."""
        return [name for name, count in self._missing.items() if count]


def _seal(buffer: Tensor) -> None:
    buffer[-DIGEST_BYTES:] = _digest_of(buffer)


def _check_seal(buffer: Tensor, message: Message) -> None:
    if not torch.equal(buffer[-DIGEST_BYTES:], _digest_of(buffer)):
        raise CorruptionError(
            f"weights from trainer rank {message.source} to worker {message.entry}, beginning with "
            f"{message.items[0][0]}: {message.num_bytes} bytes arrived that are not those sent"
        )


def _digest_of(buffer: Tensor) -> Tensor:
    number = digest(buffer[:-DIGEST_BYTES])
    signed = number - (1 << 64) if number >= 1 << 63 else number
    return torch.tensor([signed]).view(torch.uint8).to(buffer.device)
