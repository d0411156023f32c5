"""Loss functions of the engines, put together from the algorithms and their settings."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mcore_rl.algorithms.kl import KL_ESTIMATORS
from mcore_rl.algorithms.losses import ppo_clip, sft
from mcore_rl.config.schema import AlgorithmConfig
from mcore_rl.engine.base import Columns


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """PPO's clipped surrogate, plus kl_coef times the KL to the reference model.

    Minus entropy_coef times the entropy. Reads the scores log_probs and, where it counts, entropy;
    the columns log_probs (of the policy that generated, by the trainer), advantages and, with a KL,
    reference_log_probs.
    """

    config: AlgorithmConfig

    def __call__(
        self, scores: Columns, columns: Columns
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        log_probs = scores["log_probs"]
        loss, metrics = ppo_clip(
            log_probs,
            columns["log_probs"],
            columns["advantages"],
            clip_ratio_low=self.config.clip_ratio_low,
            clip_ratio_high=self.config.clip_ratio_high,
        )
        if self.config.kl_coef:
            kl = KL_ESTIMATORS[self.config.kl_estimator](log_probs, columns["reference_log_probs"])
            metrics["reference_kl"] = kl.detach()
            loss = loss + self.config.kl_coef * kl
        if self.config.entropy_coef:
            metrics["entropy"] = scores["entropy"].detach()
            loss = loss - self.config.entropy_coef * scores["entropy"]
        return loss, metrics


def supervised_loss(
    scores: Columns, columns: Columns
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Negative log-likelihood of the response tokens."""
    return sft(scores["log_probs"]), {}
