"""Which sequences go together: micro-batches by tokens, replicas by balance. Pure functions.

Everything works on a list of lengths and returns lists of indices into it; each index stands
in exactly one list. Deterministic: ties are broken by index.
"""

import heapq
import itertools
import random
from collections.abc import Sequence
from typing import Literal


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
    kk spreads the tokens evenly over as few bins as first-fit decreasing needs, and more
    where an even spread would overflow one.

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
    if method == "ffd":
        return _split_largest(bins, lengths, count)
    while True:
        bins = partition(lengths, count)
        most = max(sum(lengths[i] for i in rows) for rows in bins)
        if max_tokens is None or most <= max_tokens or count + divisor > len(lengths):
            break
        count += divisor
    if max_tokens is not None and most > max_tokens:
        return _split_largest(_first_fit_decreasing(lengths, max_tokens), lengths, count)
    return bins


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
    partitions that differ most, heaviest bin with lightest. O(n b log(n b)).
    """
    if num_bins < 1:
        raise ValueError(f"num_bins must be >= 1, got {num_bins}")
    if not lengths:
        return [[] for _ in range(num_bins)]
    # A partial partition: (-spread, tie, bins), bins = [(sum, count, rows)] heaviest first.
    # The number of rows joins the sum's comparison, so that items of length 0 spread as well.
    ticket = itertools.count()
    heap = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        bins = [(lengths[i], 1, [i])] + [(0, 0, [])] * (num_bins - 1)
        heap.append((-lengths[i], next(ticket), bins))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, _, heavy = heapq.heappop(heap)
        _, _, light = heapq.heappop(heap)
        merged = [
            (a[0] + b[0], a[1] + b[1], a[2] + b[2])
            for a, b in zip(heavy, reversed(light), strict=True)
        ]
        merged.sort(key=lambda item: (-item[0], -item[1], item[2][:1]))
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], next(ticket), merged))
    return _no_empty_bin([sorted(rows) for _, _, rows in heap[0][2]], lengths)


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
    lengths: Sequence[int], *, dp: int, n_minibatches: int, seed: int
) -> list[list[list[int]]]:
    """Rows of each minibatch on each data-parallel replica: [replica][minibatch][row].

    Minibatches are drawn over the whole batch first (seeded shuffle, sizes equal or one
    apart), then each is balanced over the replicas by tokens: the rows of an optimizer step
    do not depend on `dp`.

    Raises:
      ValueError: a minibatch has fewer rows than replicas.
    """
    order = list(range(len(lengths)))
    if n_minibatches > 1:
        random.Random(seed).shuffle(order)
    replicas: list[list[list[int]]] = [[] for _ in range(dp)]
    for i in range(n_minibatches):
        rows = sorted(order[i::n_minibatches])
        if len(rows) < dp:
            raise ValueError(f"minibatch {i} has {len(rows)} sequences for {dp} replicas")
        for replica, share in enumerate(partition([lengths[row] for row in rows], dp)):
            replicas[replica].append([rows[j] for j in share])
    return replicas
