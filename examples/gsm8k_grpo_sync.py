"""Synchronous GRPO: generate a batch under the present weights, train on it, and again.

    megarl launch examples/gsm8k_grpo_sync.py --config configs/quickstart.yaml \\
        total_train_steps=20
"""

import sys
from itertools import cycle

from gsm8k_data import get_dataset, gsm8k_reward_fn
from torch.utils.data import DataLoader
from transformers import AutoTokenizer

from megarl.api import (
    AllocationMode,
    FinetuneSpec,
    GRPOConfig,
    MegatronPPOActor,
    RemoteVLLMEngine,
    RLVRWorkflow,
    StatsLogger,
    WeightUpdateMeta,
    load_expr_config,
    stats_tracker,
)


def main(args):
    config, _ = load_expr_config(args, GRPOConfig)
    tokenizer = AutoTokenizer.from_pretrained(config.tokenizer_path)
    allocation_mode = AllocationMode.from_str(config.allocation_mode)

    rollout = RemoteVLLMEngine(config.rollout)
    rollout.initialize(train_data_parallel_size=allocation_mode.train.dp_size)

    # The whole batch on every rank: rank 0's is the one that is generated.
    dataloader = DataLoader(
        get_dataset(config.train_dataset, tokenizer),
        batch_size=config.train_dataset.batch_size,
        shuffle=config.train_dataset.shuffle,
        collate_fn=lambda x: x,
        drop_last=True,
    )
    data_generator = cycle(dataloader)
    ft_spec = FinetuneSpec(
        total_train_epochs=config.total_train_epochs,
        dataset_size=len(dataloader) * config.train_dataset.batch_size,
        train_batch_size=config.train_dataset.batch_size,
        max_train_steps=config.total_train_steps,
    )

    actor = MegatronPPOActor(
        config=config.actor, seed=config.seed, max_response_tokens=config.gconfig.max_new_tokens
    )
    actor.create_process_group(parallel_strategy=allocation_mode.train)
    actor.initialize(None, ft_spec)
    # Through a folder, where no process group reaches the servers.
    weight_update_meta = WeightUpdateMeta.from_disk(config.saver)
    actor.connect_engine(rollout, weight_update_meta)

    workflow = RLVRWorkflow(gsm8k_reward_fn, config.gconfig, tokenizer)
    stats_logger = StatsLogger(config, ft_spec)
    for global_step in range(ft_spec.total_train_steps):
        epoch, step = divmod(global_step, ft_spec.steps_per_epoch)
        with stats_tracker.record_timing("rollout"):
            batch = actor.rollout_batch(
                next(data_generator), granularity=config.gconfig.n_samples, workflow=workflow
            )
        with stats_tracker.record_timing("train_step"):
            batch["prox_logp"] = actor.compute_logp(batch)
            actor.compute_advantages(batch)
            stats = actor.ppo_update(batch)
            actor.step_lr_scheduler()
        with stats_tracker.record_timing("update_weights"):
            rollout.pause()
            actor.update_weights(weight_update_meta)
            actor.set_version(global_step + 1)
            rollout.set_version(global_step + 1)
            rollout.resume()
        stats.update(stats_tracker.export(actor.cpu_group))
        stats_logger.commit(epoch, step, global_step, stats)

    stats_logger.close()
    rollout.destroy()
    actor.destroy()


if __name__ == "__main__":
    main(sys.argv[1:])
