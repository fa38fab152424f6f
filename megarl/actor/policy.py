"""PPO and GRPO on a MegatronEngine: logprobs, advantages, update.

B  sequences     S  padded length

Shifted columns: index t of a [B, S] column made here belongs to the prediction of token
t + 1, as logits do. A trajectory's own `logprobs` and `loss_mask` stand at the token itself;
`compute_advantages` shifts them once and everything after it is shifted.
"""

from dataclasses import asdict

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.actor.engine import MegatronEngine
from megarl.actor.micro_batch import Batch
from megarl.actor.policy_loss import MASK, PolicyLoss
from megarl.actor.scatter import MINIBATCH
from megarl.algorithms.rewards import shape_rewards, token_rewards
from megarl.config.schema import NormConfig, PPOActorConfig
from megarl.ops.advantages import cu_seqlens_of_rows, gae, normalize_packed
from megarl.stats.tracker import StatsTracker
from megarl.trajectory import select, sequence_lengths

_UPDATE_KEYS = {
    "loss": "actor_loss",
    "kl": "approx_kl",
    "behave_weight": "behave_imp_weight",
    "behave_kl": "behave_approx_kl",
    "behave_masked": "rs_filtered_fraction",
}
"""Metrics of the loss that AReaL calls otherwise."""


def shift(column: Tensor) -> Tensor:
    """[B, S] at the token itself -> at the position that predicts it; the last becomes 0."""
    shifted = column.roll(-1, dims=1)
    shifted[:, -1] = 0
    return shifted


