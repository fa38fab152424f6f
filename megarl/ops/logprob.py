"""Token logprobs and entropies from vocabulary-sharded logits.

T  packed tokens          V  vocabulary          V/tp  columns of this rank's shard

One read of the logits forward, one read and write backward, and nothing of size [T, V] beside
them. Between ranks four numbers a token travel, in one all-gather: of the shard's logits in bits
(d = x log2(e) / temperature) the maximum m, s = sum 2^(d - m), t = sum 2^(d - m) (d - m), and
the label's d - m where the shard holds it.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.ops.library import define, op

_CHUNK_BYTES = 64 << 20
"""The reference alone: float32 copy of the logits that is alive at one time."""
_BITS = math.log2(math.e)


def token_logprob_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    vocab_size: int,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    keep: Tensor | None = None,
    tp_group: dist.ProcessGroup | None = None,
    with_entropy: bool = True,
    grad_in_place: bool = False,
) -> tuple[Tensor, Tensor]:
    r"""Log-probability of each label and entropy of each row, over all tp shards.

        x = logits / temperature,   Z_t = sum_v exp(x_tv)
        logp_t = x_t[label_t] - log Z_t
        H_t    = log Z_t - sum_v x_tv exp(x_tv) / Z_t

    Gradient, with p = softmax(x):
        dlogits_tv = ( dlogp_t (1[v = label_t] - p_tv) - dH_t p_tv (log p_tv + H_t) ) / temperature

    Args:
      logits: [T, V/tp] float32 or bfloat16, columns side by side. This rank's columns; columns
        at or past `vocab_size` are padding: they count nothing and their gradient is 0.
      labels: [T] int64, in [0, vocab_size), the same on every tp rank.
      vocab_size: V without padding.
      temperature: > 0, or [T] float32 of such.
      mask: [T] bool. Rows under False are not read: logp, entropy and gradient are 0.
      keep: [T, ceil(V/tp / 32)] int32 of pack_keep_mask: columns whose bit is 0 have
        probability 0, as under top-p and top-k sampling.
      tp_group: ranks that hold the other shards; None is one shard.
      with_entropy: False skips the entropy, whose result is then zeros.
      grad_in_place: the gradient is written over the logits, which nothing may read afterwards;
        there is then one backward.

    Returns:
      logp [T] float32 in nats, entropy [T] float32 in nats; equal on every tp rank.

    Raises:
      ValueError: shapes, dtypes or devices do not fit.
    """
    check_logits(logits, labels, mask, keep)
    shard = Shard(logits, labels, inverse_of(temperature, logits), mask, keep, vocab_size, tp_group)
    logp, entropy = _TokenLogprobEntropy.apply(logits, shard, with_entropy, grad_in_place)
    return logp, entropy


def inverse_of(temperature: float | Tensor, logits: Tensor) -> Tensor:
    """[1] or [T] float32, as the ops want it. ValueError if it is none."""
    if not isinstance(temperature, Tensor):
        if temperature <= 0:
            raise ValueError(f"temperature must be > 0, got {temperature}")
        return torch.full((1,), 1.0 / temperature, device=logits.device)
    if temperature.shape != logits.shape[:1] or temperature.dtype != torch.float32:
        raise ValueError(
            f"temperature must be a number or [T] float32, got {tuple(temperature.shape)} "
            f"{temperature.dtype}"
        )
    return temperature.reciprocal()


def pack_keep_mask(keep: Tensor) -> Tensor:
    """[T, V/tp] bool -> [T, ceil(V/tp / 32)] int32: bit j of word k is column 32 k + j."""
    num_rows, width = keep.shape
    words = -(-width // 32)
    bits = torch.zeros(num_rows, words * 32, dtype=torch.int64, device=keep.device)
    bits[:, :width] = keep
    weights = torch.arange(32, device=keep.device)
    packed = (bits.view(num_rows, words, 32) << weights).sum(2)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


class Shard:
    """What one rank's columns are, besides their values: the first arguments of the ops."""

    def __init__(
        self,
        logits: Tensor,
        labels: Tensor,
        inverse_temperature: Tensor,
        mask: Tensor | None,
        keep: Tensor | None,
        vocab_size: int,
        tp_group: dist.ProcessGroup | None,
    ) -> None:
        self.labels, self.inverse_temperature = labels, inverse_temperature
        self.mask, self.keep, self.tp_group = mask, keep, tp_group
        self.tp = dist.get_world_size(tp_group) if tp_group is not None else 1
        width = logits.shape[1]
        self.vocab_start = width * (dist.get_rank(tp_group) if tp_group is not None else 0)
        self.num_valid = max(0, min(width, vocab_size - self.vocab_start))

    def arguments(self, logits: Tensor) -> tuple[Any, ...]:
        """logits ... num_valid, as the schemas begin."""
        return (
            *(logits, self.labels, self.inverse_temperature, self.mask, self.keep),
            *(self.vocab_start, self.num_valid),
        )

    def forward(self, logits: Tensor, with_entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
        """logp [T], entropy [T], log_z [T, 2]."""
        num_rows = logits.shape[0]
        parts = logits.new_zeros((self.tp, num_rows, 4), dtype=torch.float32)
        mine = parts[dist.get_rank(self.tp_group) if self.tp_group is not None else 0]
        op("logprob_stats")(*self.arguments(logits), with_entropy, mine)
        if self.tp > 1:
            dist.all_gather_into_tensor(parts.view(-1, 4), mine.clone(), group=self.tp_group)
        logp, entropy = parts.new_empty(num_rows), parts.new_empty(num_rows)
        log_z = parts.new_empty((num_rows, 2))
        op("logprob_combine")(parts, self.mask, with_entropy, logp, entropy, log_z)
        return logp, entropy, log_z


class _TokenLogprobEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, shard: Shard, with_entropy: bool, grad_in_place: bool
    ) -> tuple[Tensor, Tensor]:
        logp, entropy, log_z = shard.forward(logits, with_entropy)
        ctx.save_for_backward(logits, log_z, entropy)
        ctx.shard, ctx.with_entropy, ctx.grad_in_place = shard, with_entropy, grad_in_place
        return logp, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_logp: Tensor, grad_entropy: Tensor) -> tuple[Any, ...]:
        logits, log_z, entropy = ctx.saved_tensors
        grad = logits.detach() if ctx.grad_in_place else torch.empty_like(logits)
        op("logprob_grad")(
            *ctx.shard.arguments(logits),
            log_z,
            entropy,
            grad_logp.float().contiguous(),
            grad_entropy.float().contiguous() if ctx.with_entropy else None,
            grad,
        )
        return grad, None, None, None


