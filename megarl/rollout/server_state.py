"""One server of a fleet: its state, and what it has to do.

STARTING   was added and has not answered yet
STALE      is up and waits for weights: it has just been added, or was started again
READY      answers requests
DRAINING   gets no new requests, and is left when it has answered those it has
DEAD       does not answer; it is asked for its health until it comes back, as STALE
"""

import asyncio
import enum
import time

from megarl.errors import EngineError
from megarl.rollout.api import GenerateChunk, ModelRequest
from megarl.rollout.client import ServerClient
from megarl.stats import trace


class State(enum.Enum):
    """See the module."""

    STARTING = "starting"
    STALE = "stale"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


UP = (State.STALE, State.READY, State.DRAINING)


class Server:
    """One of the fleet."""

    def __init__(self, client: ServerClient, state: State) -> None:
        self.client, self.state = client, state
        self.running: set[asyncio.Future[GenerateChunk]] = set()
        self.outstanding_tokens = 0.0
        self.last_answer_s = self.last_good_s = time.monotonic()
        self.draining_since_s = 0.0
        self.failed: set[str] = set()
        """Ids of requests whose answers were errors of its own, since its last good one."""
        self.is_lost = False
        """It died; what left the fleet did not."""
        self.was_given = False
        """Weights of a push, so that it has a version."""
        self.was_silent = False
        """Since it is dead: it has gone, so an answer is that of another process."""
        self.num_ill = 0
        """Checks in a row that failed: it may have been started again since."""
        self.check: asyncio.Task[EngineError | None] | None = None

    def set_state(self, state: State, why: str = "") -> None:
        self.state = state
        trace.instant(state.value, trace.server(self.client.address, "state"), why=why)

    def record(self, request: ModelRequest, chunk: GenerateChunk, started_s: float) -> None:
        """A request on the time line, if there is one."""
        if not trace.is_on():
            return
        trace.span(
            request.rid[:8],
            trace.server(self.client.address),
            started_s,
            time.monotonic(),
            prompt_tokens=len(request.input_ids),
            tokens=len(chunk.tokens),
            versions=sorted(set(chunk.versions)),
            stop_reason=chunk.stop_reason,
        )
