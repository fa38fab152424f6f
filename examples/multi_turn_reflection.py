"""A multi-turn agent that reflects on its wrong answers, trained end to end with GRPO.

    megarl launch examples/multi_turn_reflection.py --config configs/quickstart.yaml \\
        total_train_steps=20

The workflows are classes of this file: a training run needs no more than `arun_episode`. What
ships as megarl.api.MultiTurnWorkflow does the same, with versions of each token.
"""

import asyncio
import functools
import sys
import uuid
from itertools import cycle

import torch
from gsm8k_data import get_dataset, gsm8k_reward_fn
from torch.utils.data import DataLoader
from transformers import AutoTokenizer

from megarl.api import (
    AllocationMode,
    FinetuneSpec,
    GRPOConfig,
    MegatronPPOActor,
    ModelRequest,
    RemoteVLLMEngine,
    StatsLogger,
    WeightUpdateMeta,
    concat_padded_tensors,
    load_expr_config,
)

REFLECTION = (
    "\nYour answer is either wrong or not parsable to the reward function. "
    "Please try to answer it again."
)


def make_reflection_tokens(tokenizer):
    """Tokenised once: what was sampled is never decoded and encoded again."""
    if not tokenizer.chat_template:
        # The quickstart's tokenizer knows digits and operators only: `= ` asks it to go on.
        return tokenizer.encode("= ", add_special_tokens=False)
    messages = [{"role": "assistant", "content": "some random message."}]
    s1 = tokenizer.apply_chat_template(messages, tokenize=False)
    # An answer ends with its end token: what a template writes behind it was not sampled.
    end = s1.rindex(tokenizer.eos_token) + len(tokenizer.eos_token)
    messages += [{"role": "user", "content": REFLECTION}]
    s2 = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(s2[end:], add_special_tokens=False)


def make_input_ids(tokenizer, data):
    if "messages" not in data:
        return tokenizer.encode(data["prompt"], add_special_tokens=False)
    text = tokenizer.apply_chat_template(
        data["messages"], tokenize=False, add_generation_prompt=True
    )
    return tokenizer.encode(text, add_special_tokens=False)


class ReflectionWorkflow:
    def __init__(self, gconfig, tokenizer, max_turns, turn_discount):
        self.gconfig = gconfig
        self.tokenizer = tokenizer
        self.max_turns = max_turns
        self.turn_discount = turn_discount
        self.reflection_tokens = make_reflection_tokens(tokenizer)

    async def gen(self, engine, input_ids, rid, answer):
        req = ModelRequest(rid=rid, input_ids=input_ids, gconfig=self.gconfig)
        resp = await engine.agenerate(req)
        completions_str = self.tokenizer.decode(resp.output_tokens, skip_special_tokens=True)
        loop = asyncio.get_event_loop()
        reward = await loop.run_in_executor(
            None,
            functools.partial(
                gsm8k_reward_fn, "", completions_str, input_ids, resp.output_tokens, answer
            ),
        )
        return resp, reward

    async def arun_episode(self, engine, data):
        # Convert the prompt into input_ids
        input_ids = make_input_ids(self.tokenizer, data)
        assert self.gconfig.n_samples == 1
        t = reward = 0
        discount = 1
        rid = uuid.uuid4().hex
        seq = []
        logprobs = []
        loss_mask = []
        while t < self.max_turns and reward == 0:
            resp, reward = await self.gen(engine, input_ids, rid, data["answer"])
            input_len = resp.input_len - len(seq)
            seq += resp.input_tokens[-input_len:] + resp.output_tokens
            logprobs += [0.0] * input_len + resp.output_logprobs
            loss_mask += [0] * input_len + [1] * resp.output_len
            t += 1
            if reward == 0:
                input_ids += resp.output_tokens
                if input_ids[-1] != self.tokenizer.eos_token_id:
                    input_ids += [self.tokenizer.eos_token_id]
                input_ids += self.reflection_tokens
                discount *= self.turn_discount

        res = {
            "input_ids": torch.tensor(seq),
            "logprobs": torch.tensor(logprobs),
            "loss_mask": torch.tensor(loss_mask),
            "rewards": torch.tensor(float(reward * discount)),
            "attention_mask": torch.ones(len(seq), dtype=torch.bool),
        }
        res = {k: v.unsqueeze(0) for k, v in res.items()}
        return res


class GroupedReflectionWorkflow:
    """A group of conversations about one question, at the same time."""

    def __init__(self, gconfig, tokenizer, max_turns, turn_discount):
        self.workflows = [
            ReflectionWorkflow(gconfig.new(n_samples=1), tokenizer, max_turns, turn_discount)
            for _ in range(gconfig.n_samples)
        ]

    async def arun_episode(self, engine, data):
        tasks = [workflow.arun_episode(engine, data) for workflow in self.workflows]
        results = await asyncio.gather(*tasks)
        return concat_padded_tensors(results)


def main(args):
    config, _ = load_expr_config(args, GRPOConfig)
    tokenizer = AutoTokenizer.from_pretrained(config.tokenizer_path)
    parallel_strategy = AllocationMode.from_str(config.allocation_mode).train
    dataloader = DataLoader(
        get_dataset(config.train_dataset, tokenizer),
        batch_size=config.train_dataset.batch_size,
        shuffle=True,
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
    workflow = GroupedReflectionWorkflow(config.gconfig, tokenizer, max_turns=3, turn_discount=0.9)

    # ---- try the workflow: the servers have the weights of actor.path
    rollout = RemoteVLLMEngine(config.rollout)
    rollout.initialize(train_data_parallel_size=parallel_strategy.dp_size)
    if rollout.is_head:
        res = rollout.rollout_batch(next(data_generator)[:2], workflow=workflow)
        print(f"untrained: rewards {res['rewards'].tolist()}", flush=True)

    # ---- train with it
    actor = MegatronPPOActor(config=config.actor, seed=config.seed)
    actor.create_process_group(parallel_strategy=parallel_strategy)
    actor.initialize(None, ft_spec)
    weight_update_meta = WeightUpdateMeta.from_megatron_xccl()
    actor.connect_engine(rollout, weight_update_meta)
    stats_logger = StatsLogger(config, ft_spec)
    for global_step in range(ft_spec.total_train_steps):
        epoch, step = divmod(global_step, ft_spec.steps_per_epoch)
        # Asynchronous. `rollout_batch(next(data_generator), ...)` is the synchronous form.
        batch = actor.prepare_batch(
            dataloader,
            granularity=config.gconfig.n_samples,
            workflow=workflow,
            should_accept_fn=lambda sample: True,
        )

        logp = actor.compute_logp(batch)
        batch["prox_logp"] = logp

        actor.compute_advantages(batch)

        stats = actor.ppo_update(batch)
        actor.step_lr_scheduler()

        rollout.pause()
        actor.update_weights(weight_update_meta)
        rollout.resume()

        actor.set_version(global_step + 1)
        rollout.set_version(global_step + 1)
        stats_logger.commit(epoch, step, global_step, stats)

    stats_logger.close()
    rollout.destroy()
    actor.destroy()


if __name__ == "__main__":
    main(sys.argv[1:])
