"""The trainer's end of SGLang 0.5.23's own weight updates: its process group and its buckets.

SGLang's workers know nothing of megarl's weight group, and a bucket of theirs has no gaps. This
is what `megarl.bridge.sender` needs to speak to them. Each worker makes its end of the group by
torch's `_new_process_group_helper`, so keys in the store are named as torch 2.10 to 2.13 do it.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from math import prod

import torch
import torch.distributed as dist

from megarl.bridge.group import SOURCE_RANK, WeightGroup, address_towards
from megarl.bridge.wire import Bucket, message_bytes
from megarl.rollout.backends.sglang import group_name

_POLL_S = 0.02


def open_group(
    store: dist.TCPStore,
    world_size: int,
    device: torch.device | str,
    timeout_s: float,
    *,
    give_up: Callable[[], bool] = lambda: False,
) -> WeightGroup:
    """Join as rank 0; returns when all workers have.

    Args:
      store: of `megarl.bridge.group.listen`; the group's name follows from its port.
      give_up: asked while waiting; True ends the wait.

    Raises:
      TimeoutError: a worker did not come; names the ranks that are missing.
    """
    device, limit = torch.device(device), timedelta(seconds=timeout_s)
    name = group_name(store.port)
    prefixed: dist.Store = store
    for prefix in (name, f"{name}/", f"{device.type}/"):
        prefixed = dist.PrefixStore(prefix, prefixed)
    if device.type == "cpu":
        _meet(prefixed, world_size, timeout_s, give_up)
        options = dist.ProcessGroupGloo._Options()
        own = address_towards(store.host, store.port)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=own)]
        options._timeout = limit
        group = dist.ProcessGroupGloo(prefixed, SOURCE_RANK, world_size, options)
    else:
        options = dist.ProcessGroupNCCL.Options()
        # Transfer.wait ends first: NCCL's own limit ends the process.
        options._timeout = 2 * limit
        # Connects at the first broadcast, as the workers do: nobody to wait for.
        group = dist.ProcessGroupNCCL(prefixed, SOURCE_RANK, world_size, options)
    return WeightGroup(store, group, SOURCE_RANK, timeout_s)


def _meet(
    store: dist.Store, world_size: int, timeout_s: float, give_up: Callable[[], bool]
) -> None:
    """Until every worker is at the door: gloo's constructor cannot be interrupted."""
    deadline = time.monotonic() + timeout_s
    # Where gloo's ranks leave their addresses.
    while missing := [rank for rank in range(1, world_size) if not store.check([f"0/{rank}"])]:
        if time.monotonic() > deadline or give_up():
            raise TimeoutError(
                f"weight group of {world_size}: ranks {missing} did not join within {timeout_s:g} s"
            )
        time.sleep(_POLL_S)


def without_gaps(stream: Iterable[Bucket]) -> Iterator[Bucket]:
    """Views of the buckets that hold tensor after tensor and nothing else.

    A bucket ends where a tensor does not fill its last 16 bytes, which few tensors of a model
    do. So every message begins aligned, and nothing is copied.
    """
    for bucket in stream:
        first = start = end = 0
        for index, (dtype, shape) in enumerate(zip(bucket.dtypes, bucket.shapes, strict=True)):
            exact_end = end + prod(shape) * getattr(torch, dtype).itemsize
            end += message_bytes([dtype], [shape])
            if end != exact_end or index == len(bucket.names) - 1:
                part = slice(first, index + 1)
                yield Bucket(
                    bucket.buffer[start:exact_end],
                    bucket.names[part],
                    bucket.dtypes[part],
                    bucket.shapes[part],
                )
                first, start = index + 1, end
