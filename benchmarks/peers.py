"""What our ops are compared with; each as it is meant to be called by its own authors."""

import importlib.metadata
import importlib.util
import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

NOT_INSTALLED = "not installed"


def eager(logits: Tensor, labels: Tensor, with_entropy: bool) -> tuple[Tensor, ...]:
    """logp [T], and entropy [T] if wanted, in float32."""
    logp_all = torch.log_softmax(logits.float(), dim=-1)
    logp = logp_all.gather(1, labels[:, None])[:, 0]
    if not with_entropy:
        return (logp,)
    return logp, -(logp_all.exp() * logp_all).sum(dim=-1)


def eager_native(logits: Tensor, labels: Tensor, with_entropy: bool) -> tuple[Tensor, ...]:
    """The same in the logits' own dtype."""
    logp_all = torch.log_softmax(logits, dim=-1)
    logp = logp_all.gather(1, labels[:, None])[:, 0]
    if not with_entropy:
        return (logp,)
    return logp, -(logp_all.exp() * logp_all).sum(dim=-1)


def compiled() -> Callable[[Tensor, Tensor, bool], tuple[Tensor, ...]]:
    torch._dynamo.reset()
    return torch.compile(eager, dynamic=False)


def versions() -> dict[str, str]:
    """Of the packages that are compared with."""
    found = {}
    for package in ("megatron-core", "liger-kernel", "cut-cross-entropy", "triton"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = NOT_INSTALLED
    return found


def is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that it would be in
        return False


def start_one_rank(device: torch.device) -> None:
    """Megatron's functions take their group from its own state: one rank of one."""
    from megatron.core import parallel_state

    if not dist.is_initialized():
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        store = dist.HashStore()
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()


def megatron(logits: Tensor, labels: Tensor) -> Tensor:
    """logp [T]: Megatron-Core's cross entropy."""
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    return -vocab_parallel_cross_entropy(logits[:, None], labels[:, None])[:, 0]


def megatron_fused(logits: Tensor, labels: Tensor) -> Tensor:
    """logp [T]: the same through its jit fuser (cross_entropy_loss_fusion)."""
    from megatron.core import parallel_state
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy

    group = parallel_state.get_tensor_model_parallel_group()
    return -fused_vocab_parallel_cross_entropy(logits[:, None], labels[:, None], group)[:, 0]


def liger(logits: Tensor, labels: Tensor) -> Tensor:
    """logp [T]: Liger-Kernel's cross entropy; its gradient goes over the logits, in forward."""
    from liger_kernel.transformers import LigerCrossEntropyLoss

    return -LigerCrossEntropyLoss(reduction="none")(logits, labels)


def liger_vocab_parallel(logits: Tensor, labels: Tensor) -> Tensor:
    """logp [T]: Liger-Kernel's for a sharded vocabulary, on one shard."""
    from liger_kernel.transformers import LigerVocabParallelCrossEntropy

    return -LigerVocabParallelCrossEntropy(reduction="none")(logits[:, None], labels[:, None])[:, 0]


def liger_linear(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Sum of -logp []: gradient in forward, as ours."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    return LigerFusedLinearCrossEntropyLoss(reduction="sum")(weight, hidden, labels)


def cut_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """-logp [T] of bfloat16 inputs; gradients under 2^-12 are dropped, as by default."""
    from cut_cross_entropy import linear_cross_entropy

    return linear_cross_entropy(hidden, weight, labels, reduction="none")
