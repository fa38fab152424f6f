"""Normalisation of rewards and advantages over a group of samples or the whole batch.

Statistics are sums by group, passed through `all_reduce` before they are used. So they are
those of the whole batch however its rows are spread over data-parallel replicas, and groups
that lost members are normalised by the members they have.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

Level = Literal["batch", "group", "none"]


def normalize(
    x: Tensor,
    mask: Tensor,
    group_ids: Tensor,
    num_groups: int,
    *,
    mean_level: Level,
    mean_leave1out: bool,
    std_level: Level,
    std_unbiased: bool,
    eps: float,
    all_reduce: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    r"""(x - mean) / (std + eps) where `mask`, 0 elsewhere.

        mean_i = sum_j x_j / n                        leave-one-out: sum_{j != i} x_j / (n - 1)
        std^2  = sum_j (x_j - m)^2 / (n - 1)          biased: / n

    over the masked entries j of i's group, or of the batch; m is the plain mean of the std's
    level. Where there is no spread (one member, or equal ones) nothing is divided: eps keeps
    a small spread from exploding, and alone it would multiply by 1 / eps. A member alone has
    mean itself, so it becomes 0; with leave-one-out its mean is 0, as nothing else is known.
    Equal values become exactly 0: a float64 sum of equal float32 values does not round.

    Args:
      x: any shape, float32.
      mask: shape of x, bool. Values under False are never used, so they may be nan.
      group_ids: shape of x, int64 in [0, num_groups).
      num_groups: over all replicas.
      mean_level, std_level: "none" subtracts nothing, divides by nothing.
      all_reduce: sums a float64 tensor over replicas; None is one replica.

    Returns:
      shape of x, float32.

    Raises:
      ValueError: shapes differ.

    Source: GRPO, arXiv:2402.03300 sec. 4.1.2 (group/group); leave-one-out is RLOO,
      arXiv:2402.14740; mean without std is Dr. GRPO, arXiv:2503.20783.
    """
    if not x.shape == mask.shape == group_ids.shape:
        raise ValueError(
            f"x {tuple(x.shape)}, mask {tuple(mask.shape)} and group_ids "
            f"{tuple(group_ids.shape)} must have one shape"
        )
    reduce = all_reduce or (lambda sums: sums)
    mask = mask.bool()
    values = torch.where(mask, x.double(), 0.0)
    stats = _Statistics(values, mask, group_ids, num_groups, reduce)
    centred = values - stats.means(mean_level, leave1out=mean_leave1out)
    if std_level != "none":
        std = stats.stds(std_level, unbiased=std_unbiased)
        centred = centred / torch.where(std > 0, std + eps, 1.0)
    return torch.where(mask, centred, 0.0).float()


class _Statistics:
    """Counts, sums and squared deviations by group, over all replicas."""

    def __init__(
        self,
        values: Tensor,
        mask: Tensor,
        group_ids: Tensor,
        num_groups: int,
        reduce: Callable[[Tensor], Tensor],
    ) -> None:
        self._values, self._mask, self._ids = values, mask, group_ids
        self._num_groups, self._reduce = num_groups, reduce
        both = torch.stack([self._by_group(mask.double()), self._by_group(values)])
        self._counts, self._sums = reduce(both)

    def _by_group(self, x: Tensor) -> Tensor:
        """[num_groups] sums of the masked entries of x."""
        sums = self._values.new_zeros(self._num_groups)
        return sums.index_add(0, self._ids[self._mask], x[self._mask])

    def _at_level(self, level: Level) -> tuple[Tensor, Tensor]:
        """Count and sum of each entry's group, or of the batch."""
        if level == "group":
            return self._counts[self._ids], self._sums[self._ids]
        return self._counts.sum(), self._sums.sum()

    def means(self, level: Level, *, leave1out: bool) -> Tensor:
        if level == "none":
            return self._values.new_zeros(())
        count, total = self._at_level(level)
        if leave1out:
            return (total - self._values) / (count - 1).clamp(min=1)
        return total / count.clamp(min=1)

    def stds(self, level: Level, *, unbiased: bool) -> Tensor:
        count, _ = self._at_level(level)
        deviations = torch.where(self._mask, self._values - self.means(level, leave1out=False), 0.0)
        squares = self._reduce(self._by_group(deviations.square()))
        total = squares[self._ids] if level == "group" else squares.sum()
        return (total / (count - int(unbiased)).clamp(min=1)).sqrt()
