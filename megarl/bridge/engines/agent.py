"""One worker's end of the sharded bridge, whatever its engine.

The engine's plugin gives an agent what only it can do (trace its loader, load tensors), and
hands it the trainer's commands, which arrive at all workers of a server at once:

    trace    what this worker's loader takes of each HF tensor
    join     the weight group, for the plan that lies in its store
    receive  begin to take the next push in, in a thread, while requests are still answered
    land     take a push in, or what `receive` has taken in, and load it; the server is paused
    leave    the group

A command never raises: an engine whose worker raises may be of no more use afterwards (vLLM
0.32 mixes up the answers of the workers behind the first one that raised). Imports torch only.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from megarl.bridge.boxes import Box
from megarl.bridge.engines.trace import Part
from megarl.bridge.group import WeightGroup, connect, open_group
from megarl.bridge.needs import encode
from megarl.bridge.plan import Plan
from megarl.bridge.transport import Arrived, Assembly, Incoming, receive_all, receive_rounds

logger = logging.getLogger(__name__)

Boxes = Iterator[tuple[str, Box, Tensor]]
"""HF name, box and its bytes, as they come."""
_LATE_S = 10.0


class EngineWorker(Protocol):
    """What the plugin gives an agent: one worker of one server."""

    device: torch.device
    rank: int
    """Of the server's workers."""

    def trace(self, tensors: list[tuple[str, list[int], str]]) -> dict[str, list[Part]]:
        """What the loader takes of (HF name, shape, dtype); see trace.needed_parts."""
        ...

    def joining(self) -> AbstractContextManager[Any]:
        """Around the making of a group that is not the engine's own."""
        ...

    def load(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """All tensors of a new version, each in its HF shape, into the model that serves.

        Whatever happens, the model can compute when this returns or raises: complete layers
        with new weights, the others with old ones.
        """
        ...


class Agent:
    """See the module. One command at a time."""

    def __init__(self, worker: EngineWorker) -> None:
        self._worker = worker
        self._named: dict[str, tuple[str, list[int]]] = {}
        self._group: WeightGroup | None = None
        self._plan: Plan | None = None
        self._incoming: Incoming | None = None
        self._inbox: _Inbox | None = None

    def handle(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """`{"result": ...}`, or `{"error": text}`."""
        commands: dict[str, Callable[..., Any]] = {
            "trace": self._trace,
            "join": self._join,
            "receive": self._receive,
            "land": self._land,
            "leave": self._leave,
        }
        try:
            return {"result": commands[name](**arguments)}
        except Exception as error:
            logger.exception("megarl: %s", name)
            text = f"{type(error).__name__}: {error}"
            if self._group is not None:
                self._group.give_up(f"worker {self._worker.rank} of a server: {name}: {text}")
            return {"error": text}

    def _trace(self, tensors: list[tuple[str, list[int], str]]) -> list[Any]:
        """As megarl.bridge.needs encodes it."""
        parts = self._worker.trace(tensors)
        self._named = {name: (dtype, shape) for name, shape, dtype in tensors}
        return encode(parts, list(self._named))

    def _join(
        self, host: str, port: int, first_rank: int, world_size: int, timeout_s: float
    ) -> None:
        self._leave()
        rank = first_rank + self._worker.rank
        store = connect(host, port, timeout_s)
        with self._worker.joining():
            self._group = open_group(store, rank, world_size, self._worker.device, timeout_s)
        self._plan = Plan.from_bytes(store.get(f"plan{rank}"))
        worker = rank - self._plan.num_sources
        self._incoming = Incoming(self._plan, worker, self._worker.device)

    def _receive(self) -> None:
        self._end_inbox()
        self._inbox = _Inbox(*self._joined(), self._worker.device)

    def _land(self) -> int:
        """Bytes that were received."""
        group, plan = self._joined()
        if self._inbox is not None:
            arrived = iter(self._inbox.take(group.timeout_s))
            self._inbox = None
        else:
            assert self._incoming is not None, "joined"
            arrived = _boxes_of(receive_rounds(group, self._incoming))
        counted = _Counted(arrived)
        assembly = Assembly(plan, self._named, self._worker.device)
        self._worker.load(_whole(assembly, counted))
        if missing := assembly.incomplete():
            raise RuntimeError(f"the plan left {missing[:3]} incomplete")
        return counted.num_bytes

    def _joined(self) -> tuple[WeightGroup, Plan]:
        if self._group is None or self._plan is None:
            raise RuntimeError("join comes first")
        return self._group, self._plan

    def _leave(self) -> None:
        if self._group is not None:
            self._group.leave()
        self._end_inbox()
        self._group = self._plan = self._incoming = None

    def _end_inbox(self) -> None:
        if self._inbox is not None:
            self._inbox.end()
            self._inbox = None


class _Inbox:
    """A push that is taken in by a thread: this worker's part of the weights, a second time."""

    def __init__(self, group: WeightGroup, plan: Plan, device: torch.device) -> None:
        self._group, self._plan, self._device = group, plan, device
        self._arrived: list[tuple[str, Box, Tensor]] = []
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="megarl-receive", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for name, box, data in receive_all(self._group, self._plan, self._device):
                self._arrived.append((name, box, data))
        except Exception as error:  # noqa: BLE001 - `take` raises it
            self._error = error
            self._group.give_up(f"rank {self._group.rank} of the weight group: {error}")

    def take(self, timeout_s: float) -> list[tuple[str, Box, Tensor]]:
        """All of it. TimeoutError if it is not there; RuntimeError if it did not come."""
        self._thread.join(timeout_s + _LATE_S)
        if self._thread.is_alive():
            raise TimeoutError(f"the trainer's weights did not arrive within {timeout_s:g} s")
        if self._error is not None:
            raise self._error
        arrived, self._arrived = self._arrived, []
        return arrived

    def end(self) -> None:
        """Its group has been left or given up, so the thread ends by itself."""
        self._thread.join(_LATE_S)


class _Counted:
    """Boxes as they come, counted."""

    def __init__(self, arrived: Boxes) -> None:
        self._arrived = arrived
        self.num_bytes = 0

    def __iter__(self) -> Boxes:
        for name, box, data in self._arrived:
            self.num_bytes += data.nbytes
            yield name, box, data


def _boxes_of(rounds: Iterator[Arrived]) -> Boxes:
    for arrived in rounds:
        yield from arrived.boxes()


def _whole(assembly: Assembly, arrived: _Counted) -> Iterator[tuple[str, Tensor]]:
    """Tensors of HF shape, of which what this worker's loader reads is there."""
    for name, box, data in arrived:
        whole = assembly.add(name, box, data)
        if whole is not None:
            yield name, whole
