"""Training episodes that have ended and that no step has taken yet; and a batch of them."""

import torch

from megarl.trajectory import Trajectory, concat_padded


class Finished:
    """By task id, so that the oldest are taken first, in order of submission.

    A fixed batch is `count` accepted episodes. A dynamic one is what was accepted of `count` that
    ended: a rejected one has used up its place.
    """

    def __init__(self) -> None:
        self.accepted: dict[int, Trajectory] = {}
        self.rejected: set[int] = set()
        """Whose place in a dynamic batch no step has used up; empty where batches are fixed."""

    def __len__(self) -> int:
        return len(self.accepted) + len(self.rejected)

    def oldest(self, count: int) -> list[int]:
        return sorted(self.accepted.keys() | self.rejected)[:count]

    def drop_rejected(self, count: int, fewest: int) -> int:
        """Forget those that were rejected of the oldest `count` as long as fewer than `fewest` of
        these were accepted; how many were forgotten."""
        dropped = 0
        while len(self) >= count:
            rejected = self.rejected.intersection(self.oldest(count))
            if count - len(rejected) >= fewest:
                break
            self.rejected -= rejected
            dropped += len(rejected)
        return dropped

    def take(self, count: int) -> dict[int, Trajectory]:
        """The accepted ones of the oldest `count`, in order of submission."""
        oldest = self.oldest(count)
        assert len(oldest) == count, f"{len(oldest)} episodes are ready, not {count}"
        self.rejected.difference_update(oldest)
        return {i: self.accepted.pop(i) for i in oldest if i in self.accepted}


def as_batch(trajectories: list[Trajectory]) -> Trajectory:
    """One batch; samples of an episode share a group id, dense from 0.

    A thousand episodes take tens of milliseconds: a thread that no episode waits for should call
    it.
    """
    sizes = [trajectory["input_ids"].shape[0] for trajectory in trajectories]
    for trajectory, size in zip(trajectories, sizes, strict=True):
        if "no_eos" not in trajectory:
            trajectory["no_eos"] = torch.zeros(size, dtype=torch.bool)
        trajectory.pop("group_ids", None)  # a workflow's own say nothing about other episodes
    batch = concat_padded(trajectories)
    batch["group_ids"] = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    return batch
