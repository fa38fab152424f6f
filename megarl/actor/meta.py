"""What a training script says about its run: small values, under AReaL's names.

`load_expr_config` reads the run's file; the other classes are arguments of the actor, the
rollout engine and the services of a script.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from megarl.config import allocation
from megarl.config.checks import check
from megarl.config.load import load, resolve
from megarl.config.run import BaseExperimentConfig, FrequencyConfig, GRPOConfig, SFTConfig
from megarl.config.schema import ParallelConfig
from megarl.errors import CheckpointError, ConfigError

RunConfig = TypeVar("RunConfig", GRPOConfig, SFTConfig)

_run_dir: Path | None = None


def script_rank() -> int:
    """This process's rank as torchrun or the launcher says it; 0 of a script on its own."""
    return int(os.environ.get("RANK", "0"))


# ---------------------------------------------------------------- the run's file


def load_expr_config(args: Sequence[str], cls: type[RunConfig]) -> tuple[RunConfig, Path]:
    """The run that a command line names, resolved and checked, and the path of its file.

    `allocation_mode` of what is returned is always written out, so that a script may read the
    layout there.

    Args:
      args: `--config FILE key=value ...` or `FILE key=value ...`; `sys.argv[1:]` of a script
        that `megarl launch` or torchrun has started.

    Raises:
      ConfigError: there is no file, or the run cannot be started; names the key.
    """
    global _run_dir
    rest = list(args)
    if "--config" in rest:
        at = rest.index("--config")
        if at + 1 == len(rest):
            raise ConfigError("--config: expected a YAML file after it")
        path = Path(rest.pop(at + 1))
        del rest[at]
    elif rest and "=" not in rest[0]:
        path = Path(rest.pop(0))
    else:
        raise ConfigError(f"expected --config FILE key=value ..., got {' '.join(rest)!r}")
    config = resolve(load(path, rest, cls))
    check(config)
    if isinstance(config, GRPOConfig):
        config = replace(config, allocation_mode=_allocation_text(config))
    _run_dir = config.run_dir
    return config, path


def run_folder(config: BaseExperimentConfig | FrequencyConfig) -> Path:
    """The run's folder; of a section alone, that of the run which `load_expr_config` read last.

    Raises:
      ConfigError: a section alone, and no run was read.
    """
    if isinstance(config, BaseExperimentConfig):
        return config.run_dir
    if _run_dir is None:
        raise ConfigError("a section does not say where its run is: load_expr_config comes first")
    return _run_dir


def _allocation_text(config: GRPOConfig) -> str:
    gen, train = config.rollout.parallel, config.actor.parallel
    dp = train.dp(config.trainer_world_size)
    dims = f"d{dp}t{train.tp}p{train.pp}c{train.cp}"
    if train.etp is None:
        dims += f"e{train.ep}"
    else:
        dims = f"(attn:{dims}|ffn:t{train.etp}p{train.pp}e{train.ep})"
    return f"{config.rollout.backend}:d{gen.dp}t{gen.tp}p{gen.pp}+megarl:{dims}"


# ---------------------------------------------------------------- placement


@dataclass(frozen=True, kw_only=True)
class ParallelStrategy:
    """Ranks of one part of a run, by kind of parallelism."""

    dp_size: int = 1
    tp_size: int = 1
    pp_size: int = 1
    cp_size: int = 1
    ep_size: int = 1
    etp_size: int | None = None
    """None is tp_size."""

    @property
    def world_size(self) -> int:
        return self.dp_size * self.tp_size * self.pp_size * self.cp_size

    def as_config(self, like: ParallelConfig) -> ParallelConfig:
        """This layout as a config section, which keeps what is not said here (vpp)."""
        return replace(
            like,
            tp=self.tp_size,
            pp=self.pp_size,
            cp=self.cp_size,
            ep=self.ep_size,
            etp=self.etp_size,
        )


@dataclass(frozen=True, kw_only=True)
class AllocationMode:
    """Servers and trainer of a run: `from_str("vllm:d1t2+megarl:d2t1p1").train.dp_size` is 2."""

    gen_backend: Literal["vllm", "sglang"]
    gen: ParallelStrategy
    train: ParallelStrategy

    @classmethod
    def from_str(cls, text: str) -> "AllocationMode":
        """Parse the form of megarl.config.allocation. ConfigError names the piece at fault."""
        mode = allocation.AllocationMode.from_str(text)
        gen, train = mode.gen, mode.train
        return cls(
            gen_backend=mode.backend,
            gen=ParallelStrategy(dp_size=gen.dp, tp_size=gen.tp, pp_size=gen.pp),
            train=ParallelStrategy(
                dp_size=mode.train_dp,
                tp_size=train.tp,
                pp_size=train.pp,
                cp_size=train.cp,
                ep_size=train.ep,
                etp_size=train.etp,
            ),
        )


# ---------------------------------------------------------------- length of a run


