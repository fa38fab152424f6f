"""What the trainer's ranks do while rank 0 waits for its pool.

Rank 0 alone knows when the episodes are there: after seconds, or after hours that a slow server,
a large evaluation or a fleet that comes back takes. The others stand by for its words:

    refit   all ranks bring the present weights to servers that came back
    wait    nothing yet; said once a minute, because a collective has a limit of half an hour
    done    rank 0 has what it waited for
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from megarl.parallel import Mesh
from megarl.rollout.engine import RemoteInferenceEngine

_REFIT, _WAIT, _DONE = "refit", "wait", "done"
WAIT_INTERVAL_S = 60.0


@contextlib.contextmanager
def standing_by(
    engine: RemoteInferenceEngine | None, mesh: Mesh, refit: Callable[[], object]
) -> Iterator[None]:
    """A block in which rank 0 waits on `engine`; the others enter it once rank 0 has left it.

    Collective over the world. What rank 0 raises in the block is raised on rank 0 alone.

    Args:
      engine: of rank 0; None on the others.
      refit: the present weights into all servers; collective.
    """
    if engine is None:
        while (word := from_rank_0(None, mesh)) != _DONE:
            if word == _REFIT:
                refit()
        yield
        return
    engine.standby = _OfRank0(mesh, refit)
    try:
        yield
    finally:
        engine.standby = None
    from_rank_0(_DONE, mesh)


class _OfRank0:
    """Says the words. See `megarl.rollout.engine.StandBy`."""

    def __init__(self, mesh: Mesh, refit: Callable[[], object]) -> None:
        self._mesh, self._refit_all = mesh, refit
        self._said_s = time.monotonic()

    def refit(self) -> None:
        self._say(_REFIT)
        self._refit_all()

    def go_on(self) -> None:
        if time.monotonic() - self._said_s >= WAIT_INTERVAL_S:
            self._say(_WAIT)

    def _say(self, word: str) -> None:
        from_rank_0(word, self._mesh)
        self._said_s = time.monotonic()


def from_rank_0(value: Any, mesh: Mesh) -> Any:
    """Rank 0's value, on all ranks. Collective over the world."""
    values = [value]
    dist.broadcast_object_list(values, src=0, group=mesh.cpu_group)
    return values[0]
