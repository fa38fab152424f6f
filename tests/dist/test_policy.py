"""A whole GRPO step, from rank 0's batch to the update: the same numbers under every layout."""

import pytest
import torch
from tiny_models import VOCAB, save_tiny_hf

from megarl import parallel as mesh_module
from megarl.actor.engine import MegatronEngine
from megarl.actor.policy import PPOActor
from megarl.actor.scatter import scatter_batch
from megarl.config.schema import (
    MicroBatchSpec,
    NormConfig,
    OptimizerConfig,
    ParallelConfig,
    PPOActorConfig,
)
from megarl.stats.tracker import StatsTracker

GROUPS, SAMPLES = 4, 4
LENGTHS = [5, 17, 9, 12, 30, 4, 21, 8, 11, 26, 7, 13, 19, 6, 15, 10]
GROUP_NORM = NormConfig(mean_level="group", std_level="group")
ALGORITHMS = {
    "grpo": {"reward_norm": GROUP_NORM},
    "gspo-batch-adv": {
        "importance_sampling_level": "sequence",
        "adv_norm": NormConfig(),
        "eps_clip": 0.02,
    },
    "two-minibatches": {"reward_norm": GROUP_NORM, "ppo_n_minibatches": 2, "discount": 0.9},
}
LAYOUTS = {
    "tp2": ParallelConfig(tp=2),
    "pp2": ParallelConfig(pp=2),
    "cp2": ParallelConfig(cp=2),
    "dp2": ParallelConfig(),
}
AREAL_KEYS = {
    *("n_seqs", "n_tokens", "n_valid_tokens", "correct_n_seqs", "incorrect_n_seqs"),
    *("correct_seq_len", "incorrect_seq_len", "advantages/avg", "kl_rewards/avg"),
    *("final_reward/avg", "task_reward/max", "prompt_len/avg", "seq_len/min", "no_eos_ratios"),
    *("update/actor_loss", "update/importance_weight", "update/approx_kl", "update/entropy"),
    *("update/clip_ratio", "update/behave_imp_weight", "update/rs_filtered_fraction"),
}


def make_batch():
    generator = torch.Generator().manual_seed(3)
    shape = (len(LENGTHS), max(LENGTHS))
    lengths = torch.tensor(LENGTHS)[:, None]
    steps = torch.arange(max(LENGTHS))
    made = (steps >= 2) & (steps < lengths)
    tokens = torch.randint(0, VOCAB, shape, generator=generator)
    return {
        "input_ids": torch.where(steps < lengths, tokens, 0).int(),
        "attention_mask": steps < lengths,
        "loss_mask": made.int(),
        "logprobs": torch.where(made, -4 - torch.rand(shape, generator=generator), 0.0),
        "versions": torch.where(made, 0, -1).int(),
        "rewards": torch.randint(0, 3, (len(LENGTHS),), generator=generator).float(),
        "no_eos": torch.arange(len(LENGTHS)) % 5 == 0,
        "group_ids": torch.arange(GROUPS).repeat_interleave(SAMPLES),
    }


def one_step(folder, parallel, options):
    mesh = mesh_module.initialize(parallel, seed=1)
    try:
        config = PPOActorConfig(
            path=folder,
            dtype="float32",
            parallel=parallel,
            mb_spec=MicroBatchSpec(max_tokens_per_mb=48),
            optimizer=OptimizerConfig(lr=1e-3),
            **options,
        )
        stats = StatsTracker()
        engine = MegatronEngine(config, mesh)
        actor = PPOActor(config, engine, max_response_tokens=40, stats=stats)
        whole = make_batch() if mesh.rank == 0 else None
        minibatches = config.ppo_n_minibatches
        batch = scatter_batch(whole, mesh, n_minibatches=minibatches, seed=5)
        batch["prox_logp"] = actor.compute_logp(batch)
        metrics = actor.compute_advantages(batch) | actor.ppo_update(batch)
        return metrics, stats.export(mesh.cpu_group)
    finally:
        mesh_module.destroy()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policy")
    save_tiny_hf(folder, "qwen3", tied=True)
    return str(folder)


@pytest.fixture(scope="module")
def references(ranks, folder):
    return {
        name: ranks(1).run(one_step, folder, ParallelConfig(), options)[0]
        for name, options in ALGORITHMS.items()
    }


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_step_is_the_same_under_every_layout(ranks, folder, references, algorithm, layout):
    want = references[algorithm]
    results = ranks(2).run(one_step, folder, LAYOUTS[layout], ALGORITHMS[algorithm])
    assert results[0] == results[1]
    for got, expected in zip(results[0], want, strict=True):
        assert set(got) == set(expected)
        for key, value in expected.items():
            # Sums of float32 in another order; a loss near 0 is a difference of larger numbers.
            assert got[key] == pytest.approx(value, rel=1e-4, abs=1e-5), key


def test_areal_users_find_their_keys(references):
    _, stats = references["grpo"]
    assert {f"ppo_actor/{key}" for key in AREAL_KEYS} <= set(stats)
    assert stats["ppo_actor/n_seqs"] == len(LENGTHS)
    assert stats["ppo_actor/n_tokens"] == sum(LENGTHS)
    assert stats["ppo_actor/n_valid_tokens"] == sum(LENGTHS) - 2 * len(LENGTHS)
    rewards = make_batch()["rewards"]
    assert stats["ppo_actor/correct_n_seqs"] == int((rewards > 0).sum())
    lengths = torch.tensor(LENGTHS).float()
    right = lengths[rewards > 0].mean().item()
    assert stats["ppo_actor/correct_seq_len"] == pytest.approx(right)
    assert stats["ppo_actor/prompt_len/avg"] == 2
