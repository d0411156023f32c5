"""Losses -w * A * log pi, whose weight w has no gradient. Their values mean little."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_rl.algorithms.inputs import LossInputs, LossResult
from mcore_rl.algorithms.loss_parts import (
    LOSSES,
    MAX_LOG_RATIO,
    by_sign,
    log_ratios,
    policy_gradient,
    ratio_metrics,
    unclamped_log_ratios,
)
from mcore_rl.config.checks import check_at_least, check_between, check_positive


@LOSSES.register("gpg")
@LOSSES.register("reinforce")
def reinforce(inputs: LossInputs) -> LossResult:
    """-A * log pi (Williams 1992), the gradient of a policy on its own samples: w = 1.

    It is also the loss of GPG (arXiv:2504.02546), whose scale alpha belongs to the advantages.
    """
    weights = torch.ones_like(inputs.log_probs)
    return policy_gradient(weights, inputs), ratio_metrics(log_ratios(inputs))


@dataclass(frozen=True)
class CISPOSettings:
    clip_ratio_low: float = 1.0  # weights are at least 1 - clip_ratio_low; at 1 there is no bound
    clip_ratio_high: float = 4.0  # and at most 1 + clip_ratio_high

    def __post_init__(self) -> None:
        check_between("clip_ratio_low", self.clip_ratio_low, 0, 1)
        check_at_least("clip_ratio_high", self.clip_ratio_high, 0)


@LOSSES.register("cispo")
def cispo(inputs: LossInputs, settings: CISPOSettings) -> LossResult:
    """w = clip(r, 1 - low, 1 + high): clipped importance weights keep the gradient of all tokens.

    Equations 4 and 5 of MiniMax-M1 (arXiv:2506.13585), which has no lower bound in effect and does
    not say the upper one. The default is the 5 of ScaleRL (arXiv:2510.13786).
    """
    log_ratio = log_ratios(inputs)
    ratio = log_ratio.detach().exp()
    weights = ratio.clamp(1 - settings.clip_ratio_low, 1 + settings.clip_ratio_high)
    metrics = ratio_metrics(log_ratio) | {"clipped": weights != ratio}
    return policy_gradient(weights, inputs), metrics


@dataclass(frozen=True)
class DPPOSettings:
    """A token beyond its bound is masked if its update would lead away from the old policy."""

    max_divergence_low: float = 0.15  # of tokens with a negative advantage
    max_divergence_high: float = 0.15  # of tokens with a positive advantage
    max_ratio: float = 20.0  # weights are truncated here

    def __post_init__(self) -> None:
        check_positive("max_divergence_low", self.max_divergence_low)
        check_positive("max_divergence_high", self.max_divergence_high)
        check_at_least("max_ratio", self.max_ratio, 1)


@dataclass(frozen=True)
class DPPOKLSettings(DPPOSettings):
    max_divergence_low: float = 0.05
    max_divergence_high: float = 0.05


@LOSSES.register("dppo_tv")
def dppo_tv(inputs: LossInputs, settings: DPPOSettings) -> LossResult:
    """w = min(r, max_ratio) within the trust region |pi - pi_old| <= bound, else 0.

    DPPO with binary total variation (arXiv:2602.04879). The bound is on tokens whose update leads
    further away only: A > 0 and r > 1, or A < 0 and r < 1. The divergence is that of the
    distribution {this token, any other}. Weights are truncated as in section 5.4. The bounds are
    settings: the paper's depend on the model.
    """
    new, old = inputs.log_probs.detach().exp(), inputs.old_log_probs.exp()
    return _within(inputs, settings, (new - old).abs())


@LOSSES.register("dppo_kl")
def dppo_kl(inputs: LossInputs, settings: DPPOKLSettings) -> LossResult:
    """The same with KL(old || new) of {this token, any other}.

    Its probability of any other token has 1e-8 added, so that a token of probability 1 is finite.
    """
    new, old = inputs.log_probs.detach().clamp(max=0), inputs.old_log_probs.clamp(max=0)
    rest_new, rest_old = 1e-8 - torch.expm1(new), 1e-8 - torch.expm1(old)
    divergence = old.exp() * (old - new) + (rest_old - 1e-8) * (rest_old / rest_new).log()
    return _within(inputs, settings, divergence)


def _within(inputs: LossInputs, settings: DPPOSettings, divergence: Tensor) -> LossResult:
    log_ratio = log_ratios(inputs)
    most = by_sign(inputs.advantages, settings.max_divergence_high, settings.max_divergence_low)
    moves_away = torch.where(inputs.advantages > 0, log_ratio > 0, log_ratio < 0)
    masked = moves_away & (divergence > most)
    weights = log_ratio.detach().exp().clamp(max=settings.max_ratio) * ~masked
    metrics = ratio_metrics(log_ratio) | {"clipped": masked}
    return policy_gradient(weights, inputs), metrics


@LOSSES.register("topr")
def topr(inputs: LossInputs) -> LossResult:
    """w = 1 for a positive advantage, min(R, 1) for a negative one; R is the sequence's ratio.

    Tapered off-policy REINFORCE, equation 8 of arXiv:2503.14286. R = exp(sum of its tokens' log
    ratios), without any norm by length. The paper's aggregation is sequence_mean_token_sum. Its
    sign is that of the reward minus a baseline; ours is that of the token's advantage.
    """
    log_ratio = log_ratios(inputs)
    taper = inputs.sequence_sum(log_ratio.detach()).clamp(max=0).exp()
    weights = torch.where(inputs.advantages < 0, taper, 1)
    return policy_gradient(weights, inputs), ratio_metrics(log_ratio) | {"weight": weights}


@dataclass(frozen=True)
class VESPOSettings:
    k_positive: float = 2.0  # power of the ratio, for a positive advantage
    lambda_positive: float = 3.0  # and decay
    k_negative: float = 3.0  # the same for a negative one
    lambda_negative: float = 2.0

    def __post_init__(self) -> None:
        for name in ("k_positive", "lambda_positive", "k_negative", "lambda_negative"):
            check_at_least(name, getattr(self, name), 0)


@LOSSES.register("vespo")
def vespo(inputs: LossInputs, settings: VESPOSettings) -> LossResult:
    """w = R^k * exp(lambda * (1 - R)), where R is the ratio of the sequence, by the sign of A.

    The kernel of arXiv:2602.10693. R = exp(sum of its tokens' log ratios); the sum is clamped to
    +-20, as in the authors' code, whose defaults these are.
    """
    log_ratio = log_ratios(inputs)
    total = inputs.sequence_sum(log_ratio.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    k = by_sign(inputs.advantages, settings.k_positive, settings.k_negative)
    decay = by_sign(inputs.advantages, settings.lambda_positive, settings.lambda_negative)
    weights = (k * total + decay * (1 - total.exp())).exp()
    return policy_gradient(weights, inputs), ratio_metrics(log_ratio) | {"weight": weights}


@dataclass(frozen=True)
class DROSettings:
    beta: float  # weight of the squared log ratio

    def __post_init__(self) -> None:
        check_positive("beta", self.beta)


@LOSSES.register("dro")
def dro(inputs: LossInputs, settings: DROSettings) -> LossResult:
    """-A * log pi + beta / 2 * (log r)^2.

    Direct reward optimization: the policy's part of the loss of arXiv:2405.19107, whose value
    function is in A. There the ratio is to a fixed reference and of a sequence; here it is to the
    policy that generated and of each token, as in verl. `kimi` is the form of sequences. log r is
    not clamped: the square is finite, and pulls the more the further the policy has gone.
    """
    log_ratio = unclamped_log_ratios(inputs)
    loss = policy_gradient(torch.ones_like(log_ratio), inputs)
    return loss + settings.beta / 2 * log_ratio.square(), ratio_metrics(log_ratios(inputs))
