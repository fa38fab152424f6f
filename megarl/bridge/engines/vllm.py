"""What runs inside vLLM: the weight-transfer backend `megarl`, and two repairs on a CPU.

`register` is the entry point `vllm.general_plugins`; every process of a server calls it. An
update is start, any number of buckets, finish. Between start and finish the model's parameters
are placeholders, so the server must be paused. Whatever happens, the model can compute when
the update is over: a failed or cancelled update leaves complete layers with new weights and
the others with old ones.

Written against vLLM 0.32. A server of several workers must be started again after a failed
update: MultiprocExecutor.collective_rpc reads no further than the first worker that failed, so
the answer of the next one is taken for that of the next control request.
"""

import copy
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
import vllm
from vllm.config import VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.platforms import current_platform
from vllm.v1.worker.worker_base import WorkerBase

from megarl.bridge.engines.trace import Part, needed_parts
from megarl.bridge.group import WeightGroup, connect, open_group
from megarl.bridge.plan import Plan
from megarl.bridge.transport import Assembly, receive_all
from megarl.bridge.wire import digest, message_bytes, unpack

BACKEND = "megarl"


@dataclass
class InitInfo(WeightTransferInitInfo):
    """The weight group, as the trainer sends it to /init_weight_transfer_engine."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    timeout_s: float
    sharded: bool = False
    """A plan for this worker lies in the group's store."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One bucket, or the end of an update that the trainer gave up."""

    names: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)
    cancel: bool = False
    sharded: bool = False
    """All of the plan instead of one bucket."""
    wants_digests: bool = False
    """Keep a digest of each tensor, for `megarl_weight_digests`."""


class UpdateCancelled(RuntimeError):
    """The trainer gave the update up; vLLM ends an update only when a worker raises."""


class MegarlWeightTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """One worker's end: receives full tensors by broadcast from rank 0, the trainer.

    The model's own loader cuts this worker's shard and casts to the model's dtype.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(
        self,
        config: WeightTransferConfig,
        vllm_config: VllmConfig,
        device: torch.device,
        model: torch.nn.Module,
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self._group: WeightGroup | None = None
        self._plan: Plan | None = None
        self.named: dict[str, tuple[str, list[int]]] = {}
        """HF name -> dtype and shape, as `megarl_needed_parts` was asked."""
        self.digests: dict[str, int] | None = None
        """Of the tensors that the loader was given in an update whose digests were asked for."""

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self.shutdown()
        parallel = self.parallel_config
        rank = (
            init_info.rank_offset
            + parallel.data_parallel_index * parallel.world_size
            + parallel.rank
        )
        store = connect(init_info.master_address, init_info.master_port, init_info.timeout_s)
        with _shared_nccl_settings(self.device):
            self._group = open_group(
                store, rank, init_info.world_size, self.device, init_info.timeout_s
            )
        if init_info.sharded:
            self._plan = Plan.from_bytes(store.get(f"plan{rank}"))

    def start_weight_update(self) -> None:
        self.digests = None
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The base class goes on to torch.accelerator.synchronize(), which raises on a CPU.
        try:
            self.receive_weights(self.parse_update_info(update_info))
            if self.device.type != "cpu":
                torch.accelerator.synchronize()
        except BaseException:
            self._roll_back()
            raise

    def receive_weights(self, update_info: UpdateInfo) -> None:
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

        if update_info.cancel:
            raise UpdateCancelled("megarl: the trainer cancelled the weight update")
        if self._group is None:
            raise RuntimeError("megarl: /init_weight_transfer_engine comes before an update")
        if update_info.sharded:
            tensors = self._receive_plan(self._group)
        else:
            tensors = self._receive_bucket(self._group, update_info)
        with torch.no_grad(), disable_mtp_completeness_check():
            self.model.load_weights(tensors)

    def _receive_plan(self, group: WeightGroup) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors of HF shape, of which the parts that this worker's loader reads are there."""
        if self._plan is None:
            raise RuntimeError("megarl: this worker was given no plan")
        assembly = Assembly(self._plan, self.named, self.device)
        for name, box, data in receive_all(group, self._plan, self.device):
            whole = assembly.add(name, box, data)
            if whole is not None:
                yield name, whole
        if missing := assembly.incomplete():
            raise RuntimeError(f"megarl: the plan left {missing[:3]} incomplete")

    def _receive_bucket(
        self, group: WeightGroup, update_info: UpdateInfo
    ) -> Iterable[tuple[str, torch.Tensor]]:
        # Not reused: until a layer is complete, vLLM holds views of what came for it.
        buffer = torch.empty(
            message_bytes(update_info.dtypes, update_info.shapes),
            dtype=torch.uint8,
            device=self.device,
        )
        group.broadcast(buffer).wait()
        tensors = unpack(buffer, update_info.names, update_info.dtypes, update_info.shapes)
        if update_info.wants_digests:
            tensors = list(tensors)
            digests = {name: digest(tensor) for name, tensor in tensors}
            self.digests = {**(self.digests or {}), **digests}
        return tensors

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        if self._group is not None:
            self._group.leave()
            self._group, self._plan = None, None

    def _roll_back(self) -> None:
        """Put the former weights back wherever the new ones are not complete."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        for layer in self.model.modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                # A layer that nothing was loaded into keeps its weights in finalize.
                info.load_numel = 0
                info.loaded_weights.clear()
        finalize_layerwise_reload(self.model, self.model_config)


def register() -> None:
    """Entry point. Once or often in a process, with the same result.

    Raises:
      RuntimeError: this vLLM lacks what a repair changes; reloads would be silently wrong.
    """
    if current_platform.is_cpu():
        _repack_experts_on_reload()
        _repack_tied_heads_on_reload()
    WorkerBase.megarl_weight_digests = _weight_digests
    WorkerBase.megarl_needed_parts = _needed_parts
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, MegarlWeightTransferEngine)


def _weight_digests(self: Any) -> dict[str, int]:
    """A worker's method, for /collective_rpc: what the last update brought to its loader."""
    digests = self.weight_transfer_engine.digests
    if digests is None:
        raise RuntimeError("megarl: no digests were asked for in the last weight update")
    return dict(digests)


