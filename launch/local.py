"""Runs a whole run on this machine: which servers and trainer ranks, and with what.

Rank 0 writes to the launcher's own terminal, all others to RUN_DIR/logs/NAME.log; ranks are
told of each other by torchrun's variables, and of the servers by MEGARL_SERVER_ADDRS. What happens
to the processes from their start to their end is in `megarl.launch.supervise`. Imports no torch.

`python -m megarl.launch.local CONFIG [key=value ...]` is `megarl train CONFIG ...`, and
`python -m megarl.launch.local SCRIPT.py --config CONFIG ...` is `megarl launch SCRIPT.py ...`.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from megarl.config.load import dump
from megarl.config.run import GRPOConfig, SFTConfig
from megarl.config.servers import InferenceEngineConfig
from megarl.errors import ConfigError
from megarl.launch import folder, placement
from megarl.launch.folder import claimed
from megarl.launch.placement import Machine, Placement
from megarl.launch.process import Process
from megarl.launch.servers import Servers
from megarl.launch.supervise import supervise
from megarl.rollout.membership import addresses_in_environment
from megarl.rollout.servers import nccl_settings, sglang_command, vllm_command

Program = Literal["train", "sft", "evaluate", "verify", "script"]


def run(
    config: GRPOConfig | SFTConfig,
    program: Program,
    *,
    overwrite: bool = False,
    arguments: Sequence[str] = (),
    with_servers: bool = True,
    script: Path | None = None,
) -> int:
    """Run `python -m megarl.PROGRAM RUN_DIR` with the servers it needs; the exit code.

    0 if all trainer ranks ended well, 128 + n if signal n stopped the launcher, else the code of
    the process that failed first.

    Args:
      config: resolved and checked.
      program: `evaluate` is one client process in the run's `eval` folder, with servers that
        load the weights of `actor.path`; `verify` are all ranks, in its `verify` folder; the
        others train from what `config` says. `script` is `python SCRIPT --config
        RUN_DIR/config.yaml` on all ranks, with servers that load the weights of `actor.path`.
      overwrite: delete an earlier trial in the run folder; otherwise that is a ConfigError.
      arguments: of the program, after RUN_DIR.
      script: the file of program `script`.

    Raises:
      ConfigError: before anything is started.
      LaunchError: a process could not be started, or survived SIGKILL.
    """
    if config.cluster.n_nodes != 1:
        raise ConfigError(
            f"cluster.n_nodes: this launcher starts the processes of one machine, got "
            f"{config.cluster.n_nodes}"
        )
    used: Literal["keep", "empty", "refuse"] = "empty" if overwrite else "refuse"
    run_dir = config.run_dir
    if not overwrite and folder.goes_on(run_dir, dump(config), config.recover):
        used = "keep"
    if program in ("evaluate", "verify"):
        used, run_dir = "keep", run_dir / ("eval" if program == "evaluate" else program)
    machine = placement.this_machine(os.environ)
    servers, ranks = plan(
        config,
        program,
        run_dir,
        machine,
        arguments=arguments,
        with_servers=with_servers,
        script=script,
    )
    with claimed(run_dir, dump(config), used=used):
        what = f"{len(machine.gpus)} GPUs" if machine.gpus else f"{machine.num_cores} cores"
        print(
            f"megarl: {len(servers)} servers and {len(ranks)} ranks on {what}; "
            f"logs in {run_dir / 'logs'}",
            file=sys.stderr,
            flush=True,
        )
        restarts = _restarts(config, program)
        requests = _requests(run_dir) if restarts else None
        code: int = supervise(Servers(servers, restarts=restarts, requests=requests), ranks)
        return code


def _restarts(config: GRPOConfig | SFTConfig, program: Program) -> int:
    """How often a server may be started again; only a training run can give it weights."""
    if isinstance(config, GRPOConfig) and program == "train":
        return config.rollout.server_restarts
    return 0


def _requests(run_dir: Path) -> Path:
    """Where the trainer asks for servers to be started again."""
    return run_dir / "logs" / "restarts"


def plan(
    config: GRPOConfig | SFTConfig,
    program: Program,
    run_dir: Path,
    machine: Machine,
    *,
    arguments: Sequence[str] = (),
    with_servers: bool = True,
    script: Path | None = None,
) -> tuple[list[Process], list[Process]]:
    """The servers and the ranks of a run, not started. ConfigError if the GPUs are too few."""
    evaluating = program == "evaluate"
    rollout = config.rollout if isinstance(config, GRPOConfig) and with_servers else None
    if rollout is not None and program in ("train", "script") and _are_elsewhere(rollout):
        rollout = None
    num_servers = rollout.parallel.dp if rollout else 0
    server_size = rollout.parallel.tp * rollout.parallel.pp if rollout else 0
    num_ranks = 1 if evaluating else config.trainer_world_size
    places = placement.place(
        machine,
        num_servers=num_servers,
        server_size=server_size,
        num_ranks=0 if evaluating else num_ranks,
    )
    master_port, *ports = placement.free_ports(1 + num_servers)
    # Servers' workers compute at the same time as the ranks, so they share the cores.
    workers = num_ranks + num_servers * server_size
    threads = 1 if machine.gpus else max(1, machine.num_cores // workers)
    servers = []
    if rollout is not None and isinstance(config, GRPOConfig):
        # A script may ask for episodes before it trains; the trainer pushes first.
        loads = evaluating or (script is not None and not config.actor.init_from_scratch)
        servers = _servers(config, run_dir, machine, places, ports, evaluating, loads, threads)
    env = {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
        "PYTHONUNBUFFERED": "1",
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(master_port),
    }
    if machine.gpus and isinstance(config, GRPOConfig) and config.rollout.backend == "sglang":
        env |= nccl_settings()
    if ports:
        env["MEGARL_SERVER_ADDRS"] = ",".join(f"127.0.0.1:{port}" for port in ports)
    elif program == "verify":
        env["MEGARL_SERVER_ADDRS"] = ""  # those of the environment are not its to push into
    if servers:
        again = _restarts(config, program) > 0
        env["MEGARL_RESTARTS"] = str(_requests(run_dir).absolute()) if again else ""
    if script is not None and config.actor.init_from_scratch:
        env["MEGARL_SERVERS_WITHOUT_WEIGHTS"] = "1"
    argv = [sys.executable, "-m", f"megarl.{program}", str(run_dir), *arguments]
    if script is not None:
        argv = [sys.executable, str(script), "--config", str(run_dir / folder.CONFIG_NAME)]
    ranks = [
        Process(
            f"rank {rank}",
            argv,
            env=_environment(places.trainer, {**env, "RANK": str(rank), "LOCAL_RANK": str(rank)}),
            log=None if rank == 0 else run_dir / "logs" / f"rank-{rank}.log",
        )
        for rank in range(num_ranks)
    ]
    return servers, ranks


def _are_elsewhere(rollout: InferenceEngineConfig) -> bool:
    """Whether somebody else starts the servers, and says where they are."""
    return rollout.servers is not None or bool(addresses_in_environment())


def _servers(
    config: GRPOConfig,
    run_dir: Path,
    machine: Machine,
    places: Placement,
    ports: Sequence[int],
    evaluating: bool,
    loads: bool,
    cpu_threads: int,
) -> list[Process]:
    processes = []
    for index, (port, devices) in enumerate(zip(ports, places.servers, strict=True)):
        make = (
            partial(sglang_command, sglang=config.sglang)
            if config.rollout.backend == "sglang"
            else partial(vllm_command, vllm=config.vllm, weight_backend=not evaluating)
        )
        command = make(
            config.actor.path,
            "127.0.0.1",
            port,
            parallel=config.rollout.parallel,
            device=machine.device,
            load_format="auto" if loads else "dummy",
            server_index=index,
            cpu_threads=cpu_threads,
        )
        env = _environment(devices, command.env)
        log = run_dir / "logs" / f"server-{index}.log"
        processes.append(Process(f"server {index}", command.argv, env=env, log=log, port=port))
    return processes


def _environment(devices: str | None, additions: Mapping[str, str]) -> dict[str, str]:
    """The launcher's environment for one process, which sees `devices` only."""
    env = {**os.environ, **additions}
    # All processes are on this machine: gloo need not look for its host's name.
    env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if devices is not None:
        env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # the order of nvidia-smi's indices
        env["CUDA_VISIBLE_DEVICES"] = devices
    return env


if __name__ == "__main__":
    from megarl.cli import main

    is_script = len(sys.argv) > 1 and sys.argv[1].endswith(".py")
    sys.exit(main(["launch" if is_script else "train", *sys.argv[1:]]))
