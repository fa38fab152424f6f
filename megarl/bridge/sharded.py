"""Weights from the ranks that hold them to the workers that need them, and nothing else.

Every trainer rank has a sender, and every method is collective over the trainer. Rank 0 alone
talks to the servers: it asks each worker what its engine's loader takes of each HF tensor, and
tells them when to take a push in and when to load it, see engines/agent.py. What goes where is
in the plan, which all ranks work out from the same two layouts.

With `overlap` the servers take a push in while they still generate, and are paused only while
they load it; it costs each worker the memory of its part of the weights once more.
"""

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.distributed import TCPStore

from megarl.bridge.boxes import Box, Layout, Tensor2D, tensor_2d
from megarl.bridge.group import WeightGroup, connect, listen, open_group
from megarl.bridge.layout import workers_layout
from megarl.bridge.needs import Needs, decode
from megarl.bridge.plan import Plan, make_plan
from megarl.bridge.push import Members, Together, ask_all, own_address
from megarl.bridge.transport import Outgoing, send_all
from megarl.errors import EngineError, EngineTimeout, WeightUpdateError
from megarl.ops.pack import Box as PackBox
from megarl.rollout.api import NO_VERSION
from megarl.rollout.client import CONTROL_TIMEOUT_S, ServerClient

T = TypeVar("T")
_LATE_S = 10.0
"""After a push was given up, for a server to say so; one that is silent is dead."""


class LocalWeights(Protocol):
    """What a sender needs of a sharded model."""

    layout: Layout
    """Of all trainer ranks."""
    named: dict[str, tuple[str, list[int]]]
    """HF name -> torch's name of the dtype, and shape."""

    def sources(self, name: str, box: Box) -> Sequence[PackBox]:
        """What a box of an HF tensor is made of on this rank, see transport.Sources."""
        ...


class _Told(NamedTuple):
    """What rank 0 tells the others of the servers."""

    host: str
    port: int
    workers: list[int]
    """Of each server."""
    answers: list[str]
    """Distinct ones, in JSON, see megarl/bridge/needs.py."""
    answer_of: list[int]
    """Of each worker."""


