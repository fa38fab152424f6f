"""A push of new weights into every server, whichever way they go: pause, send, resume.

    prepare (servers generate) -> pause all -> send -> resume all

No request is ever answered from weights of which only a part is new: once sending has begun,
the servers stay paused until all that are left have all of it. A server that died, or answers
no more, is dropped from the pool and the others get the weights once more; the job goes on as
long as one is left. Every trainer rank takes part; rank 0 alone talks to the servers.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, cast
from urllib.parse import urlsplit

import torch.distributed as dist
from torch import Tensor

from megarl.bridge.group import address_towards
from megarl.errors import EngineError, MegarlError, WeightUpdateError
from megarl.rollout.client import CONTROL_TIMEOUT_S, PauseMode, ServerClient
from megarl.stats import trace

logger = logging.getLogger(__name__)
T = TypeVar("T")

MAX_BLAMELESS_TRIES = 2
"""Tries of a push that fails though every server is well: bytes that were not those sent."""
_LOOPBACK_PREFIXES = ("127.", "::1")


class ServerPool(Protocol):
    """What a push needs of the rollout engine."""

    clients: list[ServerClient]
    """Of the servers that are up."""

    def wait_for_clients(self) -> list[ServerClient]:
        """Those, once there is one. EngineError if none comes."""
        ...

    def refitted(self, clients: list[ServerClient]) -> None:
        """These servers have the present weights, and may answer requests."""
        ...

    def run(self, coro: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """The result of `coro`, run on the loop that the clients belong to."""
        ...

    def drop(self, client: ServerClient, why: str) -> None:
        """This server is dead; its requests go to the others. EngineError: none will come."""
        ...


class PushStats(NamedTuple):
    num_bytes: int
    """Sent by this rank, in the try that succeeded."""
    total_s: float
    pause_s: float
    """From the request to pause until the last server goes on."""


class WeightSender(Protocol):
    """A way for weights. Every trainer rank has one; all methods are collective.

    What fails on one rank raises WeightUpdateError on all, see `Together`.
    """

    def prepare(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """All that can be done while the servers still generate.

        Args:
          weights: full, HF-named tensors; iterating is collective. It may be iterated again.
        """
        ...

    def send(self, version: int) -> int:
        """Into servers that are paused; the bytes that this rank sent."""
        ...

    def abandon(self, timeout_s: float) -> dict[ServerClient, EngineError]:
        """After a failure: end what is under way, everywhere.

        Returns:
          on rank 0, the servers that could not be made to serve again.
        """
        ...

    def close(self) -> None: ...


class Together:
    """What one trainer rank fails in, all fail in.

    Args:
      cpu_group: all trainer ranks, gloo; None is one process without a group.
    """

    def __init__(self, cpu_group: dist.ProcessGroup | None) -> None:
        self._group = cpu_group
        self.rank = dist.get_rank(cpu_group) if cpu_group is not None else 0
        self.num_ranks = dist.get_world_size(cpu_group) if cpu_group is not None else 1

    def __call__(self, what: str, action: Callable[[], T]) -> T:
        """`action` on every rank; WeightUpdateError on all if it failed on one."""
        result, failure = None, None
        try:
            result = action()
        except (MegarlError, TimeoutError, RuntimeError) as error:
            failure = error
        told = self.gather(f"rank {self.rank}: {failure}" if failure is not None else None)
        if found := [text for text in told if text]:
            text = f"trainer ranks asked to {what}: " + "; ".join(found)
            raise WeightUpdateError(text) from failure
        return cast("T", result)

    def gather(self, value: Any) -> list[Any]:
        """Of every rank."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(values, value, group=self._group)
        return values

    def from_rank_0(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        if self._group is None:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self._group)
        return values[0]


class Members:
    """The servers of a push. Only rank 0 has any; on other ranks nothing is asked."""

    def __init__(self, servers: ServerPool | None) -> None:
        self.pool = servers
        self.clients: list[ServerClient] = []

    def renew(self) -> None:
        """From now on those that are up. Waits for one; WeightUpdateError if none comes."""
        if self.pool is not None:
            try:
                self.clients = list(self.pool.wait_for_clients())
            except EngineError as error:
                raise WeightUpdateError(f"servers: {error}") from error

    def ask(
        self, what: str, call: Callable[[ServerClient], Awaitable[T]], timeout_s: float
    ) -> list[T]:
        """`ask_all` of them; nothing on other ranks than 0."""
        return ask_all(self.pool, self.clients, what, call, timeout_s) if self.pool else []

    def failing(
        self, call: Callable[[ServerClient], Awaitable[T]], timeout_s: float
    ) -> dict[ServerClient, EngineError]:
        """Those that fail in `call`, and how."""
        if self.pool is None:
            return {}
        answers = ask_each(self.pool, self.clients, call, timeout_s)
        found = zip(self.clients, answers, strict=True)
        return {client: answer for client, answer in found if isinstance(answer, EngineError)}


