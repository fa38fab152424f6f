"""Advantages of packed sequences: GAE, and normalisation over groups or the batch.

T  packed tokens          n  sequences          G  groups

Sequence i is tokens cu_seqlens[i] .. cu_seqlens[i + 1] of every [T] tensor. Padded [B, S] rows
are B sequences of S tokens (`cu_seqlens_of_rows`), numbers by sequence are n sequences of 1.
What is computed is said in megarl/algorithms, by `gae` and `normalize`. No gradient passes.

One launch for GAE. A normalisation is two sums and one launch that applies them; a sum is one
launch over the sequences and one over the groups, both of one order, so the same bits come each
time. Everything is added in float64: a sum of equal float32 values does not round there.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from megarl.algorithms import advantages as algorithm
from megarl.algorithms.normalization import Level
from megarl.ops.library import define, op


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    no_eos: Tensor,
    *,
    gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor]:
    r"""Advantages and returns, backwards over each sequence's masked tokens.

        delta_t = r_t + gamma V_{t'} - V_t
        A_t     = delta_t + gamma lam A_{t'}          returns_t = A_t + V_t

    t' is the next masked token of the sequence: the others take no time step. After the last
    one V is 0, or, where the sequence was cut, the value one token later if it has one.

    Args:
      rewards, values: [T] float32. Under False they are not used, but for that one value.
      mask: [T] bool.
      cu_seqlens: [n + 1] int64, ascending, in [0, T].
      no_eos: [n] bool, True where the sequence was cut.
      gamma, lam: in [0, 1].

    Returns:
      advantages and returns, [T] float32, rounded once; 0 outside of the mask.

    Raises:
      ValueError: shapes, dtypes or devices do not fit, or, on the CPU, cu_seqlens' values. On
        another device those are not looked at: bounds are moved into [0, T].

    Source: Schulman et al. 2016, arXiv:1506.02438 eq. 16.
    """
    num_tokens, num_sequences = mask.numel(), cu_seqlens.numel() - 1
    _check(
        ("rewards", rewards, (num_tokens,), torch.float32),
        ("values", values, (num_tokens,), torch.float32),
        ("mask", mask, (num_tokens,), torch.bool),
        ("cu_seqlens", cu_seqlens, (max(1, num_sequences + 1),), torch.int64),
        ("no_eos", no_eos, (num_sequences,), torch.bool),
    )
    if not (0 <= gamma <= 1 and 0 <= lam <= 1):
        raise ValueError(f"gamma and lam must be in [0, 1], got {gamma} and {lam}")
    _check_values(cu_seqlens, num_tokens)
    advantages, returns = rewards.new_zeros(num_tokens), rewards.new_zeros(num_tokens)
    op("gae")(
        *(x.contiguous() for x in (rewards, values, mask, cu_seqlens, no_eos)),
        *(gamma, lam, advantages, returns),
    )
    return advantages, returns


def normalize_packed(
    x: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
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
    r"""(x - mean) / (std + eps) where `mask`, 0 elsewhere; the rules are those of `normalize`.

        mean_i = sum_j x_j / n                        leave-one-out: sum_{j != i} x_j / (n - 1)
        std^2  = sum_j (x_j - m)^2 / (n - 1)          biased: / n

    over the masked tokens j of i's group, or of the batch; m is the plain mean of the std's
    level. Nothing is divided where std is 0. Equal values become exactly 0.

    Args:
      x: [T] float32.
      mask: [T] bool. Values under False are never used, so they may be nan.
      cu_seqlens: [n + 1] int64, ascending, in [0, T].
      group_ids: [n] int64 in [0, num_groups), a sequence's group.
      num_groups: over all replicas.
      mean_level, std_level: "batch", "group", or "none": subtracts nothing, divides by nothing.
      all_reduce: sums a float64 tensor over replicas; None is one replica. It is called once,
        and once more unless std_level is "none", with [2, G] and with [G].

    Returns:
      [T] float32.

    Raises:
      ValueError: shapes, dtypes or devices do not fit, or, on the CPU, the values of cu_seqlens
        or group_ids. On another device those are not looked at: bounds are moved into [0, T],
        and a sequence of no group becomes nan.

    Source: GRPO, arXiv:2402.03300 sec. 4.1.2 (group/group); leave-one-out is RLOO,
      arXiv:2402.14740; mean without std is Dr. GRPO, arXiv:2503.20783.
    """
    num_tokens, num_sequences = mask.numel(), cu_seqlens.numel() - 1
    _check(
        ("x", x, (num_tokens,), torch.float32),
        ("mask", mask, (num_tokens,), torch.bool),
        ("cu_seqlens", cu_seqlens, (max(1, num_sequences + 1),), torch.int64),
        ("group_ids", group_ids, (num_sequences,), torch.int64),
    )
    _check_values(cu_seqlens, num_tokens)
    for name, level in (("mean_level", mean_level), ("std_level", std_level)):
        if level not in ("batch", "group", "none"):
            raise ValueError(f"{name} must be batch, group or none, got {level!r}")
    if _is_readable(group_ids) and not ((group_ids >= 0) & (group_ids < num_groups)).all():
        raise ValueError(
            f"group_ids must be in [0, {num_groups}), got {group_ids.min().item()} to "
            f"{group_ids.max().item()}"
        )
    tokens = _GroupedTokens(x, mask, cu_seqlens, group_ids, num_groups)
    reduce = all_reduce or (lambda sums: sums)
    counts, totals = reduce(tokens.sums(None))

    def at(level: Level, sums: Tensor) -> Tensor:
        """[G] sums of each group, or of the batch."""
        return sums if level == "group" else sums.sum().expand(num_groups)

    divisors = torch.ones_like(totals)
    if std_level != "none":
        count = at(std_level, counts)
        centres = at(std_level, totals) / count.clamp(min=1)
        squares = at(std_level, reduce(tokens.sums(centres)[1]))
        std = (squares / (count - int(std_unbiased)).clamp(min=1)).sqrt()
        divisors = torch.where(std > 0, std + eps, 1.0)
    if mean_level == "none":
        return tokens.apply(
            torch.zeros_like(totals), torch.ones_like(counts), divisors, leave1out=False
        )
    others = (at(mean_level, counts) - int(mean_leave1out)).clamp(min=1)
    return tokens.apply(at(mean_level, totals), others, divisors, leave1out=mean_leave1out)


def cu_seqlens_of_rows(x: Tensor) -> Tensor:
    """[B + 1] int64: the rows of x [B, ...], flattened, as packed sequences."""
    return torch.arange(x.shape[0] + 1, device=x.device) * x[:1].numel()


class _GroupedTokens:
    """Packed tokens of sequences that have groups; the sequences of a group lie anywhere."""

    def __init__(
        self, x: Tensor, mask: Tensor, cu_seqlens: Tensor, group_ids: Tensor, num_groups: int
    ) -> None:
        self._tokens = (x.contiguous(), mask.contiguous(), cu_seqlens.contiguous())
        self._ids, self._num_groups = group_ids.contiguous(), num_groups
        in_order, self._members = torch.sort(group_ids, stable=True)
        starts = torch.arange(num_groups + 1, device=x.device)
        self._offsets = torch.searchsorted(in_order, starts)

    def sums(self, centres: Tensor | None) -> Tensor:
        """[2, G] float64: masked tokens, and the sum of x or of (x - centres)^2 over them."""
        x = self._tokens[0]
        partials = x.new_empty((self._ids.numel(), 2), dtype=torch.float64)
        sums = x.new_empty((2, self._num_groups), dtype=torch.float64)
        centres = None if centres is None else centres.contiguous()
        op("group_sums")(
            *self._tokens, self._ids, self._members, self._offsets, centres, partials, sums
        )
        return sums

    def apply(self, totals: Tensor, counts: Tensor, divisors: Tensor, *, leave1out: bool) -> Tensor:
        """[T] (x - totals / counts) / divisors, or (x - (totals - x) / counts) / divisors."""
        out = torch.zeros_like(self._tokens[0])
        by_group = (x.contiguous() for x in (totals, counts, divisors))
        op("group_normalize")(*self._tokens, self._ids, *by_group, leave1out, out)
        return out


def _check(*named: tuple[str, Tensor, tuple[int, ...], torch.dtype]) -> None:
    for name, x, shape, dtype in named:
        if x.shape != shape or x.dtype != dtype:
            raise ValueError(f"{name} must be {list(shape)} {dtype}, got {list(x.shape)} {x.dtype}")
    devices = {x.device for _, x, _, _ in named}
    if len(devices) > 1:
        raise ValueError(f"one device is needed, got {sorted(map(str, devices))}")


def _is_readable(x: Tensor) -> bool:
    """Whether its values can be looked at without a wait for a GPU."""
    return x.device.type == "cpu"


def _check_values(cu_seqlens: Tensor, num_tokens: int) -> None:
    if not _is_readable(cu_seqlens):
        return
    ascends = bool((cu_seqlens.diff() >= 0).all())
    if not ascends or cu_seqlens[0] < 0 or cu_seqlens[-1] > num_tokens:
        raise ValueError(f"cu_seqlens must ascend in [0, {num_tokens}], got {cu_seqlens.tolist()}")


# ---------------------------------------------------------------- torch references


def _gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    no_eos: Tensor,
    gamma: float,
    lam: float,
    advantages: Tensor,
    returns: Tensor,
) -> None:
    """The algorithm on rows padded to the longest; a value of 0 after a sequence is none."""
    lengths = cu_seqlens.diff()
    if not lengths.any():
        return
    columns = torch.arange(int(lengths.max()), device=mask.device)
    is_token = columns < lengths[:, None]
    at = (cu_seqlens[:-1, None] + columns)[is_token]

    def padded(x: Tensor) -> Tensor:
        rows = x.new_zeros(is_token.shape)
        rows[is_token] = x[at]
        return rows

    made = algorithm.gae(
        padded(rewards), padded(values), padded(mask), no_eos, gamma=gamma, lam=lam
    )
    advantages[at], returns[at] = made[0][is_token], made[1][is_token]


def _group_sums(
    x: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    group_of_sequence: Tensor,
    members: Tensor,
    offsets: Tensor,
    centres: Tensor | None,
    partials: Tensor,
    sums: Tensor,
) -> None:
    """sums [2, G]; `members`, `offsets` and `partials` serve the kernels alone."""
    tokens = slice(int(cu_seqlens[0]), int(cu_seqlens[-1]))
    ids = torch.repeat_interleave(group_of_sequence, cu_seqlens.diff())
    terms = x[tokens].double()
    if centres is not None:
        terms = (terms - centres[ids]).square()
    counts = mask[tokens]
    sums.zero_()
    sums[0].index_add_(0, ids, counts.double())
    sums[1].index_add_(0, ids, torch.where(counts, terms, 0.0))


def _group_normalize(
    x: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    group_of_sequence: Tensor,
    totals: Tensor,
    counts: Tensor,
    divisors: Tensor,
    leave1out: bool,
    out: Tensor,
) -> None:
    """out [T]; tokens of no sequence are left alone."""
    tokens = slice(int(cu_seqlens[0]), int(cu_seqlens[-1]))
    ids = torch.repeat_interleave(group_of_sequence, cu_seqlens.diff())
    values = x[tokens].double()
    total = totals[ids] - values if leave1out else totals[ids]
    made = (values - total / counts[ids]) / divisors[ids]
    out[tokens] = torch.where(mask[tokens], made, 0.0).float()


define(
    "gae(Tensor rewards, Tensor values, Tensor mask, Tensor cu_seqlens, Tensor no_eos, "
    "float gamma, float lam, Tensor(a!) advantages, Tensor(b!) returns) -> ()",
    _gae,
)
_GROUPED = "Tensor x, Tensor mask, Tensor cu_seqlens, Tensor group_of_sequence"
define(
    f"group_sums({_GROUPED}, Tensor members, Tensor offsets, Tensor? centres, "
    "Tensor(a!) partials, Tensor(b!) sums) -> ()",
    _group_sums,
)
define(
    f"group_normalize({_GROUPED}, Tensor totals, Tensor counts, Tensor divisors, "
    "bool leave1out, Tensor(a!) out) -> ()",
    _group_normalize,
)
