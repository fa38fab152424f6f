"""One model from one format into another: one process a rank, all of them run this file.

    gguf   ->  HF folder        one process, the whole model in its memory
    HF     ->  training state   a rank reads its own shard
    state  ->  HF folder        a rank reads its own shard, rank 0 one tensor more

The state holds weights only; whatever layout wrote it, any layout reads it.
"""

import json
import os
import shutil
import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from megarl import parallel, platform
from megarl.actor.checkpoint import HF_FILES, save_hf, set_dtype
from megarl.actor.engine import DTYPES, MegatronEngine
from megarl.actor.weights_state import OWN_FILES, load_weights, save_weights, stored_dtype
from megarl.config.schema import ParallelConfig, TrainEngineConfig
from megarl.errors import CheckpointError, ConfigError, MegarlError
from megarl.parallel import Mesh

Kind = Literal["gguf_to_hf", "hf_to_state", "state_to_hf"]

_SHARD_BYTES = 5 << 30
_PLAIN_BYTE_LEVEL = ("default", "gpt-2")
"""`tokenizer.ggml.pre` of a split that is GPT-2's, which byte-level tokenizers start with."""


@dataclass(frozen=True)
class Conversion:
    """What a launcher asks of the ranks; made from JSON."""

    kind: Kind
    source: Path
    target: Path
    """Made by the ranks; the launcher gives it its name once all of them ended well."""
    model: Path | None
    """Folder with config.json and the tokenizer; None for a .gguf file, which has its own."""
    dtype: Literal["bfloat16", "float32"] | None
    """None keeps the dtype of a training state."""
    parallel: ParallelConfig

    @classmethod
    def from_json(cls, text: str) -> "Conversion":
        data = json.loads(text)
        model = None if data["model"] is None else Path(data["model"])
        return cls(
            data["kind"],
            Path(data["source"]),
            Path(data["target"]),
            model,
            data["dtype"],
            ParallelConfig(**data["parallel"]),
        )


def convert_sharded(job: Conversion, mesh: Mesh) -> None:
    """HF folder to state, or back. Collective over the world.

    Raises:
      CheckpointError: the source lacks a weight, or is of another model.
      ConfigError: its dtype is none that the trainer has, and the job names none.
    """
    reading = job.kind == "state_to_hf"
    dtype = job.dtype or _name_of(stored_dtype(job.source))
    assert job.model is not None, "launchers name a folder"
    engine = MegatronEngine(
        TrainEngineConfig(
            path=str(job.model),
            init_from_scratch=reading,
            dtype=dtype,
            parallel=job.parallel,
        ),
        mesh,
    )
    if reading:
        load_weights(engine, job.source)
        save_hf(engine, job.target, max_shard_bytes=_SHARD_BYTES)
        if mesh.rank == 0:
            for name in OWN_FILES:  # of the state, if its folder is the model's too
                (job.target / name).unlink(missing_ok=True)
    else:
        if mesh.rank == 0:
            job.target.mkdir()
        dist.barrier(group=mesh.cpu_group)
        save_weights(engine, job.target)
        if mesh.rank == 0:
            _copy_hf_files(job.model, job.target)
            set_dtype(job.target / "config.json", str(engine.spec.transformer.params_dtype))
    dist.barrier(group=mesh.cpu_group)


def _name_of(dtype: torch.dtype) -> Any:
    for name, candidate in DTYPES.items():
        if candidate == dtype:
            return name
    raise ConfigError(f"--dtype: needed, the source holds {dtype}")


def _copy_hf_files(source: Path, target: Path) -> None:
    for pattern in HF_FILES:
        for path in source.glob(pattern):
            if not path.name.endswith(".index.json"):
                shutil.copy(path, target / path.name)


# ---------------------------------------------------------------- gguf


def convert_gguf(source: Path, target: Path, dtype: torch.dtype) -> None:
    """A .gguf file as an HF folder with tokenizer, dequantised by transformers.

    Raises:
      CheckpointError: the file lacks a weight, or splits text in a way that is not known here.
      ConfigError: transformers does not read this architecture.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    try:
        config = AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
        # What AutoModelForCausalLM.from_pretrained(gguf_file=...) does, without accelerate.
        found = load_gguf_checkpoint(  # type: ignore[no-untyped-call]
            str(source), return_tensors=True, model_to_load=model, torch_dtype=dtype
        )
    except ValueError as error:
        raise ConfigError(f"SOURCE: {source}: {error}") from error
    model.load_state_dict(found["tensors"], strict=False, assign=True)
    model.tie_weights()
    missing = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if missing:
        raise CheckpointError(f"{source}: {len(missing)} weights are missing, {missing[0]} first")
    model.config.architectures = [type(model).__name__]
    tokenizer = _gguf_tokenizer(source)
    model.save_pretrained(target, max_shard_size=_SHARD_BYTES)
    tokenizer.save_pretrained(target)


def _gguf_tokenizer(source: Path) -> Any:
    """The file's tokenizer, with its own rule of where a text is split before merging."""
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    model, split = _gguf_fields(source, "tokenizer.ggml.model", "tokenizer.ggml.pre")
    if model == "gpt2" and split == "smollm":
        # transformers 5.19 does not know it and splits as GPT-2: of GSM8K's texts, 16 of 2,638
        # came out as other tokens, where two spaces or lines stand before a number.
        digits = pre_tokenizers.Digits(individual_digits=True)
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    elif model == "gpt2" and split not in (None, *_PLAIN_BYTE_LEVEL, *GGUF_PRE_TOKENIZER_SPLITS):
        raise CheckpointError(
            f"{source}: tokenizer.ggml.pre {split!r} is a way to split text that is not known; "
            f"tokens would silently differ from those the model was trained on"
        )
    return tokenizer


def _gguf_fields(source: Path, *names: str) -> list[Any]:
    """Header fields of the file, None for one that is not there."""
    from gguf import GGUFReader

    reader = GGUFReader(str(source))
    fields = [reader.get_field(name) for name in names]
    return [None if field is None else field.contents() for field in fields]


def main(arguments: list[str]) -> int:
    """`python -m megarl.convert JSON`, started once a rank by a launcher; the exit code."""
    job = Conversion.from_json(arguments[0])
    try:
        if job.kind == "gguf_to_hf":
            convert_gguf(job.source, job.target, DTYPES[job.dtype or "float32"])
        else:
            platform.setup()
            if platform.is_cuda():
                torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            dist.init_process_group(platform.collective_backend(), timeout=timedelta(minutes=30))
            convert_sharded(job, parallel.initialize(job.parallel, seed=0))
            parallel.destroy()
            dist.destroy_process_group()
    except MegarlError as error:
        print(f"megarl: {error}", file=sys.stderr)
        # Past the other ranks, who may wait in a collective; the launcher ends them.
        sys.stderr.flush()
        os._exit(2 if isinstance(error, ConfigError) else 1)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
