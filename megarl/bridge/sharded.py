"""Weights from the ranks that hold them to the workers that need them, and nothing else.

Every trainer rank has a sender, and every method is collective over the trainer. Rank 0 alone
talks to the servers: it asks each worker what its engine's loader takes of each HF tensor, and
leads a push:

    pause all servers -> start -> every rank sends its rounds while the workers load theirs
    -> finish(version) -> resume all

What goes where is in the plan, which all ranks work out from the same two layouts.
"""

import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import accumulate
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.bridge.boxes import Box, Layout, Tensor2D, tensor_2d
from megarl.bridge.group import WeightGroup, connect, listen, open_group
from megarl.bridge.layout import workers_layout
from megarl.bridge.plan import Plan, make_plan
from megarl.bridge.sender import PushStats, ServerPool, ask_all, own_address, paused
from megarl.bridge.transport import send_all
from megarl.errors import MegarlError, WeightUpdateError
from megarl.rollout.client import PauseMode


class LocalWeights(Protocol):
    """What a sender needs of a sharded model."""

    layout: Layout
    """Of all trainer ranks."""
    named: dict[str, tuple[str, list[int]]]
    """HF name -> torch's name of the dtype, and shape."""

    def pack(self, name: str, box: Box, buffer: Tensor) -> None:
        """Write a box that this rank holds into [num_bytes] uint8."""
        ...


