"""Losses of the ratio of each token: PPO's clip, and softer forms of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mcore_rl.algorithms.inputs import LossInputs, LossResult
from mcore_rl.algorithms.loss_parts import (
    LOSSES,
    MAX_LOG_RATIO,
    by_sign,
    clipped_surrogate,
    log_ratios,
    ratio_metrics,
)
from mcore_rl.config.checks import check_positive
from mcore_rl.config.schema import PPOClipSettings


@LOSSES.register("ppo_clip")
def ppo_clip(inputs: LossInputs, settings: PPOClipSettings) -> LossResult:
    """The clipped surrogate of PPO: -min(r * A, clip(r, 1 - low, 1 + high) * A).

    Equation 7 of Schulman et al. 2017 (arXiv:1707.06347), which it leaves in three places: the clip
    may be asymmetric ("clip-higher", section 3.1 of DAPO, arXiv:2503.14476); log ratios are
    clamped to +-20; and with `dual_clip` = c, the loss of a negative advantage is at most -c * A
    (dual-clip PPO of Ye et al. 2019, arXiv:1912.09729, whose c is 3).

    Reads log_probs, old_log_probs and advantages. Returns the loss of each token and, detached, per
    token: `ratio`; `clipped`, true where the loss is clipped and has no gradient; `approx_kl`, the
    k3 estimate of KL(old || new); and `dual_clipped`.
    """
    log_ratio, advantages = log_ratios(inputs), inputs.advantages
    low, high = settings.clip_ratio_low, settings.clip_ratio_high
    loss, clipped = clipped_surrogate(log_ratio.exp(), advantages, low, high)
    metrics = ratio_metrics(log_ratio) | {"clipped": clipped}
    if settings.dual_clip is not None:
        most = torch.where(advantages < 0, -settings.dual_clip * advantages, torch.inf)
        metrics["dual_clipped"] = loss.detach() > most
        loss = torch.minimum(loss, most)
    return loss, metrics


@dataclass(frozen=True)
class DecoupledPPOSettings(PPOClipSettings):
    weight_cap: float | None = None  # weights of the behaviour policy are at most this

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weight_cap is not None:
            check_positive("weight_cap", self.weight_cap)


@LOSSES.register("decoupled_ppo")
def decoupled_ppo(inputs: LossInputs, settings: DecoupledPPOSettings) -> LossResult:
    """ppo_clip around a proximal policy, times the weight proximal / behaviour of each token.

    The decoupled objective of AReaL (arXiv:2505.24298), after Hilton et al. 2022
    (arXiv:2110.00641). The proximal policy is that of old_log_probs, the behaviour policy that of
    rollout_log_probs. Their objective has no cap; AReaL's code drops tokens beyond one, and ours
    truncates their weights.

    Metrics: those of ppo_clip, and `behaviour_weight`.
    """
    loss, metrics = ppo_clip(inputs, settings)
    log_weight = inputs.old_log_probs - inputs.rollout_log_probs
    weight = log_weight.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    if settings.weight_cap is not None:
        weight = weight.clamp(max=settings.weight_cap)
    return weight * loss, {**metrics, "behaviour_weight": weight}


@dataclass(frozen=True)
class SAPOSettings:
    temperature_positive: float = 1.0  # of tokens with a positive advantage
    temperature_negative: float = 1.05  # of the others

    def __post_init__(self) -> None:
        check_positive("temperature_positive", self.temperature_positive)
        check_positive("temperature_negative", self.temperature_negative)


@LOSSES.register("sapo")
def sapo(inputs: LossInputs, settings: SAPOSettings) -> LossResult:
    """Soft adaptive policy optimization: -f(r) * A, f(r) = sigmoid(t * (r - 1)) * 4 / t.

    From arXiv:2511.20347, with the temperature t by the sign of the advantage. At r = 1 its
    gradient is that of PPO, and it fades out on both sides. The paper's aggregation is
    sequence_mean_token_mean.
    """
    log_ratio, advantages = log_ratios(inputs), inputs.advantages
    temperature = by_sign(advantages, settings.temperature_positive, settings.temperature_negative)
    gate = torch.sigmoid(temperature * (log_ratio.exp() - 1)) * 4 / temperature
    return -gate * advantages, ratio_metrics(log_ratio)