class ShardedSender:
    """A `WeightSender`, see the module.

    Args:
      members: the servers, on rank 0.
      weights: this rank's part of the model.
      bucket_bytes: most bytes out of and into one rank in a round; two rounds are in memory.
      timeout_s: one message, or one control request.
      device: where messages are packed; cpu is gloo, cuda NCCL.
      overlap: see the module.
    """

    def __init__(
        self,
        members: Members,
        weights: LocalWeights,
        together: Together,
        *,
        bucket_bytes: int,
        timeout_s: float,
        device: torch.device | str,
        overlap: bool = False,
    ) -> None:
        self._members, self._weights, self._together = members, weights, together
        self._bucket_bytes, self._timeout_s = bucket_bytes, timeout_s
        self._device, self._overlap = torch.device(device), overlap
        self._joined: list[ServerClient] = []
        self._group_name: dict[str, str] = {}
        """An argument of commands: a worker that has joined another trainer's group refuses."""
        self._group: WeightGroup | None = None
        self._plan: Plan | None = None
        self._outgoing: Outgoing | None = None
        self._needs: dict[ServerClient, list[str]] = {}
        self.num_in_place = 0
        """Workers whose model the last push was written straight into; on rank 0."""
        self._has_begun = False
        self._num_bytes = 0
        self._gave_up = threading.Event()

    @property
    def plan(self) -> Plan:
        """RuntimeError before the first `prepare`."""
        if self._plan is None:
            raise RuntimeError("prepare() comes first")
        return self._plan

    def prepare(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Plan, and make the group with every worker, the first time; with `overlap`, send.

        Args:
          weights: not read: the ranks send what they hold.
        """
        is_current = self._group is not None and self._joined == self._members.clients
        if not self._together.from_rank_0(is_current):
            self.close()
            self._joined = list(self._members.clients)
            self._connect()
        if self._overlap:
            self._together("have the workers receive", self._have_them_receive)
            self._num_bytes = self._together("send weights", self._send_all)

    def send(self, version: int) -> int:
        self._has_begun = True
        self._gave_up.clear()
        action = self._land if self._overlap else self._send_and_land
        num_bytes = self._together("send weights", action)

        self._together(
            "finish the update",
            lambda: self._ask("finish", lambda c: c.set_version(version, self._timeout_s)),
        )
        self._has_begun = False
        return num_bytes

    def abandon(self, timeout_s: float) -> dict[ServerClient, EngineError]:
        self.close()
        self._needs.clear()  # a server may have been started again, and its client not know it
        begun, self._has_begun = self._has_begun, False

        async def end(client: ServerClient) -> None:
            await client.command("leave", {}, timeout_s)
            if begun:
                await client.set_version(NO_VERSION, timeout_s)

        return self._members.failing(end, timeout_s)

    def close(self) -> None:
        """Leave the group. The servers leave when they end, or with the next group."""
        if self._group is not None:
            self._group.give_up("the trainer has left")
            self._group.leave()
            self._group = None

    # ------------------------------------------------------------------ the group and the plan

    def _connect(self) -> None:
        store: TCPStore | None = None
        told: _Told | None = None

        def meet() -> None:
            nonlocal store, told
            if self._members.pool is None:
                return
            clients = self._members.clients
            self._trace_the_new(clients)
            store = listen(own_address(clients), self._timeout_s)
            of_workers = [answer for client in clients for answer in self._needs[client]]
            answers = list(dict.fromkeys(of_workers))
            index = {answer: i for i, answer in enumerate(answers)}
            workers = [len(self._needs[client]) for client in clients]
            told = _Told(store.host, store.port, workers, answers, [index[a] for a in of_workers])

        self._together("meet", meet)
        told = _Told(*self._together.from_rank_0(told))
        self._group_name = {"group_name": f"{told.host}:{told.port}"}
        self._plan = self._make_plan(told)
        rank = self._together.rank
        self._outgoing = Outgoing(self._plan, rank, self._weights.sources, self._device)

        def join() -> None:
            world_size = self._together.num_ranks + sum(told.workers)
            if store is None:
                own = connect(told.host, told.port, self._timeout_s)
                self._group = self._open(own, world_size)
                return
            for worker in range(sum(told.workers)):
                part = self.plan.part_of_worker(worker)
                store.set(f"plan{self._together.num_ranks + worker}", part)
            self._join_with_servers(store, told.workers, world_size)

        self._together("join the weight group", join)

    def _trace_the_new(self, clients: list[ServerClient]) -> None:
        """Ask those that have not been asked; a server that comes again is another client."""
        self._needs = {client: self._needs[client] for client in clients if client in self._needs}
        named = self._weights.named
        tensors = [[name, shape, dtype] for name, (dtype, shape) in named.items()]
        assert self._members.pool is not None, "rank 0 alone"
        new = [client for client in clients if client not in self._needs]
        answers = ask_all(
            self._members.pool,
            new,
            "trace their loaders",
            lambda c: c.command("trace", {"tensors": tensors}, self._timeout_s),
            self._timeout_s,
        )
        for client, of_workers in zip(new, answers, strict=True):
            self._needs[client] = [json.dumps(answer) for answer in of_workers]

    def _make_plan(self, told: _Told) -> Plan:
        sizes: dict[str, Tensor2D] = {
            name: tensor_2d(shape, getattr(torch, dtype).itemsize)
            for name, (dtype, shape) in self._weights.named.items()
        }
        distinct: list[Needs] = [decode(json.loads(a), list(sizes)) for a in told.answers]
        return make_plan(
            sizes,
            self._weights.layout,
            workers_layout([distinct[i] for i in told.answer_of]),
            num_sources=self._together.num_ranks,
            num_workers=len(told.answer_of),
            bucket_bytes=self._bucket_bytes,
        )

    def _open(self, store: TCPStore, world_size: int, **options: Any) -> WeightGroup:
        rank = self._together.rank
        return open_group(store, rank, world_size, self._device, self._timeout_s, **options)

    def _join_with_servers(self, store: TCPStore, workers: list[int], world_size: int) -> None:
        starts = accumulate(workers, initial=self._together.num_ranks)
        offsets = dict(zip(self._members.clients, starts, strict=False))

        def arguments(client: ServerClient) -> dict[str, Any]:
            return {
                "host": store.host,
                "port": store.port,
                "first_rank": offsets[client],
                "world_size": world_size,
                "timeout_s": self._timeout_s,
            }

        # The worker gives up first: it knows whom it waited for.
        limit = self._timeout_s + CONTROL_TIMEOUT_S
        with ThreadPoolExecutor(1, "megarl-weight-requests") as thread:
            joined = thread.submit(
                self._ask,
                "join the weight group",
                lambda c: c.command("join", arguments(c), limit),
            )
            try:
                self._group = self._open(store, world_size, give_up=joined.done)
            except (TimeoutError, RuntimeError):
                joined.result()  # a server's own words, if it has any
                raise
            joined.result()

    # ------------------------------------------------------------------ a push

    def _send_all(self) -> int:
        assert self._group is not None, "a push without a group"
        assert self._outgoing is not None, "a group without a plan"
        try:
            return send_all(self._group, self.plan, self._outgoing)
        except (TimeoutError, RuntimeError) as error:
            self._group.give_up(f"trainer rank {self._together.rank}: {error}")
            self._gave_up.set()
            raise

    def _have_them_receive(self) -> None:
        limit = self._timeout_s
        self._ask("receive", lambda c: c.command("receive", self._group_name, limit))

    def _send_and_land(self) -> int:
        if self._members.pool is None:
            return self._send_all()
        with ThreadPoolExecutor(1, "megarl-weight-requests") as thread:
            landed = thread.submit(self._land)
            try:
                num_bytes = self._send_all()
            except (TimeoutError, RuntimeError):
                landed.result()  # a server's own words, if it has any
                raise
            landed.result()
        return num_bytes

    def _land(self) -> int:
        """All workers load; the bytes that this rank sent before, with `overlap`."""
        if self._members.pool is None:
            return self._num_bytes
        received = self._ask("load the weights", self._land_one)
        answers = [answer for of_server in received for answer in of_server]
        num_bytes = sum(bytes_received for bytes_received, _ in answers)
        self.num_in_place = sum(in_place for _, in_place in answers)
        planned = int(self.plan.bytes_into_workers().sum())
        if num_bytes != planned:
            raise WeightUpdateError(f"{num_bytes} bytes reached the workers, not {planned}")
        return self._num_bytes

    async def _land_one(self, client: ServerClient) -> list[list[int]]:
        """Of each worker, bytes received and whether they went straight into its model.

        A server's failure ends the push for all.
        """
        limit = 2 * self._timeout_s + CONTROL_TIMEOUT_S
        answer = asyncio.ensure_future(client.command("land", self._group_name, limit))
        gave_up_at: float | None = None
        while not answer.done():
            await asyncio.wait([answer], timeout=1.0)
            if self._gave_up.is_set():
                gave_up_at = gave_up_at or time.monotonic()
                if time.monotonic() > gave_up_at + _LATE_S and not answer.done():
                    answer.cancel()
                    raise EngineTimeout(f"{client.address}: land: no answer after the end")
        try:
            return answer.result()
        except EngineError as error:
            if self._group is not None:
                self._group.give_up(str(error))
            self._gave_up.set()
            raise

    def _ask(self, what: str, call: Callable[[ServerClient], Awaitable[T]]) -> list[T]:
        """Of the group's servers, by rank 0; nothing on the others."""
        return self._members.ask(what, call, self._timeout_s)
