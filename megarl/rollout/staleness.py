"""How many episodes may start: the bound on off-policyness, kept at admission.

At version v an episode may start while

    accepted + running < (eta + v + 1) B                                                    (1)

so those of versions <= v, consumed B a step and oldest first, are used up by step v + eta:
nothing finished is ever thrown away for its age. Rejected episodes leave the sum, which lets
others take their place. A long episode may be overtaken by younger ones, so (1) alone bounds
only the mean; the step of version v waits for what still runs since v - eta or before. There
are never more than B of these that are not consumed.
"""

from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True)
class RolloutCounts:
    submitted: int = 0
    running: int = 0
    accepted: int = 0
    rejected: int = 0


class StalenessManager:
    """Counts episodes. Not thread-safe: it belongs to the rollout loop.

    Args:
      max_concurrent_rollouts: C, episodes at the same time.
      consumer_batch_size: B, episodes a training step consumes.
      max_staleness: eta, versions an episode may lag behind the step that trains on it.

    Source: AReaL, arXiv:2505.24298 eq. 3.
    """

    def __init__(
        self, max_concurrent_rollouts: int, consumer_batch_size: int, max_staleness: int
    ) -> None:
        if max_concurrent_rollouts < 1 or consumer_batch_size < 1 or max_staleness < 0:
            raise ValueError(
                f"need max_concurrent_rollouts >= 1, consumer_batch_size >= 1 and max_staleness "
                f">= 0, got {max_concurrent_rollouts}, {consumer_batch_size}, {max_staleness}"
            )
        self.max_concurrent_rollouts = max_concurrent_rollouts
        self.consumer_batch_size = consumer_batch_size
        self.max_staleness = max_staleness
        self._submitted = self._accepted = self._rejected = 0
        self._running: Counter[int] = Counter()
        """Episodes that run, by the version at which they started."""

    @property
    def counts(self) -> RolloutCounts:
        running = self._running.total()
        return RolloutCounts(self._submitted, running, self._accepted, self._rejected)

    @property
    def pending_limit(self) -> int:
        """Episodes worth having queued or running: all that any version may start at once."""
        return (self.max_staleness + 1) * self.consumer_batch_size

    def capacity(self, version: int) -> int:
        """Episodes that may start now; 0 or less is none.

        min( C - running,  (eta + version + 1) B - (accepted + running) )
        """
        running = self._running.total()
        allowed = (self.max_staleness + version + 1) * self.consumer_batch_size
        return min(self.max_concurrent_rollouts - running, allowed - (self._accepted + running))

    def overdue(self, version: int) -> int:
        """Episodes that run and only the step of `version` may still take: it waits for them."""
        oldest = version - self.max_staleness
        return sum(count for started, count in self._running.items() if started <= oldest)

    def on_submitted(self) -> None:
        """An episode was queued."""
        self._submitted += 1

    def on_started(self, version: int) -> None:
        self._running[version] += 1

    def on_accepted(self, started: int) -> None:
        """An episode that started at version `started` ended well."""
        self._end(started)
        self._accepted += 1

    def on_rejected(self, started: int) -> None:
        self._end(started)
        self._rejected += 1

    def _end(self, started: int) -> None:
        self._running[started] -= 1
        if not self._running[started]:
            del self._running[started]

    def on_restored(self) -> None:
        """An episode that an earlier process accepted, and no step has consumed."""
        self._accepted += 1

    def on_version_recovered(self, version: int, submitted: int = 0, rejected: int = 0) -> None:
        """After a restart at `version`: all steps before it have consumed their batches."""
        self._accepted = version * self.consumer_batch_size
        self._submitted, self._rejected = submitted, rejected
