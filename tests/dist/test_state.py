"""Training states: saved at one layout, loaded at another, and training goes on the same."""

import random

import pytest
import torch
from test_engine import make_batch, make_engine, nll, rows_of
from tiny_models import save_tiny_hf

from megarl import parallel as mesh_module
from megarl.actor.state import StateWriter, latest_state, load_pool, load_state
from megarl.config.schema import ParallelConfig
from megarl.errors import CheckpointError


def step(engine, index):
    batch = rows_of(make_batch(index), engine.mesh)
    metrics = engine.train_batch(batch, nll, keys=("mask",), num_tokens=int(batch["mask"].sum()))
    engine.step_lr_scheduler()
    return metrics


def save_after_two_steps(folder, parallel, root):
    engine = make_engine(folder, parallel)
    try:
        for i in range(2):
            step(engine, i)
        StateWriter(engine, root).save(2, {"cursor": 17}, [({"id": 1}, torch.ones(2))])
        return [step(engine, i) for i in (2, 3)]
    finally:
        mesh_module.destroy()


def save_while_training_goes_on(folder, parallel, root):
    engine = make_engine(folder, parallel)
    try:
        writer = StateWriter(engine, root, in_background=True)
        step(engine, 0)
        step(engine, 1)
        writer.save(2, {"cursor": 17}, [])
        is_there_at_once = (root / "latest").exists()
        history = [step(engine, i) for i in (2, 3)]
        writer.wait()
        return is_there_at_once, history
    finally:
        mesh_module.destroy()


def draw_after(folder, parallel, root, action):
    """Random numbers of this rank after saving, or after loading."""
    engine = make_engine(folder, parallel)
    try:
        if action == "save":
            torch.rand(3 + engine.mesh.rank)
            random.random()
            StateWriter(engine, root).save(1, {})
        else:
            load_state(engine, latest_state(root))
        return torch.rand(2).tolist(), random.random()
    finally:
        mesh_module.destroy()


def load_and_go_on(folder, parallel, root):
    engine = make_engine(folder, parallel)
    try:
        counters = load_state(engine, latest_state(root))
        return counters, engine.version, [step(engine, i) for i in (2, 3)]
    finally:
        mesh_module.destroy()


def name(parallel):
    sizes = {"tp": parallel.tp, "pp": parallel.pp, "vpp": parallel.vpp, "cp": parallel.cp}
    sizes |= {"ep": parallel.ep, "etp": parallel.etp}
    return "".join(f"{key}{n}" for key, n in sizes.items() if n not in (1, None)) or "dp2"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("state")
    save_tiny_hf(folder, "qwen3", tied=True)
    return folder


@pytest.fixture(scope="module")
def experts_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    save_tiny_hf(folder, "qwen3_moe", tied=False)
    return folder


@pytest.mark.parametrize(
    ("at_save", "at_load"),
    [
        (ParallelConfig(tp=2), ParallelConfig(tp=2)),
        (ParallelConfig(tp=2), ParallelConfig(pp=2)),
        (ParallelConfig(), ParallelConfig(tp=2)),
        (ParallelConfig(tp=2), ParallelConfig()),
        (ParallelConfig(cp=2), ParallelConfig(cp=2)),
        (ParallelConfig(pp=2, vpp=2), ParallelConfig(pp=2, vpp=2)),
        (ParallelConfig(pp=2, vpp=2), ParallelConfig(pp=2)),
        (ParallelConfig(pp=2), ParallelConfig(cp=2)),
    ],
    ids=name,
)
def test_training_goes_on_as_if_it_had_not_stopped(ranks, folder, tmp_path, at_save, at_load):
    compare(ranks, folder, tmp_path, at_save, at_load)


@pytest.mark.parametrize(
    ("at_save", "at_load"),
    [
        (ParallelConfig(ep=2), ParallelConfig(ep=2)),
        (ParallelConfig(ep=2), ParallelConfig(tp=2, ep=2, etp=1)),
        (ParallelConfig(), ParallelConfig(pp=2)),
        (ParallelConfig(ep=2), ParallelConfig(pp=2)),
        (ParallelConfig(tp=2), ParallelConfig(ep=2)),
    ],
    ids=name,
)
def test_training_with_experts_goes_on(ranks, experts_folder, tmp_path, at_save, at_load):
    compare(ranks, experts_folder, tmp_path, at_save, at_load)


def compare(ranks, folder, tmp_path, at_save, at_load):
    reference = ranks(2).run(save_after_two_steps, str(folder), at_save, tmp_path)[0]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_2"]
    assert load_pool(tmp_path / "step_2")[0][0] == {"id": 1}
    for counters, version, history in ranks(2).run(load_and_go_on, str(folder), at_load, tmp_path):
        assert counters == {"cursor": 17, "step": 2}
        assert version == 2
        for got, want in zip(history, reference, strict=True):
            if at_save == at_load:
                assert got == want  # the same bits
            else:
                assert got["loss"] == pytest.approx(want["loss"], rel=1e-4)
                assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-3)


@pytest.mark.parametrize("parallel", [ParallelConfig(tp=2), ParallelConfig()], ids=name)
def test_a_state_written_in_the_background_is_of_its_step(ranks, folder, tmp_path, parallel):
    results = ranks(2).run(save_while_training_goes_on, str(folder), parallel, tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_2"]
    again = ranks(2).run(load_and_go_on, str(folder), parallel, tmp_path)
    for (there_at_once, want), (_, version, got) in zip(results, again, strict=True):
        assert not there_at_once
        assert version == 2
        assert got == want


def test_random_numbers_go_on(ranks, folder, tmp_path):
    parallel = ParallelConfig(tp=2)
    want = ranks(2).run(draw_after, str(folder), parallel, tmp_path, "save")
    assert want[0] != want[1]
    assert ranks(2).run(draw_after, str(folder), parallel, tmp_path, "load") == want


def test_a_pointer_to_nothing_is_an_error(tmp_path):
    assert latest_state(tmp_path) is None
    (tmp_path / "latest").write_text("step_9")
    with pytest.raises(CheckpointError, match="step_9"):
        latest_state(tmp_path)
