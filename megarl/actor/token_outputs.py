"""From what the last pipeline stage gives to logprobs, entropies and the loss of its tokens.

T   real tokens of a micro-batch     T'  those and padding, T'/cp of them on each cp rank
H   hidden size                      V   vocabulary, V/tp columns of it on each tp rank

The stage gives logits [1, T'/cp, V/tp], or with `fused_linear_logprob` hidden states
[1, T'/cp, H] ([1, T'/cp/tp, H] with sequence parallelism), from which megarl.ops.linear_logprob
goes on.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from megarl.actor.micro_batch import Batch, MicroBatch
from megarl.config.schema import TrainEngineConfig
from megarl.model.build import ModelSpec
from megarl.model.output_layer import give_hidden_states, giving_logits, output_weight
from megarl.ops.linear_logprob import linear_logprob_entropy, linear_logprob_loss
from megarl.ops.logprob import token_logprob_entropy
from megarl.parallel import Mesh


@dataclass(frozen=True)
class TokenOutputs:
    """What the last stage knows of one micro-batch, and the columns asked for. T real tokens."""

    logp: Tensor
    """[T] float32, of the label of each token."""
    entropy: Tensor
    """[T] float32."""
    columns: Batch
    cu_seqlens: Tensor
    num_tokens: Tensor
    """[] global normaliser of the loss."""


LossFn = Callable[[TokenOutputs], tuple[Tensor, dict[str, Tensor]]]
"""TokenOutputs -> (loss, metrics), all sums / num_tokens."""


@runtime_checkable
class LogitsLoss(Protocol):
    """A LossFn that can also be asked for logits, whose gradient it then makes in one pass."""

    def __call__(self, outputs: TokenOutputs) -> tuple[Tensor, dict[str, Tensor]]: ...

    def of_logits(
        self,
        logits: Tensor,
        labels: Tensor,
        mask: Tensor,
        columns: Batch,
        cu_seqlens: Tensor,
        num_tokens: Tensor,
        **options: Any,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """What __call__ gives for their logprobs; the logits are written over.

        Args:
          logits: [T, V]. labels: [T] int64. mask: [T] bool, the tokens that count.
          columns: [T] each. cu_seqlens: [n + 1], from 0 to T.
          options: `vocab_size` and `temperature`.
        """
        ...


@dataclass(frozen=True)
class Loss:
    """A LossFn, and what is known of it. See MegatronEngine.train_batch."""

    fn: LossFn
    num_tokens: Tensor
    mask_key: str | None
    per_token: bool


class TokenHead:
    """What follows the last transformer layer.

    Args:
      model: this rank's last chunk; it is made to give hidden states if the config says so.
      trains: whether the weights have Megatron's gradient buffers.
    """

    def __init__(
        self,
        config: TrainEngineConfig,
        spec: ModelSpec,
        mesh: Mesh,
        model: GPTModel,
        *,
        trains: bool,
    ) -> None:
        self.config, self.mesh, self.model = config, mesh, model
        self.options: dict[str, Any] = {
            "vocab_size": spec.vocab_size,
            "temperature": config.temperature,
            "tp_group": mesh.tp_group if mesh.parallel.tp > 1 else None,
        }
        self.is_fused = config.fused_linear_logprob and mesh.is_last_stage
        if self.is_fused:
            give_hidden_states(model)
            self.fused_options: dict[str, Any] = {
                "sequence_parallel": spec.transformer.sequence_parallel,
                "chunk_tokens": config.fused_linear_chunk_tokens,
                "into_main_grad": trains,
            }

    @contextlib.contextmanager
    def giving_logits(self) -> Iterator[None]:
        """The model gives logits, fused or not."""
        if self.is_fused:
            with giving_logits(self.model):
                yield
        else:
            yield

    def logprobs(self, micro_batch: MicroBatch, output: Tensor) -> Tensor:
        """[T] float32, 0 at the last token of each sequence, which has no label."""
        return self._logprobs(micro_batch, output, self._counts(micro_batch, None), False)[0]

    def loss(
        self, loss: Loss, micro_batch: MicroBatch, output: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """What the LossFn gives for the micro-batch."""
        counts = self._counts(micro_batch, loss.mask_key)
        # A chunk of a cp rank's tokens is no stretch of the columns, which are whole.
        if self.is_fused and loss.per_token and self.mesh.parallel.cp == 1:
            return self._loss_in_chunks(loss, micro_batch, output, counts)
        parallel = self.mesh.parallel
        if (
            isinstance(loss.fn, LogitsLoss)
            and loss.per_token
            and not self.is_fused
            and parallel.tp == parallel.cp == 1
        ):
            return self._loss_of_logits(loss.fn, loss.num_tokens, micro_batch, output, counts)
        logp, entropy = self._logprobs(micro_batch, output, counts, True)
        return loss.fn(
            TokenOutputs(
                logp, entropy, micro_batch.columns, micro_batch.cu_seqlens, loss.num_tokens
            )
        )

    def _counts(self, micro_batch: MicroBatch, mask_key: str | None) -> Tensor:
        """[T'/cp] bool: tokens with a label, and of these only those under the mask if given."""
        cp, width = self.mesh.parallel.cp, micro_batch.labels.numel()
        places = micro_batch.places
        if mask_key is None:
            real = torch.ones_like(places, dtype=torch.bool)
        else:
            real = micro_batch.columns[mask_key].bool()
        real = real.index_fill(0, micro_batch.cu_seqlens[1:] - 1, False)
        everywhere = torch.zeros(cp * width, dtype=torch.bool, device=places.device)
        return everywhere.index_copy_(0, places, real).view(cp, width)[self.mesh.place.cp]

    def _logprobs(
        self, micro_batch: MicroBatch, output: Tensor, counts: Tensor, entropy: bool
    ) -> tuple[Tensor, Tensor]:
        """logp [T], entropy [T]; 0 where `counts` is False."""
        # Not output[0], whose gradient is a zeroed copy of the whole.
        rows = output.squeeze(0)
        if self.is_fused:
            logp, ent = linear_logprob_entropy(
                rows,
                output_weight(self.model),
                micro_batch.labels,
                mask=counts,
                with_entropy=entropy,
                **self.options,
                **self.fused_options,
            )
        else:
            # Nobody else reads the logits.
            logp, ent = token_logprob_entropy(
                rows,
                micro_batch.labels,
                mask=counts,
                with_entropy=entropy,
                grad_in_place=True,
                **self.options,
            )
        if self.mesh.parallel.cp > 1:
            # Every cp rank computes the whole loss from all tokens, and the gradient of its own.
            both = gather_from_sequence_parallel_region(
                torch.stack([logp, ent], dim=1),
                tensor_parallel_output_grad=False,
                group=self.mesh.cp_group,
            )
            logp, ent = both.unbind(dim=1)
        return logp[micro_batch.places], ent[micro_batch.places]

    def _loss_of_logits(
        self,
        fn: LogitsLoss,
        num_tokens: Tensor,
        micro_batch: MicroBatch,
        logits: Tensor,
        counts: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The LossFn over all rows of the logits; those of padding, at the end, do not count."""
        rows = logits.squeeze(0)
        padding = (0, rows.shape[0] - micro_batch.num_tokens)
        ends = micro_batch.cu_seqlens
        if padding[1]:
            ends = torch.cat([ends, ends.new_tensor([rows.shape[0]])])
        columns = {
            name: torch.nn.functional.pad(column, padding)
            for name, column in micro_batch.columns.items()
        }
        options = {name: self.options[name] for name in ("vocab_size", "temperature")}
        return fn.of_logits(rows, micro_batch.labels, counts, columns, ends, num_tokens, **options)

    def _loss_in_chunks(
        self, loss: Loss, micro_batch: MicroBatch, hidden: Tensor, counts: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The sum of the LossFn over chunks of tokens, whose gradients are made on the way."""
        sums: dict[str, Tensor] = {}

        def of_chunk(
            logp: Tensor, entropy: Tensor, rows: slice
        ) -> tuple[Tensor, Tensor, Tensor | None]:
            num_real = max(0, min(rows.stop, micro_batch.num_tokens) - rows.start)
            if num_real == 0:  # padding alone
                return logp.new_zeros(()), torch.zeros_like(logp), None
            real = slice(rows.start, rows.start + num_real)
            with torch.enable_grad():
                inputs = [x[:num_real].detach().requires_grad_() for x in (logp, entropy)]
                value, metrics = loss.fn(
                    TokenOutputs(
                        inputs[0],
                        inputs[1],
                        {name: column[real] for name, column in micro_batch.columns.items()},
                        # Of what the chunk has of each sequence, which may be nothing.
                        (micro_batch.cu_seqlens - rows.start).clamp(0, num_real),
                        loss.num_tokens,
                    )
                )
            for name, metric in metrics.items():
                sums[name] = sums[name] + metric if name in sums else metric
            by_logp, by_entropy = torch.autograd.grad(value, inputs, allow_unused=True)
            padding = (0, logp.numel() - num_real)
            return (
                value.detach().float(),
                torch.zeros_like(logp) if by_logp is None else _pad(by_logp, padding),
                None if by_entropy is None else _pad(by_entropy, padding),
            )

        total, _, _ = linear_logprob_loss(
            hidden.squeeze(0),
            output_weight(self.model),
            micro_batch.labels,
            of_chunk,
            mask=counts,
            **self.options,
            **self.fused_options,
        )
        return total, sums


def _pad(x: Tensor, padding: tuple[int, int]) -> Tensor:
    return torch.nn.functional.pad(x.float(), padding)
