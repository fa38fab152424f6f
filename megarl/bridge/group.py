"""The process group that carries weights: trainer rank 0 and every server worker.

It stands beside torch.distributed's default group, which it neither needs nor touches: a
server has one of its own. gloo on a CPU, NCCL on a GPU. A broadcast's source is rank 0, and
there may be other trainer ranks that send to single workers. Every wait
ends; what it ends with names who was awaited. A rank that cannot go on says so to all by
`give_up`, and nobody waits for it any longer than a second. Imports torch only: this file also
runs inside the servers.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

SOURCE_RANK = 0
_POLL_S = 0.0005
_MEMBER_POLL_S = 0.02
_GIVEN_UP = "given up"
_MOST_WORDS = 2000
_GIVEN_UP_POLL_S = 1.0  # of 1,024 ranks: a thousand small requests a second to rank 0


class GivenUp(RuntimeError):
    """Another rank has given this group up; its words."""


class WeightGroup:
    """A standing group. Not thread-safe; one operation at a time."""

    def __init__(self, store: dist.TCPStore, group: Any, rank: int, timeout_s: float) -> None:
        self.rank, self.timeout_s = rank, timeout_s
        self._store = store  # rank 0's holds the server of the others' connections
        self._group = group
        self._next_check_s = 0.0

    def deadline(self) -> float:
        """Of a wait that begins now, on time.monotonic's clock."""
        return time.monotonic() + self.timeout_s

    @property
    def is_gloo(self) -> bool:
        return bool(self._group.name() == "gloo")

    def broadcast(self, buffer: Tensor) -> "Transfer":
        """Start sending (rank 0) or receiving `buffer`, contiguous."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = SOURCE_RANK, 0
        return Transfer(self, self._group.broadcast([buffer], options), buffer)

    def exchange(self, sends: list["Parcel"], receives: list["Parcel"]) -> "Exchange":
        """Start sending and receiving all of these, on every rank that takes part.

        Between two ranks the order of parcels is the same at both ends.
        """
        if self.is_gloo:
            works = [
                (parcel, self._group.recv([parcel.buffer], parcel.peer, 0)) for parcel in receives
            ]
            works += [
                (parcel, self._group.send([parcel.buffer], parcel.peer, 0)) for parcel in sends
            ]
            return Exchange(self, works)
        device = (sends or receives)[0].buffer.device
        self._group._start_coalescing(device)
        for parcel in receives:
            self._group.recv([parcel.buffer], parcel.peer, 0)
        for parcel in sends:
            self._group.send([parcel.buffer], parcel.peer, 0)
        work = self._group._end_coalescing(device)
        return Exchange(self, [(parcel, work) for parcel in [*receives, *sends]])

    def give_up(self, why: str) -> None:
        """End every wait of every rank; the group is of no more use."""
        with contextlib.suppress(RuntimeError):  # rank 0 is gone, and with it all waits
            # The first words stay: what follows is mostly their consequence.
            self._store.compare_set(_GIVEN_UP, "", why[:_MOST_WORDS])

    def check(self) -> None:
        """While waiting, as often as one likes.

        Raises:
          GivenUp: a rank gave up.
          RuntimeError: rank 0 is gone.
        """
        now = time.monotonic()
        if now < self._next_check_s:
            return
        self._next_check_s = now + _GIVEN_UP_POLL_S
        try:
            words = self._store.get(_GIVEN_UP) if self._store.check([_GIVEN_UP]) else None
        except RuntimeError as error:
            raise RuntimeError(
                f"rank 0 of the weight group, the trainer, is gone: {error}"
            ) from error
        if words is not None:
            raise GivenUp(words.decode())

    def leave(self) -> None:
        """Drop the group at once; what is under way fails, here and on the other ranks."""
        if self._group is None:
            return
        if self._group.name() == "nccl":
            # Also keeps NCCL's watchdog from ending the process over a late operation.
            self._group.abort()
        # gloo cannot be interrupted: its destructor waits until what is under way has timed out.
        last_reference, self._group = [self._group], None
        threading.Thread(
            target=last_reference.clear, name="megarl-weight-group-leave", daemon=True
        ).start()


class Transfer:
    """An operation under way. Keeps its buffer alive."""

    def __init__(self, group: WeightGroup, work: Any, buffer: Tensor) -> None:
        self._group, self._work, self._buffer = group, work, buffer

    def wait(self) -> None:
        """Until the buffer has arrived (or, on rank 0, may be overwritten).

        Raises:
          TimeoutError: not within the group's limit.
          RuntimeError: a connection broke.
        """
        awaited = "rank 0, the trainer" if self._group.rank else "the servers' workers"
        deadline = self._group.deadline()
        while not self._work.is_completed():
            self._group.check()
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{self._buffer.numel()} bytes of weights: {awaited} did not take part "
                    f"within {self._group.timeout_s:g} s"
                )
            time.sleep(_POLL_S)
        self._work.wait()  # raises what went wrong; on a GPU orders the stream after NCCL's


class Parcel(NamedTuple):
    """A message to or from one rank."""

    peer: int
    buffer: Tensor
    """[num_bytes] uint8, contiguous."""
    what: str
    """For an error: `round 3`."""


class Exchange:
    """Messages under way. Keeps their buffers alive."""

    def __init__(self, group: WeightGroup, works: list[tuple[Parcel, Any]]) -> None:
        self._group, self._works = group, works

    def wait(self) -> None:
        """Until all have arrived, and what was sent may be overwritten.

        Raises:
          TimeoutError: not within the group's limit; names the first rank that is awaited.
          GivenUp: another rank cannot go on.
          RuntimeError: a connection broke.
        """
        if not self._works:
            return
        deadline = self._group.deadline()
        awaited = [self._works[0][0]]
        try:
            if self._group.is_gloo:
                self._wait_gloo(deadline, awaited)
            else:
                self._wait_nccl(deadline)
        except GivenUp:
            raise
        except (TimeoutError, RuntimeError) as error:
            # gloo's own clock may be some milliseconds ahead of ours.
            if time.monotonic() < deadline and "timed out" not in str(error).lower():
                raise RuntimeError(f"weights, {awaited[0].what}: {error}") from error
            raise TimeoutError(
                f"weights, {awaited[0].what}: rank {awaited[0].peer} of the weight group did not "
                f"take part within {self._group.timeout_s:g} s"
            ) from error

    def _wait_gloo(self, deadline: float, awaited: list[Parcel]) -> None:
        """In a thread: gloo's wait cannot be interrupted, and is_completed() of a message stays
        False until it was waited for."""
        done, errors, works = threading.Event(), [], self._works

        def wait() -> None:
            try:
                for parcel, work in works:
                    awaited[0] = parcel
                    work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))
            except RuntimeError as error:
                errors.append(error)
            finally:
                done.set()

        threading.Thread(target=wait, name="megarl-weight-wait", daemon=True).start()
        while not done.wait(_GIVEN_UP_POLL_S):
            self._group.check()
        if errors:
            raise errors[0]

    def _wait_nccl(self, deadline: float) -> None:
        for _, work in self._works:
            while not work.is_completed():
                self._group.check()
                if time.monotonic() > deadline:
                    raise TimeoutError
                time.sleep(_POLL_S)
            work.wait()


def listen(address: str, timeout_s: float) -> dist.TCPStore:
    """Rank 0's meeting point, on a free port (`.port`) of `address` alone."""
    with socket.socket(_family(address), socket.SOCK_STREAM) as listener:
        listener.bind((address, 0))
        listener.listen(socket.SOMAXCONN)
        port = listener.getsockname()[1]
        return dist.TCPStore(
            address,
            port,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )


