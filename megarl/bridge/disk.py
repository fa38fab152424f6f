"""Weights through a folder that trainer rank 0 writes and every server can read.

A version is a folder `version_N` of safetensors, there whole or not at all; only the newest is
kept. Slower than a broadcast, and works where no process group reaches the servers. Needs
nothing of megarl in the servers (on a CPU it does, for vLLM's reload to be right).
"""

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from megarl.bridge.push import Members, Together
from megarl.errors import EngineError
from megarl.rollout.api import NO_VERSION
from megarl.rollout.client import ServerClient

MAX_SHARD_BYTES = 5 << 30
INDEX_NAME = "model.safetensors.index.json"


class DiskSender:
    """A `WeightSender`. Only rank 0 writes.

    Args:
      members: the servers, on rank 0.
      folder: the sender's own; trainer and servers see it under one path.
      timeout_s: one request.
    """

    def __init__(
        self, members: Members, together: Together, *, folder: Path, timeout_s: float
    ) -> None:
        self._members, self._together = members, together
        self._folder, self._timeout_s = folder.absolute(), timeout_s
        self._num_bytes = 0
        self._has_begun = False

    def prepare(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Write them."""

        def write() -> None:
            if self._members.pool is None:
                for _ in weights:
                    raise AssertionError("only rank 0 is given tensors")
                return
            target, partial = self._target(version), self._folder / f"partial_{version}"
            for old in (partial, target):  # of a run that this one goes on with
                shutil.rmtree(old, ignore_errors=True)
            partial.mkdir(parents=True)
            self._num_bytes = write_safetensors(weights, partial, max_shard_bytes=MAX_SHARD_BYTES)
            partial.rename(target)

        self._together("write the weights", write)

    def send(self, version: int) -> int:
        """Have every server read."""
        self._has_begun = True

        def read() -> int:
            if self._members.pool is None:
                return 0
            target = self._target(version)
            self._members.ask(
                f"load {target}",
                lambda c: c.load_from_disk(str(target), version, self._timeout_s),
                self._timeout_s,
            )
            for old in self._folder.glob("version_*"):
                if old != target:
                    shutil.rmtree(old)
            return self._num_bytes

        num_bytes = self._together("have the weights read", read)
        self._has_begun = False
        return num_bytes

    def abandon(self, timeout_s: float) -> dict[ServerClient, EngineError]:
        begun, self._has_begun = self._has_begun, False

        async def end(client: ServerClient) -> None:
            if begun:
                await client.set_version(NO_VERSION, timeout_s)
            await client.health(timeout_s)

        return self._members.failing(end, timeout_s)

    def close(self) -> None:
        """The last version stays: servers may read it again."""

    def _target(self, version: int) -> Path:
        return self._folder / f"version_{version}"


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
