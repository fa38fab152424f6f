"""One worker's end of the sharded bridge, whatever its engine.

The engine's plugin gives an agent what only it can do (trace its loader, load tensors), and
hands it the trainer's commands, which arrive at all workers of a server at once:

    hello    nothing: an agent is there
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
from itertools import islice
from typing import Any, Protocol

import torch
from torch import Tensor

from megarl.bridge.engines.landing import Landing
from megarl.bridge.engines.trace import Trace
from megarl.bridge.group import WeightGroup, connect, open_group
from megarl.bridge.needs import encode
from megarl.bridge.plan import Plan
from megarl.bridge.transport import Arrived, Assembly, Incoming, receive_rounds

logger = logging.getLogger(__name__)

_LATE_S = 10.0


class EngineWorker(Protocol):
    """What the plugin gives an agent: one worker of one server."""

    engine: str
    device: torch.device
    rank: int
    """Of the server's workers."""

    @property
    def model(self) -> torch.nn.Module:
        """The one that serves."""
        ...

    def trace(self, tensors: list[tuple[str, list[int], str]]) -> Trace:
        """What the loader does with (HF name, shape, dtype); see trace.trace_loading."""
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

    def place(self, write: Callable[[], None]) -> None:
        """Let `write` put all of a new version straight into the model that serves."""
        ...


class Agent:
    """See the module. One command at a time."""

    def __init__(self, worker: EngineWorker) -> None:
        self._worker = worker
        self._named: dict[str, tuple[str, list[int]]] = {}
        self._group: WeightGroup | None = None
        self._group_name = ""
        self._incoming: Incoming | None = None
        self._trace_found: Trace | None = None
        self._landing: Landing | None = None
        self._inbox: _Inbox | None = None

    def handle(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """`{"result": ...}`, or `{"error": text}`."""
        commands: dict[str, Callable[..., Any]] = {
            "hello": lambda: None,
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
        found = self._trace_found = self._worker.trace(tensors)
        self._named = {name: (dtype, shape) for name, shape, dtype in tensors}
        return encode(found.parts, list(self._named))

    def _join(
        self, host: str, port: int, first_rank: int, world_size: int, timeout_s: float
    ) -> None:
        self._leave()
        self._group_name = f"{host}:{port}"
        rank = first_rank + self._worker.rank
        store = connect(host, port, timeout_s)
        with self._worker.joining():
            self._group = open_group(store, rank, world_size, self._worker.device, timeout_s)
        plan = Plan.from_bytes(store.get(f"plan{rank}"))
        self._incoming = Incoming(plan, rank - plan.num_sources, self._worker.device)
        assert self._trace_found is not None, "trace comes before join"
        self._landing = Landing(
            self._trace_found,
            self._worker.model,
            self._incoming,
            self._named,
            engine=self._worker.engine,
        )

    def _receive(self, group_name: str) -> None:
        group, incoming, _ = self._joined(group_name)
        self._end_inbox()
        self._inbox = _Inbox(group, incoming)

    def _land(self, group_name: str) -> list[int]:
        """Bytes that were received, and whether they went straight into the model."""
        group, incoming, landing = self._joined(group_name)
        if self._inbox is not None:
            rounds = iter(self._inbox.take(group.timeout_s))
            self._inbox = None
        else:
            rounds = receive_rounds(group, incoming)
        if landing.is_ready():
            self._worker.place(lambda: _land_in_place(landing, rounds))
            return [incoming.num_bytes, 1]
        assembly = Assembly(incoming.plan, self._named, self._worker.device)
        self._worker.load(_whole(assembly, rounds, landing))
        if missing := assembly.incomplete():
            raise RuntimeError(f"the plan left {missing[:3]} incomplete")
        landing.prove()
        for name, reason in islice(landing.refusals.items(), 3):
            logger.debug("megarl: weights go through the engine's loader: %s: %s", name, reason)
        return [incoming.num_bytes, 0]

    def _joined(self, group_name: str) -> tuple[WeightGroup, Incoming, Landing]:
        if self._group is None or self._incoming is None or self._landing is None:
            raise RuntimeError("join comes first")
        if group_name != self._group_name:
            # Another trainer's: whoever asks would be waited for in vain.
            raise RuntimeError(f"joined the group of {self._group_name}, not of {group_name}")
        return self._group, self._incoming, self._landing

    def _leave(self) -> None:
        if self._group is not None:
            self._group.leave()
        self._end_inbox()
        self._group = self._incoming = self._landing = None

    def _end_inbox(self) -> None:
        if self._inbox is not None:
            self._inbox.end()
            self._inbox = None


class _Inbox:
    """A push that is taken in by a thread: this worker's part of the weights, a second time."""

    def __init__(self, group: WeightGroup, incoming: Incoming) -> None:
        self._group, self._incoming = group, incoming
        self._arrived: list[Arrived] = []
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="megarl-receive", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for arrived in receive_rounds(self._group, self._incoming):
                self._arrived.append(arrived.on(self._incoming.device))
        except Exception as error:  # noqa: BLE001 - `take` raises it
            self._error = error
            self._group.give_up(f"rank {self._group.rank} of the weight group: {error}")

    def take(self, timeout_s: float) -> list[Arrived]:
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


def _land_in_place(landing: Landing, rounds: Iterator[Arrived]) -> None:
    for arrived in rounds:
        landing.land(arrived)


def _whole(
    assembly: Assembly, rounds: Iterator[Arrived], landing: Landing
) -> Iterator[tuple[str, Tensor]]:
    """Tensors of HF shape, of which what this worker's loader reads is there."""
    for arrived in rounds:
        landing.watch(arrived)
        for name, box, data in arrived.boxes():
            whole = assembly.add(name, box, data)
            if whole is not None:
                yield name, whole
