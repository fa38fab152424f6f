"""A batch from rank 0, where the rollout pool lives, to every data-parallel replica.

Minibatches are chosen over the whole batch first, then each is balanced over the replicas by
tokens, so the samples an optimizer step sees do not depend on how many replicas there are.
Rank 0 sends a replica only its own rows, to the replica's head, which passes them on: each
row leaves rank 0 once, whatever tp, pp and cp are.
"""

import json

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.actor.micro_batch import Batch
from megarl.data.packing import split_batch
from megarl.parallel import Mesh, coordinates
from megarl.trajectory import select, sequence_lengths

MINIBATCH = "minibatch"
"""Column [B] int64 added here: the optimizer step a row belongs to."""


def scatter_batch(
    batch: Batch | None, mesh: Mesh, *, n_minibatches: int, seed: int, granularity: int = 1
) -> Batch:
    """The rows of this rank's replica, with a MINIBATCH column. Collective over the world.

    Args:
      batch: the whole padded batch on rank 0, None elsewhere.
      seed: of the shuffle that cuts minibatches.
      granularity: rows of a group that stays together, see split_batch.

    Raises:
      ValueError: on rank 0, see split_batch.
    """
    parts: list[Batch] = []
    if mesh.rank == 0:
        assert batch is not None
        lengths = sequence_lengths(batch).tolist()
        split = split_batch(
            lengths, dp=mesh.dp, n_minibatches=n_minibatches, seed=seed, granularity=granularity
        )
        parts = [_part(batch, minibatches) for minibatches in split]
    head = mesh.replica_ranks[0]
    mine: Batch = parts[0] if mesh.rank == 0 else {}
    if mesh.rank == 0:
        for replica in range(1, mesh.dp):
            _send(parts[replica], _head_of(replica, mesh), mesh)
    elif mesh.rank == head:
        mine = _receive(mesh)
    return _broadcast(mine, head, mesh)


def _part(batch: Batch, minibatches: list[list[int]]) -> Batch:
    """One replica's rows, cut to their own longest sequence."""
    rows = torch.tensor([row for rows in minibatches for row in rows])
    part = select(batch, rows)
    longest = int(sequence_lengths(part).max())
    part = {key: x[:, :longest] if x.ndim == 2 else x for key, x in part.items()}
    which = [i for i, rows_of_i in enumerate(minibatches) for _ in rows_of_i]
    return {**part, MINIBATCH: torch.tensor(which)}


def _head_of(replica: int, mesh: Mesh) -> int:
    ranks = range(mesh.world_size)
    return next(r for r in ranks if coordinates(r, mesh.world_size, mesh.parallel).dp == replica)


def _flatten(batch: Batch) -> tuple[Tensor, Tensor]:
    """Header (JSON: name, dtype, shape) and payload, both uint8."""
    described = [(k, str(x.dtype).removeprefix("torch."), list(x.shape)) for k, x in batch.items()]
    header = torch.frombuffer(bytearray(json.dumps(described).encode()), dtype=torch.uint8)
    payload = torch.cat([x.contiguous().view(-1).view(torch.uint8) for x in batch.values()])
    return header, payload


def _unflatten(header: Tensor, payload: Tensor) -> Batch:
    batch, start = {}, 0
    for name, dtype_name, shape in json.loads(bytes(header.tolist())):
        dtype = getattr(torch, dtype_name)
        stop = start + torch.Size(shape).numel() * dtype.itemsize
        # A copy: a slice of the payload need not be aligned for its dtype.
        batch[name] = payload[start:stop].clone().view(dtype).view(shape)
        start = stop
    return batch


def _send(batch: Batch, to: int, mesh: Mesh) -> None:
    header, payload = _flatten(batch)
    sizes = torch.tensor([header.numel(), payload.numel()])
    for tensor in (sizes, header, payload):
        dist.send(tensor, to, group=mesh.cpu_group)


def _receive(mesh: Mesh) -> Batch:
    sizes = torch.empty(2, dtype=torch.int64)
    dist.recv(sizes, 0, group=mesh.cpu_group)
    header, payload = (torch.empty(int(n), dtype=torch.uint8) for n in sizes)
    dist.recv(header, 0, group=mesh.cpu_group)
    dist.recv(payload, 0, group=mesh.cpu_group)
    return _unflatten(header, payload)


def _broadcast(batch: Batch, head: int, mesh: Mesh) -> Batch:
    """`batch` of the replica's head on all its ranks."""
    if len(mesh.replica_ranks) == 1:
        return batch
    is_head = mesh.rank == head
    sizes = torch.empty(2, dtype=torch.int64)
    header = payload = torch.empty(0, dtype=torch.uint8)
    if is_head:
        header, payload = _flatten(batch)
        sizes = torch.tensor([header.numel(), payload.numel()])
    dist.broadcast(sizes, head, group=mesh.replica_group)
    if not is_head:
        header, payload = (torch.empty(int(n), dtype=torch.uint8) for n in sizes)
    dist.broadcast(header, head, group=mesh.replica_group)
    dist.broadcast(payload, head, group=mesh.replica_group)
    return batch if is_head else _unflatten(header, payload)