def _needed_parts(self: Any, tensors: list[tuple[str, list[int], str]]) -> dict[str, list[Part]]:
    """A worker's method, for /collective_rpc: what its loader takes of these HF tensors.

    The model is made a second time, without data, by the engine's own code for this worker's
    place; nothing of the one that serves is touched.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
    from vllm.model_executor.model_loader.utils import initialize_model

    config = copy.copy(self.vllm_config)
    # Layers enter themselves here by name, and a name may be there once.
    config.compilation_config = copy.copy(config.compilation_config)
    config.compilation_config.static_forward_context = {}
    if hasattr(config.compilation_config, "static_all_moe_layers"):
        config.compilation_config.static_all_moe_layers = []
    with set_current_vllm_config(config), torch.device("meta"):
        model = initialize_model(vllm_config=config)
    with set_current_vllm_config(config), disable_mtp_completeness_check():
        parts = needed_parts(model.load_weights, tensors)
    self.weight_transfer_engine.named = {name: (dtype, shape) for name, shape, dtype in tensors}
    return parts


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


def _patchable(owner: Any, name: str) -> Any:
    """The function `owner.name`, None if it is ours already."""
    function = getattr(owner, name, None)
    if function is None:
        raise RuntimeError(
            f"megarl: vLLM {vllm.__version__} has no {owner.__name__}.{name}; the repairs of "
            "weight reloads on a CPU were written for 0.32"
        )
    return None if hasattr(function, "_megarl") else function


def _patch(owner: Any, function: Any) -> None:
    function._megarl = True
    setattr(owner, function.__name__, function)


def _shared_nccl_settings(device: torch.device) -> Any:
    """vLLM sets NCCL variables for its own groups; one shared with the trainer needs none."""
    if device.type == "cpu":
        return nullcontext()
    from vllm.utils.nccl import unpinned_nccl_env

    return unpinned_nccl_env()
