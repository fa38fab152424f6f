"""Logits and every gradient of the Megatron model equal HF's, for each family and layout.

Megatron sums in another order (and splits sums over ranks), so equality is to float32
rounding: 1e-5 of the largest logit or of the largest entry of each gradient.
Not covered: dtypes other than float32, and TransformerEngine's layers.
"""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tiny_models import VOCAB, save_tiny_hf

from megarl import parallel as mesh_module
from megarl.actor import micro_batch as mb
from megarl.actor.engine import MegatronEngine
from megarl.config.schema import MicroBatchSpec, OptimizerConfig, ParallelConfig, TrainEngineConfig
from megarl.model.weights import HFExport

TOLERANCE = 1e-5
LENGTHS = [5, 17, 9, 12, 30, 2, 21, 8]


def make_batch(rows: list[int]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, VOCAB, (len(LENGTHS), max(LENGTHS)), generator=generator)
    valid = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    # Shifted: index t trains the prediction of token t + 1; the last token predicts nothing.
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None] - 1
    weights = torch.rand(valid.shape, generator=generator) * mask
    batch = {
        "input_ids": torch.where(valid, tokens, 0).int(),
        "attention_mask": valid,
        "weights": weights,
    }
    return {key: x[rows] for key, x in batch.items()}


def weighted_logp_loss(outputs):
    """A loss whose gradient at each token differs, with a term in the entropy."""
    weights = outputs.columns["weights"]
    where = weights > 0
    logp = torch.where(where, outputs.logp, 0.0)
    entropy = torch.where(where, outputs.entropy, 0.0)
    return -(weights * logp + 0.1 * weights * entropy).sum() / outputs.num_tokens, {}


def run_megatron(folder: str, parallel: ParallelConfig, sequence_parallel: bool):
    """On each rank; rank 0 returns loss, logprobs in row order, and HF-named gradients."""
    mesh = mesh_module.initialize(parallel, seed=1)
    try:
        config = TrainEngineConfig(
            path=folder,
            dtype="float32",
            parallel=parallel,
            sequence_parallel=sequence_parallel,
            mb_spec=MicroBatchSpec(max_tokens_per_mb=40),
            optimizer=OptimizerConfig(lr=0.0, gradient_clipping=0.0),
            use_distributed_optimizer=False,
        )
        engine = MegatronEngine(config, mesh)
        rows = list(range(mesh.place.dp, len(LENGTHS), mesh.dp))
        batch = make_batch(rows)
        logits = collect_logits(engine, batch)
        metrics = engine.train_batch(
            batch, weighted_logp_loss, keys=("weights",), num_tokens=len(rows)
        )
        export = HFExport(engine.chunks, engine.spec, mesh)
        for chunk in engine.chunks:
            for parameter in chunk.parameters():
                parameter.data.copy_(parameter.main_grad)
        gradients = {name: tensor.clone() for name, tensor in export}
        return metrics, gradients, dict(zip(rows, logits, strict=True)) if logits else {}
    finally:
        mesh_module.destroy()


@torch.no_grad()
def collect_logits(engine: MegatronEngine, batch) -> list[torch.Tensor]:
    """Full-vocabulary logits of each row, on the ranks of the last stage."""
    bins = mb.assign(mb.sequence_lengths(batch).tolist(), engine.config.mb_spec, engine.mesh)
    micro_batches = mb.build(batch, bins, (), engine.mesh)

    def keep(micro_batch, logits):
        shard = logits[0].contiguous()
        shards = [torch.empty_like(shard) for _ in range(engine.mesh.parallel.tp)]
        dist.all_gather(shards, shard, group=engine.mesh.tp_group)
        full = torch.cat(shards, dim=1)[: micro_batch.num_tokens]
        return logits.new_zeros(()), torch.tensor(1, dtype=torch.int), {"logits": full}

    outputs = engine._run(micro_batches, keep, forward_only=True)
    rows: dict[int, torch.Tensor] = {}
    for micro_batch, output in zip(micro_batches, outputs, strict=False):
        sizes = micro_batch.cu_seqlens.diff().tolist()
        for row, part in zip(micro_batch.rows.tolist(), output["logits"].split(sizes), strict=True):
            rows[row] = part
    return [rows[i] for i in sorted(rows)]


def run_hf(model: torch.nn.Module):
    batch = make_batch(list(range(len(LENGTHS))))
    model.zero_grad()
    loss, logits = 0.0, {}
    for row, length in enumerate(LENGTHS):
        ids = batch["input_ids"][row : row + 1, :length].long()
        logits[row] = model(input_ids=ids).logits[0]
        logp_all = F.log_softmax(logits[row][:-1], dim=-1)
        logp = logp_all.gather(1, ids[0, 1:, None])[:, 0]
        entropy = -(logp_all.exp() * logp_all).sum(-1)
        weights = batch["weights"][row, : length - 1]
        loss = loss - (weights * (logp + 0.1 * entropy)).sum() / len(LENGTHS)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return loss.item(), gradients, {row: x.detach() for row, x in logits.items()}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    cache: dict[tuple[str, bool], tuple[Path, tuple]] = {}

    def get(family: str, tied: bool):
        if (family, tied) not in cache:
            folder = tmp_path_factory.mktemp(f"{family}-{tied}")
            cache[family, tied] = folder, run_hf(save_tiny_hf(folder, family, tied=tied))
        return cache[family, tied]

    return get


# World size, layout, sequence parallelism.
LAYOUTS = {
    "tp1": (1, ParallelConfig(), False),
    "tp2": (2, ParallelConfig(tp=2), False),
    "tp2sp": (2, ParallelConfig(tp=2), True),
    "pp2": (2, ParallelConfig(pp=2), False),
    "dp2": (2, ParallelConfig(), False),
    "tp2pp2sp": (4, ParallelConfig(tp=2, pp=2), True),
}
FAMILIES = [(family, tied) for family in ("llama", "qwen2", "qwen3") for tied in (False, True)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("family", "tied"), FAMILIES, ids=lambda x: str(x))
def test_logits_and_gradients_equal_hf(ranks, model_folder, family, tied, layout):
    folder, (hf_loss, hf_gradients, hf_logits) = model_folder(family, tied)
    world_size, parallel, sequence_parallel = LAYOUTS[layout]
    results = ranks(world_size).run(run_megatron, str(folder), parallel, sequence_parallel)

    metrics, gradients, _ = results[0]
    logits = {row: x for _, _, found in results for row, x in found.items()}
    assert set(logits) == set(hf_logits)
    for row, reference in hf_logits.items():
        error = (logits[row] - reference).abs().max() / reference.abs().max()
        assert error <= TOLERANCE, f"row {row}: logits are off by {error:.2e}"
    assert metrics["loss"] == pytest.approx(hf_loss, rel=TOLERANCE)
    assert set(gradients) == set(hf_gradients)
    for name, reference in hf_gradients.items():
        error = (gradients[name] - reference).abs().max() / reference.abs().max()
        assert error <= TOLERANCE, f"{name}: gradient is off by {error:.2e}"