def check_logits(logits: Tensor, labels: Tensor, mask: Tensor | None, keep: Tensor | None) -> None:
    """ValueError that names what does not fit."""
    if logits.ndim != 2 or labels.shape != logits.shape[:1]:
        raise ValueError(
            f"need logits [T, V/tp] and labels [T], got {tuple(logits.shape)} and "
            f"{tuple(labels.shape)}"
        )
    if logits.dtype not in (torch.float32, torch.bfloat16) or labels.dtype != torch.int64:
        raise ValueError(
            f"need float32 or bfloat16 logits and int64 labels, got {logits.dtype} and "
            f"{labels.dtype}"
        )
    if logits.shape[1] > 1 and logits.stride(1) != 1:
        raise ValueError(f"columns of logits must lie side by side, got strides {logits.stride()}")
    words = -(-logits.shape[1] // 32)
    for name, column, shape, dtype in (
        ("mask", mask, labels.shape, torch.bool),
        ("keep", keep, (labels.shape[0], words), torch.int32),
    ):
        if column is not None and (column.shape != shape or column.dtype != dtype):
            raise ValueError(
                f"{name} must be {tuple(shape)} {dtype}, got {tuple(column.shape)} {column.dtype}"
            )
    devices = {x.device for x in (logits, labels, mask, keep) if x is not None}
    if len(devices) > 1:
        raise ValueError(f"one device is needed, got {sorted(map(str, devices))}")


# ---------------------------------------------------------------- torch references


def reference_stats(
    logits: Tensor,
    labels: Tensor,
    inverse_temperature: Tensor,
    mask: Tensor | None,
    keep: Tensor | None,
    vocab_start: int,
    num_valid: int,
    with_entropy: bool,
    parts: Tensor,
) -> None:
    """parts [T, 4] as in the module's text; rows under a False mask are left alone."""
    column = labels - vocab_start
    is_here = (column >= 0) & (column < num_valid)
    for rows in _row_chunks(logits):
        d = _bits(logits, inverse_temperature, keep, rows, num_valid)
        made = torch.zeros(d.shape[0], 4, device=d.device)
        made[:, 0] = made[:, 3] = -torch.inf
        if num_valid:
            top = d.amax(dim=1)
            # A row of -inf: its exponentials are 0, not nan.
            d = torch.where(torch.isneginf(top)[:, None], -torch.inf, d - top[:, None])
            exps = d.exp2()
            made[:, 0], made[:, 1] = top, exps.sum(dim=1)
            if with_entropy:
                made[:, 2] = torch.where(exps == 0, 0.0, d * exps).sum(dim=1)
            label = d.gather(1, torch.where(is_here[rows], column[rows], 0)[:, None])[:, 0]
            made[:, 3] = torch.where(is_here[rows], label, -torch.inf)
        counts = slice(None) if mask is None else mask[rows]
        parts[rows][counts] = made[counts]


def reference_combine(
    parts: Tensor,
    mask: Tensor | None,
    with_entropy: bool,
    logp: Tensor,
    entropy: Tensor,
    log_z: Tensor,
) -> None:
    """Parts [tp, T, 4] -> logp [T], entropy [T], and m and log2 s of the whole row [T, 2]."""
    tops, sums, weighted, labels = parts.double().unbind(dim=2)
    top = tops.amax(dim=0)
    gaps = torch.where((sums == 0) & torch.isneginf(tops), -torch.inf, tops - top)
    scales = gaps.exp2()
    s = (scales * sums).sum(dim=0)
    # A shard of -inf adds nothing.
    t = torch.where(scales == 0, 0.0, scales * (weighted + gaps * sums)).sum(dim=0)
    log_s = s.log2()
    counts = torch.ones_like(top, dtype=torch.bool) if mask is None else mask
    logp.copy_(torch.where(counts, ((gaps + labels).amax(dim=0) - log_s) / _BITS, 0.0))
    if with_entropy:
        entropy.copy_(torch.where(counts, (log_s - t / s) / _BITS, 0.0))
    else:
        entropy.zero_()
    log_z.copy_(torch.where(counts[:, None], torch.stack([top, log_s], dim=1), 0.0))


def reference_grad(
    logits: Tensor,
    labels: Tensor,
    inverse_temperature: Tensor,
    mask: Tensor | None,
    keep: Tensor | None,
    vocab_start: int,
    num_valid: int,
    log_z: Tensor,
    entropy: Tensor,
    grad_logp: Tensor,
    grad_entropy: Tensor | None,
    grad: Tensor,
) -> None:
    """grad [T, V/tp]; may be the logits themselves."""
    column = labels - vocab_start
    is_here = (column >= 0) & (column < num_valid)
    for rows in _row_chunks(logits):
        d = _bits(logits, inverse_temperature, keep, rows, num_valid)
        d = d - log_z[rows, :1] - log_z[rows, 1:]
        probs = d.exp2()
        made = -grad_logp[rows, None] * probs
        if grad_entropy is not None:
            # An impossible token (probability 0, logprob -inf) has no part in the entropy.
            surprise = torch.where(probs > 0, probs * (d / _BITS + entropy[rows, None]), 0.0)
            made -= grad_entropy[rows, None] * surprise
        if num_valid:
            at_label = torch.where(is_here[rows], grad_logp[rows], 0.0)
            local = torch.where(is_here[rows], column[rows], 0)
            made.scatter_add_(1, local[:, None], at_label[:, None])
        made *= _of_rows(inverse_temperature, rows)
        if mask is not None:
            made = torch.where(mask[rows, None], made, 0.0)
        grad[rows, :num_valid] = made.to(grad.dtype)
        grad[rows, num_valid:] = 0


def _bits(
    logits: Tensor,
    inverse_temperature: Tensor,
    keep: Tensor | None,
    rows: slice,
    num_valid: int,
) -> Tensor:
    """[rows, num_valid] float32 logits in bits, -inf where they are not kept."""
    d = logits[rows, :num_valid].float() * (_of_rows(inverse_temperature, rows) * _BITS)
    if keep is None:
        return d
    columns = torch.arange(num_valid, device=d.device)
    kept = keep[rows][:, columns >> 5] >> (columns & 31) & 1
    return torch.where(kept.bool(), d, -torch.inf)


def _of_rows(inverse_temperature: Tensor, rows: slice) -> Tensor:
    """[rows or 1, 1]."""
    if inverse_temperature.numel() == 1:
        return inverse_temperature.view(1, 1)
    return inverse_temperature[rows, None]


def _row_chunks(logits: Tensor) -> list[slice]:
    num_rows, width = logits.shape
    step = max(1, _CHUNK_BYTES // (4 * max(1, width)))
    return [slice(i, min(i + step, num_rows)) for i in range(0, num_rows, step)]


_SHARD = (
    "Tensor logits, Tensor labels, Tensor inverse_temperature, Tensor? mask, Tensor? keep, "
    "int vocab_start, int num_valid"
)
define(f"logprob_stats({_SHARD}, bool with_entropy, Tensor(a!) parts) -> ()", reference_stats)
define(
    "logprob_combine(Tensor parts, Tensor? mask, bool with_entropy, Tensor(a!) logp, "
    "Tensor(b!) entropy, Tensor(c!) log_z) -> ()",
    reference_combine,
)
define(
    f"logprob_grad({_SHARD}, Tensor log_z, Tensor entropy, Tensor grad_logp, "
    "Tensor? grad_entropy, Tensor(a!) grad) -> ()",
    reference_grad,
)
