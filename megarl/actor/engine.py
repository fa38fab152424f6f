"""One Megatron-Core model on this mesh: forward, backward, optimizer, schedule.

Every loss given to `train_batch` is a sum over its tokens divided by the step's GLOBAL
number of tokens. Micro-batches and data-parallel ranks are then only summed, so how a batch
is cut never changes the loss or the gradient.
"""

import logging
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from torch import Tensor, nn

from megarl.actor import micro_batch as mb
from megarl.actor.micro_batch import Batch, MicroBatch
from megarl.actor.token_outputs import Loss, LossFn, TokenHead, TokenOutputs
from megarl.config.schema import OptimizerConfig, TrainEngineConfig
from megarl.errors import NonFiniteError
from megarl.model.build import (
    ModelSpec,
    build_model,
    model_spec,
    needs_one_length,
    read_hf_config,
)
from megarl.model.weights import HFExport, load_hf
from megarl.ops.library import log_source
from megarl.parallel import Mesh

logger = logging.getLogger(__name__)

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


__all__ = ["LossFn", "MegatronEngine", "TokenOutputs"]


class MegatronEngine:
    """A model that can be run, and trained if the config has an optimizer.

    Every method is collective over the world. A batch is the padded trajectory dict of this
    data-parallel replica, equal on all its ranks.
    """

    def __init__(self, config: TrainEngineConfig, mesh: Mesh, *, total_steps: int = 1) -> None:
        self.config, self.mesh = config, mesh
        self.version = 0
        if mesh.rank == 0:
            log_source(mesh.device)
        self.spec: ModelSpec = model_spec(
            read_hf_config(config.path),
            mesh,
            dtype=DTYPES[config.dtype],
            recompute=config.recompute,
            moe=config.moe,
            sequence_parallel=config.sequence_parallel,
        )
        self.needs_one_length = needs_one_length(self.spec.hf_config, mesh, config.moe)
        self.chunks = build_model(self.spec, mesh)
        if not config.init_from_scratch:
            load_hf(self.chunks, self.spec, mesh, config.path)
        self.head = TokenHead(
            config, self.spec, mesh, self.chunks[-1], trains=config.optimizer is not None
        )
        self.export = HFExport(self.chunks, self.spec, mesh)
        self.modules: list[nn.Module] = list(self.chunks)
        if self.spec.transformer.bf16:
            self.modules = [Float16Module(self.spec.transformer, c) for c in self.chunks]
        self.optimizer: Any = None
        if config.optimizer is not None:
            self._make_trainable(config.optimizer, total_steps)

    # ------------------------------------------------------------------ construction

    def _make_trainable(self, optimizer: OptimizerConfig, total_steps: int) -> None:
        config, transformer = self.config, self.spec.transformer
        ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=config.use_distributed_optimizer,
            overlap_grad_reduce=config.overlap_grad_reduce,
        )
        self.modules = [
            DistributedDataParallel(transformer, ddp_config, module, disable_bucketing=i > 0)
            for i, module in enumerate(self.modules)
        ]
        for module in self.modules:
            module.broadcast_params()
        self.optimizer = get_megatron_optimizer(
            MegatronOptimizerConfig(
                optimizer=optimizer.type,
                lr=optimizer.lr,
                min_lr=optimizer.lr * optimizer.min_lr_ratio,
                weight_decay=optimizer.weight_decay,
                adam_beta1=optimizer.beta1,
                adam_beta2=optimizer.beta2,
                adam_eps=optimizer.eps,
                clip_grad=optimizer.gradient_clipping,
                bf16=transformer.bf16,
                params_dtype=transformer.params_dtype,
                use_distributed_optimizer=config.use_distributed_optimizer,
            ),
            self.modules,
        )
        warmup_steps = math.ceil(optimizer.warmup_steps_proportion * total_steps)
        self.scheduler = OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=optimizer.lr,
            min_lr=optimizer.lr * optimizer.min_lr_ratio,
            lr_warmup_steps=warmup_steps,
            lr_decay_steps=max(total_steps, warmup_steps) + 1,
            lr_decay_style=optimizer.lr_scheduler_type,
            start_wd=optimizer.weight_decay,
            end_wd=optimizer.weight_decay,
            wd_incr_steps=0,
            wd_incr_style="constant",
        )
        # Step 1 of the warm-up is not zero: Megatron counts the step before, we the step itself.
        self.scheduler.step(1)
        transformer.grad_scale_func = self.optimizer.scale_loss
        # The loss is already divided by the global token count: no division here.
        transformer.finalize_model_grads_func = lambda modules, num_tokens, **kw: (
            finalize_model_grads(modules, None, **kw)
        )
        if config.overlap_grad_reduce:
            no_sync = [module.no_sync for module in self.modules]
            transformer.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]

    # ------------------------------------------------------------------ running the model

    @torch.no_grad()
    def forward(self, batch: Batch) -> Tensor:
        """Logprob of each next token: index t of a row is log p(token t + 1 | tokens 0..t).

        Returns:
          [B, S] float32 on the CPU, the same on every rank of the replica; 0 at the last
          token of a sequence and on padding.
        """
        micro_batches, outputs = self._evaluate(batch, self._collect)
        logp = torch.zeros(batch["input_ids"].shape, dtype=torch.float32)
        if self.mesh.is_last_stage:
            values = [output["logp"] for output in outputs]
            logp = mb.unpack(micro_batches, values, batch["input_ids"])
        if self.mesh.parallel.pp > 1:
            on_device = logp.to(self.mesh.device)
            dist.broadcast(on_device, self.mesh.last_stage_rank, group=self.mesh.pp_group)
            logp = on_device.cpu()
        return logp

    @torch.no_grad()
    def logits(self, batch: Batch) -> list[Tensor]:
        """Logits over the whole vocabulary, to be compared with another model's.

        Returns:
          of each row [length, V] in the model's dtype, on the ranks of the last pipeline
          stage; nothing on the others.
        """
        mesh = self.mesh

        def gather(x: Tensor, count: int, group: dist.ProcessGroup, dim: int) -> Tensor:
            parts = [torch.empty_like(x) for _ in range(count)]
            dist.all_gather(parts, x.contiguous(), group=group)
            return torch.cat(parts, dim=dim)

        def whole(
            micro_batch: MicroBatch, shard: Tensor
        ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            columns = gather(shard[0], mesh.parallel.tp, mesh.tp_group, dim=1)
            rows = gather(columns, mesh.parallel.cp, mesh.cp_group, dim=0)
            real = rows[micro_batch.places][:, : self.spec.vocab_size]
            return shard.new_zeros(()), shard.new_ones((), dtype=torch.int), {"logits": real}

        with self.head.giving_logits():
            micro_batches, outputs = self._evaluate(batch, whole)
        found: dict[int, Tensor] = {}
        for micro_batch, output in zip(micro_batches, outputs, strict=mesh.is_last_stage):
            sizes = micro_batch.cu_seqlens.diff().tolist()
            parts = output["logits"].split(sizes)
            found |= dict(zip(micro_batch.rows.tolist(), parts, strict=True))
        return [found[row] for row in sorted(found)]

    def _evaluate(
        self, batch: Batch, after: Callable[..., Any]
    ) -> tuple[list[MicroBatch], list[dict[str, Tensor]]]:
        """The batch's micro-batches, and on the last stage what `after` made of each."""
        bins = mb.assign(self._lengths(batch), self.config.mb_spec, self.mesh)
        micro_batches = mb.build(batch, bins, (), self.mesh, one_length=self.needs_one_length)
        for module in self.modules:
            module.eval()
        return micro_batches, self._run(micro_batches, after, forward_only=True)

    def train_batch(
        self,
        batch: Batch,
        loss_fn: LossFn,
        *,
        keys: tuple[str, ...],
        num_tokens: int,
        mask_key: str | None = None,
        per_token: bool = False,
    ) -> dict[str, float]:
        """One optimizer step.

        Args:
          loss_fn: see LossFn; called on the last pipeline stage, once a micro-batch.
          keys: [B, S] columns of the batch that `loss_fn` reads.
          num_tokens: tokens that count in this replica's batch; the normaliser is their sum
            over replicas.
          mask_key: which of `keys` is 0 where `loss_fn` uses neither logp nor entropy: they are
            not computed there but 0, as they always are at the last token of a sequence.
          per_token: the loss is a sum of terms that depend on one token each, and metrics are
            sums too. With `fused_linear_logprob` and cp 1 it is then called on consecutive
            chunks of a micro-batch, which saves a quarter of the output layer's products;
            `cu_seqlens` are then those of what a chunk has of each sequence.

        Returns:
          `loss`, `grad_norm`, `lr`, and loss_fn's metrics; the same on every rank.

        Raises:
          NonFiniteError: the loss or the gradient norm is; weights and optimizer are untouched.
          ValueError: mask_key is not one of keys.
        """
        if mask_key is not None and mask_key not in keys:
            raise ValueError(f"mask_key {mask_key!r} is not one of keys {keys}")
        assert self.optimizer is not None, "this engine was built without an optimizer"
        total = torch.tensor([float(num_tokens)], dtype=torch.float64)
        dist.all_reduce(total, group=self.mesh.cpu_group)
        ranks_a_replica = self.mesh.world_size // self.mesh.dp
        normaliser = (total[0] / ranks_a_replica).float().to(self.mesh.device)

        bins = mb.assign(self._lengths(batch), self.config.mb_spec, self.mesh)
        micro_batches = mb.build(batch, bins, keys, self.mesh, one_length=self.needs_one_length)
        for module in self.modules:
            module.train()
            module.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss = partial(self._loss, Loss(loss_fn, normaliser, mask_key, per_token))
        metrics = self._reduce(self._run(micro_batches, loss, forward_only=False))
        metrics["grad_norm"] = self._finite_step(metrics["loss"])
        metrics["lr"] = self.optimizer.param_groups[0]["lr"]
        return metrics

    def step_lr_scheduler(self) -> None:
        """Move the learning-rate schedule one training step on."""
        self.scheduler.step(1)

    def _lengths(self, batch: Batch) -> list[int]:
        lengths: list[int] = mb.sequence_lengths(batch).tolist()
        return lengths

    def _run(
        self, micro_batches: list[MicroBatch], after: Callable[..., Any], *, forward_only: bool
    ) -> list[dict[str, Tensor]]:
        """Megatron's pipeline schedule over `micro_batches`; last stage's outputs in order."""

        def forward_step(batches: Iterator[MicroBatch], module: nn.Module) -> tuple[Tensor, Any]:
            micro_batch = next(batches)
            kwargs = {"fp32_output": False} if self.spec.transformer.bf16 else {}
            output = module(
                micro_batch.input_ids,
                micro_batch.position_ids,
                None,
                packed_seq_params=micro_batch.packed,
                **kwargs,
            )
            return output, partial(after, micro_batch)

        iterators = [iter(micro_batches) for _ in self.modules]
        single = len(self.modules) == 1
        # Megatron divides the length of a sequence by cp to get that of an activation.
        longest = max(m.labels.numel() for m in micro_batches) * self.mesh.parallel.cp
        outputs: list[dict[str, Tensor]] = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators[0] if single else iterators,
            model=self.modules[0] if single else self.modules,
            num_microbatches=len(micro_batches),
            seq_length=longest,
            micro_batch_size=1,
            forward_only=forward_only,
        )
        return outputs

    def _collect(
        self, micro_batch: MicroBatch, output: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        logp = self.head.logprobs(micro_batch, output)
        return logp.new_zeros(()), logp.new_ones((), dtype=torch.int), {"logp": logp}

    def _loss(
        self, loss_fn: Loss, micro_batch: MicroBatch, output: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        loss, metrics = self.head.loss(loss_fn, micro_batch, output)
        # The schedule scales the loss in place, so what is logged is a copy.
        logged = {"loss": loss.detach().clone(), **metrics}
        return loss, loss.new_ones((), dtype=torch.int), logged

    def _reduce(self, outputs: list[dict[str, Tensor]]) -> dict[str, float]:
        """Sum over micro-batches and replicas, then from the last stage to all."""
        mesh = self.mesh
        names = sorted(outputs[0]) if mesh.is_last_stage else []
        if mesh.is_last_stage:
            sums = torch.stack(
                [torch.stack([o[name].float() for o in outputs]).sum() for name in names]
            )
            dist.all_reduce(sums, group=mesh.dp_group)
        if mesh.parallel.pp > 1:
            shared: list[Any] = [names]
            dist.broadcast_object_list(shared, mesh.last_stage_rank, group=mesh.pp_group)
            names = shared[0]
            if not mesh.is_last_stage:
                sums = torch.empty(len(names), device=mesh.device)
            dist.broadcast(sums, mesh.last_stage_rank, group=mesh.pp_group)
        return dict(zip(names, sums.tolist(), strict=True))

    @torch.no_grad()
    def _finite_step(self, loss: float) -> float:
        """Clip and step, unless the loss or the gradient is not finite. Returns the norm."""
        optimizer = self.optimizer
        optimizer.prepare_grads()
        grad_norm = float(optimizer.get_grad_norm())
        # Both are reduced over the world, so all ranks raise or none does.
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise NonFiniteError(
                f"version {self.version}: loss {loss}, gradient norm {grad_norm}; "
                "the optimizer did not step"
            )
        for part in getattr(optimizer, "chained_optimizers", [optimizer]):
            parameters = part.get_parameters()
            if parameters and part.config.clip_grad > 0:
                clip_grad_by_total_norm_fp32(
                    parameters, max_norm=part.config.clip_grad, total_norm=grad_norm
                )
        optimizer.step_with_ready_grads()
        return grad_norm
