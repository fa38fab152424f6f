"""`benchmarks/bridge_plan.py`: its layouts fit, its rows add up, and what it writes is whole."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import tiny_config

from megarl.bridge.layout import hf_tensors
from megarl.config.schema import ParallelConfig

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import bridge_plan

    return bridge_plan


def config_of(model):
    return json.loads((FOLDER / "models" / f"{model}.json").read_text())


def test_every_size_has_a_layout_or_a_reason(benchmark):
    ours = {(s.model, s.gpus) for s in benchmark.SETUPS if not s.is_published}
    for model in benchmark.MODELS:
        count = sum(t.rows * t.columns for t in hf_tensors(config_of(model), 2).values())
        for gpus in benchmark.SIZES:
            assert bool(benchmark._too_large(count, gpus)) != ((model, gpus) in ours), (model, gpus)
    assert {gpus for _, gpus in ours} <= set(benchmark.SIZES)


def test_every_trainer_of_ours_fits(benchmark):
    room = benchmark.GPU_BYTES - benchmark.RESERVED_BYTES
    for setup in benchmark.SETUPS:
        if not setup.is_published:
            config = config_of(setup.model)
            assert config["num_hidden_layers"] >= setup.parallel.pp
            assert setup.parallel.dp(setup.trainer_ranks) >= 1  # ConfigError if it does not divide
            states = benchmark.trainer_state_bytes(config, setup.parallel, setup.trainer_ranks)
            assert states <= room, setup


@pytest.mark.parametrize(
    ("parallel", "world", "share"),
    [
        (ParallelConfig(), 1, 18.0),
        (ParallelConfig(), 2, 12.0),  # the optimizer's 12 bytes on two copies
        (ParallelConfig(cp=2), 4, 9.0),
    ],
)
def test_states_of_whole_copies(benchmark, parallel, world, share):
    config = tiny_config("llama", tied=False).to_dict()
    count = sum(t.rows * t.columns for t in hf_tensors(config, 2).values())
    assert benchmark.trainer_state_bytes(config, parallel, world) == count * share


def test_states_of_divided_experts(benchmark):
    """Two ranks with half the experts each: 18 bytes of those, 12 of all else."""
    config = tiny_config("qwen3_moe", tied=False).to_dict()
    tensors = {n: t.rows * t.columns for n, t in hf_tensors(config, 2).items()}
    experts = sum(size for name, size in tensors.items() if ".experts." in name)
    rest = sum(tensors.values()) - experts
    parallel = ParallelConfig(ep=2, etp=1)
    want = 18 * experts / 2 + 12 * rest
    assert benchmark.trainer_state_bytes(config, parallel, 2) == want


def test_rows_add_up(benchmark):
    small, published = benchmark.rows(["qwen3_30b_a3b"], [32])
    for row in (small, published):
        total = 2 * row["parameters"] / 1e9
        assert round(total, 1) == 61.1
        # Each byte leaves the trainer once, and a worker gets what it needs, once.
        assert row["out_of_trainer_mean_gb"] * 16 == pytest.approx(total)
        assert row["into_worker_mean_gb"] == row["optimum_into_worker_gb"] > 0
        assert row["estimate_of_broadcast_s"] == pytest.approx(total / 50)
        assert row["optimum_s"] <= row["estimate_s"] < row["estimate_of_broadcast_s"]
        assert row["fits"]
        assert [p["seconds"] for p in row["published"]][:1] == ["0.74-1.00"]
    assert published["is_published_layout"]
    assert not small["is_published_layout"]
    (left_out,) = benchmark.rows(["kimi_k2"], [32])
    assert "18,475 GB of the trainer's states" in left_out["left_out"]


def test_a_layout_that_does_not_fit_is_left_out(benchmark):
    setup = benchmark.Setup(
        "qwen3_30b_a3b",
        2,
        ParallelConfig(ep=2, etp=1),
        benchmark.RolloutParallelConfig(tp=2),
    )
    row = benchmark.planned(setup, config_of("qwen3_30b_a3b"))
    assert row["left_out"] == "a rank's states or weights are over 64 GB"
    assert row["trainer_state_gb"] > 64 > row["server_weights_gb"] > 30
    assert "estimate_s" not in row


def test_the_file_has_its_circumstances(tmp_path):
    path = tmp_path / "plan.json"
    result = subprocess.run(
        [
            *(sys.executable, "bridge_plan.py", "--json", str(path)),
            *("--model", "qwen3_30b_a3b", "--gpus", "32"),
        ],
        capture_output=True,
        text=True,
        cwd=FOLDER,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(path.read_text())
    for key in ("commit", "torch", "numpy", "cpu", "load_before", "date"):
        assert found["environment"][key], key
    assert found["meaning"].startswith("On paper: no GPU")
    assert len(found["rows"]) == 2
    assert "on paper; the last column was measured" in result.stdout
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]
