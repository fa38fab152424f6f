"""Ranks that stand by while rank 0 waits for its pool: longer than a collective may take, and
through pushes. The pool is a clock."""

import time
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from megarl import parallel
from megarl.actor import coordinator as coordinator_module
from megarl.actor import spmd, stand_by
from megarl.actor.coordinator import DistRolloutCoordinator, ScriptCoordinator
from megarl.actor.meta import WeightUpdateMeta
from megarl.config.schema import ParallelConfig, TrainEngineConfig

LIMIT_S = 8.0
"""Of a collective."""
WAIT_S = 12.0


class Pool:
    """What a coordinator needs of rank 0's engines: one that calls whoever stands by."""

    def __init__(self, is_head, wait_s):
        self.is_head, self.wait_s = is_head, wait_s
        self.config = SimpleNamespace(consumer_batch_size=4)
        self.engine, self.standby, self.pushed = self, None, []

    def wait(self):
        ends_s = time.monotonic() + self.wait_s
        self.standby.refit()
        while time.monotonic() < ends_s:
            self.standby.go_on()
            time.sleep(0.01)
        self.standby.refit()
        return {"rows": self.wait_s}  # stands for a batch

    def prepare_batch(self, *args, **options):
        return self.wait()

    rollout_batch = prepare_batch

    def evaluate(self):
        return self.wait()

    def export_stats(self):
        return {"accepted": 4.0}

    def on_pushed(self, version):
        self.pushed.append(version)


def ask(kind, wait_s, mesh, refit):
    """What this rank's coordinator gives for one wait of rank 0."""
    pool = Pool(mesh.rank == 0, wait_s)
    if kind in ("train", "evaluate"):
        head = SimpleNamespace(
            engine=pool,
            evaluate=pool.evaluate,
            export_stats=pool.export_stats,
            prompts=None,
            workflow=None,
            should_accept=None,
        )
        actor = SimpleNamespace(ppo_n_minibatches=1)
        config = SimpleNamespace(dynamic_bs=False, seed=1, actor=actor)
        of_run = DistRolloutCoordinator(config, head if pool.is_head else None, mesh, refit)
        return of_run.evaluate() if kind == "evaluate" else of_run.prepare_batch()[0]
    trainer = SimpleNamespace(mesh=mesh, config=actor_config(), seed=1, refit=refit)
    of_script = ScriptCoordinator(pool, trainer)
    if kind == "script rollout":
        return of_script.rollout_batch([1, 2, 3], workflow=object())
    # With a share of the data on each rank, or all of it on rank 0.
    batch_size = 2 if kind == "script shares" else 4
    return of_script.prepare_batch(Loader(batch_size), workflow=object())


class Loader(list):
    def __init__(self, batch_size):
        super().__init__()
        self.batch_size = batch_size


def actor_config():
    return TrainEngineConfig(path="m")


def wait(kind, wait_s):
    stand_by.WAIT_INTERVAL_S = 0.5
    coordinator_module.scatter_batch = lambda batch, mesh, **_: batch
    mesh = parallel.initialize(ParallelConfig(), seed=1, timeout_s=LIMIT_S)
    refits = []

    def refit():
        dist.barrier(group=mesh.cpu_group)
        refits.append(mesh.rank)

    try:
        return ask(kind, wait_s, mesh, refit), len(refits)
    finally:
        parallel.destroy()


@pytest.fixture
def restored(ranks):
    """The ranks' modules are those of all tests of the session."""
    yield
    ranks(2).run(restore)


def restore():
    from megarl.actor.scatter import scatter_batch

    stand_by.WAIT_INTERVAL_S = 60.0
    coordinator_module.scatter_batch = scatter_batch


KINDS = ["train", "evaluate", "script", "script rollout", "script shares"]


@pytest.mark.parametrize("kind", KINDS)
def test_servers_that_come_back_get_weights_from_all_ranks(ranks, restored, kind):
    assert ranks(2).run(wait, kind, 0.0) == [({"rows": 0.0}, 2), (None, 2)]


@pytest.mark.parametrize("kind", ["train", "script"])
def test_rank_0_may_wait_longer_than_a_collective(ranks, restored, kind):
    assert ranks(2).run(wait, kind, WAIT_S) == [({"rows": WAIT_S}, 2), (None, 2)]


# ---------------------------------------------------------------- what a script's refit brings


class Pusher:
    """Instead of the real one: what it was asked to push."""

    def __init__(self, mesh):
        self.mesh, self.pushed = mesh, []

    def push(self, weights, version):
        dist.barrier(group=self.mesh.cpu_group)
        self.pushed.append(version)

    def close(self):
        pass


def refit_in_script():
    real, coordinator_module.scatter_batch = (
        coordinator_module.scatter_batch,
        lambda batch, mesh, **_: batch,
    )
    real_make, pushers = spmd.make_pusher, []

    def make_pusher(update, servers, engine, *, folder):
        pushers.append(Pusher(engine.mesh))
        return pushers[-1]

    spmd.make_pusher = make_pusher
    actor = spmd.MegatronPPOActor(actor_config())
    actor.create_process_group()
    try:
        actor._engine = SimpleNamespace(mesh=actor.mesh, version=7, export=())
        pool = Pool(actor.mesh.rank == 0, 0.0)
        meta = WeightUpdateMeta.from_megatron_xccl()
        actor.connect_engine(pool, meta)
        actor.prepare_batch(Loader(4), workflow=object())
        actor.update_weights(meta)
        actor.prepare_batch(Loader(4), workflow=object())
        return pushers[0].pushed, pool.pushed
    finally:
        actor.destroy()
        spmd.make_pusher, coordinator_module.scatter_batch = real_make, real


def test_a_server_that_came_back_gets_the_weights_that_the_others_have(ranks):
    """On all ranks, under the version of the last push."""
    versions = [7, 7, 7, 8, 8, 8]
    assert ranks(2).run(refit_in_script) == [(versions, versions), (versions, [])]
