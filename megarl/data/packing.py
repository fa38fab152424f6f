"""Which sequences go together: micro-batches by tokens, replicas by balance. Pure functions.

Everything works on a list of lengths and returns lists of indices into it; each index stands
in exactly one list. Deterministic: ties are broken by index.
"""

import bisect
import heapq
import itertools
import random
from collections.abc import Sequence
from typing import Literal, NamedTuple


def pack(
    lengths: Sequence[int],
    *,
    max_tokens: int | None,
    min_bins: int = 1,
    divisor: int = 1,
    method: Literal["ffd", "kk"] = "ffd",
) -> list[list[int]]:
    """Bins of at most `max_tokens` tokens.

    ffd is first-fit decreasing, which needs at most 11/9 of the fewest bins + 1 (Dosa 2007).
    kk spreads the tokens evenly over as many bins, or gives the bins of ffd where an even
    spread would overflow one. So both give the same number of bins: what first-fit
    decreasing needs or `min_bins`, whichever is more, rounded up to `divisor`.

    Args:
      max_tokens: None is no bound.
      min_bins: at least so many, none of them empty.
      divisor: the number of bins is a multiple of it.

    Raises:
      ValueError: a sequence alone is longer than `max_tokens`, or there are too few sequences
        to fill the bins.
    """
    if max_tokens is not None:
        for i, length in enumerate(lengths):
            if length > max_tokens:
                raise ValueError(
                    f"sequence {i} has {length} tokens, more than max_tokens_per_mb {max_tokens}"
                )
    bins = _first_fit_decreasing(lengths, max_tokens)
    count = max(len(bins), min_bins, 1)
    count = -(-count // divisor) * divisor
    if count > len(lengths):
        raise ValueError(f"{len(lengths)} sequences cannot fill {count} micro-batches")
    if method == "kk":
        even = partition(lengths, count)
        if max_tokens is None or max(sum(lengths[i] for i in rows) for rows in even) <= max_tokens:
            return even
    return _split_largest(bins, lengths, count)


def _first_fit_decreasing(lengths: Sequence[int], max_tokens: int | None) -> list[list[int]]:
    """O(n log n): a tree over the bins' free space finds the first that fits."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    if max_tokens is None:
        return [order] if order else []
    size = 1 << max(1, (len(lengths) - 1).bit_length())
    free = [max_tokens] * (2 * size)
    bins: list[list[int]] = []
    for i in order:
        node = 1
        while node < size:
            node = 2 * node if free[2 * node] >= lengths[i] else 2 * node + 1
        which = node - size
        if which == len(bins):
            bins.append([])
        bins[which].append(i)
        free[node] -= lengths[i]
        while node > 1:
            node //= 2
            free[node] = max(free[2 * node], free[2 * node + 1])
    return bins


def _split_largest(bins: list[list[int]], lengths: Sequence[int], count: int) -> list[list[int]]:
    """Halve the bin with the most tokens that has two sequences, until there are `count`."""
    heap = [(-sum(lengths[i] for i in rows), order, rows) for order, rows in enumerate(bins)]
    heapq.heapify(heap)
    single: list[list[int]] = []
    ticket = itertools.count(len(bins))
    while len(heap) + len(single) < count:
        _, _, rows = heapq.heappop(heap)
        if len(rows) == 1:
            single.append(rows)
            continue
        for half in partition([lengths[i] for i in rows], 2):
            part = [rows[i] for i in half]
            heapq.heappush(heap, (-sum(lengths[i] for i in part), next(ticket), part))
    return single + [rows for _, _, rows in sorted(heap, key=lambda item: item[1])]


def partition(lengths: Sequence[int], num_bins: int) -> list[list[int]]:
    """`num_bins` lists with about equal sums, none empty where there are enough items.

    The largest differencing method of Karmarkar and Karp (1982): merge the two partial
    partitions that differ most, heaviest bin with lightest. Sums end at most the largest
    item apart.

    Raises:
      ValueError: num_bins < 1.
    """
    if num_bins < 1:
        raise ValueError(f"num_bins must be >= 1, got {num_bins}")
    ticket = itertools.count()
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    heap = [(-lengths[i], next(ticket), [_Bin(-lengths[i], -1, i, [i])]) for i in order]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, _, heavy = heapq.heappop(heap)
        _, _, light = heapq.heappop(heap)
        merged = _merge(heavy, light, num_bins)
        lightest = merged[-1].minus_sum if len(merged) == num_bins else 0
        heapq.heappush(heap, (merged[0].minus_sum - lightest, next(ticket), merged))
    bins = [sorted(held.rows) for held in heap[0][2]] if heap else []
    return _no_empty_bin(bins + [[] for _ in range(num_bins - len(bins))], lengths)


class _Bin(NamedTuple):
    """Sorts heaviest first; then by number of rows, so that items of length 0 spread as well."""

    minus_sum: int
    minus_count: int
    first: int  # a row of it: no two bins of a partition compare equal
    rows: list[int]


def _merge(a: list[_Bin], b: list[_Bin], num_bins: int) -> list[_Bin]:
    """Pair the heaviest bins of one with the lightest of the other; both are used up.

    A partition holds its non-empty bins only: most have few, and a list of `num_bins` for
    each item would be n * b of them.
    """
    if len(a) < len(b):
        a, b = b, a
    # Bins of `b` pair with the last ones of `a`, the heaviest with the lightest; where `a` has
    # none left, they stay as they are.
    paired = max(0, len(a) + len(b) - num_bins)
    changed = b[: len(b) - paired]
    for mine, other in zip(a[len(a) - paired :], reversed(b[len(b) - paired :]), strict=True):
        large, small = sorted((mine, other), key=lambda held: held.minus_count)
        large.rows.extend(small.rows)
        total = mine.minus_sum + other.minus_sum
        changed.append(_Bin(total, -len(large.rows), large.first, large.rows))
    del a[len(a) - paired :]
    for held in changed:
        bisect.insort(a, held)
    return a


def _no_empty_bin(bins: list[list[int]], lengths: Sequence[int]) -> list[list[int]]:
    """Give an empty bin the smallest item of the bin with the most items."""
    for empty in bins:
        if not empty:
            donor = max(bins, key=len)
            if len(donor) < 2:
                break
            smallest = min(donor, key=lambda i: (lengths[i], i))
            donor.remove(smallest)
            empty.append(smallest)
    return bins


def split_batch(
    lengths: Sequence[int], *, dp: int, n_minibatches: int, seed: int, granularity: int = 1
) -> list[list[list[int]]]:
    """Rows of each minibatch on each data-parallel replica: [replica][minibatch][row].

    Minibatches are drawn over the whole batch first (seeded shuffle, sizes equal or one
    apart), then each is balanced over the replicas by tokens: the rows of an optimizer step
    do not depend on `dp`.

    Args:
      granularity: g, rows i * g to i * g + g - 1 are one group, which is never torn: it is
        drawn, weighed and placed as a whole.

    Raises:
      ValueError: the rows are not a multiple of g, or a minibatch has fewer groups than
        replicas.
    """
    if granularity < 1 or len(lengths) % granularity:
        raise ValueError(
            f"{len(lengths)} sequences are not a multiple of granularity {granularity}"
        )
    groups = range(0, len(lengths), granularity)
    sizes = [sum(lengths[first : first + granularity]) for first in groups]
    order = list(range(len(sizes)))
    if n_minibatches > 1:
        random.Random(seed).shuffle(order)
    replicas: list[list[list[int]]] = [[] for _ in range(dp)]
    for i in range(n_minibatches):
        drawn = sorted(order[i::n_minibatches])
        if len(drawn) < dp:
            what = "sequences" if granularity == 1 else f"groups of {granularity} sequences"
            raise ValueError(f"minibatch {i} has {len(drawn)} {what} for {dp} replicas")
        for replica, share in enumerate(partition([sizes[group] for group in drawn], dp)):
            firsts = [drawn[j] * granularity for j in share]
            rows = [row for first in firsts for row in range(first, first + granularity)]
            replicas[replica].append(rows)
    return replicas
