"""How many episodes may start: the bound on off-policyness, kept at admission.

An episode that starts while the trainer is at version v is trained on at the earliest when
all episodes accepted or running before it are consumed, B a step. So a bound eta on

    (accepted + running) <= (eta + v + 1) B

is a bound on versions: nothing finished is ever thrown away for its age. Rejected episodes
leave the sum, which lets others take their place.
"""

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
        self._submitted = self._running = self._accepted = self._rejected = 0

    @property
    def counts(self) -> RolloutCounts:
        return RolloutCounts(self._submitted, self._running, self._accepted, self._rejected)

    @property
    def pending_limit(self) -> int:
        """Episodes worth having queued or running: all that any version may start at once."""
        return (self.max_staleness + 1) * self.consumer_batch_size

    def capacity(self, version: int) -> int:
        """Episodes that may start now; 0 or less is none.

        min( C - running,  (eta + version + 1) B - (accepted + running) )
        """
        concurrency = self.max_concurrent_rollouts - self._running
        allowed = (self.max_staleness + version + 1) * self.consumer_batch_size
        return min(concurrency, allowed - (self._accepted + self._running))

    def on_submitted(self) -> None:
        """An episode was queued."""
        self._submitted += 1

    def on_started(self) -> None:
        self._running += 1

    def on_accepted(self) -> None:
        self._running -= 1
        self._accepted += 1

    def on_rejected(self) -> None:
        self._running -= 1
        self._rejected += 1

    def on_version_recovered(self, version: int) -> None:
        """After a restart at `version`: all steps before it have consumed their batches."""
        self._accepted = version * self.consumer_batch_size