class Pusher:
    """Pushes by one sender, with every fault of a server.

    Args:
      members: as the sender has them.
      sender: of this rank.
      pause: what requests in flight do meanwhile, see ServerClient.pause.
      timeout_s: one control request.
    """

    def __init__(
        self,
        members: Members,
        sender: WeightSender,
        together: Together,
        *,
        pause: PauseMode,
        timeout_s: float,
    ) -> None:
        self._members, self.sender, self._together = members, sender, together
        self._pause, self._timeout_s = pause, timeout_s

    def push(self, weights: Iterable[tuple[str, Tensor]], version: int) -> PushStats:
        """Collective. See the module.

        Raises:
          WeightUpdateError: no server is left, or the push failed though all are well. What is
            left then stays paused, with a mixture of old and new weights under version -1.
        """
        started = time.perf_counter()
        paused_at: float | None = None
        is_paused = False
        blameless = 0
        while True:
            try:
                self._together("meet", self._members.renew)
                with trace.phase("prepare", trace.PUSH_PHASES, version=version):
                    self.sender.prepare(weights, version)
                if not is_paused:
                    paused_at = paused_at or time.perf_counter()
                    with trace.phase("pause", trace.PUSH_PHASES, version=version):
                        self._together("pause the servers", self._pause_all)
                    is_paused = True
                with trace.phase("send", trace.PUSH_PHASES, version=version):
                    num_bytes = self.sender.send(version)
                is_paused = False  # if one cannot go on, the others have: they stop again
                with trace.phase("resume", trace.PUSH_PHASES, version=version):
                    self._together("resume the servers", self._resume_all)
                    self._together("go on", self._declare_ready)
                break
            except WeightUpdateError as error:
                blameless += not self._drop_the_dead(error)
                if blameless >= MAX_BLAMELESS_TRIES:
                    raise
            except BaseException:
                # This rank's own error: the others will hear of it when this process ends.
                self.sender.abandon(self._timeout_s)
                raise
        ended = time.perf_counter()
        assert paused_at is not None, "sent without a pause"
        return PushStats(num_bytes, ended - started, ended - paused_at)

    def close(self) -> None:
        self.sender.close()

    def _pause_all(self) -> None:
        limit = self._timeout_s
        self._members.ask("pause", lambda c: c.pause(self._pause, limit), limit)

    def _resume_all(self) -> None:
        self._members.ask("resume", lambda c: c.resume(self._timeout_s), self._timeout_s)

    def _declare_ready(self) -> None:
        if self._members.pool is not None:
            self._members.pool.refitted(self._members.clients)

    def _drop_the_dead(self, error: WeightUpdateError) -> bool:
        """Whether there were any. Raises on all ranks if that leaves none."""
        dead = self.sender.abandon(self._timeout_s)
        last: str | None = None
        for client, reason in dead.items():
            assert self._members.pool is not None, "rank 0 alone"
            logger.warning("weights: %s is dropped: %s; after: %s", client.address, reason, error)
            try:
                self._members.pool.drop(client, str(reason))
            except EngineError as none_left:
                last = str(none_left)
        num_dead, last = self._together.from_rank_0((len(dead), last))
        if last is not None:
            raise WeightUpdateError(f"{last}; after: {error}") from error
        if not num_dead and self._members.pool is not None:
            logger.warning("weights: all servers are well, but: %s", error)
        return bool(num_dead)


def ask_all(
    pool: ServerPool,
    clients: Sequence[ServerClient],
    what: str,
    call: Callable[[ServerClient], Awaitable[T]],
    timeout_s: float,
) -> list[T]:
    """`call` of every server at once, in their order.

    Raises:
      WeightUpdateError: of all servers that failed, after all have answered.
    """
    errors: list[str] = []  # the first is the cause; others may fail for lack of that one

    async def note(client: ServerClient) -> T:
        try:
            return await call(client)
        except EngineError as error:
            errors.append(str(error))
            raise

    answers = ask_each(pool, clients, note, timeout_s)
    if errors:
        raise WeightUpdateError(f"servers asked to {what}: " + "; ".join(errors))
    return cast("list[T]", answers)


def ask_each(
    pool: ServerPool,
    clients: Sequence[ServerClient],
    call: Callable[[ServerClient], Awaitable[T]],
    timeout_s: float,
) -> list[T | EngineError]:
    """`call` of these servers at once: what each answered, or how it failed."""

    async def ask(client: ServerClient) -> T | EngineError:
        try:
            return await call(client)
        except EngineError as error:
            return error

    async def ask_them() -> list[T | EngineError]:
        return await asyncio.gather(*(ask(client) for client in clients))

    # Each request has a limit of its own; this one is for a loop that is stuck.
    try:
        return pool.run(ask_them(), timeout_s=4 * (timeout_s + CONTROL_TIMEOUT_S))
    except EngineError as error:
        raise WeightUpdateError(f"servers: {error}") from error


def own_address(clients: Sequence[ServerClient]) -> str:
    """This machine's address as all servers can reach it."""
    targets = [urlsplit(client.address) for client in clients]
    own = [address_towards(t.hostname or "", t.port or 80) for t in targets]
    remote = [address for address in own if not address.startswith(_LOOPBACK_PREFIXES)]
    return (remote or own)[0]
