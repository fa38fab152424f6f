"""A conversation as the columns of one trajectory row, token by token as it grew."""

from typing import Any

import numpy as np
import torch

from megarl.rollout.api import NO_VERSION, ModelResponse
from megarl.trajectory import Trajectory


class Conversation:
    """What was given and what was sampled, in order.

    Token ids stay as they were sampled. What has been decoded and encoded again need not be the
    same tokens, and their logprobs would then belong to nothing.
    """

    def __init__(self, prompt_ids: list[int]) -> None:
        self.tokens: list[int] = []
        self._loss_mask: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._stop_reason = ""
        self.give(prompt_ids)

    def give(self, tokens: list[int]) -> None:
        """Tokens that no weights of ours sampled."""
        self._append(tokens, 0, [0.0] * len(tokens), [NO_VERSION] * len(tokens))

    def take(self, response: ModelResponse) -> None:
        count = response.output_len
        logprobs, versions = response.output_logprobs, response.output_versions
        assert len(logprobs) == len(versions) == count, "a logprob and a version for each token"
        self._append(response.output_tokens, 1, logprobs, versions)
        self._stop_reason = response.stop_reason

    def _append(
        self, tokens: list[int], sampled: int, logprobs: list[float], versions: list[int]
    ) -> None:
        self.tokens += tokens
        self._loss_mask += [sampled] * len(tokens)
        self._logprobs += logprobs
        self._versions += versions

    def as_trajectory(self, reward: float) -> Trajectory:
        """[1, S] columns; `no_eos` is the last answer's."""
        return {
            "input_ids": _row(self.tokens, np.int32),
            "attention_mask": torch.ones(1, len(self.tokens), dtype=torch.bool),
            "loss_mask": _row(self._loss_mask, np.int32),
            "logprobs": _row(self._logprobs, np.float32),
            "versions": _row(self._versions, np.int32),
            "rewards": torch.tensor([float(reward)]),
            "no_eos": torch.tensor([self._stop_reason == "length"]),
        }


def _row(values: list[int] | list[float], dtype: type[np.number[Any]]) -> torch.Tensor:
    """[1, S]. Through numpy, which reads a list four times as fast as torch."""
    return torch.from_numpy(np.array([values], dtype=dtype))
