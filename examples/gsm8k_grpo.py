"""Asynchronous GRPO: episodes are generated while the trainer trains.

    megarl launch examples/gsm8k_grpo.py --config configs/quickstart.yaml total_train_steps=20

A dataset other than the config's: train_dataset.path=gsm8k/train.jsonl, and a model that can
read it: actor.path=... Every rank runs this file; rank 0 talks to the servers.
"""

import sys

from gsm8k_data import get_dataset, gsm8k_reward_fn
from torch.utils.data import DataLoader
from transformers import AutoTokenizer

from megarl.api import (
    AllocationMode,
    Evaluator,
    FinetuneSpec,
    GRPOConfig,
    MegatronPPOActor,
    RemoteVLLMEngine,
    RLVRWorkflow,
    Saver,
    StatsLogger,
    WeightUpdateMeta,
    load_expr_config,
    stats_tracker,
)


def make_dataloader(config, tokenizer, rank, world_size):
    """This data-parallel rank's share of the training data."""
    return DataLoader(
        get_dataset(config.train_dataset, tokenizer, rank, world_size),
        batch_size=config.train_dataset.batch_size // world_size,
        shuffle=config.train_dataset.shuffle,
        collate_fn=lambda x: x,
        drop_last=True,
    )


def main(args):
    config, _ = load_expr_config(args, GRPOConfig)
    tokenizer = AutoTokenizer.from_pretrained(config.tokenizer_path)
    allocation_mode = AllocationMode.from_str(config.allocation_mode)
    parallel_strategy = allocation_mode.train

    rollout = RemoteVLLMEngine(config.rollout)
    rollout.initialize(train_data_parallel_size=parallel_strategy.dp_size)

    actor = MegatronPPOActor(
        config=config.actor, seed=config.seed, max_response_tokens=config.gconfig.max_new_tokens
    )
    actor.create_process_group(parallel_strategy=parallel_strategy)
    train_dataloader = make_dataloader(
        config, tokenizer, actor.data_parallel_rank, actor.data_parallel_world_size
    )
    ft_spec = FinetuneSpec(
        total_train_epochs=config.total_train_epochs,
        dataset_size=len(train_dataloader) * config.train_dataset.batch_size,
        train_batch_size=config.train_dataset.batch_size,
        max_train_steps=config.total_train_steps,
    )
    actor.initialize(None, ft_spec)
    weight_update_meta = WeightUpdateMeta.from_megatron_xccl(allocation_mode)
    actor.connect_engine(rollout, weight_update_meta)
    ref = None
    if config.ref is not None:
        ref = MegatronPPOActor(config=config.ref)
        ref.create_process_group(parallel_strategy=parallel_strategy)
        ref.initialize(None, ft_spec)

    train(config, tokenizer, rollout, actor, ref, train_dataloader, ft_spec, weight_update_meta)

    rollout.destroy()
    if ref is not None:
        ref.destroy()
    actor.destroy()


def train(config, tokenizer, rollout, actor, ref, train_dataloader, ft_spec, weight_update_meta):
    workflow = RLVRWorkflow(
        reward_fn=gsm8k_reward_fn,
        gconfig=config.gconfig,
        tokenizer=tokenizer,
        enable_thinking=False,
    )
    eval_workflow = RLVRWorkflow(gsm8k_reward_fn, config.eval_gconfig, tokenizer)
    valid_dataset = get_dataset(config.valid_dataset, tokenizer) if config.valid_dataset else []

    def evaluate_fn():
        if rollout.is_head and valid_dataset:
            held_out = rollout.rollout_batch(valid_dataset, eval_workflow, is_eval=True)
            stats_tracker.scalar(**{"eval-rollout/reward": held_out["rewards"].mean()})

    saver, evaluator = Saver(config, ft_spec), Evaluator(config, ft_spec)
    stats_logger = StatsLogger(config, ft_spec)

    for global_step in range(ft_spec.total_train_steps):
        epoch, step = divmod(global_step, ft_spec.steps_per_epoch)

        with stats_tracker.record_timing("rollout"):
            batch = actor.prepare_batch(
                train_dataloader,
                granularity=config.gconfig.n_samples,
                workflow=workflow,
                should_accept_fn=lambda sample: True,
            )

        if config.actor.recompute_logprob or config.actor.use_decoupled_loss:
            with stats_tracker.record_timing("recompute_logp"):
                logp = actor.compute_logp(batch)
                batch["prox_logp"] = logp

        if ref is not None:
            with stats_tracker.record_timing("ref_logp"):
                batch["ref_logp"] = ref.compute_logp(batch)

        with stats_tracker.record_timing("compute_advantage"):
            actor.compute_advantages(batch)

        with stats_tracker.record_timing("train_step"):
            stats = actor.ppo_update(batch)
            actor.step_lr_scheduler()

        # No episode starts while weights move, nor while they are saved and evaluated.
        rollout.pause()
        with stats_tracker.record_timing("update_weights"):
            actor.update_weights(weight_update_meta)
            actor.set_version(global_step + 1)
            rollout.set_version(global_step + 1)
        with stats_tracker.record_timing("save"):
            saver.save(actor, epoch, step, global_step, tokenizer=tokenizer)
        with stats_tracker.record_timing("eval"):
            evaluator.evaluate(evaluate_fn, epoch, step, global_step)
        stats.update(stats_tracker.export(actor.cpu_group))
        stats.update({f"rollout/{name}": x for name, x in rollout.export_stats().items()})
        stats_logger.commit(epoch, step, global_step, stats)
        rollout.resume()

    stats_logger.close()


if __name__ == "__main__":
    main(sys.argv[1:])