@dataclass(frozen=True)
class FinetuneSpec:
    """How long a run is, which its schedules and its frequencies in epochs depend on."""

    total_train_epochs: int
    dataset_size: int
    """Rows of an epoch."""
    train_batch_size: int
    """Rows of a step, over all ranks."""
    max_train_steps: int | None = None
    """Ends the run before its epochs do."""

    def __post_init__(self) -> None:
        if self.total_train_epochs < 1 or not 1 <= self.train_batch_size <= self.dataset_size:
            raise ValueError(
                f"need total_train_epochs >= 1 and 1 <= train_batch_size <= dataset_size, got "
                f"{self.total_train_epochs}, {self.train_batch_size}, {self.dataset_size}"
            )

    @property
    def steps_per_epoch(self) -> int:
        return self.dataset_size // self.train_batch_size

    @property
    def total_train_steps(self) -> int:
        return self.max_train_steps or self.total_train_epochs * self.steps_per_epoch


@dataclass(frozen=True)
class StepInfo:
    """A step that was done, counted from 0."""

    epoch: int
    epoch_step: int
    global_step: int
    steps_per_epoch: int

    def next(self) -> "StepInfo":
        """The step after it."""
        epoch, epoch_step = divmod(self.global_step + 1, self.steps_per_epoch)
        return StepInfo(epoch, epoch_step, self.global_step + 1, self.steps_per_epoch)


@dataclass
class RecoverInfo:
    """Where a script stands, beside the weights that `actor.save` writes."""

    last_step_info: StepInfo
    dataloader_info: dict[str, Any] = field(default_factory=dict)
    """`state_dict()` of the dataloader, if it has one; JSON values."""

    _NAME = "recover_info.json"

    def dump(self, folder: str | Path) -> None:
        """Write to `folder`, whole or not at all. For one rank to call."""
        path = Path(folder) / self._NAME
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(self)), encoding="utf-8")
        partial.rename(path)

    @classmethod
    def load(cls, folder: str | Path) -> "RecoverInfo":
        """What `dump` wrote. CheckpointError if there is none."""
        path = Path(folder) / cls._NAME
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            return cls(StepInfo(**values["last_step_info"]), values["dataloader_info"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path}: {error!r}") from error


# ---------------------------------------------------------------- weights


@dataclass
class WeightUpdateMeta:
    """How new weights reach the servers."""

    type: Literal["disk", "xccl"]
    """xccl is a process group with every server worker: NCCL, or gloo on a CPU."""
    path: str | None = None
    """Of disk: a folder that trainer and servers see under one path."""
    allocation_mode: AllocationMode | None = None
    """Kept for the script; the servers say themselves how many workers they have."""
    nccl_group_name: str = "update_weight_group"
    """Kept for the script; each actor makes a group of its own."""
    weight_chunked_mem_mb: int = 256
    """Of xccl: most MiB of one message; two are in memory at once."""
    pause: Literal["keep", "abort"] = "keep"
    """What a request in flight does meanwhile, see WeightUpdateConfig."""
    timeout_s: float = 600.0
    """One bucket, or one control request."""
    version: int | None = None
    """Of the weights to send; None is the version after the actor's."""

    def __post_init__(self) -> None:
        if self.type not in ("disk", "xccl"):
            raise ValueError(f"type must be disk or xccl, got {self.type!r}")
        if self.type == "disk" and not self.path:
            raise ValueError("a weight update of type disk needs a path")

    @classmethod
    def from_disk(
        cls, place: str | Path | BaseExperimentConfig | FrequencyConfig, **options: Any
    ) -> "WeightUpdateMeta":
        """Through a folder: `place` itself, or RUN/weights of the run of a config."""
        folder = place if isinstance(place, str | Path) else run_folder(place) / "weights"
        return cls(type="disk", path=str(folder), **options)

    @classmethod
    def from_megatron_xccl(
        cls, allocation_mode: AllocationMode | None = None, **options: Any
    ) -> "WeightUpdateMeta":
        """Over a process group; `options` are fields of this class."""
        return cls(type="xccl", allocation_mode=allocation_mode, **options)

    from_megatron_nccl = from_fsdp_xccl = from_megatron_xccl

    def with_version(self, version: int) -> "WeightUpdateMeta":
        """A copy for the weights of `version`."""
        return replace(self, version=version)


@dataclass
class SaveLoadMeta:
    """A model on disk."""

    path: str | Path
    weight_format: Literal["hf", "dcp"] = "hf"
    """hf: a folder for transformers and vLLM. dcp: Megatron's sharded checkpoint."""
    with_optim: bool = False
    """With optimizer and schedule; needs dcp, which always has them."""
    tokenizer: Any = None
    """Saved along; None copies the files of the model's own folder."""
    processor: Any = None
    base_model_path: str | None = None

    def __post_init__(self) -> None:
        if self.weight_format not in ("hf", "dcp"):
            raise ValueError(f"weight_format must be hf or dcp, got {self.weight_format!r}")
        if self.with_optim and self.weight_format == "hf":
            raise ValueError("with_optim needs weight_format dcp: an HF folder has weights only")
