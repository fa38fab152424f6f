"""CUDA or CPU. Everything Megatron-Core needs to run on a CPU with gloo lives in this file.

`setup()` is called once, by the process that is a trainer rank, before Megatron builds
anything. On a CUDA machine it changes nothing. On a CPU it fills the places where
Megatron-Core 0.16.1 assumes a GPU: the `torch.cuda` calls it makes unconditionally, factory
functions given a literal device="cuda", and four functions of its own. The numbers are those
of Megatron's own code; only device queries, streams and copies to a GPU are replaced.
"""

import contextlib
import functools
import logging
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._device import _device_constructors

_CPU = torch.device("cpu")


def is_cuda() -> bool:
    return torch.cuda.is_available()


def device() -> torch.device:
    """The device of this trainer rank: the one chosen with torch.cuda.set_device."""
    return torch.device("cuda", torch.cuda.current_device()) if is_cuda() else _CPU


def collective_backend() -> str:
    """torch.distributed backend for tensors on `device()`."""
    return "nccl" if is_cuda() else "gloo"


@functools.cache
def setup() -> None:
    """Make Megatron-Core run on this machine. Calling it again does nothing."""
    logging.getLogger("megatron").setLevel(logging.WARNING)
    if is_cuda():
        return
    _replace_torch_cuda()
    _replace_factories()
    _replace_tensor_methods()
    _replace_in_megatron()


class _Stream:
    """A stream on a device that runs everything in order: waiting is done already."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def synchronize(self) -> None: ...
    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def query(self) -> bool:
        return True


class _Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def record(self, *args: Any) -> None: ...
    def wait(self, *args: Any) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True


def _replace_torch_cuda() -> None:
    # One function object a name: torch 2.13's compiler, which Megatron imports, keeps its rules
    # by object and raises "Duplicate torch object" for one that stands under two names.
    stream = _Stream()
    replacements: dict[str, Any] = {
        "current_device": lambda: _CPU,
        "synchronize": lambda *args: None,
        "set_device": lambda *args: None,
        "empty_cache": lambda: None,
        "Stream": _Stream,
        "Event": _Event,
        "current_stream": lambda *args: stream,
        "default_stream": lambda *args: stream,
        "stream": lambda *args: contextlib.nullcontext(),
        "get_rng_state": lambda *args: torch.get_rng_state(),
        "set_rng_state": lambda state, *args: torch.set_rng_state(state),
        "manual_seed": lambda seed: torch.default_generator.manual_seed(seed),
    }
    for name, replacement in replacements.items():
        setattr(torch.cuda, name, replacement)


def _replace_factories() -> None:
    """Factories given device="cuda" or pin_memory=True allocate plain CPU memory."""
    # `with torch.device(...)` knows the factories by a set that is made at its first use: with
    # the wrapped ones in it, transformers 5.19 loads models whose rotary buffer is garbage.
    _device_constructors()

    def on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(factory)
        def wrapped(*args: Any, **kwargs: Any) -> torch.Tensor:
            wanted = kwargs.get("device")
            if wanted is not None and torch.device(wanted).type == "cuda":
                kwargs["device"] = _CPU
            if kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False
            return factory(*args, **kwargs)

        return wrapped

    like = ("empty_like", "zeros_like", "ones_like")
    for name in ("tensor", "zeros", "ones", "empty", "full", "arange", *like):
        setattr(torch, name, on_cpu(getattr(torch, name)))


def _replace_tensor_methods() -> None:
    plain_type = torch.Tensor.type

    def type_seen_by_megatron(self: torch.Tensor, dtype: Any = None, *args: Any, **kw: Any) -> Any:
        # Gradient clipping keeps only gradients whose type() starts with torch.cuda.
        if dtype is not None:
            return plain_type(self, dtype, *args, **kw)
        name = plain_type(self)
        caller = sys._getframe(1).f_code.co_filename
        return name.replace("torch.", "torch.cuda.", 1) if "/megatron/core/" in caller else name

    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    torch.Tensor.type = type_seen_by_megatron  # type: ignore[method-assign,assignment]


def _replace_in_megatron() -> None:
    """Megatron-Core 0.16.1 functions that reach for CUDA behind torch's public API."""
    from megatron.core.tensor_parallel import mappings
    from megatron.core.tensor_parallel import random as rng
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    rng._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    rng._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    # The tracker logs an error at each fork of the CPU generator, which is the one meant here.
    logging.getLogger(rng.__name__).addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )
    # NameError in the router with moe_router_dtype set and no TransformerEngine.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    # Its own version leaves CPU splits as tensors, which all_to_all_single refuses.
    token_dispatcher.maybe_move_tensor_to_cpu = _splits_to_numpy
    _allow_uneven_splits(mappings)


def _splits_to_numpy(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _allow_uneven_splits(mappings: Any) -> None:
    """Experts split over ranks (etp) get unequal numbers of tokens from each.

    gloo gathers and scatters equal parts only: "invalid tensor size at index 1".
    """
    import torch.distributed as dist

    gather, reduce_scatter = (
        mappings._gather_along_first_dim,
        mappings._reduce_scatter_along_first_dim,
    )

    def gather_uneven(
        input_: torch.Tensor, group: Any, output_split_sizes: Any = None, *args: Any
    ) -> torch.Tensor:
        if output_split_sizes is None or group.size() == 1:
            return gather(input_, group, output_split_sizes, *args)
        longest = max(output_split_sizes)
        padded = input_.new_zeros((longest, *input_.shape[1:]))
        padded[: input_.shape[0]] = input_
        parts = [torch.empty_like(padded) for _ in output_split_sizes]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:n] for part, n in zip(parts, output_split_sizes, strict=True)])

    def reduce_scatter_uneven(
        input_: torch.Tensor, group: Any, input_split_sizes: Any = None, *args: Any
    ) -> torch.Tensor:
        if input_split_sizes is None or group.size() == 1:
            return reduce_scatter(input_, group, input_split_sizes, *args)
        total = input_.clone()
        dist.all_reduce(total, group=group)
        return total.split(list(input_split_sizes))[group.rank()].clone()

    mappings._gather_along_first_dim = gather_uneven
    mappings._reduce_scatter_along_first_dim = reduce_scatter_uneven