class PPOActor:
    """The policy that learns. Every method is collective over the world.

    Args:
      stats: gets AReaL's keys, `ppo_actor/...` and `ppo_actor/update/...`, once a replica.
    """

    def __init__(
        self,
        config: PPOActorConfig,
        engine: MegatronEngine,
        *,
        max_response_tokens: int,
        stats: StatsTracker | None = None,
    ) -> None:
        self.config, self.engine, self.mesh = config, engine, engine.mesh
        self.stats = stats
        self.max_response_tokens = max_response_tokens
        self.loss = PolicyLoss(config)

    def compute_logp(self, batch: Batch) -> Tensor:
        """Shifted logprobs [B, S] under the present weights."""
        return self.engine.forward(batch)

    @property
    def needs_prox_logp(self) -> bool:
        return self.config.use_decoupled_loss or self.config.recompute_logprob

    def compute_advantages(self, batch: Batch) -> dict[str, float]:
        """Add what the loss reads: shifted_mask, behaviour_logp, prox_logp, advantages.

        Reads `rewards`, `group_ids`, `logprobs`, `loss_mask`, `no_eos`, and where present
        `prox_logp` and `ref_logp` (shifted). Statistics of groups and of the batch are taken
        over all replicas, so they do not depend on how rows were spread.

        Returns:
          `reward` (mean before shaping), `no_eos_ratio`, `response_tokens` (mean), staleness,
          and `prox_behave_gap_max`, the largest difference of a token's logprob between
          trainer and server: rounding where the server had the trainer's weights. The same
          on every rank.
        """
        config = self.config
        mask = shift(batch["loss_mask"]).bool()
        behaviour = shift(batch["logprobs"]).float()
        num_groups = self._num_groups(batch["group_ids"])
        rewards = shape_rewards(
            batch["rewards"].float(),
            mask.sum(1),
            max_response_tokens=self.max_response_tokens,
            scaling=config.reward_scaling,
            bias=config.reward_bias,
            clip=config.reward_clip,
            overlong_tokens=config.overlong_tokens if config.overlong_reward_penalty else None,
            overlong_penalty_factor=(
                config.overlong_penalty_factor if config.overlong_reward_penalty else None
            ),
        )
        if config.reward_norm:
            everyone = torch.ones_like(rewards, dtype=torch.bool)
            rewards = self._normalize(
                rewards, everyone, batch["group_ids"], num_groups, config.reward_norm
            )
        anchor = batch["prox_logp"] if self.needs_prox_logp else behaviour
        kl_rewards = token_rewards(
            rewards,
            mask,
            batch["no_eos"],
            logp=anchor,
            ref_logp=batch.get("ref_logp"),
            kl_ctl=config.kl_ctl,
            kl_estimator=config.kl_estimator,
            mask_no_eos_with_zero=config.mask_no_eos_with_zero,
        )
        advantages, _ = gae(
            kl_rewards.flatten(),
            torch.zeros_like(kl_rewards).flatten(),
            mask.flatten(),
            cu_seqlens_of_rows(mask),
            batch["no_eos"],
            gamma=config.discount,
            lam=config.gae_lambda,
        )
        advantages = advantages.view_as(mask)
        if config.adv_norm:
            advantages = self._normalize(
                advantages, mask, batch["group_ids"], num_groups, config.adv_norm
            )
        batch.update(
            shifted_mask=mask, behaviour_logp=behaviour, prox_logp=anchor, advantages=advantages
        )
        self._record_batch(batch, rewards, kl_rewards)
        return self._batch_stats(batch, mask)

    def ppo_update(self, batch: Batch) -> dict[str, float]:
        """One optimizer step a minibatch. Returns the mean of their metrics.

        Raises:
          NonFiniteError: see MegatronEngine.train_batch.
        """
        steps = []
        for i in range(self.config.ppo_n_minibatches):
            rows = (batch[MINIBATCH] == i).nonzero()[:, 0]
            minibatch = select(batch, rows)
            num_tokens = int(minibatch["shifted_mask"].sum())
            steps.append(
                self.engine.train_batch(
                    minibatch,
                    self.loss,
                    keys=self.loss.keys,
                    num_tokens=num_tokens,
                    mask_key=MASK,
                    per_token=self.loss.per_token,
                )
            )
        means = {name: sum(step[name] for step in steps) / len(steps) for name in steps[0]}
        if self.stats is not None and self.mesh.rank == 0:
            with self.stats.scope("ppo_actor"), self.stats.scope("update"):
                self.stats.scalar(**{_UPDATE_KEYS.get(name, name): x for name, x in means.items()})
        return means

    def _record_batch(self, batch: Batch, rewards: Tensor, kl_rewards: Tensor) -> None:
        place = self.mesh.place
        if self.stats is None or (place.tp, place.pp, place.cp) != (0, 0, 0):
            return
        stats, mask, attention = self.stats, batch["shifted_mask"], batch["attention_mask"].bool()
        lengths = sequence_lengths(batch).float()
        is_correct = batch["rewards"] > 0
        with stats.scope("ppo_actor"):
            stats.denominator(
                n_seqs=torch.ones_like(is_correct),
                n_tokens=attention,
                n_valid_tokens=mask,
                correct_n_seqs=is_correct,
                incorrect_n_seqs=~is_correct,
            )
            stats.stat("correct_n_seqs", reduce="avg", correct_seq_len=lengths)
            stats.stat("incorrect_n_seqs", reduce="avg", incorrect_seq_len=lengths)
            stats.stat(
                "n_seqs",
                task_reward=batch["rewards"].float(),
                final_reward=rewards,
                seq_len=lengths,
                prompt_len=lengths - mask.sum(1),
            )
            stats.stat("n_seqs", reduce="avg", no_eos_ratios=batch["no_eos"].float())
            stats.stat(
                "n_valid_tokens",
                advantages=batch["advantages"],
                kl_rewards=kl_rewards,
                old_logp=batch["behaviour_logp"],
            )

    # ------------------------------------------------------------------ over the replicas

    def _all_reduce(self, x: Tensor) -> Tensor:
        """Sum over data-parallel replicas; every rank of a replica holds the same rows."""
        on_device = x.to(self.mesh.device)
        dist.all_reduce(on_device, group=self.mesh.dp_group)
        return on_device.to(x.device)

    def _num_groups(self, group_ids: Tensor) -> int:
        most = group_ids.max().to(self.mesh.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.mesh.dp_group)
        return int(most) + 1

    def _normalize(
        self, x: Tensor, mask: Tensor, group_ids: Tensor, num_groups: int, norm: NormConfig
    ) -> Tensor:
        """x and mask [B] or [B, S], group_ids [B]."""
        made = normalize_packed(
            x.flatten(),
            mask.flatten(),
            cu_seqlens_of_rows(x),
            group_ids,
            num_groups,
            all_reduce=self._all_reduce,
            **asdict(norm),
        )
        return made.view_as(x)

    def _batch_stats(self, batch: Batch, mask: Tensor) -> dict[str, float]:
        head = self.engine.version
        versions = batch["versions"][batch["loss_mask"].bool()]
        lag = (head - versions).double()
        sums = torch.stack(
            [
                torch.tensor(float(mask.shape[0]), dtype=torch.float64),
                batch["rewards"].double().sum(),
                batch["no_eos"].double().sum(),
                mask.sum().double(),
                sequence_lengths(batch).sum().double(),
                lag.sum(),
            ]
        )
        rows, reward, no_eos, response_tokens, tokens, lag_sum = self._all_reduce(sums).tolist()
        gap = torch.where(mask, batch["prox_logp"] - batch["behaviour_logp"], 0.0).abs()
        most_lag = lag.max() if lag.numel() else torch.tensor(0.0)
        highest = torch.stack([most_lag.float(), gap.max().float()]).to(self.mesh.device)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=self.mesh.dp_group)
        return {
            "reward": reward / rows,
            "no_eos_ratio": no_eos / rows,
            "response_tokens": response_tokens / rows,
            "num_tokens": tokens,
            "staleness_mean": lag_sum / max(1.0, response_tokens),
            "staleness_max": float(highest[0]),
            "prox_behave_gap_max": float(highest[1]),
        }
