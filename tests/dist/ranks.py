"""Rank processes that stay alive over many tests: importing torch and Megatron takes seconds."""

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any


class RankGroup:
    """`world_size` gloo ranks; `run` calls a module-level function on all of them at once."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._ranks: list[tuple[Any, Connection]] = []

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = 240.0) -> list[Any]:
        """Each rank's result. A failure on one rank ends them all and raises here."""
        if not self._ranks:
            self._start()
        for _, pipe in self._ranks:
            pipe.send((function, args))
        results = []
        for rank, (_, pipe) in enumerate(self._ranks):
            if not pipe.poll(timeout_s):
                self.close()
                raise TimeoutError(f"rank {rank} of {self.world_size}: no answer in {timeout_s} s")
            try:
                error, result = pipe.recv()
            except EOFError:
                error, result = f"rank {rank} of {self.world_size} died", None
            if error:
                self.close()
                raise AssertionError(f"rank {rank} of {self.world_size}:\n{error}")
            results.append(result)
        return results

    def _start(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        context = multiprocessing.get_context("spawn")
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, self.world_size, port))
            process.start()
            theirs.close()
            self._ranks.append((process, ours))

    def close(self) -> None:
        # A rank that reads the end of its pipe leaves by itself and ends its own children.
        for _, pipe in self._ranks:
            pipe.close()
        for process, _ in self._ranks:
            process.join(10)
            process.kill()
            process.join()
        self._ranks = []


def _serve(pipe: Connection, rank: int, world_size: int, port: int) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
        HF_HUB_OFFLINE="1",
    )
    import torch

    from megarl import platform

    torch.set_num_threads(1)
    platform.setup()
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=120))
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((None, function(*args)))
        except BaseException:  # noqa: BLE001 - reported to the test, which raises it
            pipe.send((traceback.format_exc(), None))
