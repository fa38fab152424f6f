"""Token logprobs and entropies from vocabulary-sharded logits.

T  packed tokens          V  vocabulary          V/tp  columns of this rank's shard

Between ranks only four numbers a token travel: the shard's maximum, its sum of
exponentials, its sum of exponential times logit, and the label's logit where the shard
holds it. Nothing of size [T, V] is made beyond one chunk of rows in float32.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_CHUNK_BYTES = 64 << 20
"""Float32 copy of the logits that is alive at one time."""


def token_logprob_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    tp_group: dist.ProcessGroup | None = None,
    with_entropy: bool = True,
) -> tuple[Tensor, Tensor]:
    r"""Log-probability of each label and entropy of each row, over all tp shards.

        x = logits / temperature,   Z_t = sum_v exp(x_tv)
        logp_t = x_t[label_t] - log Z_t
        H_t    = log Z_t - sum_v x_tv exp(x_tv) / Z_t

    Gradient, with p = softmax(x):
        dlogits_tv = ( dlogp_t (1[v = label_t] - p_tv) - dH_t p_tv (log p_tv + H_t) ) / temperature

    Args:
      logits: [T, V/tp] float32 or bfloat16. This rank's columns; columns at or past
        `vocab_size` are padding: they count nothing and their gradient is 0.
      labels: [T] int64, in [0, vocab_size), the same on every tp rank.
      vocab_size: V without padding.
      temperature: > 0.
      tp_group: ranks that hold the other shards; None is one shard.
      with_entropy: False skips the entropy, whose result is then zeros.

    Returns:
      logp [T] float32 in nats, entropy [T] float32 in nats; equal on every tp rank.

    Raises:
      ValueError: shapes or dtypes do not fit.
    """
    if logits.ndim != 2 or labels.shape != logits.shape[:1]:
        raise ValueError(
            f"need logits [T, V/tp] and labels [T], got {tuple(logits.shape)} and "
            f"{tuple(labels.shape)}"
        )
    if not logits.is_floating_point() or labels.dtype != torch.int64:
        raise ValueError(
            f"need float logits and int64 labels, got {logits.dtype} and {labels.dtype}"
        )
    if temperature <= 0:
        raise ValueError(f"temperature must be > 0, got {temperature}")
    logp, entropy = _TokenLogprobEntropy.apply(
        logits, labels, vocab_size, temperature, tp_group, with_entropy
    )
    return logp, entropy


class _TokenLogprobEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        temperature: float,
        tp_group: dist.ProcessGroup | None,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        tp_rank = dist.get_rank(tp_group) if tp_group is not None else 0
        width = logits.shape[1]
        start = tp_rank * width
        num_valid = max(0, min(width, vocab_size - start))
        local_labels = labels - start
        is_here = (local_labels >= 0) & (local_labels < num_valid)
        local_labels = torch.where(is_here, local_labels, 0)

        parts = logits.new_empty((logits.shape[0], 4), dtype=torch.float32)
        for rows in _row_chunks(logits):
            parts[rows] = _shard_parts(
                logits[rows, :num_valid].float() / temperature, local_labels[rows], is_here[rows]
            )
        log_z, mean_x, label_x = _combine(parts, tp_group)
        logp = label_x - log_z
        entropy = log_z - mean_x if with_entropy else torch.zeros_like(log_z)
        ctx.save_for_backward(logits, local_labels, is_here, log_z, entropy)
        ctx.num_valid, ctx.temperature, ctx.with_entropy = num_valid, temperature, with_entropy
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, grad_logp: Tensor, grad_entropy: Tensor) -> tuple[Any, ...]:
        logits, local_labels, is_here, log_z, entropy = ctx.saved_tensors
        grad = torch.empty_like(logits)
        grad[:, ctx.num_valid :] = 0
        for rows in _row_chunks(logits):
            logp_all = logits[rows, : ctx.num_valid].float() / ctx.temperature
            logp_all -= log_z[rows, None]
            probs = logp_all.exp()
            shard_grad = -grad_logp[rows, None] * probs
            if ctx.with_entropy:
                # An impossible token (probability 0, logprob -inf) has no part in the entropy.
                surprise = torch.where(probs > 0, probs * (logp_all + entropy[rows, None]), 0.0)
                shard_grad -= grad_entropy[rows, None] * surprise
            label_grad = torch.where(is_here[rows], grad_logp[rows], 0.0)
            shard_grad.scatter_add_(1, local_labels[rows, None], label_grad[:, None])
            grad[rows, : ctx.num_valid] = (shard_grad / ctx.temperature).to(grad.dtype)
        return grad, None, None, None, None, None


def _row_chunks(logits: Tensor) -> list[slice]:
    num_rows, width = logits.shape
    step = max(1, _CHUNK_BYTES // (4 * max(1, width)))
    return [slice(i, min(i + step, num_rows)) for i in range(0, num_rows, step)]


def _shard_parts(x: Tensor, local_labels: Tensor, is_here: Tensor) -> Tensor:
    """[rows, 4]: max, sum exp(x - max), sum (x - max) exp(x - max), label's x or 0."""
    if x.shape[1] == 0:  # the whole shard is padding
        parts = x.new_zeros((x.shape[0], 4))
        parts[:, 0] = -torch.inf
        return parts
    top = x.amax(dim=1)
    shifted = x - top[:, None]
    # A row of -inf: its exponentials are 0, not nan.
    shifted = torch.where(torch.isneginf(top)[:, None], -torch.inf, shifted)
    exps = shifted.exp()
    weighted = torch.where(exps > 0, shifted * exps, 0.0).sum(dim=1)
    label_x = torch.where(is_here, x.gather(1, local_labels[:, None])[:, 0], 0.0)
    return torch.stack([top, exps.sum(dim=1), weighted, label_x], dim=1)


def _combine(parts: Tensor, tp_group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor, Tensor]:
    """Shards' parts [T, 4] -> log Z, sum_v p_v x_v, label's x; each [T]."""
    num_shards = dist.get_world_size(tp_group) if tp_group is not None else 1
    if num_shards > 1:
        gathered = parts.new_empty((num_shards * parts.shape[0], 4))
        dist.all_gather_into_tensor(gathered, parts, group=tp_group)
        shards = gathered.view(num_shards, -1, 4)
    else:
        shards = parts[None]
    tops, sums, weighted, labels = shards.unbind(dim=2)
    top = tops.amax(dim=0)
    scales = (tops - top).exp()
    z = (sums * scales).sum(dim=0)
    # sum x exp(x - top) = scale (weighted + shard_top sums); a shard of -inf adds nothing.
    shard_x = torch.where(scales > 0, scales * (weighted + (tops - top) * sums), 0.0).sum(dim=0)
    return top + z.log(), top + shard_x / z, labels.sum(dim=0)
