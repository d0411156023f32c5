"""Losses of the ratio of each sequence."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_rl.algorithms.inputs import LossInputs, LossResult
from mcore_rl.algorithms.loss_parts import (
    LOSSES,
    clipped_surrogate,
    log_ratios,
    ratio_metrics,
    unclamped_log_ratios,
)
from mcore_rl.config.checks import check_at_least, check_between, check_positive


@dataclass(frozen=True)
class GSPOSettings:
    clip_ratio_low: float = 3e-4  # section 5.1 of the paper
    clip_ratio_high: float = 4e-4

    def __post_init__(self) -> None:
        check_between("clip_ratio_low", self.clip_ratio_low, 0, 1)
        check_at_least("clip_ratio_high", self.clip_ratio_high, 0)


@LOSSES.register("gspo")
def gspo(inputs: LossInputs, settings: GSPOSettings) -> LossResult:
    """-min(s * A, clip(s, 1 - low, 1 + high) * A), equation 5 of arXiv:2507.18071.

    s = exp(mean of the log ratios of its tokens) is the ratio of a sequence, equation 7. The
    paper's aggregation is sequence_mean_token_mean.

    The log ratio of each token is clamped at 20 either way, and so is their mean. verl clamps the
    mean alone, at 10 and from above alone.

    Metrics: `ratio`, of the sequence; `clipped`; `approx_kl`, of the tokens.
    """
    log_ratio = log_ratios(inputs)
    return _clipped(inputs.sequence_mean(log_ratio).exp(), log_ratio, inputs, settings)


@LOSSES.register("gspo_token")
def gspo_token(inputs: LossInputs, settings: GSPOSettings) -> LossResult:
    """GSPO-token, equations 13 and 14: s_t = sg[s] * pi_t / sg[pi_t], for advantages of tokens.

    Its values are those of `gspo`, and so are its gradients where all tokens of a sequence have
    the same advantage.
    """
    log_ratio = log_ratios(inputs)
    own = (log_ratio - log_ratio.detach()).exp()  # 1, with the gradient of this token
    ratio = inputs.sequence_mean(log_ratio.detach()).exp() * own
    return _clipped(ratio, log_ratio, inputs, settings)


def _clipped(
    ratio: Tensor, log_ratio: Tensor, inputs: LossInputs, settings: GSPOSettings
) -> LossResult:
    low, high = settings.clip_ratio_low, settings.clip_ratio_high
    loss, clipped = clipped_surrogate(ratio, inputs.advantages, low, high)
    return loss, ratio_metrics(log_ratio) | {"ratio": ratio.detach(), "clipped": clipped}


@dataclass(frozen=True)
class LUSPOSettings(GSPOSettings):
    clip_ratio_low: float = 2e-3  # section 5.1 of the paper
    clip_ratio_high: float = 2.5e-3


@LOSSES.register("luspo")
def luspo(inputs: LossInputs, settings: LUSPOSettings) -> LossResult:
    """gspo times the length of the sequence, so that no length is favoured (arXiv:2602.05261).

    With the paper's aggregation, sequence_mean_token_mean, it is gspo with
    sequence_mean_token_sum.
    """
    loss, metrics = gspo(inputs, settings)
    return loss * _lengths(inputs), metrics


@dataclass(frozen=True)
class GMPOSettings:
    clip_log_ratio_low: float = 0.4  # log ratios of tokens are clipped at minus this
    clip_log_ratio_high: float = 0.4  # and at this

    def __post_init__(self) -> None:
        check_at_least("clip_log_ratio_low", self.clip_log_ratio_low, 0)
        check_at_least("clip_log_ratio_high", self.clip_log_ratio_high, 0)


@LOSSES.register("gmpo")
def gmpo(inputs: LossInputs, settings: GMPOSettings) -> LossResult:
    """-A * geometric mean over the tokens of their ratios, each clipped as in PPO.

    The objective of arXiv:2507.20673: with A > 0 the log ratio of a token counts as at most `high`,
    with A < 0 as at least -`low`. A is the mean of the tokens' advantages: the paper has one for
    each sequence. Its aggregation is sequence_mean_token_mean.
    """
    log_ratio, advantages = log_ratios(inputs), inputs.advantages
    bounded = torch.where(
        advantages > 0,
        log_ratio.clamp(max=settings.clip_log_ratio_high),
        log_ratio.clamp(min=-settings.clip_log_ratio_low),
    )
    ratio = inputs.sequence_mean(bounded).exp()
    metrics = ratio_metrics(log_ratio) | {"ratio": ratio.detach()}
    metrics["clipped"] = (bounded != log_ratio).detach()
    return -inputs.sequence_mean(advantages) * ratio, metrics


@dataclass(frozen=True)
class KimiSettings:
    tau: float  # weight of the squared log ratio

    def __post_init__(self) -> None:
        check_positive("tau", self.tau)


@LOSSES.register("kimi")
def kimi(inputs: LossInputs, settings: KimiSettings) -> LossResult:
    """-A * log pi + tau / 2 * (log R)^2 / length, where R is the ratio of the sequence.

    Kimi k1.5 (arXiv:2501.12599), equation 3: online mirror descent. log R is the sum of the log
    ratios of the tokens. The sum over a sequence is the paper's loss, so the aggregation is
    sequence_mean_token_sum. The paper's A is the reward minus the mean of its group: grpo without
    normalize_by_std. It does not give a tau. As in `dro`, log ratios are not clamped.
    """
    total = inputs.sequence_sum(unclamped_log_ratios(inputs))
    square = total.square() / _lengths(inputs).clamp(min=1)
    loss = -inputs.advantages * inputs.log_probs + settings.tau / 2 * square
    return loss, ratio_metrics(log_ratios(inputs))


def _lengths(inputs: LossInputs) -> Tensor:
    """[tokens]: how many tokens of its sequence are trained on."""
    return inputs.sequence_sum(torch.ones_like(inputs.log_probs.detach()))
