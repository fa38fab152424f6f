"""How many episodes may start: the bound on off-policyness, kept at admission.

At version v an episode may start while

    accepted + spent + running < (eta + v - v0 + 1) B                                       (1)

where v0 is the version at which the pool began, 0 in most runs. So those of versions <= v,
consumed B a step and oldest first, are used up by step v + eta: nothing finished is ever thrown
away for its age. Rejected episodes leave the sum, which lets others take their place; where
batches are dynamic they stay in it as `spent`: a step then consumes B places, some of them of
rejected episodes.

A long episode may be overtaken by younger ones, so (1) alone bounds only the mean. Of those that
started at u or before, the steps after v that may still take them, up to u + eta, have room for

    (u + eta - v) B,  0 if that is less                                                     (2)

so the step of version v waits while more of them run. What has finished is taken oldest first
and by (1) never too much, so no step trains on an episode that is older than eta.
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
        self._submitted = self._accepted = self._rejected = self._spent = 0
        self._first_version = 0
        self._running: Counter[int] = Counter()
        """Episodes that run, by the version at which they started."""

    @property
    def counts(self) -> RolloutCounts:
        running = self._running.total()
        return RolloutCounts(self._submitted, running, self._accepted, self._rejected)

    @property
    def spent(self) -> int:
        """Places of batches that rejected episodes use up, so that no other takes them."""
        return self._spent

    @property
    def pending_limit(self) -> int:
        """Episodes worth having queued or running: all that any version may start at once."""
        return (self.max_staleness + 1) * self.consumer_batch_size

    def capacity(self, version: int) -> int:
        """Episodes that may start now; 0 or less is none.

        min( C - running,  (eta + version - v0 + 1) B - (accepted + spent + running) )
        """
        running = self._running.total()
        steps = self.max_staleness + version - self._first_version + 1
        allowed = steps * self.consumer_batch_size
        used = self._accepted + self._spent + running
        return min(self.max_concurrent_rollouts - running, allowed - used)

    def overdue(self, version: int) -> int:
        """How many of the episodes that run have to end before the step of `version`; see (2)."""
        most = running = 0
        for started in sorted(self._running):
            running += self._running[started]
            later_steps = max(0, started + self.max_staleness - version)
            most = max(most, running - later_steps * self.consumer_batch_size)
        return most

    def on_submitted(self) -> None:
        """An episode was queued."""
        self._submitted += 1

    def on_started(self, version: int) -> None:
        self._running[version] += 1

    def on_accepted(self, started: int) -> None:
        """An episode that started at version `started` ended well."""
        self._end(started)
        self._accepted += 1

    def on_rejected(self, started: int, *, is_spent: bool = False) -> None:
        """Its place is another's, unless it `is_spent`."""
        self._end(started)
        self._rejected += 1
        self._spent += is_spent

    def on_freed(self, count: int) -> None:
        """Places that rejected episodes had used up are others' again."""
        assert count <= self._spent, f"{count} of {self._spent} places"
        self._spent -= count

    def _end(self, started: int) -> None:
        self._running[started] -= 1
        if not self._running[started]:
            del self._running[started]

    def on_restored(self, *, is_rejected: bool = False) -> None:
        """An episode that ended in an earlier process, and whose place no step has used up."""
        if is_rejected:
            self._spent += 1
        else:
            self._accepted += 1

    def on_version(self, version: int) -> None:
        """The servers hold `version`. While no episode has a place, the pool begins here.

        No step before this one has taken anything of the pool: they were those of an earlier
        process, or of batches that were generated at once. If their (version - v0) B places
        counted as free, so many episodes more could start now, and the last of them would be
        trained on version - v0 steps too late. Steps that pass the pool by while it holds
        episodes are not seen here: those episodes then grow too old.
        """
        if not self._accepted + self._spent + self._running.total():
            self._first_version = version

    def on_version_recovered(
        self, version: int, submitted: int = 0, rejected: int = 0, spent: int = 0
    ) -> None:
        """After a restart at `version`: all steps before it have used up their places."""
        self._first_version = 0
        self._accepted = version * self.consumer_batch_size - spent
        self._submitted, self._rejected, self._spent = submitted, rejected, spent
