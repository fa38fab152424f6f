"""`megarl convert`: what a source is, and the ranks that turn it into something else.

TARGET appears whole or not at all: the ranks write into TARGET.partial, which gets its name
when all of them ended well and is deleted otherwise. Imports no torch.
"""

import importlib.util
import json
import math
import os
import shutil
import struct
import sys
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Literal

import yaml

from megarl.config.checks import MODEL_TYPES, has_weights
from megarl.config.schema import ParallelConfig
from megarl.errors import ConfigError
from megarl.launch import placement
from megarl.launch.process import Process
from megarl.launch.servers import Servers
from megarl.launch.supervise import supervise

Dtype = Literal["bfloat16", "float32"]

_DTYPES: dict[str, Dtype] = {"BF16": "bfloat16", "F32": "float32"}
_LATEST = "latest"
_STATE_MARK = ".metadata"
"""Megarl's training states are torch's distributed checkpoints; this is their index."""


def convert(
    source: Path,
    target: Path,
    *,
    parallel: str = "",
    dtype: Dtype | None = None,
    model: Path | None = None,
) -> int:
    """Convert the model in `source` into `target`; the exit code, as of `supervise`.

    Args:
      source: a .gguf file or a folder with one, an HF folder, or a training state.
      parallel: `tp=2,pp=2`, the layout of the ranks that read and write; "" is one rank.
      dtype: of the weights written; None keeps theirs (float32 for a .gguf file).
      model: where a training state without a config.json gets it and its tokenizer from.

    Raises:
      ConfigError: before anything is started or written.
      LaunchError: a process could not be started, or survived SIGKILL.
    """
    if target.exists() or target.is_symlink():
        raise ConfigError(f"TARGET: {target} exists already")
    layout = parse_parallel(parallel)
    kind, source = recognise(source)
    if kind == "gguf_to_hf":
        _check_gguf(source, parallel, model)
    else:
        model = _model_folder(kind, source, model)
        _check_layout(model, layout)
    if kind == "hf_to_state" and dtype is None:
        dtype = stored_dtype(source)
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        (partial / "logs").mkdir(parents=True)
        job = {
            "kind": kind,
            "source": str(source),
            "target": str(partial / "model"),
            "model": None if model is None else str(model),
            "dtype": dtype,
            "parallel": asdict(layout),
        }
        code: int = supervise(Servers([]), ranks_of(job, world_size(layout), partial / "logs"))
        if code == 0:
            os.rename(partial / "model", target)
            print(f"megarl: {source} -> {target}", file=sys.stderr)
        return code
    except OSError as error:
        raise ConfigError(f"TARGET: {target}: {error.strerror}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def ranks_of(job: dict[str, Any], world_size: int, logs: Path) -> list[Process]:
    """The ranks, not started. ConfigError if this machine has GPUs, but too few."""
    machine = placement.this_machine(os.environ)
    if 0 < len(machine.gpus) < world_size:
        raise ConfigError(
            f"--parallel: needs {world_size} ranks, this machine shows {len(machine.gpus)} GPUs; "
            f"with CUDA_VISIBLE_DEVICES= the CPU converts"
        )
    (port,) = placement.free_ports(1)
    threads = max(1, machine.num_cores // world_size)
    env = {
        **os.environ,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        "PYTHONWARNINGS": "ignore::UserWarning",  # Megatron's, of packages that are not there
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    if machine.gpus:
        env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # the order of nvidia-smi's indices
        env["CUDA_VISIBLE_DEVICES"] = ",".join(machine.gpus[:world_size])
    return [
        Process(
            f"rank {rank}",
            [sys.executable, "-m", "megarl.convert", json.dumps(job)],
            env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            log=None if rank == 0 else logs / f"rank-{rank}.log",
        )
        for rank in range(world_size)
    ]


# ---------------------------------------------------------------- what is asked


def parse_parallel(text: str) -> ParallelConfig:
    """`tp=2,pp=2` -> a layout. ConfigError names the piece that is wrong."""
    names = [field.name for field in fields(ParallelConfig)]
    sizes: dict[str, int] = {}
    for piece in filter(None, text.split(",")):
        name, _, size = piece.partition("=")
        if name not in names or not size.isdecimal() or name in sizes:
            raise ConfigError(
                f"--parallel: at {piece!r} in {text!r}: expected NAME=NUMBER, each of "
                f"{', '.join(names)} at most once"
            )
        sizes[name] = int(size)
    try:
        return ParallelConfig(**sizes)
    except ConfigError as error:
        raise ConfigError(f"--parallel: {error}") from None


def world_size(parallel: ParallelConfig) -> int:
    """The fewest ranks that hold the model once in this layout."""
    experts = parallel.ep * parallel.expert_tp * parallel.pp if parallel.ep > 1 else 1
    return math.lcm(parallel.model_size, experts)


def recognise(source: Path) -> tuple[str, Path]:
    """Which conversion `source` asks for, and the file or folder that holds the model."""
    if source.suffix == ".gguf" and source.is_file():
        return "gguf_to_hf", source
    if (source / _LATEST).is_file():
        state = source / (source / _LATEST).read_text(encoding="utf-8").strip()
        if not (state / _STATE_MARK).is_file():
            raise ConfigError(f"SOURCE: {source / _LATEST} names {state}, which is no whole state")
        return "state_to_hf", state
    if (source / _STATE_MARK).is_file():
        return "state_to_hf", source
    if (source / "config.json").is_file() and has_weights(source):
        return "hf_to_state", source
    files = sorted(source.glob("*.gguf")) if source.is_dir() else []
    if len(files) == 1:
        return "gguf_to_hf", files[0]
    if files:
        names = ", ".join(file.name for file in files)
        raise ConfigError(f"SOURCE: {source} has {len(files)} .gguf files, name one: {names}")
    raise ConfigError(
        f"SOURCE: {source} is no .gguf file, no folder with one, no HF folder with *.safetensors "
        f"and no training state"
    )


def stored_dtype(folder: Path) -> Dtype:
    """The dtype of all tensors of an HF folder. ConfigError if they differ, or it is another."""
    found = set()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        found |= {tensor["dtype"] for name, tensor in header.items() if name != "__metadata__"}
    dtype = _DTYPES.get(found.pop()) if len(found) == 1 else None
    if dtype is None:
        raise ConfigError(
            f"--dtype: needed, the tensors of {folder} are not all bfloat16 or all float32"
        )
    return dtype


def _check_gguf(source: Path, parallel: str, model: Path | None) -> None:
    if parallel:
        raise ConfigError(f"--parallel: {parallel}: one process reads {source}")
    if model is not None:
        raise ConfigError(f"--model: {model}: {source} has its own config")
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError(f"SOURCE: {source} needs the package gguf; pip install megarl[gguf]")


def _model_folder(kind: str, source: Path, model: Path | None) -> Path:
    """Where config.json and the tokenizer are."""
    if (source / "config.json").is_file():
        if model is not None:
            raise ConfigError(f"--model: {model}: {source} has its own config.json")
        return source
    assert kind == "state_to_hf", kind
    if model is None:
        model = _model_of_run(source)
    if not (model / "config.json").is_file():
        raise ConfigError(f"--model: {model} has no config.json")
    return model


def _model_of_run(state: Path) -> Path:
    """`actor.path` of the run whose recover/step_N is `state`."""
    path = state.absolute().parents[1] / "config.yaml"
    try:
        config: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
        return Path(config["actor"]["path"])
    except (OSError, yaml.YAMLError, KeyError, TypeError):
        raise ConfigError(
            f"--model: needed, {state} has no config.json and {path} names no actor.path"
        ) from None


def _check_layout(model: Path, parallel: ParallelConfig) -> None:
    """ConfigError if the trainer has no such model, or cannot split it by `parallel`."""
    try:
        config: dict[str, Any] = json.loads((model / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{model}/config.json: {error}") from error
    if config.get("model_type") not in MODEL_TYPES:
        raise ConfigError(
            f"SOURCE: model_type {config.get('model_type')!r} of {model} is not supported; "
            f"supported: {', '.join(MODEL_TYPES)}"
        )
    heads = config["num_attention_heads"]
    rules = {
        "num_attention_heads": ("tp", parallel.tp, heads),
        "num_key_value_heads": ("tp", parallel.tp, config.get("num_key_value_heads", heads)),
        "num_hidden_layers": (
            "pp * vpp",
            parallel.pp * (parallel.vpp or 1),
            config["num_hidden_layers"],
        ),
    }
    experts = config.get("num_experts") or config.get("num_local_experts")
    if parallel.ep > 1 or parallel.etp is not None:
        if not experts:
            raise ConfigError(f"--parallel: ep {parallel.ep} needs experts, {model} has none")
        rules["num_experts"] = ("ep", parallel.ep, experts)
    for key, (name, size, count) in rules.items():
        if count % size:
            raise ConfigError(f"--parallel: {name} {size} does not divide {key} {count} of {model}")
