"""Who a trainer rank is and whom it talks to.

Rank order is Megatron's "tp-cp-ep-dp-pp": tensor-parallel neighbours are adjacent, then
context, then data; pipeline stages are farthest apart. This is the only file that calls
`megatron.core.parallel_state`.
"""

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch.distributed import distributed_c10d

from megarl import platform
from megarl.config.schema import ParallelConfig


@dataclass(frozen=True)
class Coordinates:
    """Where one rank stands in the dense layout."""

    dp: int
    pp: int
    cp: int
    tp: int


@dataclass(frozen=True)
class ExpertCoordinates:
    """Where one rank stands in the layout of the experts, which shares the pipeline stages."""

    edp: int
    """Replica of the experts: 0 holds the ones that are exported."""
    pp: int
    ep: int
    etp: int


def expert_coordinates(rank: int, world_size: int, parallel: ParallelConfig) -> ExpertCoordinates:
    """Rank -> its place among the experts. ValueError if it is not in the world."""
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not in a world of {world_size}")
    pp, rest = divmod(rank, world_size // parallel.pp)
    rest, etp = divmod(rest, parallel.expert_tp)
    edp, ep = divmod(rest, parallel.ep)
    return ExpertCoordinates(edp=edp, pp=pp, ep=ep, etp=etp)


def coordinates(rank: int, world_size: int, parallel: ParallelConfig) -> Coordinates:
    """Rank -> its place in a world laid out by `parallel`. ValueError if it is not in it."""
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not in a world of {world_size}")
    dp = parallel.dp(world_size)
    rest, tp = divmod(rank, parallel.tp)
    rest, cp = divmod(rest, parallel.cp)
    pp, dp_rank = divmod(rest, dp)
    return Coordinates(dp=dp_rank, pp=pp, cp=cp, tp=tp)


def rank_of(place: Coordinates, world_size: int, parallel: ParallelConfig) -> int:
    """The inverse of `coordinates`."""
    dp = parallel.dp(world_size)
    return ((place.pp * dp + place.dp) * parallel.cp + place.cp) * parallel.tp + place.tp


@dataclass(frozen=True)
class Mesh:
    """This rank's place and its process groups. Made once by `initialize`."""

    parallel: ParallelConfig
    rank: int
    world_size: int
    dp: int
    place: Coordinates
    expert_place: ExpertCoordinates
    device: torch.device
    tp_group: dist.ProcessGroup
    etp_group: dist.ProcessGroup
    """Ranks that hold the slices of one expert."""
    pp_group: dist.ProcessGroup
    cp_group: dist.ProcessGroup
    """Ranks that hold the parts of the same sequences, and the same slice of the model."""
    dp_group: dist.ProcessGroup
    """Ranks with the same slice of the model, the same part of a sequence and other data."""
    cpu_group: dist.ProcessGroup
    """All ranks, gloo: for what lives in host memory."""
    replica_group: dist.ProcessGroup
    """The ranks of this data-parallel replica, gloo."""

    @property
    def is_first_stage(self) -> bool:
        return self.place.pp == 0

    @property
    def is_last_stage(self) -> bool:
        return self.place.pp == self.parallel.pp - 1

    @property
    def last_stage_rank(self) -> int:
        """World rank of the last pipeline stage of this pipeline."""
        return dist.get_process_group_ranks(self.pp_group)[-1]

    @property
    def replica_ranks(self) -> list[int]:
        """World ranks of this data-parallel replica; the first one heads it."""
        return dist.get_process_group_ranks(self.replica_group)


def initialize(parallel: ParallelConfig, *, seed: int, timeout_s: float = 1800.0) -> Mesh:
    """Make the process groups of this rank, and seed every generator.

    Needs the default process group. Weights that are the same on two ranks are drawn from
    the same seed; tensor-parallel shards from different ones.

    Raises:
      ConfigError: the world is not a multiple of the model's size.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dp = parallel.dp(world_size)
    place = coordinates(rank, world_size, parallel)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.virtual_stages,
        context_parallel_size=parallel.cp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=parallel.etp,
        distributed_timeout_minutes=max(1, int(timeout_s // 60)),
    )
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)

    timeout = timedelta(seconds=timeout_s)
    cpu_group = dist.new_group(backend="gloo", timeout=timeout)
    replica_group = None
    for replica in range(dp):
        members = [
            r for r in range(world_size) if coordinates(r, world_size, parallel).dp == replica
        ]
        group = dist.new_group(members, backend="gloo", timeout=timeout)
        if rank in members:
            replica_group = group
    assert replica_group is not None
    return Mesh(
        parallel=parallel,
        rank=rank,
        world_size=world_size,
        dp=dp,
        place=place,
        expert_place=expert_coordinates(rank, world_size, parallel),
        device=platform.device(),
        tp_group=parallel_state.get_tensor_model_parallel_group(),
        etp_group=parallel_state.get_expert_tensor_parallel_group(),
        pp_group=parallel_state.get_pipeline_model_parallel_group(),
        cp_group=parallel_state.get_context_parallel_group(),
        dp_group=parallel_state.get_data_parallel_group(),
        cpu_group=cpu_group,
        replica_group=replica_group,
    )


def destroy() -> None:
    """End all groups but the world's, so that `initialize` can make others."""
    parallel_state.destroy_model_parallel()
    # Megatron-Core 0.16.1 forgets its groups and does not end them: each keeps its threads and
    # connections, and after a hundred layouts in one process thousands of them fight for a core.
    for group in list(distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def data_parallel_group_with_cp() -> dist.ProcessGroup:
    """The ranks that share a shard of the optimizer."""
    return parallel_state.get_data_parallel_group(with_context_parallel=True)
