"""One time line of a run, RUN/trace.json: drop it on ui.perfetto.dev.

    span(name, track, start_s, end_s, **args)     something that took time
    instant(name, track, **args)                  something that happened

A `Track` is a row: a process (the trainer, a server) and a name in it. Spans of one track that
overlap go to lanes of their own, so thousands of requests can be told at the same time.

The file is in the JSON array form of the Trace Event Format, a line an event. That form may end
without its bracket, so the file is never closed: it can be read at any moment and after a crash,
and a run that goes on appends to it. Times are microseconds since 1970. Those of a restarted run
stay; the steps that it runs again are then there twice.

While nothing is recorded the functions return at once. Otherwise they put the event into a queue,
from any thread; one thread of its own makes lines of it. At most MAX_QUEUED events wait, those
beyond are dropped and counted. A process that is killed loses what came in the last FLUSH_S.
Imports no torch.
"""

import contextlib
import heapq
import json
import logging
import math
import threading
import time
import zlib
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)

MAX_QUEUED = 100_000
FLUSH_S = 0.25
_CLOSE_TIMEOUT_S = 60.0


class Track(NamedTuple):
    """Where an event is shown."""

    process: str
    name: str


PHASES = Track("trainer", "phases")
STEPS = Track("trainer", "steps")
WEIGHTS = Track("trainer", "weights")
PUSH_PHASES = Track("trainer", "weights, by phase")
PAUSES = Track("rollout", "servers paused")
EPISODES = Track("rollout", "episodes")
EVAL_EPISODES = Track("rollout", "evaluation")


class _Event(NamedTuple):
    name: str
    track: Track
    start_s: float
    end_s: float | None
    """None is an instant."""
    args: dict[str, Any]


def server(address: str, name: str = "requests") -> Track:
    """A row of the server at `address`."""
    return Track(f"server {address.removeprefix('http://')}", name)


def span(name: str, track: Track, start_s: float, end_s: float, **args: Any) -> None:
    """What went on from `start_s` to `end_s`, both of time.monotonic().

    Args:
      args: numbers, texts, lists of them; shown beside the event.
    """
    if _recorder is not None:
        _recorder.add(_Event(name, track, start_s, end_s, args))


def instant(name: str, track: Track, **args: Any) -> None:
    """What happens now. `args` as of `span`."""
    if _recorder is not None:
        _recorder.add(_Event(name, track, time.monotonic(), None, args))


def is_on() -> bool:
    """Whether events are recorded; for callers whose `args` cost something."""
    return _recorder is not None


@contextlib.contextmanager
def phase(name: str, track: Track = PHASES, **args: Any) -> Iterator[None]:
    """A span of what is inside."""
    start_s = time.monotonic()
    try:
        yield
    finally:
        span(name, track, start_s, time.monotonic(), **args)


def start(path: Path) -> None:
    """Record into `path`, behind what an earlier process wrote there."""
    global _recorder
    assert _recorder is None, f"a time line is being written to {_recorder.path}"
    _recorder = _Recorder(path)


def stop() -> None:
    """Write what is queued and end. TimeoutError if the disk does not take it."""
    global _recorder
    recorder, _recorder = _recorder, None
    if recorder is not None:
        recorder.close()


