"""What runs inside SGLang: megarl's agent in each tensor-parallel worker.

`register` is the entry point `sglang.srt.plugins`; every process of a server calls it, and SGLang
itself stays as it is: both functions below are put around its own by its HookRegistry. A command
comes as the action of /weights_checker, which goes to every worker at once whether or not the
server is paused, and does not wait for requests as SGLang's update routes do; the answers of all
workers, in JSON, are the message that rank 0 sends back. Nothing raises: an exception in a
request's handler ends SGLang's scheduler, and with it the server.

Written against SGLang 0.5.23. Gathered weights need none of this, see
megarl/rollout/backends/sglang.py.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import sglang
import torch
import torch.distributed as dist
from sglang.srt.managers.io_struct import CheckWeightsReqOutput
from sglang.srt.model_loader.loader import (
    LoadConfig,
    _get_quantization_config,
    _initialize_model,
)
from sglang.srt.model_loader.utils import set_default_torch_dtype
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_parallel

from megarl.bridge.engines.agent import Agent
from megarl.bridge.engines.trace import Trace, trace_loading
from megarl.bridge.engines.trace_cache import TraceKey, cached_trace
from megarl.bridge.wire import digest

COMMAND_PREFIX = "megarl:"
"""Of an action that is a command, `{"name": ..., "arguments": {...}}` in JSON."""

_LAYOUT_OPTIONS = (
    *("device", "quantization", "moe_runner_backend", "moe_a2a_backend", "moe_dense_tp_size"),
    *("enable_dp_attention", "enable_dp_lm_head", "ep_num_redundant_experts"),
)
"""Of SGLang's server arguments: which part of a tensor a worker takes, besides its place."""

_COMPONENTS = "sglang.srt.managers.scheduler_components.weight_updater"
_RUNNERS = "sglang.srt.model_executor.model_runner_components.weight_updater"


