"""Which devices and ports of this machine each process of a run gets. Imports no torch."""

import os
import random
import shutil
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megarl.errors import ConfigError, LaunchError

_NVIDIA_SMI_S = 60.0
_PORT_TRIES = 1000
_FIRST_PORT = 10_000


@dataclass(frozen=True)
class Machine:
    gpus: tuple[str, ...]
    """What CUDA_VISIBLE_DEVICES may name; empty is a run on the CPU."""
    num_cores: int

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        return "cuda" if self.gpus else "cpu"


@dataclass(frozen=True)
class Placement:
    """CUDA_VISIBLE_DEVICES of each server and of the trainer; None is a machine without."""

    servers: list[str | None]
    trainer: str | None


def this_machine(environ: Mapping[str, str]) -> Machine:
    """The GPUs that `environ` and the driver show, and the cores this process may use."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    gpus = list_gpus() if visible is None else visible.split(",")
    gpus = [gpu.strip() for gpu in gpus if gpu.strip()]
    return Machine(gpus=tuple(gpus), num_cores=len(os.sched_getaffinity(0)))


def list_gpus() -> list[str]:
    """GPUs by index in PCI order; MIG slices by their name. Empty without a driver.

    Raises:
      LaunchError: nvidia-smi is there and does not answer.
    """
    if shutil.which("nvidia-smi") is None:
        return []
    try:
        answer = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=_NVIDIA_SMI_S, check=True
        )
    except subprocess.TimeoutExpired as error:
        raise LaunchError(f"nvidia-smi -L: no answer in {_NVIDIA_SMI_S} s") from error
    except subprocess.CalledProcessError as error:
        raise LaunchError(f"nvidia-smi -L: exit code {error.returncode}: {error.stdout}") from error
    return parse_gpu_list(answer.stdout)


def parse_gpu_list(text: str) -> list[str]:
    """The devices in the output of `nvidia-smi -L`.

    A GPU cut into MIG slices is only usable through them, and they have no index.
    """
    devices: list[list[str]] = []
    for line in text.splitlines():
        if line.startswith("GPU "):
            devices.append([line.removeprefix("GPU ").partition(":")[0]])
        elif line.lstrip().startswith("MIG ") and devices:
            if not devices[-1][0].startswith("MIG-"):
                devices[-1].clear()
            devices[-1].append(line.partition("(UUID: ")[2].rstrip(") "))
    return [name for group in devices for name in group]


def place(machine: Machine, *, num_servers: int, server_size: int, num_ranks: int) -> Placement:
    """Devices for servers first, then for the ranks; nobody shares one.

    Raises:
      ConfigError: the machine has GPUs, but too few.
    """
    if not machine.gpus:
        return Placement(servers=[None] * num_servers, trainer=None)
    needed = num_servers * server_size + num_ranks
    if needed > len(machine.gpus):
        raise ConfigError(
            f"cluster.n_gpus_per_node: {num_servers} servers of {server_size} and {num_ranks} "
            f"trainer ranks need {needed} GPUs, this machine shows {len(machine.gpus)}"
        )
    cuts = [i * server_size for i in range(num_servers + 1)]
    servers = [",".join(machine.gpus[i : i + server_size]) for i in cuts[:-1]]
    return Placement(servers=[*servers], trainer=",".join(machine.gpus[cuts[-1] : needed]))


def free_ports(count: int) -> list[int]:
    """Loopback ports that nobody listens on.

    They lie below the range that the kernel gives to outgoing connections, so that none is
    taken in the minute that a server needs before it binds its own.
    """
    text = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text()
    end = int(text.split()[0])
    ports: list[int] = []
    for _ in range(_PORT_TRIES):
        if len(ports) == count:
            return ports
        port = random.randrange(min(_FIRST_PORT, end - 1), end)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in ports:
            ports.append(port)
    raise LaunchError(f"found {len(ports)} free ports below {end} in {_PORT_TRIES} tries")
