"""What runs inside vLLM: megarl's agent in each worker, and the weight-transfer backend `megarl`
for gathered weights.

`register` is the entry point `vllm.general_plugins`; every process of a server calls it. While
weights are loaded the model's parameters are placeholders, so the server must be paused.
Whatever happens, the model can compute when the update is over: a failed or cancelled update
leaves complete layers with new weights and the others with old ones.

Written against vLLM 0.32. No method that all workers run raises: MultiprocExecutor.collective_rpc
reads no further than the first worker that raised, and takes the answer of the next one for that
of the next request.
"""

import copy
import json
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import vllm
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.platforms import current_platform
from vllm.v1.worker.worker_base import WorkerBase

from megarl.bridge.engines import vllm_cpu
from megarl.bridge.engines.agent import Agent
from megarl.bridge.engines.trace import Trace, trace_loading
from megarl.bridge.engines.trace_cache import TraceKey, cached_trace
from megarl.bridge.group import WeightGroup, connect, open_group
from megarl.bridge.wire import digest, message_bytes, unpack

logger = logging.getLogger(__name__)

BACKEND = "megarl"


# ---------------------------------------------------------------- sharded


class VLLMWorker:
    """What megarl's agent needs of a worker. `worker` is vLLM's own."""

    def __init__(self, worker: Any) -> None:
        self.engine = "vllm"
        self._worker = worker
        parallel = worker.vllm_config.parallel_config
        self.rank = parallel.data_parallel_index * parallel.world_size + parallel.rank
        self.device: torch.device = worker.device

    @property
    def model(self) -> torch.nn.Module:
        served: torch.nn.Module = self._worker.model_runner.model
        return served

    def trace(self, tensors: list[tuple[str, list[int], str]]) -> Trace:
        """From the cache, if it is there."""
        config = self._worker.vllm_config
        parallel, model = config.parallel_config, config.model_config
        key = TraceKey(
            engine=self.engine,
            engine_version=vllm.__version__,
            hf_config=json.loads(model.hf_config.to_json_string(use_diff=False)),
            dtype=str(model.dtype),
            tp=parallel.tensor_parallel_size,
            pp=parallel.pipeline_parallel_size,
            ep=parallel.data_parallel_size if parallel.enable_expert_parallel else 0,
            rank=self.rank,
            tensors=tensors,
            options={
                "device": self.device.type,
                "quantization": str(model.quantization),
                "placement": str(parallel.expert_placement_strategy),
            },
        )
        return cached_trace(key, lambda: self._trace(tensors))

    def _trace(self, tensors: list[tuple[str, list[int], str]]) -> Trace:
        """The model is made a second time, without data, by the engine's own code for this
        worker's place; nothing of the one that serves is touched."""
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
        from vllm.model_executor.model_loader.utils import initialize_model

        config = copy.copy(self._worker.vllm_config)
        # Layers enter themselves here by name, and a name may be there once.
        config.compilation_config = copy.copy(config.compilation_config)
        config.compilation_config.static_forward_context = {}
        if hasattr(config.compilation_config, "static_all_moe_layers"):
            config.compilation_config.static_all_moe_layers = []
        with set_current_vllm_config(config), torch.device("meta"), _expert_maps_with_data():
            model = initialize_model(vllm_config=config)
        with set_current_vllm_config(config), disable_mtp_completeness_check():
            return trace_loading(model, tensors)

    def joining(self) -> AbstractContextManager[Any]:
        return _shared_nccl_settings(self.device)

    def load(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

        model, config = self.model, self._worker.vllm_config
        with (
            set_current_vllm_config(config),
            _reload(model, config.model_config),
            torch.no_grad(),
            disable_mtp_completeness_check(),
        ):
            model.load_weights(tensors)
        self._settle()

    def place(self, write: Callable[[], None]) -> None:
        with torch.no_grad():
            write()
        self._settle()

    def _settle(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        self._worker.model_runner.reset_lora_state()


@contextmanager
def _expert_maps_with_data() -> Iterator[None]:
    """Under expert parallelism the loader reads which experts are this worker's from a tensor."""
    from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager

    calculate = ExpertMapManager._calculate_expert_maps

    def on_cpu(self: Any) -> None:
        with torch.device("cpu"):
            calculate(self)

    ExpertMapManager._calculate_expert_maps = on_cpu
    try:
        yield
    finally:
        ExpertMapManager._calculate_expert_maps = calculate


@contextmanager
def _reload(model: torch.nn.Module, model_config: Any) -> Iterator[None]:
    """The model takes weights inside; rolled back where that fails."""
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    initialize_layerwise_reload(model)
    try:
        yield
    except BaseException:
        _roll_back(model, model_config)
        raise
    finalize_layerwise_reload(model, model_config)


def _roll_back(model: torch.nn.Module, model_config: Any) -> None:
    """Put the former weights back wherever the new ones are not complete."""
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            # A layer that nothing was loaded into keeps its weights in finalize.
            info.load_numel = 0
            info.loaded_weights.clear()
    finalize_layerwise_reload(model, model_config)


def _command(self: Any, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """A worker's method, for /collective_rpc: a command of the trainer, see agent.py."""
    engine = self.weight_transfer_engine
    if name == "check_update":
        return {"error": engine.error} if engine.error else {"result": None}
    if name == "cancel_update":
        if self._weight_update_active:
            _roll_back(engine.model, engine.model_config)
            self.finish_weight_update()
        return {"result": None}
    if not hasattr(self, "_megarl_agent"):
        self._megarl_agent = Agent(VLLMWorker(self))
    answer: dict[str, Any] = self._megarl_agent.handle(name, arguments)
    return answer


# ---------------------------------------------------------------- gathered


@dataclass
class InitInfo(WeightTransferInitInfo):
    """The weight group, as the trainer sends it to /init_weight_transfer_engine."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    timeout_s: float


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One bucket."""

    names: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)
    wants_digests: bool = False
    """Keep a digest of each tensor, for `megarl_weight_digests`."""


class MegarlWeightTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """One worker's end: receives full tensors by broadcast from rank 0, the trainer.

    The model's own loader cuts this worker's shard and casts to the model's dtype. What fails
    is kept in `error` and told by the command `check_update`; after it the worker still takes
    its part in broadcasts, and loads no more.
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
        self.error: str | None = None
        self.digests: dict[str, int] | None = None
        """Of the tensors that the loader was given in an update whose digests were asked for."""

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self.shutdown()
        self.error = None
        try:
            self._join(init_info)
        except (TimeoutError, RuntimeError) as error:
            logger.exception("megarl: init_weight_transfer_engine")
            self.error = f"init_weight_transfer_engine: {type(error).__name__}: {error}"

    def _join(self, init_info: InitInfo) -> None:
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

    def start_weight_update(self) -> None:
        self.digests = self.error = None
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The base class goes on to torch.accelerator.synchronize(), which raises on a CPU.
        try:
            self.receive_weights(self.parse_update_info(update_info))
            if self.device.type != "cpu":
                torch.accelerator.synchronize()
        except Exception as error:
            logger.exception("megarl: update_weights")
            if self.error is None:
                self.error = f"update_weights: {type(error).__name__}: {error}"
                _roll_back(self.model, self.model_config)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

        if self._group is None:
            raise RuntimeError("megarl: /init_weight_transfer_engine comes before an update")
        # Not reused: until a layer is complete, vLLM holds views of what came for it.
        buffer = torch.empty(
            message_bytes(update_info.dtypes, update_info.shapes),
            dtype=torch.uint8,
            device=self.device,
        )
        self._group.broadcast(buffer).wait()
        if self.error is not None:
            return
        tensors: Iterable[tuple[str, torch.Tensor]] = unpack(
            buffer, update_info.names, update_info.dtypes, update_info.shapes
        )
        if update_info.wants_digests:
            tensors = list(tensors)
            digests = {name: digest(tensor) for name, tensor in tensors}
            self.digests = {**(self.digests or {}), **digests}
        with torch.no_grad(), disable_mtp_completeness_check():
            self.model.load_weights(tensors)

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        if self._group is not None:
            self._group.leave()
            self._group = None


def _weight_digests(self: Any) -> dict[str, Any]:
    """A worker's method, for /collective_rpc: what the last update brought to its loader."""
    digests = self.weight_transfer_engine.digests
    if digests is None:
        return {"error": "no digests were asked for in the last weight update"}
    return {"result": dict(digests)}


def register() -> None:
    """Entry point. Once or often in a process, with the same result.

    Raises:
      RuntimeError: see vllm_cpu.repair.
    """
    if current_platform.is_cpu():
        vllm_cpu.repair()
    WorkerBase.megarl_weight_digests = _weight_digests
    WorkerBase.megarl_command = _command
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, MegarlWeightTransferEngine)


def _shared_nccl_settings(device: torch.device) -> AbstractContextManager[Any]:
    """vLLM sets NCCL variables for its own groups; one shared with the trainer needs none."""
    if device.type == "cpu":
        return nullcontext()
    from vllm.utils.nccl import unpinned_nccl_env

    return unpinned_nccl_env()
