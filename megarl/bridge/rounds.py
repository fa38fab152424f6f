"""Where the boxes of a plan lie in the messages of its rounds, the same at both ends.

    bucket     the messages of a round at one rank, each from a multiple of 16 bytes on
    message    its boxes without gaps, then the digest of them, 8 bytes
    box        its elements, row after row

Boxes whose size is a multiple of 16 bytes come first in a message, then those of 8, 4, 2 and 1:
so each begins where its elements and the copy's wide accesses want it, and nothing is padded.
On the wire are the plan's bytes and 8 more a message; bytes that are reported are the plan's.
Imports torch and numpy only.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from megarl.bridge.boxes import Box
from megarl.bridge.plan import Transfer
from megarl.bridge.wire import ALIGNMENT_BYTES, digest_on_device

DIGEST_BYTES = 8


class CorruptionError(RuntimeError):
    """A message is not what was sent."""


class Item(NamedTuple):
    """A box in a message."""

    name: str
    box: Box
    start: int
    """Its first byte in the message, or in the bucket."""
    num_bytes: int


class Message(NamedTuple):
    """Boxes, side by side in this order, from a trainer rank to workers."""

    source: int
    entry: int
    others: tuple[int, ...]
    items: list[Item]
    num_bytes: int
    """Without the digest."""


@dataclass(frozen=True)
class Round:
    """The messages of one round at one rank, and the bucket that they lie in."""

    number: int
    messages: list[Message]
    """In the order that all ranks agree on."""
    starts: list[int]
    """First byte of each message."""
    num_bytes: int
    """Of the bucket."""

    def parts(self, bucket: Tensor) -> Iterator[tuple[Message, Tensor]]:
        """Each message with its digest, as a view of the bucket."""
        for message, start in zip(self.messages, self.starts, strict=True):
            yield message, bucket[start : start + message.num_bytes + DIGEST_BYTES]

    def items(self) -> Iterator[Item]:
        """Where boxes lie in the bucket."""
        for message, start in zip(self.messages, self.starts, strict=True):
            for item in message.items:
                yield item._replace(start=start + item.start)


def rounds_of(transfers: Iterable[Transfer]) -> list[Round]:
    """The rounds that there is anything in."""
    found: dict[int, dict[tuple[int, int, tuple[int, ...]], list[Transfer]]] = {}
    for t in transfers:
        key = (t.source, t.entry, t.others)
        found.setdefault(t.round, defaultdict(list))[key].append(t)
    made = []
    for number in sorted(found):
        messages = [_message(*key, of_key) for key, of_key in sorted(found[number].items())]
        sizes = [_aligned(m.num_bytes + DIGEST_BYTES) for m in messages]
        starts = list(accumulate(sizes, initial=0))
        made.append(Round(number, messages, starts[:-1], starts[-1]))
    return made


def _message(
    source: int, entry: int, others: tuple[int, ...], transfers: list[Transfer]
) -> Message:
    # n & -n is the largest power of 2 that divides n; the sort keeps the order of equals.
    ordered = sorted(transfers, key=lambda t: -min(ALIGNMENT_BYTES, t.num_bytes & -t.num_bytes))
    starts = list(accumulate((t.num_bytes for t in ordered), initial=0))
    items = [
        Item(t.name, t.box, start, t.num_bytes)
        for t, start in zip(ordered, starts[:-1], strict=True)
    ]
    return Message(source, entry, others, items, starts[-1])


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def seal(part: Tensor) -> None:
    """Put the digest at the end of a message."""
    part[-DIGEST_BYTES:] = _digest_of(part)


def check_seals(round_: Round, bucket: Tensor) -> None:
    """On a GPU one wait for all messages of a round.

    Raises:
      CorruptionError: a message is not what was sent.
    """
    parts = list(round_.parts(bucket))
    said = torch.stack([part[-DIGEST_BYTES:] for _, part in parts])
    are_wrong = (said != torch.stack([_digest_of(part) for _, part in parts])).any(1)
    for (message, _), is_wrong in zip(parts, are_wrong.tolist(), strict=True):
        if is_wrong:
            raise CorruptionError(
                f"weights of round {round_.number} from trainer rank {message.source} to worker "
                f"{message.entry}, beginning with {message.items[0].name}: {message.num_bytes} "
                f"bytes arrived that are not those sent"
            )


def _digest_of(part: Tensor) -> Tensor:
    """[8] uint8 of what comes before it."""
    return digest_on_device(part[:-DIGEST_BYTES]).view(1).view(torch.uint8)