class _Recorder:
    """A queue that any thread fills, and the thread that empties it into the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._queue: deque[_Event] = deque()  # append and popleft are atomic
        self._num_dropped = 0
        self._ends = threading.Event()
        self._lines = _Lines(to_epoch_s=time.time() - time.monotonic())
        cut_torn_line(path)
        # Unbuffered: what was written is in the file, whatever becomes of this process.
        self._file = path.open("ab", buffering=0)
        self._is_lost = False
        """The disk took a line in part, or none: nothing may stand behind it."""
        if self._file.tell() == 0:
            self._put(["[\n"])
        self._thread = threading.Thread(target=self._write, name="trace", daemon=True)
        self._thread.start()

    def add(self, event: _Event) -> None:
        if len(self._queue) >= MAX_QUEUED:
            self._num_dropped += 1  # may miss one of another thread: it is told, not reckoned with
            return
        self._queue.append(event)

    def close(self) -> None:
        self._ends.set()
        self._thread.join(_CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            raise TimeoutError(f"{self.path}: events not written within {_CLOSE_TIMEOUT_S} s")
        self._file.close()
        if self._num_dropped:
            logger.warning("%s: %d lines are missing", self.path, self._num_dropped)

    def _write(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._ends.wait(FLUSH_S)
            lines = []
            while self._queue:
                lines += self._lines.of(self._queue.popleft())
                if len(lines) >= 1000:
                    self._put(lines)
                    lines = []
            self._put(lines)

    def _put(self, lines: list[str]) -> None:
        data = memoryview("".join(lines).encode())
        try:
            while data and not self._is_lost:
                data = data[self._file.write(data) :]
        except OSError as error:
            # A time line is not worth a run: it ends here, and that is told.
            self._is_lost = True
            logger.warning("%s ends: %s", self.path, error)
        if self._is_lost:
            self._num_dropped += len(lines)


class _Lines:
    """Events as lines of the file. Belongs to the writing thread."""

    def __init__(self, to_epoch_s: float) -> None:
        self._to_epoch_s = to_epoch_s
        self._ids: dict[tuple[Track, int], tuple[int, int]] = {}
        self._lanes: dict[Track, list[tuple[int, int]]] = {}
        """Of each track a heap of (end of the last span in microseconds, lane)."""

    def of(self, event: _Event) -> list[str]:
        """The event's line, after those that name its lane where it is the first one in it."""
        start_us = self._microseconds(event.start_s)
        line: dict[str, Any] = {"name": event.name, "ts": start_us}
        lane = 0
        if event.end_s is None:
            line |= {"ph": "i", "s": "t"}
        else:
            end_us = max(start_us, self._microseconds(event.end_s))
            line |= {"ph": "X", "dur": end_us - start_us}
            lane = self._take_lane(event.track, start_us, end_us)
        lines = []
        if (event.track, lane) not in self._ids:
            lines = self._introduce(event.track, lane)
        line["pid"], line["tid"] = self._ids[event.track, lane]
        if event.args:
            line["args"] = {key: _plain(value) for key, value in event.args.items()}
        return [*lines, _json(line)]

    def _microseconds(self, monotonic_s: float) -> int:
        return math.floor((monotonic_s + self._to_epoch_s) * 1e6)

    def _take_lane(self, track: Track, start_us: int, end_us: int) -> int:
        """One that is free from `start_us` on: spans of a lane never overlap."""
        lanes = self._lanes.setdefault(track, [])
        if lanes and lanes[0][0] <= start_us:
            lane = lanes[0][1]
            heapq.heapreplace(lanes, (end_us, lane))
        else:
            lane = len(lanes)
            heapq.heappush(lanes, (end_us, lane))
        return lane

    def _introduce(self, track: Track, lane: int) -> list[str]:
        """Ids that follow from the names alone: those of a run that goes on are the same."""
        name = track.name if lane == 0 else f"{track.name} {lane}"
        pid, tid = _number(track.process), _number(f"{track.process}/{name}")
        self._ids[track, lane] = pid, tid
        ids = {"ph": "M", "pid": pid, "tid": tid}
        return [
            _json({"name": "process_name", **ids, "args": {"name": track.process}}),
            _json({"name": "thread_name", **ids, "args": {"name": name}}),
            _json({"name": "thread_sort_index", **ids, "args": {"sort_index": lane}}),
        ]


def cut_torn_line(path: Path) -> None:
    """Drop what stands behind the last whole line: a process died while it wrote."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        end = file.seek(0, 2)
        keep, block = 0, 1 << 16
        for position in range(max(0, end - block), -block, -block):
            file.seek(max(0, position))
            newline = file.read(block).rfind(b"\n")
            if newline >= 0:
                keep = max(0, position) + newline + 1
                break
        if keep < end:
            file.truncate(keep)


def _number(name: str) -> int:
    """1 ... 2^31 - 1; viewers give 0 a meaning of its own."""
    return zlib.crc32(name.encode()) % (2**31 - 1) + 1


def _json(line: dict[str, Any]) -> str:
    return json.dumps(line, separators=(",", ":")) + ",\n"


def _plain(value: Any) -> Any:
    """As JSON has it: what is not finite, and any other type, becomes text."""
    if isinstance(value, bool | int | str | None):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return str(value)


_recorder: _Recorder | None = None
