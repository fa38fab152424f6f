"""`LocalTensors.sources`: what a rank says it holds of an HF tensor is that part of it."""

import pytest
import torch
from test_engine import make_engine
from tiny_models import save_tiny_hf, split_experts

from megarl import parallel as mesh_module
from megarl.bridge.boxes import Box
from megarl.config.schema import ParallelConfig
from megarl.model.weights import LocalTensors


def held_parts(folder, parallel, dtype):
    """{(HF name, box): its elements} of all boxes of this rank, and of rows within them."""
    engine = make_engine(folder, parallel, dtype=dtype)
    try:
        local = LocalTensors(engine.chunks, engine.spec, engine.mesh)
        found, most = {}, 0
        for name, held in local.layout.items():
            for whole, holders in zip(held.boxes, held.holders, strict=True):
                if engine.mesh.rank not in holders:
                    continue
                for box in within(whole):
                    sources = local.sources(name, box)
                    most = max(most, len(sources))
                    dtype = getattr(torch, local.named[name][0])
                    assert all(s.dtype == dtype for s in sources)
                    parts = [s.view().reshape(-1).to(dtype) for s in sources]
                    found[name, tuple(box)] = torch.cat(parts)
        outside = local.sources("model.norm.weight", Box(0, 1, 10_000, 10_001))
        return found, most, len(outside)
    finally:
        mesh_module.destroy()


def within(box):
    """The box, and all but its first and last row and column."""
    yield box
    rows = (box.row + 1, box.row_end - 1) if box.row_end - box.row > 2 else box[:2]
    columns = (box.column + 1, box.column_end - 1) if box.column_end - box.column > 2 else box[2:]
    yield Box(*rows, *columns)


@pytest.mark.parametrize(
    ("family", "tied", "parallel", "world"),
    [
        ("qwen2", False, ParallelConfig(), 2),  # biases; two KV groups a rank
        ("qwen3", True, ParallelConfig(tp=2, pp=2), 4),
        ("qwen3_moe", False, ParallelConfig(tp=2, ep=2, etp=1), 2),
        ("deepseek_v3", False, ParallelConfig(tp=2, ep=2, etp=1), 2),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_a_rank_holds(ranks, tmp_path, family, tied, parallel, world, dtype):
    # 97 entries: with tp 2 the vocabulary is padded.
    model = save_tiny_hf(tmp_path, family, tied=tied, vocab=97)
    results = ranks(world).run(held_parts, tmp_path, parallel, dtype)
    tensors = split_experts(dict(model.state_dict()))
    seen = set()
    for found, most, num_outside in results:
        for (name, box), got in found.items():
            seen.add(name)
            # A router's bias is float32 in any model.
            want = tensors[name].to(got.dtype)
            assert got.dtype == (torch.float32 if "score" in name else getattr(torch, dtype))
            row, row_end, column, column_end = box
            matrix = want.view(-1, want.shape[-1])[row:row_end, column:column_end]
            assert torch.equal(got, matrix.reshape(-1)), (name, box)
        assert most == (2 if family == "qwen2" else 1)
        assert num_outside == 0
    assert seen == set(tensors) - ({"lm_head.weight"} if tied else set())