def connect(address: str, port: int, timeout_s: float) -> dist.TCPStore:
    """The other ranks' way to rank 0's meeting point. RuntimeError if nobody is there."""
    limit = timedelta(seconds=timeout_s)
    return dist.TCPStore(address, port, is_master=False, timeout=limit, wait_for_workers=False)


def open_group(
    store: dist.TCPStore,
    rank: int,
    world_size: int,
    device: torch.device | str,
    timeout_s: float,
    *,
    give_up: Callable[[], bool] = lambda: False,
) -> WeightGroup:
    """Join; returns when all `world_size` ranks have.

    Args:
      store: rank 0's `listen`, or `connect` to it.
      give_up: asked while waiting; True ends the wait.

    Raises:
      TimeoutError: a rank did not come; names the ranks that are missing.
    """
    try:
        _meet(store, rank, world_size, timeout_s, give_up)
    except TimeoutError as error:
        store.compare_set(_GIVEN_UP, "", str(error))  # so that those who came need not wait
        raise
    device = torch.device(device)
    limit = timedelta(seconds=timeout_s)
    prefixed = dist.PrefixStore("weights", store)
    if device.type == "cpu":
        options = dist.ProcessGroupGloo._Options()
        own = address_towards(store.host, store.port)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=own)]
        options._timeout = limit
        group = dist.ProcessGroupGloo(prefixed, rank, world_size, options)
    else:
        if device.index is None:
            device = torch.device(device.type, torch.cuda.current_device())
        options = dist.ProcessGroupNCCL.Options()
        # Transfer.wait ends first: NCCL's own limit ends the process.
        options._timeout = 2 * limit
        group = dist.ProcessGroupNCCL(prefixed, rank, world_size, options)
        group._set_sequence_number_for_group()
        group.eager_connect_single_device(device)
    return WeightGroup(store, group, rank, timeout_s)


def address_towards(host: str, port: int) -> str:
    """This machine's address on the way to `host`; no packet is sent."""
    family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def _family(address: str) -> socket.AddressFamily:
    return socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]


def _meet(
    store: dist.TCPStore,
    rank: int,
    world_size: int,
    timeout_s: float,
    give_up: Callable[[], bool],
) -> None:
    """Until every rank is at the door: a group's own constructor cannot say who is late."""
    store.set(f"rank{rank}", "here")
    store.add("arrived", 1)  # one number to ask for, whatever the size of the world
    deadline = time.monotonic() + timeout_s
    polls = 0
    while store.add("arrived", 0) < world_size:
        polls += 1
        others_gave_up = polls % 50 == 0 and store.check([_GIVEN_UP])
        if time.monotonic() > deadline or give_up() or others_gave_up:
            missing = [i for i in range(world_size) if not store.check([f"rank{i}"])]
            raise TimeoutError(
                f"weight group of {world_size}: ranks {missing} did not join within {timeout_s:g} s"
            )
        time.sleep(_MEMBER_POLL_S)
