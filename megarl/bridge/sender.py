"""Gathered weights by broadcast: trainer rank 0 sends each tensor to every worker.

    start -> for every bucket: broadcast while the servers receive and load it, pack the next
    one meanwhile -> finish(version)

Works with any layout on both sides, and moves world_size times more bytes than it must.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor

from megarl.bridge import stock_sglang
from megarl.bridge.group import SOURCE_RANK, Transfer, WeightGroup, listen, open_group
from megarl.bridge.push import Members, Together, own_address
from megarl.bridge.wire import Bucket, buckets, digest
from megarl.errors import EngineError, WeightUpdateError
from megarl.rollout.client import ServerClient


class BroadcastSender:
    """A `WeightSender` over one process group: rank 0 and every worker of every server.

    Args:
      members: the servers, on rank 0; the other ranks take part in the export alone.
      bucket_bytes: most bytes of one message (a larger tensor is one alone); two are in memory.
      timeout_s: one bucket, or one control request.
      device: where buckets are packed; cpu is gloo, cuda NCCL.
      digests: gets a digest of each tensor, and the workers keep those of what they received,
        for `ServerClient.weight_digests`.
    """

    def __init__(
        self,
        members: Members,
        together: Together,
        *,
        bucket_bytes: int,
        timeout_s: float,
        device: torch.device | str,
        digests: dict[str, int] | None = None,
    ) -> None:
        self._members, self._together = members, together
        self._bucket_bytes, self._timeout_s = bucket_bytes, timeout_s
        self._device = torch.device(device)
        self._digests = digests
        self._joined: list[ServerClient] = []
        self._group: WeightGroup | None = None
        self._stream: Iterator[Any] = iter(())
        self._has_begun = False

    def prepare(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Make the group, the first time; a trainer of one rank packs the first bucket."""
        self._together("join the weight group", self._connect)

        def pack_first() -> None:
            if self._members.pool is None:
                self._stream = iter(weights)
                return
            named = _with_digests(weights, self._digests) if self._digests is not None else weights
            stream = buckets(named, self._bucket_bytes, self._device)
            if self._members.clients[0].weight_protocol == "sglang":
                stream = stock_sglang.without_gaps(stream)
            if self._together.num_ranks > 1:
                # The others take part in the export when they send, after all have met again.
                self._stream = stream
                return
            first = next(stream, None)
            if first is None:
                raise WeightUpdateError(f"version {version}: no weights to push")
            self._stream = chain([first], stream)

        self._together("pack the weights", pack_first)

    def send(self, version: int) -> int:
        self._has_begun = True

        def stream_all() -> int:
            try:
                return self._send(version) if self._members.pool is not None else 0
            finally:
                for _ in self._stream:  # the other ranks are in the export, too
                    pass

        num_bytes = self._together("broadcast the weights", stream_all)
        self._has_begun = False
        return num_bytes

    def abandon(self, timeout_s: float) -> dict[ServerClient, EngineError]:
        self.close()
        begun, self._has_begun = self._has_begun, False

        async def end(client: ServerClient) -> None:
            if begun:
                # A worker that still waits for a bucket answers when the group's limit is over.
                await client.cancel_update(2 * timeout_s)
            else:
                await client.health(timeout_s)

        return self._members.failing(end, timeout_s)

    def close(self) -> None:
        """Leave the group. The servers leave when they end, or with the next group."""
        if self._group is not None:
            self._group.give_up("the trainer has left")
            self._group.leave()
            self._group = None

    def _connect(self) -> None:
        clients = self._members.clients
        if self._members.pool is None or (self._group is not None and self._joined == clients):
            return
        self.close()
        if len({client.weight_protocol for client in clients}) > 1:
            raise WeightUpdateError(
                "weight_update.mode: broadcast has one group of one engine, and the servers are "
                "of several; sharded and disk serve them all"
            )
        self._joined = list(clients)
        sizes = self._ask("say how many workers they have", lambda c: c.world_size(self._timeout_s))
        world_size = 1 + sum(sizes)
        offsets = dict(zip(clients, accumulate(sizes, initial=1), strict=False))
        store = listen(own_address(clients), self._timeout_s)
        with ThreadPoolExecutor(1, "megarl-weight-requests") as thread:
            joined = thread.submit(
                self._ask,
                "join the weight group",
                lambda c: c.init_weight_group(
                    store.host, store.port, offsets[c], world_size, self._timeout_s
                ),
            )
            try:
                if clients[0].weight_protocol == "sglang":
                    self._group = stock_sglang.open_group(
                        *(store, world_size, self._device, self._timeout_s), give_up=joined.done
                    )
                else:
                    self._group = open_group(
                        *(store, SOURCE_RANK, world_size, self._device, self._timeout_s),
                        give_up=joined.done,
                    )
            except (TimeoutError, RuntimeError):
                joined.result()  # a server's own words, if it has any
                raise
            joined.result()

    def _send(self, version: int) -> int:
        self._ask("start an update", lambda c: c.start_update(self._timeout_s))
        num_bytes = 0
        with ThreadPoolExecutor(1, "megarl-weight-requests") as thread:
            under_way: tuple[Transfer, Future[list[None]]] | None = None
            for bucket in self._stream:  # the step packs a bucket while the one before is sent
                if under_way is not None:
                    _wait(*under_way)
                under_way = self._start_bucket(bucket, thread)
                num_bytes += bucket.buffer.numel()
            assert under_way is not None, "a push without a bucket"
            _wait(*under_way)
        self._ask("finish the update", lambda c: c.finish_update(version, self._timeout_s))
        return num_bytes

    def _start_bucket(
        self, bucket: Bucket, thread: ThreadPoolExecutor
    ) -> tuple[Transfer, Future[list[None]]]:
        assert self._group is not None, "a push without a group"
        info = {
            "names": bucket.names,
            "dtypes": bucket.dtypes,
            "shapes": bucket.shapes,
            "wants_digests": self._digests is not None,
        }
        what = f"take {bucket.names[0]} to {bucket.names[-1]}"
        answers = thread.submit(self._ask, what, lambda c: c.update_weights(info, self._timeout_s))
        return self._group.broadcast(bucket.buffer), answers

    def _ask(self, what: str, call: Callable[[ServerClient], Any]) -> list[Any]:
        return self._members.ask(what, call, self._timeout_s)


def _wait(transfer: Transfer, answers: Future[list[None]]) -> None:
    # The answers first: a server that refused never takes part in the transfer.
    answers.result()
    try:
        transfer.wait()
    except (TimeoutError, RuntimeError) as error:
        raise WeightUpdateError(f"the servers took a bucket that was not sent: {error}") from error


def _with_digests(
    weights: Iterable[tuple[str, Tensor]], digests: dict[str, int]
) -> Iterator[tuple[str, Tensor]]:
    digests.clear()  # of a try that failed
    for name, tensor in weights:
        digests[name] = digest(tensor)
        yield name, tensor
