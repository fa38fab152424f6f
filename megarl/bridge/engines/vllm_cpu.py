"""Three repairs of vLLM 0.32 on a CPU, made in every process of a server."""

from functools import wraps
from typing import Any

import torch
import vllm


def repair() -> None:
    """Once or often in a process, with the same result.

    Raises:
      RuntimeError: this vLLM lacks what a repair changes; it would be silently wrong.
    """
    _repack_experts_on_reload()
    _repack_tied_heads_on_reload()
    _make_room_between_stages()


def _repack_experts_on_reload() -> None:
    """vLLM 0.32 on a CPU: after a reload the experts compute with their old weights.

    UnquantizedFusedMoEMethod._setup_kernel packs them for the CPU kernel only while
    `moe_kernel` is None, that is on the first load; logprobs are 7 to 9 nats off.
    """
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
        UnquantizedFusedMoEMethod,
    )

    setup_kernel = _patchable(UnquantizedFusedMoEMethod, "_setup_kernel")
    if setup_kernel is None:
        return

    @wraps(setup_kernel)
    def _setup_kernel(self: Any, layer: Any, w13: torch.Tensor, w2: torch.Tensor) -> None:
        self.moe_kernel = None
        setup_kernel(self, layer, w13, w2)

    _patch(UnquantizedFusedMoEMethod, _setup_kernel)


def _repack_tied_heads_on_reload() -> None:
    """vLLM 0.32 on a CPU: after a reload a tied lm_head computes with its old weights.

    It has no tensor of its own in a checkpoint, so nothing rebuilds `cpu_linear`, which holds
    a packed copy; logprobs are 3 nats off.
    """
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.model_executor.model_loader.reload import layerwise

    finalize = _patchable(layerwise, "finalize_layerwise_processing")
    if finalize is None:
        return

    @wraps(finalize)
    def finalize_layerwise_processing(model: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        finalize(model, *args, **kwargs)
        for layer in model.modules():
            # A weight of no elements was packed and dropped; meta is another stage's layer.
            if (
                isinstance(layer, ParallelLMHead)
                and hasattr(layer, "cpu_linear")
                and layer.weight.numel()
                and not layer.weight.is_meta
            ):
                dispatch_cpu_unquantized_gemm(layer, remove_weight=False)

    _patch(layerwise, finalize_layerwise_processing)


def _make_room_between_stages() -> None:
    """vLLM 0.32 on a CPU: the first request to a server of several pipeline stages ends it.

    What a stage receives is allocated in the warm-up, which is left out where nothing is
    compiled: AssertionError in sync_and_gather_intermediate_tensors.
    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    sync = _patchable(GPUModelRunner, "sync_and_gather_intermediate_tensors")
    if sync is None:
        return

    @wraps(sync)
    def sync_and_gather_intermediate_tensors(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.intermediate_tensors is None:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )
        return sync(self, *args, **kwargs)

    _patch(GPUModelRunner, sync_and_gather_intermediate_tensors)


def _patchable(owner: Any, name: str) -> Any:
    """The function `owner.name`, None if it is ours already."""
    function = getattr(owner, name, None)
    if function is None:
        raise RuntimeError(
            f"megarl: vLLM {vllm.__version__} has no {owner.__name__}.{name}; the repairs of "
            "vLLM on a CPU were written for 0.32"
        )
    return None if hasattr(function, "_megarl") else function


def _patch(owner: Any, function: Any) -> None:
    function._megarl = True
    setattr(owner, function.__name__, function)
