"""MegatronPPOActor and its coordinator on several ranks, with episodes that are made up.

Real servers: tests/e2e/test_examples.py.
"""

from types import SimpleNamespace

import pytest
import torch
from tiny_models import VOCAB, save_tiny_hf

from megarl.actor.coordinator import ScriptCoordinator
from megarl.actor.meta import FinetuneSpec, ParallelStrategy, SaveLoadMeta
from megarl.actor.spmd import MegatronPPOActor
from megarl.config.schema import (
    MicroBatchSpec,
    OptimizerConfig,
    ParallelConfig,
    PPOActorConfig,
    TrainEngineConfig,
)

SPEC = FinetuneSpec(total_train_epochs=1, dataset_size=32, train_batch_size=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    save_tiny_hf(path, "qwen3", tied=False)
    return path


def make_actor(folder, *, dtype="float32", **options):
    config = PPOActorConfig(
        path=str(folder),
        dtype=dtype,
        mb_spec=MicroBatchSpec(max_tokens_per_mb=64),
        optimizer=OptimizerConfig(lr=1e-2),
        **options,
    )
    actor = MegatronPPOActor(config, seed=3)
    actor.create_process_group()
    actor.initialize(None, SPEC)
    return actor


class Rollout:
    """Episodes whose tokens are the row's number; pulls rows like the real pool."""

    def __init__(self, rank, pulls=1):
        self.is_head, self.pulls = rank == 0, pulls
        self.config = SimpleNamespace(consumer_batch_size=4)
        self.engine = SimpleNamespace(standby=None)
        self.rows = []

    def prepare_batch(self, stream, *, dynamic_bs, fewest, **asked):
        assert self.is_head
        self.asked = asked
        stream = stream if hasattr(stream, "__next__") else iter(stream)
        # What was pulled before the stream ran dry is kept, as the pool keeps what is queued.
        while len(self.rows) < 4 * self.pulls:
            self.rows += next(stream)
        taken, self.rows = self.rows[:4], self.rows[4:]
        return make_batch(taken[:fewest] if dynamic_bs else taken)

    def rollout_batch(self, data, workflow, should_accept_fn, **asked):
        assert self.is_head
        return make_batch(data)


def make_batch(rows):
    """Two samples an episode."""
    n, width = 2 * len(rows), 8
    ids = torch.tensor([row for row in rows for _ in range(2)])
    tokens = (ids[:, None] * 7 + torch.arange(width)) % VOCAB
    lengths = 4 + torch.arange(n) % 4
    valid = torch.arange(width) < lengths[:, None]
    generated = valid & (torch.arange(width) >= 2)
    return {
        "input_ids": torch.where(valid, tokens, 0).int(),
        "attention_mask": valid,
        "loss_mask": generated.int(),
        "logprobs": torch.where(generated, -1.0, 0.0),
        "versions": torch.where(generated, 0, -1).int(),
        "rewards": torch.arange(n).float() % 3,
        "group_ids": torch.arange(n) // 2,
        "no_eos": torch.zeros(n, dtype=torch.bool),
        "row": ids,
    }


class Loader(list):
    def __init__(self, rows, batch_size):
        super().__init__(rows[i : i + batch_size] for i in range(0, len(rows), batch_size))
        self.batch_size = batch_size


def coordinate(folder, shares, pulls):
    actor = make_actor(folder)
    try:
        rollout = Rollout(actor.mesh.rank, pulls)
        coordinator = ScriptCoordinator(rollout, actor)
        rank, world = actor.data_parallel_rank, actor.data_parallel_world_size
        rows = list(range(16))
        loader = Loader(rows[rank::world], 4 // world) if shares else Loader(rows, 4)
        seen = []
        for _ in range(2):
            source = loader if shares or rank else iter_once(loader, rollout)
            seen.append(coordinator.prepare_batch(source, granularity=2, workflow=object()))
        data = list(range(20 + 2 * rank, 22 + 2 * rank)) if shares else [20, 21, 22]
        seen.append(coordinator.rollout_batch(data, granularity=2, workflow=object()))
        return rank, [batch["row"].tolist() for batch in seen]
    finally:
        actor.destroy()


def iter_once(loader, rollout):
    """One iterator for all calls, as RemoteVLLMEngine keeps it."""
    if not hasattr(rollout, "stream"):
        rollout.stream = iter(loader)

    class Stream:
        batch_size = loader.batch_size

        def __next__(self):
            return next(rollout.stream)

    return Stream()


@pytest.mark.parametrize("pulls", [1, 3])
def test_shares_of_all_replicas_reach_the_pool_whenever_it_runs_out(ranks, folder, pulls):
    results = dict(ranks(2).run(coordinate, folder, True, pulls))
    for step, want in enumerate([[0, 2, 1, 3], [4, 6, 5, 7], [20, 21, 22, 23]]):
        rows = results[0][step] + results[1][step]
        assert sorted(rows) == sorted(2 * want)
        # A group of two rows stays on one replica.
        assert all(part[::2] == part[1::2] for part in (results[0][step], results[1][step]))


def test_a_whole_batch_is_that_of_rank_0(ranks, folder):
    results = dict(ranks(2).run(coordinate, folder, False, 1))
    for step, want in enumerate([[0, 1, 2, 3], [4, 5, 6, 7], [20, 21, 22]]):
        assert sorted(results[0][step] + results[1][step]) == sorted(2 * want)


def take_dynamic_batch(folder):
    actor = make_actor(folder)
    try:
        rollout = Rollout(actor.mesh.rank)
        asked = {"workflow": object, "workflow_kwargs": {"a": 1}, "group_size": 2}
        batch = ScriptCoordinator(rollout, actor).prepare_batch(
            Loader(list(range(8)), 4), granularity=2, dynamic_bs=True, **asked
        )
        if rollout.is_head:
            assert rollout.asked == {**asked, "should_accept_fn": None}
        return batch["row"].tolist()
    finally:
        actor.destroy()


def test_every_replica_has_a_group_of_a_dynamic_batch(ranks, folder):
    results = ranks(2).run(take_dynamic_batch, folder)
    assert sorted(results) == [[0, 0], [1, 1]]


def train_save_load(folder, out, dtype):
    actor = make_actor(folder, parallel=ParallelConfig(tp=2), dtype=dtype)
    reference = MegatronPPOActor(TrainEngineConfig(path=str(folder), dtype=dtype))
    other = None
    try:
        with pytest.raises(ValueError, match="share one layout"):
            reference.create_process_group()
        strategy = ParallelStrategy(tp_size=2)
        reference.create_process_group(strategy)
        reference.initialize(None, SPEC)
        with pytest.raises(RuntimeError, match="has compute_logp only"):
            reference.ppo_update({})
        coordinator = ScriptCoordinator(Rollout(actor.mesh.rank), actor)
        batch = coordinator.rollout_batch([1, 2, 3, 4], workflow=object())
        before = actor.compute_logp(batch)
        assert torch.equal(before, reference.compute_logp(batch))
        means = actor.compute_advantages(batch)
        stats = actor.ppo_update(batch)
        actor.set_version(1)
        trained = actor.compute_logp(batch)
        actor.save(SaveLoadMeta(out / "state", weight_format="dcp", with_optim=True))
        actor.save(SaveLoadMeta(out / "hf"))
        other = make_actor(folder, parallel=ParallelConfig(tp=2), dtype=dtype)
        other.load(SaveLoadMeta(out / "state", weight_format="dcp", with_optim=True))
        from_state = other.get_version(), other.compute_logp(batch)
        other.destroy()
        # From HF: the optimizer's own copy of the weights must have followed.
        other = make_actor(folder, parallel=ParallelConfig(tp=2), dtype=dtype)
        other.load(SaveLoadMeta(out / "hf"))
        from_hf = other.compute_logp(batch)
        for group in other.engine.optimizer.param_groups:
            group["lr"] = 0.0
        other.compute_advantages(batch)
        other.ppo_update(batch)
        return before, trained, from_state, from_hf, other.compute_logp(batch), means, stats
    finally:
        for model in (actor, reference, other):
            if model is not None:
                model.destroy()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_and_its_weights_on_disk(ranks, folder, tmp_path, dtype):
    results = ranks(2).run(train_save_load, folder, tmp_path, dtype)
    for before, trained, (version, from_state), from_hf, after_no_step, means, stats in results:
        assert not torch.allclose(before, trained, atol=1e-3)
        assert version == 1
        assert torch.equal(from_state, trained)
        torch.testing.assert_close(from_hf, trained, rtol=0, atol=1e-6)
        torch.testing.assert_close(after_no_step, from_hf, rtol=0, atol=1e-6)
        assert means["reward"] == stats["reward"] == pytest.approx(7 / 8)
        assert stats["grad_norm"] > 0
    assert results[0][-1] == results[1][-1]


def wrong_layout(folder):
    actor = MegatronPPOActor(TrainEngineConfig(path=str(folder)))
    with pytest.raises(ValueError, match="is not a layout of 2 ranks"):
        actor.create_process_group(ParallelStrategy(tp_size=4))


def test_a_layout_of_another_world_is_named(ranks, folder):
    ranks(2).run(wrong_layout, folder)
