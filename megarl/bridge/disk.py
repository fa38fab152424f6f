"""Weights through a folder that trainer rank 0 writes and every server can read.

A version is a folder `version_N` of safetensors, there whole or not at all; only the newest is
kept. Slower than a broadcast, and works where no process group reaches the servers. Needs
nothing of megarl in the servers (on a CPU it does, for vLLM's reload to be right).
"""

import json
import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from megarl.bridge.sender import PushStats, ServerPool, ask_all, paused
from megarl.rollout.client import PauseMode

MAX_SHARD_BYTES = 5 << 30
INDEX_NAME = "model.safetensors.index.json"


class DiskSender:
    """A `WeightSender`. After a failed push a server may be unable to go on: start it again.

    Args:
      engine: the servers' clients and their loop.
      folder: the sender's own; trainer and servers see it under one path.
      pause: what requests in flight do meanwhile, see ServerClient.pause.
      timeout_s: one request.
    """

    def __init__(
        self, engine: ServerPool, *, folder: Path, pause: PauseMode, timeout_s: float
    ) -> None:
        self._engine, self._folder = engine, folder.absolute()
        self._pause, self._timeout_s = pause, timeout_s

    def connect(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)

    def push(self, weights: Iterable[tuple[str, Tensor]], version: int) -> PushStats:
        """Write, pause, have every server read, resume. WeightUpdateError if one failed."""
        started = time.perf_counter()
        target = self._folder / f"version_{version}"
        partial = self._folder / f"partial_{version}"
        for old in (partial, target):  # of a run that this one goes on with
            shutil.rmtree(old, ignore_errors=True)
        partial.mkdir(parents=True)
        num_bytes = write_safetensors(weights, partial, max_shard_bytes=MAX_SHARD_BYTES)
        partial.rename(target)
        paused_at = time.perf_counter()
        with paused(self._engine, self._pause, self._timeout_s):
            ask_all(
                self._engine,
                f"load {target}",
                lambda c: c.load_from_disk(str(target), version, self._timeout_s),
                self._timeout_s,
            )
        ended = time.perf_counter()
        for old in self._folder.glob("version_*"):
            if old != target:
                shutil.rmtree(old)
        return PushStats(num_bytes, ended - started, ended - paused_at)

    def close(self) -> None:
        """The last version stays: servers may read it again."""


def write_safetensors(
    weights: Iterable[tuple[str, Tensor]], folder: Path, *, max_shard_bytes: int
) -> int:
    """`weights`, consumed once, as an HF checkpoint's tensor files and index; their bytes.

    Holds one shard in memory, on the CPU. A tensor larger than `max_shard_bytes` is a shard of
    its own.

    Raises:
      ValueError: `weights` is empty, or a name comes twice.
    """
    shard: dict[str, Tensor] = {}
    shard_bytes = num_bytes = 0
    shards: list[list[str]] = []
    seen: set[str] = set()

    def flush() -> None:
        nonlocal shard_bytes
        save_file(shard, folder / f"part-{len(shards):05}.safetensors", metadata={"format": "pt"})
        shards.append(list(shard))
        shard.clear()
        shard_bytes = 0

    for name, tensor in weights:
        if name in seen:
            raise ValueError(f"{name} comes twice")
        seen.add(name)
        if shard and shard_bytes + tensor.nbytes > max_shard_bytes:
            flush()
        # A copy: the sender of `weights` may use the tensor's memory for the next one.
        shard[name] = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
        shard_bytes += tensor.nbytes
        num_bytes += tensor.nbytes
    if not shard:
        raise ValueError(f"{folder}: no weights to write")
    flush()
    _name_shards(folder, shards, num_bytes)
    return num_bytes


def _name_shards(folder: Path, shards: list[list[str]], num_bytes: int) -> None:
    """HF's file names, which say how many there are."""
    weight_map = {}
    for i, names in enumerate(shards):
        file_name = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        if len(shards) == 1:
            file_name = "model.safetensors"
        os.rename(folder / f"part-{i:05}.safetensors", folder / file_name)
        weight_map |= dict.fromkeys(names, file_name)
    if len(shards) > 1:
        index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
        (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")
