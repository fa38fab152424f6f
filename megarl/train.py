"""The loop of a GRPO or PPO run: one process a rank, all of them run this file.

    prompts -> pool -> episodes -> batch -> replicas -> logprobs -> advantages -> update
       ^                                                                            |
       +---------------------- servers <- weights of version v + 1 <----------------+

The pool keeps generating while the trainer trains; it stops admitting episodes only while
weights move. `rollout.max_head_offpolicyness` bounds how old an episode may be.
"""

import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from megarl import parallel, platform
from megarl.actor.checkpoint import Checkpointer, Frequency
from megarl.actor.coordinator import DistRolloutCoordinator, open_rollout, total_steps
from megarl.actor.engine import MegatronEngine
from megarl.actor.policy import PPOActor
from megarl.actor.recover import Recovery
from megarl.actor.weight_push import make_pusher, push_weights
from megarl.config.load import load
from megarl.config.run import BaseExperimentConfig, GRPOConfig
from megarl.parallel import Mesh
from megarl.rollout.membership import named_servers
from megarl.stats.report import RunReporter
from megarl.stats.tracker import StatsTracker

logger = logging.getLogger("megarl")

COLLECTIVE_LIMIT_S = 1800.0
_BEYOND_SERVERS_S = 300.0


def train(config: GRPOConfig, run_dir: Path, addresses: list[str], mesh: Mesh) -> None:
    """Run every step of `config`. Collective over the world; rank 0 reports."""
    stats = StatsTracker()
    with (
        open_rollout(config, addresses, run_dir, mesh) as head,
        RunReporter(config, run_dir, enabled=mesh.rank == 0) as report,
    ):
        steps = total_steps(config, head, mesh)
        steps_per_epoch = head.prompts.steps_per_epoch if head else 1
        engine = MegatronEngine(config.actor, mesh, total_steps=steps)
        longest = config.gconfig.max_new_tokens
        actor = PPOActor(config.actor, engine, max_response_tokens=longest, stats=stats)
        ref = MegatronEngine(config.ref, mesh) if config.ref else None
        checkpoints = Checkpointer(config, run_dir, engine, steps_per_epoch)
        recovery = Recovery(config, run_dir, engine, steps_per_epoch)
        evaluations = Frequency(config.evaluator, steps_per_epoch)
        servers, weights_dir = head.engine if head else None, run_dir / "weights"
        pusher = make_pusher(config.weight_update, servers, engine, folder=weights_dir)

        def refit() -> None:
            push_weights(engine, head, pusher, version=engine.version)

        coordinator = DistRolloutCoordinator(config, head, mesh, refit)

        prompts = head.prompts if head else None
        first = recovery.restore(prompts, head)
        coordinator.num_batches = first
        report.start(steps, after=first)
        push_weights(engine, head, pusher, version=first)
        evaluates = config.valid_dataset is not None

        def evaluate(step: int) -> None:
            with stats.record_timing("eval"):  # in the row of the next step
                result = coordinator.evaluate()
            report.evaluation(step, result)

        if evaluates and config.evaluator.at_start and first == 0:
            evaluate(0)

        for step in range(first + 1, steps + 1):
            with stats.record_timing("rollout"):
                batch, pool_stats = coordinator.prepare_batch()
            if ref is not None:
                with stats.record_timing("ref_logp"):
                    batch["ref_logp"] = ref.forward(batch)
            if actor.needs_prox_logp:
                with stats.record_timing("recompute_logp"):
                    batch["prox_logp"] = actor.compute_logp(batch)
            with stats.record_timing("compute_advantage"):
                stats.scalar(**actor.compute_advantages(batch))
            with stats.record_timing("train_step"):
                stats.scalar(**actor.ppo_update(batch))
                engine.step_lr_scheduler()
            with stats.record_timing("update_weights"):
                stats.scalar(**push_weights(engine, head, pusher, version=step))
            with stats.record_timing("save"):
                checkpoints.after_step(step, last=step == steps)
            report.step(step, stats.export(mesh.cpu_group), pool_stats)
            is_last_eval = step == steps and config.evaluator.at_end
            if evaluates and coordinator.agreed(evaluations.due(step) or is_last_eval):
                evaluate(step)
            # Last: a run that goes on after this step finds all that the step reported.
            with stats.record_timing("checkpoint_for_recover"):
                recovery.after_step(step, prompts, head)
        recovery.finish()
        pusher.close()


def collective_limit_s(config: BaseExperimentConfig) -> float:
    """How long a rank waits for the others in a collective."""
    if not isinstance(config, GRPOConfig):
        return COLLECTIVE_LIMIT_S
    # Rank 0 waits for servers, at the start and in a push, while the others wait for it.
    return max(COLLECTIVE_LIMIT_S, config.rollout.setup_timeout_s + _BEYOND_SERVERS_S)


@contextmanager
def trainer_rank(
    config: BaseExperimentConfig, parallel_config: parallel.ParallelConfig
) -> Iterator[Mesh]:
    """Join the world described by torchrun's environment variables; leave it at the end."""
    logging.basicConfig(
        level=logging.INFO if os.environ["RANK"] == "0" else logging.WARNING,
        format="%(asctime)s %(name)s: %(message)s",
        datefmt="%H:%M:%S",
    )
    if platform.is_cuda():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    platform.setup()
    limit_s = collective_limit_s(config)
    dist.init_process_group(platform.collective_backend(), timeout=timedelta(seconds=limit_s))
    mesh = parallel.initialize(parallel_config, seed=config.seed, timeout_s=limit_s)
    yield mesh
    # Only after success: a rank that failed must not wait here for the others.
    parallel.destroy()
    dist.destroy_process_group()


def main(arguments: list[str]) -> None:
    """`python -m megarl.train RUN_DIR`, started once a rank by a launcher."""
    run_dir = Path(arguments[0])
    config = load(run_dir / "config.yaml", [])
    addresses = named_servers(config.rollout.servers, config.rollout.setup_timeout_s)
    start = time.monotonic()
    with trainer_rank(config, config.actor.parallel) as mesh:
        train(config, run_dir, addresses, mesh)
    logger.debug("trained in %.1f s", time.monotonic() - start)


if __name__ == "__main__":
    main(sys.argv[1:])
