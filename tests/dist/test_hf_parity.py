"""Logits and every gradient of the Megatron model equal HF's, for each family and layout.

Megatron sums in another order (and splits sums over ranks), so equality is to float32
rounding: 1e-5 of the largest logit or of the largest entry of each gradient.
Not covered: dtypes other than float32, and TransformerEngine's layers.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tiny_models import VOCAB, save_tiny_hf, split_experts

from megarl import parallel as mesh_module
from megarl.actor.engine import MegatronEngine
from megarl.config.schema import (
    MicroBatchSpec,
    MoEConfig,
    OptimizerConfig,
    ParallelConfig,
    RecomputeConfig,
    TrainEngineConfig,
)
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


def run_megatron(folder: str, parallel: ParallelConfig, options: dict):
    """On each rank; rank 0 returns loss, logprobs in row order, and HF-named gradients."""
    mesh = mesh_module.initialize(parallel, seed=1)
    try:
        config = TrainEngineConfig(
            path=folder,
            dtype="float32",
            parallel=parallel,
            optimizer=OptimizerConfig(lr=0.0, gradient_clipping=0.0),
            use_distributed_optimizer=False,
            **{"mb_spec": MicroBatchSpec(max_tokens_per_mb=40), **options},
        )
        engine = MegatronEngine(config, mesh)
        rows = list(range(mesh.place.dp, len(LENGTHS), mesh.dp))
        batch = make_batch(rows)
        logits = engine.logits(batch)
        metrics = engine.train_batch(
            batch, weighted_logp_loss, keys=("weights",), num_tokens=len(rows)
        )
        export = HFExport(engine.chunks, engine.spec, mesh)
        for chunk in engine.chunks:
            for parameter in chunk.parameters():
                # Without a gradient: the bias of a router, which is a buffer in transformers.
                value = parameter.main_grad if parameter.requires_grad else torch.nan
                parameter.data.copy_(torch.as_tensor(value))
        exported = {name: tensor.clone() for name, tensor in export}
        gradients = {name: x for name, x in exported.items() if not x.isnan().all()}
        return metrics, gradients, dict(zip(rows, logits, strict=True)) if logits else {}
    finally:
        mesh_module.destroy()


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
    gradients = split_experts({name: p.grad for name, p in model.named_parameters()})
    return loss.item(), gradients, {row: x.detach() for row, x in logits.items()}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    cache: dict[tuple, tuple[Path, tuple]] = {}

    def get(family: str, tied: bool, **options):
        key = (family, tied, str(options))
        if key not in cache:
            folder = tmp_path_factory.mktemp(f"{family}-{tied}")
            cache[key] = folder, run_hf(save_tiny_hf(folder, family, tied=tied, **options))
        return cache[key]

    return get


@dataclass(frozen=True)
class Layout:
    world_size: int
    parallel: ParallelConfig
    options: dict = field(default_factory=dict)
    """Of TrainEngineConfig."""


NO_SP = {"sequence_parallel": False}
LAYOUTS = {
    "tp1": Layout(1, ParallelConfig()),
    "tp2": Layout(2, ParallelConfig(tp=2), NO_SP),
    "tp2sp": Layout(2, ParallelConfig(tp=2)),
    "pp2": Layout(2, ParallelConfig(pp=2)),
    "dp2": Layout(2, ParallelConfig()),
    "cp2": Layout(2, ParallelConfig(cp=2)),
    "pp2vpp2": Layout(2, ParallelConfig(pp=2, vpp=2)),
    "tp2pp2sp": Layout(4, ParallelConfig(tp=2, pp=2)),
}
ALLGATHER = {"moe": MoEConfig(token_dispatcher_type="allgather")}
MOE_LAYOUTS = {
    "ep1": Layout(1, ParallelConfig()),
    "ep2": Layout(2, ParallelConfig(ep=2)),
    "ep2-allgather": Layout(2, ParallelConfig(ep=2), ALLGATHER),
    "tp2sp": Layout(2, ParallelConfig(tp=2)),
    "tp2ep2etp1sp": Layout(2, ParallelConfig(tp=2, ep=2, etp=1)),
    "ep2etp2": Layout(4, ParallelConfig(ep=2, etp=2)),
    "pp2": Layout(2, ParallelConfig(pp=2)),
    "pp2vpp2": Layout(2, ParallelConfig(pp=2, vpp=2)),
    "cp2": Layout(2, ParallelConfig(cp=2)),
    "cp2ep2": Layout(2, ParallelConfig(cp=2, ep=2)),
    "tp2ep2sp": Layout(4, ParallelConfig(tp=2, ep=2)),
    "tp2ep2sp-allgather": Layout(4, ParallelConfig(tp=2, ep=2), ALLGATHER),
    "pp2ep2": Layout(4, ParallelConfig(pp=2, ep=2)),
}
DEEPSEEK_LAYOUTS = {
    "plain": Layout(1, ParallelConfig()),
    "tp2sp": Layout(2, ParallelConfig(tp=2)),
    "tp2ep2etp1sp": Layout(2, ParallelConfig(tp=2, ep=2, etp=1)),
    "pp2": Layout(2, ParallelConfig(pp=2)),
    "cp2": Layout(2, ParallelConfig(cp=2)),
    "ep2-allgather": Layout(2, ParallelConfig(ep=2), ALLGATHER),
    "tp2pp2ep2etp1sp": Layout(4, ParallelConfig(tp=2, pp=2, ep=2, etp=1)),
}
NO_YARN = {"rope_parameters": {"rope_type": "default", "rope_theta": 50000.0}}
PLAIN_YARN = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 16,
    }
}
DEEPSEEK_OPTIONS = {
    "all queries' rows": {"q_lora_rank": None},
    "no groups": {"n_group": 1, "topk_group": 1},
    "no yarn": NO_YARN,
    "yarn without mscale": PLAIN_YARN,
    "five layers": {"num_hidden_layers": 5, "first_k_dense_replace": 2},
}
FULL, CORE = RecomputeConfig(granularity="full"), RecomputeConfig(granularity="selective")
MOE = RecomputeConfig(granularity="selective", modules=["core_attn", "moe"])
COMBINED = {
    "tp2cp2sp-full": ("qwen3", Layout(4, ParallelConfig(tp=2, cp=2), {"recompute": FULL})),
    "pp2vpp2cp2-core": ("llama", Layout(4, ParallelConfig(pp=2, vpp=2, cp=2), {"recompute": CORE})),
    "pp4": ("qwen2", Layout(4, ParallelConfig(pp=4))),
    "tp2pp2vpp2ep2etp1sp-moe": (
        "qwen3_moe",
        Layout(4, ParallelConfig(tp=2, pp=2, vpp=2, ep=2, etp=1), {"recompute": MOE}),
    ),
    "pp2vpp2ep2-full": (
        "qwen3_moe",
        Layout(4, ParallelConfig(pp=2, vpp=2, ep=2), {"recompute": FULL}),
    ),
    "tp2cp2ep4etp1sp-allgather": (
        "qwen3_moe",
        Layout(4, ParallelConfig(tp=2, cp=2, ep=4, etp=1), ALLGATHER),
    ),
    "tp2cp2sp-deepseek-full": (
        "deepseek_v3",
        Layout(4, ParallelConfig(tp=2, cp=2), {"recompute": FULL}),
    ),
    "pp2vpp2ep2-deepseek-core-moe": (
        "deepseek_v3",
        Layout(4, ParallelConfig(pp=2, vpp=2, ep=2), {"recompute": MOE}),
    ),
}
FAMILIES = [(family, tied) for family in ("llama", "qwen2", "qwen3") for tied in (False, True)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("family", "tied"), FAMILIES, ids=lambda x: str(x))
def test_logits_and_gradients_equal_hf(ranks, model_folder, family, tied, layout):
    compare(ranks, *model_folder(family, tied), LAYOUTS[layout])


@pytest.mark.parametrize("layout", MOE_LAYOUTS)
def test_experts_equal_hf(ranks, model_folder, layout):
    compare(ranks, *model_folder("qwen3_moe", False), MOE_LAYOUTS[layout])


@pytest.mark.parametrize("layout", DEEPSEEK_LAYOUTS)
def test_latent_attention_and_biased_routing_equal_hf(ranks, model_folder, layout):
    compare(ranks, *model_folder("deepseek_v3", False), DEEPSEEK_LAYOUTS[layout])


@pytest.mark.parametrize("layout", ["tp2sp", "pp2"])
@pytest.mark.parametrize("options", DEEPSEEK_OPTIONS)
def test_variants_of_deepseek_equal_hf(ranks, model_folder, options, layout):
    folder, results = model_folder("deepseek_v3", False, **DEEPSEEK_OPTIONS[options])
    compare(ranks, folder, results, DEEPSEEK_LAYOUTS[layout])


@pytest.mark.parametrize("layout", [ParallelConfig(pp=2), ParallelConfig(pp=2, vpp=2)], ids=str)
@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("qwen3_moe", False)])
def test_stages_of_unequal_depth(ranks, model_folder, family, tied, layout):
    compare(ranks, *model_folder(family, tied, num_hidden_layers=7), Layout(2, layout))


@pytest.mark.parametrize("num_micro_batches", [2, 4, 8])
@pytest.mark.parametrize("layout", ["pp2vpp2", "cp2"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_any_number_of_micro_batches(ranks, model_folder, family, layout, num_micro_batches):
    count = {"mb_spec": MicroBatchSpec(n_mbs=num_micro_batches)}
    compare(ranks, *model_folder(family, False), replace(LAYOUTS[layout], options=count))


@pytest.mark.parametrize("name", COMBINED)
def test_layouts_and_recompute_combine(ranks, model_folder, name):
    family, layout = COMBINED[name]
    compare(ranks, *model_folder(family, False), layout)


@pytest.mark.parametrize("tied", [False, True])
def test_some_layers_dense_and_one_softmax_over_all_experts(ranks, model_folder, tied):
    mixed = {"mlp_only_layers": [0, 2], "norm_topk_prob": False}
    layout = Layout(2, ParallelConfig(pp=2, vpp=2))
    compare(ranks, *model_folder("qwen3_moe", tied, **mixed), layout)


def compare(ranks, folder, hf_results, layout):
    hf_loss, hf_gradients, hf_logits = hf_results
    group = ranks(layout.world_size)
    results = group.run(run_megatron, str(folder), layout.parallel, layout.options)

    metrics, gradients, _ = results[0]
    logits = {row: x for _, _, found in results for row, x in found.items()}
    assert set(logits) == set(hf_logits)
    for row, reference in hf_logits.items():
        error = (logits[row] - reference).abs().max() / reference.abs().max()
        assert error <= TOLERANCE, f"row {row}: logits are off by {error:.2e}"
    assert metrics["loss"] == pytest.approx(hf_loss, rel=TOLERANCE)
    assert set(gradients) == set(hf_gradients)
    for name, reference in hf_gradients.items():
        error, largest = (gradients[name] - reference).abs().max(), reference.abs().max()
        # 0 of an expert that no token went to.
        assert error <= TOLERANCE * largest, f"{name}: {largest:.2e} is off by {error:.2e}"
