"""The one world of ranks that all models of a script share, for as long as there is one."""

import logging
import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from megarl import parallel, platform
from megarl.config.schema import ParallelConfig
from megarl.parallel import Mesh

_COLLECTIVE_TIMEOUT = timedelta(minutes=30)


def size() -> int:
    """Ranks that run this script, as torchrun or the launcher says."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@dataclass
class _World:
    """This process's place among the ranks: one, which all models of a script share."""

    mesh: Mesh
    is_ours: bool
    """Whether the default process group was made here, and ends here."""
    num_users: int = 0


_world: _World | None = None


def join(layout: ParallelConfig, seed: int) -> Mesh:
    """The mesh of `layout`, made with the first model. ValueError if that had another."""
    global _world
    if _world is None:
        is_ours = _init_process_group()
        _world = _World(parallel.initialize(layout, seed=seed), is_ours)
    if _world.mesh.parallel != layout:
        raise ValueError(
            f"the models of a script share one layout: the first has {_world.mesh.parallel}, this "
            f"one {layout}"
        )
    _world.num_users += 1
    return _world.mesh


def _init_process_group() -> bool:
    """torchrun's or the launcher's world; a script on its own is a world of one.

    False if the script has made it.
    """
    if not logging.getLogger().handlers:
        level = logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING
        logging.basicConfig(
            level=level, format="%(asctime)s %(name)s: %(message)s", datefmt="%H:%M:%S"
        )
    if platform.is_cuda():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    platform.setup()
    if dist.is_initialized():
        return False
    backend = platform.collective_backend()
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend, timeout=_COLLECTIVE_TIMEOUT)
    else:
        store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)  # type: ignore[attr-defined]
        dist.init_process_group(
            backend, store=store, rank=0, world_size=1, timeout=_COLLECTIVE_TIMEOUT
        )
    return True


def leave() -> None:
    """The last model takes the world with it."""
    global _world
    assert _world is not None, "left more often than joined"
    _world.num_users -= 1
    if not _world.num_users:
        parallel.destroy()
        if _world.is_ours:
            dist.destroy_process_group()
        _world = None
