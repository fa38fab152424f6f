"""`bridge/layout.py` against the parameters that real Megatron models hold."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_engine import make_engine
from tiny_models import save_tiny_hf

from megarl import parallel as mesh_module
from megarl.bridge.layout import hf_tensors, trainer_layout
from megarl.config.schema import ParallelConfig


def number(folder):
    """Give every element of a checkpoint a number of its own; name -> [rows, columns]."""
    path, first, numbered = folder / "model.safetensors", 1, {}
    for name, tensor in load_file(path).items():
        numbers = torch.arange(first, first + tensor.numel(), dtype=torch.float32)
        numbered[name] = numbers.view(tensor.shape)
        first += tensor.numel()
    assert first < 2**24, "float32 counts no further"
    save_file(numbered, path, metadata={"format": "pt"})
    return {name: x.reshape(-1, x.shape[-1]) for name, x in numbered.items()}


def held_numbers(folder, parallel):
    engine = make_engine(folder, parallel)
    try:
        values = [p.detach().flatten() for chunk in engine.chunks for p in chunk.parameters()]
        found = torch.cat(values)
        return engine.mesh.rank, sorted(found[found != 0].tolist())
    finally:
        mesh_module.destroy()


@pytest.mark.parametrize(
    ("family", "tied", "parallel"),
    [
        ("deepseek_v3", False, ParallelConfig(tp=2)),
        ("deepseek_v3", False, ParallelConfig(tp=2, ep=2, etp=1)),
        ("deepseek_v3", False, ParallelConfig(pp=2)),
        ("deepseek_v3", False, ParallelConfig(pp=2, vpp=2)),
        ("qwen2", False, ParallelConfig(tp=2)),
        ("qwen3", True, ParallelConfig(pp=2)),
        ("llama", False, ParallelConfig(pp=2, vpp=2)),
        ("qwen3_moe", False, ParallelConfig(ep=2, etp=1)),
        ("qwen3_moe", True, ParallelConfig(tp=2, ep=2, etp=1)),
        ("qwen3_moe", False, ParallelConfig(tp=2)),
        ("llama", True, ParallelConfig(cp=2)),
    ],
)
@pytest.mark.parametrize("num_layers", [4, 5])
def test_ranks_hold_what_the_layout_says(ranks, tmp_path, family, tied, parallel, num_layers):
    model = save_tiny_hf(tmp_path, family, tied=tied, vocab=97, num_hidden_layers=num_layers)
    numbers = number(tmp_path)
    config = model.config.to_dict()
    layout = trainer_layout(config, parallel, 2)
    assert numbers.keys() == hf_tensors(config, 4).keys()
    for rank, held in ranks(2).run(held_numbers, tmp_path, parallel):
        want = [
            numbers[name][box.row : box.row_end, box.column : box.column_end].flatten()
            for name, where in layout.items()
            for box, holders in zip(where.boxes, where.holders, strict=True)
            if rank in holders
        ]
        assert held == sorted(torch.cat(want).tolist())
