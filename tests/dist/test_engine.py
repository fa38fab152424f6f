"""MegatronEngine: optimizer steps, the finite check, export, forward.

The optimizer is compared with torch.optim.AdamW on the HF model: same loss, same schedule.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from tiny_models import VOCAB, save_tiny_hf, split_experts

from megarl import parallel as mesh_module
from megarl.actor.checkpoint import save_hf
from megarl.actor.engine import MegatronEngine
from megarl.config.schema import (
    MicroBatchSpec,
    OptimizerConfig,
    ParallelConfig,
    RecomputeConfig,
    TrainEngineConfig,
)
from megarl.errors import NonFiniteError

STEPS = 4
OPTIMIZER = OptimizerConfig(
    lr=1e-2,
    weight_decay=0.1,
    beta2=0.95,
    lr_scheduler_type="linear",
    min_lr_ratio=0.1,
    warmup_steps_proportion=0.5,
    gradient_clipping=0.5,
)
LENGTHS = [4, 19, 11, 8]


def make_batch(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCAB, (len(LENGTHS), max(LENGTHS)), generator=generator)
    steps = torch.arange(max(LENGTHS))
    valid = steps < torch.tensor(LENGTHS)[:, None]
    return {
        "input_ids": torch.where(valid, tokens, 0).int(),
        "attention_mask": valid,
        "mask": steps < torch.tensor(LENGTHS)[:, None] - 1,
    }


def rows_of(batch, mesh):
    return {key: x[mesh.place.dp :: mesh.dp] for key, x in batch.items()}


def nll(outputs):
    mask = outputs.columns["mask"]
    return -torch.where(mask, outputs.logp, 0.0).sum() / outputs.num_tokens, {}


def make_engine(folder, parallel, *, total_steps=STEPS, **options):
    mesh = mesh_module.initialize(parallel, seed=1)
    defaults = {
        "dtype": "float32",
        "mb_spec": MicroBatchSpec(max_tokens_per_mb=24),
        "optimizer": OPTIMIZER,
    }
    config = TrainEngineConfig(path=str(folder), parallel=parallel, **{**defaults, **options})
    return MegatronEngine(config, mesh, total_steps=total_steps)


def train(folder, parallel, use_distributed_optimizer):
    engine = make_engine(folder, parallel, use_distributed_optimizer=use_distributed_optimizer)
    try:
        history = []
        for step in range(STEPS):
            batch = rows_of(make_batch(step), engine.mesh)
            num_tokens = int(batch["mask"].sum())
            history.append(engine.train_batch(batch, nll, keys=("mask",), num_tokens=num_tokens))
            engine.step_lr_scheduler()
        return history, {name: tensor.clone() for name, tensor in engine.export}
    finally:
        mesh_module.destroy()


def train_hf(model):
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), eps=1e-8)
    history = []
    for step in range(STEPS):
        batch = make_batch(step)
        loss = 0.0
        for row, length in enumerate(LENGTHS):
            ids = batch["input_ids"][row : row + 1, :length].long()
            logits = model(input_ids=ids).logits[0, :-1]
            loss = loss + F.cross_entropy(logits, ids[0, 1:], reduction="sum")
        loss = loss / (sum(LENGTHS) - len(LENGTHS))
        adam.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.gradient_clipping)
        # Warm-up to lr over steps 1, 2; then linear from lr at step 2 to a tenth after the last.
        lr = 1e-2 * min(1.0, (step + 1) / 2)
        if step + 1 > 2:
            lr = 1e-3 + 9e-3 * (1 - (step + 1 - 2) / (STEPS + 1 - 2))
        for group in adam.param_groups:
            group["lr"] = lr
        adam.step()
        history.append({"loss": loss.item(), "grad_norm": norm.item(), "lr": lr})
    return history, split_experts(dict(model.named_parameters()))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("engine")
    return folder, train_hf(save_tiny_hf(folder, "qwen3", tied=True))


@pytest.fixture(scope="module")
def trained_experts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    return folder, train_hf(save_tiny_hf(folder, "qwen3_moe", tied=False))


LAYOUTS = {
    "plain": (1, ParallelConfig(), False),
    "tp2sp": (2, ParallelConfig(tp=2), True),
    "pp2": (2, ParallelConfig(pp=2), False),
    "dp2": (2, ParallelConfig(), True),
    "cp2": (2, ParallelConfig(cp=2), True),
    "pp2vpp2": (2, ParallelConfig(pp=2, vpp=2), True),
}
MOE_LAYOUTS = {
    "ep2": (2, ParallelConfig(ep=2)),
    "tp2ep2etp1": (2, ParallelConfig(tp=2, ep=2, etp=1)),
    "dp2": (2, ParallelConfig()),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_equal_torch_adamw(ranks, trained, layout):
    world_size, parallel, distributed = LAYOUTS[layout]
    compare(ranks, trained, world_size, parallel, distributed)


@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("layout", MOE_LAYOUTS)
def test_steps_with_experts_equal_torch_adamw(ranks, trained_experts, layout, distributed):
    compare(ranks, trained_experts, *MOE_LAYOUTS[layout], distributed)


def compare(ranks, trained, world_size, parallel, distributed):
    folder, (reference, reference_weights) = trained
    results = ranks(world_size).run(train, str(folder), parallel, distributed)
    for history, _ in results:
        for got, want in zip(history, reference, strict=True):
            # Rounding grows a little each step: Adam divides by the root of small squares.
            assert got["loss"] == pytest.approx(want["loss"], rel=1e-4)
            assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-3)
            assert got["lr"] == pytest.approx(want["lr"])
    weights = results[0][1]
    for name, want in reference_weights.items():
        # Adam's first steps move an entry by about lr whatever the gradient's size, so an
        # entry whose gradient is rounding noise may move either way: a share of lr.
        assert (weights[name] - want).abs().max() < 1e-2 * 0.2, name


def one_step(folder, parallel, options):
    engine = make_engine(folder, parallel, **options)
    try:
        batch = rows_of(make_batch(0), engine.mesh)
        num_tokens = int(batch["mask"].sum())
        metrics = engine.train_batch(batch, nll, keys=("mask",), num_tokens=num_tokens)
        return metrics, {tensor.dtype for _, tensor in engine.export}
    finally:
        mesh_module.destroy()


# What changes how a step is computed must not change what it computes.
OPTIONS = {
    "recompute-full": {"recompute": RecomputeConfig(granularity="full")},
    "recompute-selective": {"recompute": RecomputeConfig(granularity="selective")},
    "overlap-grad-reduce": {"overlap_grad_reduce": True},
    "one-micro-batch": {"mb_spec": MicroBatchSpec()},
    "karmarkar-karp": {"mb_spec": MicroBatchSpec(max_tokens_per_mb=24, packing="kk")},
    "sgd": {
        "optimizer": OptimizerConfig(type="sgd", lr=1e-2, gradient_clipping=0.5),
        "use_distributed_optimizer": False,
    },
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("parallel", [ParallelConfig(tp=2), ParallelConfig(pp=2)], ids=["tp", "pp"])
def test_options_change_no_number(ranks, trained, name, parallel):
    folder, (reference, _) = trained
    for metrics, _ in ranks(2).run(one_step, str(folder), parallel, OPTIONS[name]):
        assert metrics["loss"] == pytest.approx(reference[0]["loss"], rel=1e-5)
        assert metrics["grad_norm"] == pytest.approx(reference[0]["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("parallel", [ParallelConfig(tp=2), ParallelConfig(pp=2)], ids=["tp", "pp"])
def test_bfloat16_tracks_float32(ranks, trained, parallel):
    folder, (reference, _) = trained
    options = {"dtype": "bfloat16"}
    for rank, (metrics, dtypes) in enumerate(
        ranks(2).run(one_step, str(folder), parallel, options)
    ):
        # 8 bits of mantissa through 4 layers.
        assert metrics["loss"] == pytest.approx(reference[0]["loss"], rel=2e-2)
        assert metrics["grad_norm"] == pytest.approx(reference[0]["grad_norm"], rel=0.1)
        assert dtypes == ({torch.bfloat16} if rank == 0 else set())


def train_on_infinity(folder, parallel):
    engine = make_engine(folder, parallel)
    try:
        before = [p.detach().clone() for chunk in engine.chunks for p in chunk.parameters()]

        def explode(outputs):
            loss, _ = nll(outputs)
            return loss * torch.inf, {}

        batch = rows_of(make_batch(0), engine.mesh)
        message = ""
        try:
            engine.train_batch(batch, explode, keys=("mask",), num_tokens=10)
        except NonFiniteError as error:
            message = str(error)
        after = [p for chunk in engine.chunks for p in chunk.parameters()]
        return message, all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    finally:
        mesh_module.destroy()


@pytest.mark.parametrize("parallel", [ParallelConfig(tp=2), ParallelConfig(pp=2)], ids=str)
def test_a_non_finite_loss_stops_every_rank_before_the_optimizer(ranks, trained, parallel):
    for message, unchanged in ranks(2).run(train_on_infinity, str(trained[0]), parallel):
        assert "the optimizer did not step" in message
        assert unchanged


def export_and_forward(folder, parallel, out):
    engine = make_engine(folder, parallel)
    try:
        logp = engine.forward(rows_of(make_batch(0), engine.mesh))
        names = [name for name, _ in engine.export]
        assert len(names) == len(set(names)), "a tensor is exported twice"
        save_hf(engine, out, max_shard_bytes=20_000)
        return logp
    finally:
        mesh_module.destroy()


@pytest.mark.parametrize(
    ("family", "tied", "vocab", "parallel"),
    [
        ("qwen3", True, VOCAB, ParallelConfig(tp=2)),
        ("llama", False, VOCAB + 1, ParallelConfig(tp=2)),  # a padded vocabulary
        ("qwen2", True, VOCAB, ParallelConfig(pp=2)),
    ],
    ids=["qwen3-tp2", "llama-tp2-odd-vocab", "qwen2-pp2"],
)
def test_hf_in_hf_out_is_bitwise(ranks, tmp_path, family, tied, vocab, parallel):
    import transformers

    source, out = tmp_path / "in", tmp_path / "out"
    model = save_tiny_hf(source, family, tied=tied, vocab=vocab)
    logps = ranks(2).run(export_and_forward, str(source), parallel, out)

    again = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    exported = again.state_dict()
    for name, want in model.state_dict().items():
        assert torch.equal(exported[name], want), name
    assert not out.with_name("out.partial").exists()

    batch = make_batch(0)
    for row, length in enumerate(LENGTHS):
        ids = batch["input_ids"][row : row + 1, :length].long()
        logp = F.log_softmax(again(input_ids=ids).logits[0, :-1], dim=-1)
        want = logp.gather(1, ids[0, 1:, None])[:, 0]
        for got in logps:
            # float32 sums in another order over 4 layers.
            torch.testing.assert_close(got[row, : length - 1], want, rtol=0, atol=1e-5)
            assert not got[row, length - 1 :].any()


def describe(parallel):
    from megatron.core import parallel_state

    mesh = mesh_module.initialize(parallel, seed=1)
    try:
        place = mesh_module.coordinates(mesh.rank, mesh.world_size, parallel)
        assert mesh_module.rank_of(place, mesh.world_size, parallel) == mesh.rank
        megatron = (
            parallel_state.get_data_parallel_rank(),
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_tensor_model_parallel_rank(),
        )
        return (place.dp, place.pp, place.tp), megatron, mesh.replica_ranks
    finally:
        mesh_module.destroy()


@pytest.mark.parametrize(
    "parallel", [ParallelConfig(tp=2), ParallelConfig(pp=2), ParallelConfig(tp=2, pp=2)], ids=str
)
def test_coordinates_are_megatrons(ranks, parallel):
    for ours, megatron, replica in ranks(4).run(describe, parallel):
        assert ours == megatron
        assert len(replica) == math.prod((parallel.tp, parallel.pp))