class ShardedSender:
    """See the module.

    Args:
      servers: on rank 0, the clients and their loop; None on the others.
      weights: this rank's part of the model.
      cpu_group: all trainer ranks, gloo.
      bucket_bytes: most bytes out of and into one rank in a round; two rounds are in memory.
      pause, timeout_s: as of BroadcastSender.
      device: where messages are packed; cpu is gloo, cuda NCCL.
    """

    def __init__(
        self,
        servers: ServerPool | None,
        weights: LocalWeights,
        *,
        cpu_group: dist.ProcessGroup,
        bucket_bytes: int,
        pause: PauseMode,
        timeout_s: float,
        device: torch.device | str,
    ) -> None:
        self._servers, self._weights, self._cpu_group = servers, weights, cpu_group
        self._bucket_bytes, self._pause, self._timeout_s = bucket_bytes, pause, timeout_s
        self._device = torch.device(device)
        self._rank, self._num_ranks = dist.get_rank(cpu_group), dist.get_world_size(cpu_group)
        self._group: WeightGroup | None = None
        self._plan: Plan | None = None

    @property
    def plan(self) -> Plan:
        """RuntimeError before `connect`."""
        if self._plan is None:
            raise RuntimeError("connect() comes first")
        return self._plan

    def connect(self) -> None:
        """Ask for the servers' layouts, plan, and make the group with every worker.

        Raises:
          WeightUpdateError: on all ranks; names who did not answer or join.
        """
        told: list[Any] = [None]
        store = None

        def meet() -> None:
            nonlocal store
            if self._servers is None:
                return
            sizes = self._ask("say how many workers they have", lambda c: c.world_size(limit))
            asked = [[name, shape, dtype] for name, (dtype, shape) in self._weights.named.items()]
            answers = self._ask("trace their loaders", lambda c: c.needed_parts(asked, limit))
            store = listen(own_address(self._servers.clients), self._timeout_s)
            needs = [worker for server in answers for worker in server]
            told[0] = (store.host, store.port, sizes, needs)

        limit = self._timeout_s
        self._together("meet", meet)
        dist.broadcast_object_list(told, src=0, group=self._cpu_group)
        host, port, sizes, needs = told[0]
        self._plan = self._make_plan(needs)

        def join() -> None:
            world_size = self._num_ranks + sum(sizes)
            if store is None:
                own = connect(host, port, self._timeout_s)
                self._group = open_group(own, self._rank, world_size, self._device, self._timeout_s)
                return
            for worker in range(sum(sizes)):
                part = self.plan.part_of_worker(worker)
                store.set(f"plan{self._num_ranks + worker}", part)
            self._join_with_servers(store, sizes, world_size)

        self._together("join the weight group", join)

    def _make_plan(self, needs: list[dict[str, list[list[int]]]]) -> Plan:
        sizes: dict[str, Tensor2D] = {
            name: tensor_2d(shape, getattr(torch, dtype).itemsize)
            for name, (dtype, shape) in self._weights.named.items()
        }
        boxes = [{name: [Box(*p) for p in parts] for name, parts in n.items()} for n in needs]
        return make_plan(
            sizes,
            self._weights.layout,
            workers_layout(boxes),
            num_sources=self._num_ranks,
            num_workers=len(needs),
            bucket_bytes=self._bucket_bytes,
        )

    def _join_with_servers(self, store: dist.TCPStore, sizes: list[int], world_size: int) -> None:
        assert self._servers is not None, "rank 0 alone"
        starts = accumulate(sizes, initial=self._num_ranks)
        offsets = dict(zip(self._servers.clients, starts, strict=False))
        with ThreadPoolExecutor(1, "megarl-weight-requests") as thread:
            joined = thread.submit(
                self._ask,
                "join the weight group",
                lambda c: c.init_weight_group(
                    *(store.host, store.port, offsets[c], world_size, self._timeout_s),
                    sharded=True,
                ),
            )
            try:
                self._group = open_group(
                    *(store, self._rank, world_size, self._device, self._timeout_s),
                    give_up=joined.done,
                )
            except (TimeoutError, RuntimeError):
                joined.result()  # a server's own words, if it has any
                raise
            joined.result()

    def push(self, weights: Iterable[tuple[str, Tensor]], version: int) -> PushStats:
        """The present weights of all ranks into every worker.

        Args:
          weights: not read: the ranks send what they hold.

        Returns:
          bytes that this rank sent, and seconds; the pause is rank 0's.

        Raises:
          WeightUpdateError: on all ranks; the servers then hold a mixture under version -1.
        """
        started = time.perf_counter()
        if self._group is None:
            self.connect()
        with ExitStack() as pause:
            self._together("pause the servers", lambda: self._start(pause))
            paused_at = time.perf_counter()
            try:
                num_bytes = self._together("send weights", self._send)
                self._together("finish the update", lambda: self._finish(version))
            except BaseException as error:
                self._abandon(error)
                raise
        ended = time.perf_counter()
        return PushStats(num_bytes, ended - started, ended - paused_at)

    def _start(self, pause: ExitStack) -> None:
        if self._servers is None:
            return
        pause.enter_context(paused(self._servers, self._pause, self._timeout_s))
        self._ask("start an update", lambda c: c.start_update(self._timeout_s))

    def _send(self) -> int:
        assert self._group is not None, "a push without a group"
        if self._servers is None:
            return send_all(self._group, self.plan, self._weights.pack, self._device)
        with ThreadPoolExecutor(1, "megarl-weight-requests") as thread:
            info = {"sharded": True}
            answers = thread.submit(
                self._ask,
                "take the weights",
                lambda c: c.update_weights(info, 2 * self._timeout_s),
            )
            try:
                num_bytes = send_all(self._group, self.plan, self._weights.pack, self._device)
            except (TimeoutError, RuntimeError):
                self._leave()
                answers.result()  # a server's own words, if it has any
                raise
            answers.result()
        return num_bytes

    def _finish(self, version: int) -> None:
        if self._servers is not None:
            self._ask("finish the update", lambda c: c.finish_update(version, self._timeout_s))

    def close(self) -> None:
        """Leave the group. The servers leave when they end, or with the next group."""
        self._leave()

    def _leave(self) -> None:
        if self._group is not None:
            self._group.leave()
            self._group = None

    def _abandon(self, error: BaseException) -> None:
        """After a failure: no group, and every server able to serve what it has."""
        self._leave()
        if self._servers is None:
            return
        try:
            self._ask("end the update", lambda c: c.cancel_update(2 * self._timeout_s))
        except MegarlError as second:
            error.add_note(str(second))

    def _together(self, what: str, action: Callable[[], Any]) -> Any:
        """`action` on every rank; if it failed on one, WeightUpdateError on all."""
        result, failure = None, None
        try:
            result = action()
        except (MegarlError, TimeoutError, RuntimeError) as error:
            failure = f"rank {self._rank}: {error}"
        failures: list[str | None] = [None] * self._num_ranks
        dist.all_gather_object(failures, failure, group=self._cpu_group)
        if found := [text for text in failures if text]:
            raise WeightUpdateError(f"trainer ranks asked to {what}: " + "; ".join(found))
        return result

    def _ask(self, what: str, call: Callable[[Any], Any]) -> list[Any]:
        assert self._servers is not None, "rank 0 alone"
        return ask_all(self._servers, what, call, self._timeout_s)
