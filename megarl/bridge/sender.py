"""The trainer's end of a weight push, on rank 0. One push:

    pack bucket 0 -> pause all servers -> start -> for every bucket: broadcast while the
    servers receive and load it, pack the next one meanwhile -> finish(version) -> resume all

The servers are resumed whatever happened, so no request hangs. A push that fails raises
WeightUpdateError naming the servers; they then hold a mixture of old and new weights under
version -1, and the next push brings all of it again over a new group.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import accumulate, chain
from typing import Any, NamedTuple, Protocol, TypeVar, cast
from urllib.parse import urlsplit

import torch
from torch import Tensor

from megarl.bridge.group import (
    SOURCE_RANK,
    Transfer,
    WeightGroup,
    address_towards,
    listen,
    open_group,
)
from megarl.bridge.wire import Bucket, buckets, digest
from megarl.errors import EngineError, MegarlError, WeightUpdateError
from megarl.rollout.client import CONTROL_TIMEOUT_S, PauseMode, ServerClient

T = TypeVar("T")
_LOOPBACK_PREFIXES = ("127.", "::1")


class ServerPool(Protocol):
    """What a sender needs of the rollout engine."""

    clients: list[ServerClient]

    def run(self, coro: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """The result of `coro`, run on the loop that the clients belong to."""
        ...


class PushStats(NamedTuple):
    num_bytes: int
    """Sent once; every worker received as many."""
    total_s: float
    pause_s: float
    """From the request to pause until the last server goes on."""


class WeightSender(Protocol):
    """A way for new weights into all servers. Lives on trainer rank 0."""

    def connect(self) -> None: ...

    def push(self, weights: Iterable[tuple[str, Tensor]], version: int) -> PushStats:
        """Bring full, HF-named tensors, consumed once; WeightUpdateError if a server failed."""
        ...

    def close(self) -> None: ...


def own_address(clients: list[ServerClient]) -> str:
    """This machine's address as all servers can reach it."""
    targets = [urlsplit(client.address) for client in clients]
    own = [address_towards(t.hostname or "", t.port or 80) for t in targets]
    remote = [address for address in own if not address.startswith(_LOOPBACK_PREFIXES)]
    return (remote or own)[0]


def _wait(transfer: Transfer, answers: Future[list[None]]) -> None:
    # The answers first: a server that refused never takes part in the transfer.
    answers.result()
    try:
        transfer.wait()
    except (TimeoutError, RuntimeError) as error:
        raise WeightUpdateError(f"the servers took a bucket that was not sent: {error}") from error


