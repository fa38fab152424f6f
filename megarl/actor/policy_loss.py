"""The policy loss of a config, as MegatronEngine.train_batch takes it."""

from dataclasses import asdict
from typing import Any

from torch import Tensor

from megarl.actor.micro_batch import Batch
from megarl.actor.token_outputs import TokenOutputs
from megarl.algorithms.losses import Correction, LossOutput
from megarl.config.schema import PPOActorConfig
from megarl.ops.logprob_loss import logprob_policy_loss
from megarl.ops.policy_loss import policy_loss

MASK = "shifted_mask"
_COLUMNS = ("prox_logp", "behaviour_logp", "advantages")


class PolicyLoss:
    """A LogitsLoss: of logprobs, or of the logits where one rank has them all."""

    def __init__(self, config: PPOActorConfig) -> None:
        correction = config.rejection_sampling
        self._level = config.importance_sampling_level
        self._correction = Correction(**asdict(correction)) if correction else None
        self._has_ref = config.kl_loss_coef > 0
        higher = config.eps_clip_higher
        self._settings: dict[str, Any] = {
            "eps_clip_low": config.eps_clip,
            "eps_clip_high": config.eps_clip if higher is None else higher,
            "objective": config.objective,
            "c_clip": config.c_clip,
            "decoupled": config.use_decoupled_loss,
            "correction": self._correction,
            "kl_coef": config.kl_loss_coef,
            "kl_estimator": config.kl_estimator,
        }

    @property
    def keys(self) -> tuple[str, ...]:
        """Columns of a batch that it reads, MASK among them."""
        return (*_COLUMNS, MASK, *(("ref_logp",) if self._has_ref else ()))

    @property
    def per_token(self) -> bool:
        """Whether it is a sum of terms that depend on one token each."""
        of_sequence = self._correction is not None and self._correction.level == "sequence"
        return self._level == "token" and not of_sequence

    def __call__(self, outputs: TokenOutputs) -> LossOutput:
        columns = outputs.columns
        return policy_loss(
            outputs.logp,
            *(columns[name] for name in _COLUMNS),
            columns[MASK],
            outputs.cu_seqlens,
            num_tokens=outputs.num_tokens,
            level=self._level,
            ref_logp=columns.get("ref_logp"),
            entropy=outputs.entropy,
            **self._settings,
        )

    def of_logits(
        self,
        logits: Tensor,
        labels: Tensor,
        mask: Tensor,
        columns: Batch,
        cu_seqlens: Tensor,
        num_tokens: Tensor,
        **options: Any,
    ) -> LossOutput:
        """See LogitsLoss. For a loss that is `per_token`."""
        return logprob_policy_loss(
            logits,
            labels,
            *(columns[name] for name in _COLUMNS),
            mask,
            cu_seqlens,
            num_tokens=num_tokens,
            ref_logp=columns.get("ref_logp"),
            **self._settings,
            **options,
        )