class SGLangWorker:
    """What megarl's agent needs of a worker. `manager` is its SchedulerWeightUpdaterManager."""

    def __init__(self, manager: Any) -> None:
        self.engine = "sglang"
        self._manager = manager
        self._runner = manager.tp_worker.model_runner
        self.rank: int = get_parallel().tp_rank
        self.device = torch.device(self._runner.device)
        if self.device.type == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device())

    @property
    def model(self) -> torch.nn.Module:
        served: torch.nn.Module = self._runner.model
        return served

    def trace(self, tensors: list[tuple[str, list[int], str]]) -> Trace:
        """From the cache, if it is there."""
        config, args = self._runner.model_config, self._runner.server_args
        key = TraceKey(
            engine=self.engine,
            engine_version=sglang.__version__,
            hf_config=json.loads(config.hf_config.to_json_string(use_diff=False)),
            dtype=str(config.dtype),
            tp=args.tp_size,
            pp=args.pp_size,
            ep=args.ep_size,
            rank=self.rank,
            tensors=tensors,
            options={name: str(getattr(args, name, None)) for name in _LAYOUT_OPTIONS},
        )
        return cached_trace(key, lambda: self._trace(tensors))

    def _trace(self, tensors: list[tuple[str, list[int], str]]) -> Trace:
        """The model is made a second time, without data, by the engine's own code for this
        worker's place; nothing of the one that serves is touched."""
        self._check_can_load()
        config, load_config = self._runner.model_config, LoadConfig()
        with set_default_torch_dtype(config.dtype), torch.device("meta"):
            quantisation = _get_quantization_config(config, load_config)
            model = _initialize_model(config, load_config, quantisation)
            return trace_loading(model, tensors)

    def joining(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def load(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """SGLang copies into the model that serves, tensor by tensor: after a failure it computes
        with a mixture of old and new ones."""
        updater = self._runner.weight_updater
        with self._updating():
            # What SGLang's own updates do before and after, for layers that repack their weights.
            updater.begin_weight_update()
            try:
                with torch.no_grad():
                    self.model.load_weights(tensors)
            finally:
                updater.end_weight_update(run_post_load=False)

    def place(self, write: Callable[[], None]) -> None:
        with self._updating(), torch.no_grad():
            write()

    @contextmanager
    def _updating(self) -> Iterator[None]:
        """Only while nothing is computed; what was computed with the old weights is dropped."""
        self._check_can_load()
        manager = self._manager
        # Paused by `retract`, or by `abort`, which pauses the tokenizer's process alone.
        if not manager.scheduler._engine_paused and not manager.is_fully_idle():
            raise RuntimeError("the server is not paused")
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if not manager.flush_cache(empty_cache=False):
            raise RuntimeError("the KV cache of the old weights could not be dropped")

    def _check_can_load(self) -> None:
        """RuntimeError if weights loaded into this model would not all be used."""
        if self._manager.draft_worker is not None:
            raise RuntimeError("SGLang drafts with a second model, whose weights megarl has not")
        for name, layer in self._runner.model.named_modules():
            # Packed in place after the first load, and SGLang 0.5.23 cannot unpack them.
            if getattr(layer, "use_intel_amx_backend", False):
                raise RuntimeError(f"SGLang has packed {name} for AMX and cannot load it again")


# ---------------------------------------------------------------- hooks

_agents: dict[int, Agent] = {}
"""One in a process; the key is its manager's id."""
_digests: dict[str, int] | None = None
"""Of the tensors that gathered updates brought since they were asked for."""


def _check_weights(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Around SchedulerWeightUpdaterManager.check_weights."""
    if not request.action.startswith(COMMAND_PREFIX):
        return original(manager, request)
    answer = _answer(manager, request.action.removeprefix(COMMAND_PREFIX))
    answers: list[Any] = [None] * dist.get_world_size(manager.tp_cpu_group)
    dist.all_gather_object(answers, answer, group=manager.tp_cpu_group)
    message = json.dumps(answers) if get_parallel().tp_rank == 0 else ""
    return CheckWeightsReqOutput(success=True, message=message)


def _answer(manager: Any, text: str) -> dict[str, Any]:
    global _digests
    try:
        command = json.loads(text)
        name, arguments = command["name"], command["arguments"]
        if name == "keep_digests":
            _digests = {}
            return {"result": None}
        if name == "digests":
            if _digests is None:
                return {"error": "no digests were asked for in the last weight update"}
            kept, _digests = _digests, None
            return {"result": kept}
        if id(manager) not in _agents:
            _agents[id(manager)] = Agent(SGLangWorker(manager))
    except Exception as error:  # noqa: BLE001 - the trainer is told; the scheduler must go on
        return {"error": f"{type(error).__name__}: {error}"}
    return _agents[id(manager)].handle(name, arguments)


def _load_gathered(
    original: Callable[..., Any],
    updater: Any,
    named_tensors: Iterable[tuple[str, torch.Tensor]],
) -> Any:
    """Around WeightUpdater.load_weights_from_distributed."""
    if _digests is not None:
        named_tensors = list(named_tensors)
        _digests.update((name, digest(tensor)) for name, tensor in named_tensors)
    return original(updater, named_tensors)


def register() -> None:
    """Entry point. Once or often in a process, with the same result.

    Raises:
      RuntimeError: this SGLang lacks what a command needs. (SGLang logs it and serves; commands
        are then refused as unknown actions.)
    """
    from sglang.srt.managers.scheduler_components.weight_updater import (
        SchedulerWeightUpdaterManager,
    )
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    for owner, name in (
        (SchedulerWeightUpdaterManager, "check_weights"),
        (WeightUpdater, "load_weights_from_distributed"),
    ):
        if not hasattr(owner, name):
            raise RuntimeError(
                f"megarl: SGLang {sglang.__version__} has no {owner.__name__}.{name}; this plugin "
                "was written for 0.5.23"
            )
    for target, hook in (
        (f"{_COMPONENTS}.SchedulerWeightUpdaterManager.check_weights", _check_weights),
        (f"{_RUNNERS}.WeightUpdater.load_weights_from_distributed", _load_gathered),
    ):
        if not any(known is hook for _, known, _ in HookRegistry._hooks.get(target, ())):
            HookRegistry.register(target, hook, HookType.AROUND)