class BroadcastSender:
    """Over one process group: rank 0 and every worker of every server.

    Args:
      engine: the servers' clients and their loop.
      bucket_bytes: most bytes of one message (a larger tensor is one alone); two are in memory.
      pause: what requests in flight do meanwhile, see ServerClient.pause.
      timeout_s: one bucket, or one control request.
      device: where buckets are packed; cpu is gloo, cuda NCCL.
    """

    def __init__(
        self,
        engine: ServerPool,
        *,
        bucket_bytes: int,
        pause: PauseMode,
        timeout_s: float,
        device: torch.device | str,
    ) -> None:
        self._engine, self._pause = engine, pause
        self._bucket_bytes, self._timeout_s = bucket_bytes, timeout_s
        self._device = torch.device(device)
        self._group: WeightGroup | None = None

    def connect(self) -> None:
        """Make the group with every worker. WeightUpdateError names who did not join."""
        sizes = self._ask("say how many workers they have", lambda c: c.world_size(self._timeout_s))
        world_size = 1 + sum(sizes)
        offsets = dict(zip(self._engine.clients, accumulate(sizes, initial=1), strict=False))
        store = listen(own_address(self._engine.clients), self._timeout_s)

        def join(client: ServerClient) -> Awaitable[None]:
            return client.init_weight_group(
                store.host, store.port, offsets[client], world_size, self._timeout_s
            )

        with ThreadPoolExecutor(1, "megarl-weight-requests") as thread:
            joined = thread.submit(self._ask, "join the weight group", join)
            try:
                self._group = open_group(
                    store,
                    SOURCE_RANK,
                    world_size,
                    self._device,
                    self._timeout_s,
                    give_up=joined.done,
                )
            except (TimeoutError, RuntimeError) as error:
                joined.result()  # a server's own words, if it has any
                raise WeightUpdateError(str(error)) from error
            joined.result()

    def push(
        self,
        weights: Iterable[tuple[str, Tensor]],
        version: int,
        *,
        digests: dict[str, int] | None = None,
    ) -> PushStats:
        """See WeightSender.

        Args:
          digests: filled with each tensor's digest as it was sent; the workers then keep theirs
            for `ServerClient.weight_digests`.
        """
        started = time.perf_counter()
        if self._group is None:
            self.connect()
        if digests is not None:
            weights = _with_digests(weights, digests)
        stream = buckets(weights, self._bucket_bytes, self._device)
        first = next(stream, None)
        if first is None:
            raise ValueError(f"version {version}: no weights to push")
        paused_at = time.perf_counter()
        with paused(self._engine, self._pause, self._timeout_s):
            try:
                num_bytes = self._send(chain([first], stream), version, digests is not None)
            except BaseException as error:
                self._abandon(error)
                raise
        ended = time.perf_counter()
        return PushStats(num_bytes, ended - started, ended - paused_at)

    def close(self) -> None:
        """Leave the group. The servers leave when they end, or with the next group."""
        if self._group is not None:
            self._group.leave()
            self._group = None

    def _send(self, stream: Iterator[Bucket], version: int, wants_digests: bool) -> int:
        self._ask("start an update", lambda c: c.start_update(self._timeout_s))
        num_bytes = 0
        with ThreadPoolExecutor(1, "megarl-weight-requests") as thread:
            under_way: tuple[Transfer, Future[list[None]]] | None = None
            for bucket in stream:  # the step packs a bucket while the one before is sent
                if under_way is not None:
                    _wait(*under_way)
                under_way = self._start_bucket(bucket, thread, wants_digests)
                num_bytes += bucket.buffer.numel()
            assert under_way is not None, "a push without a bucket"
            _wait(*under_way)
        self._ask("finish the update", lambda c: c.finish_update(version, self._timeout_s))
        return num_bytes

    def _start_bucket(
        self, bucket: Bucket, thread: ThreadPoolExecutor, wants_digests: bool
    ) -> tuple[Transfer, Future[list[None]]]:
        assert self._group is not None, "a push without a group"
        info = {
            "names": bucket.names,
            "dtypes": bucket.dtypes,
            "shapes": bucket.shapes,
            "wants_digests": wants_digests,
        }
        what = f"take {bucket.names[0]} to {bucket.names[-1]}"
        answers = thread.submit(self._ask, what, lambda c: c.update_weights(info, self._timeout_s))
        return self._group.broadcast(bucket.buffer), answers

    def _abandon(self, error: BaseException) -> None:
        """After a failure: no group, and every server able to serve what it has."""
        self.close()
        try:
            # A worker that still waits for a bucket answers when the group's limit is over.
            self._ask("end the update", lambda c: c.cancel_update(2 * self._timeout_s))
        except MegarlError as second:
            error.add_note(str(second))

    def _ask(self, what: str, call: Callable[[ServerClient], Awaitable[T]]) -> list[T]:
        return ask_all(self._engine, what, call, self._timeout_s)


def _with_digests(
    weights: Iterable[tuple[str, Tensor]], digests: dict[str, int]
) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in weights:
        digests[name] = digest(tensor)
        yield name, tensor


def ask_all(
    engine: ServerPool, what: str, call: Callable[[ServerClient], Awaitable[T]], timeout_s: float
) -> list[T]:
    """`call` of every server at once, in their order.

    Raises:
      WeightUpdateError: of all servers that failed, after all have answered.
    """
    clients = engine.clients
    errors: list[EngineError] = []  # the first is the cause; others may fail for lack of that one

    async def ask(client: ServerClient) -> T | None:
        try:
            return await call(client)
        except EngineError as error:
            errors.append(error)
            return None

    async def ask_each() -> list[T | None]:
        return await asyncio.gather(*(ask(client) for client in clients))

    # Each request has a limit of its own; this one is for a loop that is stuck.
    try:
        answers = engine.run(ask_each(), timeout_s=4 * (timeout_s + CONTROL_TIMEOUT_S))
    except EngineError as error:
        raise WeightUpdateError(f"servers asked to {what}: {error}") from error
    if errors:
        raise WeightUpdateError(
            f"servers asked to {what}: " + "; ".join(map(str, errors))
        ) from errors[0]
    return cast("list[T]", answers)


@contextmanager
def paused(engine: ServerPool, mode: PauseMode, timeout_s: float) -> Iterator[None]:
    """All servers paused inside, all resumed after it, also after an error."""

    def resume() -> None:
        ask_all(engine, "resume", lambda c: c.resume(2 * timeout_s), timeout_s)

    try:
        ask_all(engine, "pause", lambda c: c.pause(mode, timeout_s), timeout_s)
        yield
    except BaseException as error:
        try:
            resume()
        except MegarlError as second:
            error.add_note(str(second))
        raise
    resume()
