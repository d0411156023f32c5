"""Losses of each token, before any mask or mean: only aggregation.py normalises.

A loss outside the package has the same contract: docs/algorithms.md. r is pi / pi_old, the ratio of
a token to the rollout policy; log r is clamped to +-20, so that a diverging policy gives a large
loss rather than a nan. Metrics of each loss: `ratio`, `approx_kl` (the k3 estimate of
KL(old || new)), and `clipped` where there is a clip.

Losses of token ratios come first, then losses of sequence ratios, then losses that select tokens of
the whole mini-batch before the update, at last those of value models and supervised training.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mcore_rl.algorithms.inputs import LossInputs, LossResult, MiniBatchInputs, prepared_by
from mcore_rl.algorithms.reductions import Floats
from mcore_rl.algorithms.registry import Registry
from mcore_rl.config.checks import check_at_least, check_between, check_positive
from mcore_rl.config.schema import PPOClipSettings
from mcore_rl.data.batch import Jagged

LOSSES: Registry[Callable[[LossInputs], LossResult]] = Registry("algorithm.loss", ("inputs",))

# exp(20) = 5e8, far above any ratio of a healthy run; beyond 88 float32 overflows to inf, whose
# gradient is nan even where the clip has discarded it.
MAX_LOG_RATIO = 20.0


def compute_unclamped_log_ratios(inputs: LossInputs) -> Tensor:
    """Compute log(policy / rollout policy) with gradient: [tokens].

    For penalties of log ratios, which are finite without a clamp and need a gradient everywhere.
    """
    return inputs.log_probs - inputs.old_log_probs.detach()


def compute_log_ratios(inputs: LossInputs) -> Tensor:
    """Compute log(policy / rollout policy), clamped to +-20 so that its exponential is finite."""
    return compute_unclamped_log_ratios(inputs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def compute_ratio_metrics(log_ratio: Tensor) -> dict[str, Tensor]:
    """Return the metrics `ratio` and `approx_kl`, the k3 estimate of KL(old || new)."""
    log_ratio = log_ratio.detach()
    return {"ratio": log_ratio.exp(), "approx_kl": torch.expm1(log_ratio) - log_ratio}


def compute_clipped_surrogate(
    ratio: Tensor, advantages: Tensor, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """Return -min(ratio * A, clip(ratio, 1 - low, 1 + high) * A), and true where it is clipped."""
    unclipped = ratio * advantages
    clipped = ratio.clamp(1.0 - low, 1.0 + high) * advantages
    return -torch.minimum(unclipped, clipped), clipped.detach() < unclipped.detach()


def select_by_sign(advantages: Tensor, positive: float, negative: float) -> Tensor:
    """Return `positive` where the advantage is above 0, else `negative`: [tokens]."""
    return torch.full_like(advantages, negative).masked_fill(advantages > 0, positive)


def compute_policy_gradient(weights: Tensor, inputs: LossInputs) -> Tensor:
    """Compute -weight * A * log pi, with weights without gradient."""
    return -weights * inputs.advantages * inputs.log_probs


@LOSSES.register("ppo_clip")
def ppo_clip(inputs: LossInputs, settings: PPOClipSettings) -> LossResult:
    """PPO: the clipped surrogate -min(r * A, clip(r, 1 - low, 1 + high) * A).

    Equation 7 of Schulman et al. 2017 (arXiv:1707.06347), with three differences: the clip may be
    asymmetric ("clip-higher", section 3.1 of DAPO, arXiv:2503.14476); log ratios are
    clamped to +-20; and with `dual_clip` = c, the loss of a negative advantage is at most -c * A
    (dual-clip PPO of Ye et al. 2019, arXiv:1912.09729, whose c is 3).

    Reads log_probs, old_log_probs and advantages. Returns the loss of each token and, detached, per
    token: `ratio`, `approx_kl`, `clipped` (true where the loss is clipped and has no gradient) and
    `dual_clipped`.
    """
    log_ratio, advantages = compute_log_ratios(inputs), inputs.advantages
    low, high = settings.clip_ratio_low, settings.clip_ratio_high
    loss, clipped = compute_clipped_surrogate(log_ratio.exp(), advantages, low, high)
    metrics = compute_ratio_metrics(log_ratio) | {"clipped": clipped}
    if settings.dual_clip is not None:
        bound = torch.where(advantages < 0, -settings.dual_clip * advantages, torch.inf)
        metrics["dual_clipped"] = loss.detach() > bound
        loss = torch.minimum(loss, bound)
    return loss, metrics


@dataclass(frozen=True)
class DecoupledPPOSettings(PPOClipSettings):
    weight_cap: float | None = None  # largest weight proximal / behaviour

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weight_cap is not None:
            check_positive("weight_cap", self.weight_cap)


@LOSSES.register("decoupled_ppo")
def decoupled_ppo(inputs: LossInputs, settings: DecoupledPPOSettings) -> LossResult:
    """ppo_clip around a proximal policy, times the weight proximal / behaviour of each token.

    Decoupled objective of AReaL (arXiv:2505.24298), after Hilton et al. 2022 (arXiv:2110.00641).
    The log-probs of the proximal policy are old_log_probs, those of the behaviour policy
    rollout_log_probs. Their objective has no cap; AReaL's code drops tokens beyond one, this
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
    temperature_negative: float = 1.05  # of all other tokens

    def __post_init__(self) -> None:
        check_positive("temperature_positive", self.temperature_positive)
        check_positive("temperature_negative", self.temperature_negative)


@LOSSES.register("sapo")
def sapo(inputs: LossInputs, settings: SAPOSettings) -> LossResult:
    """Soft adaptive policy optimization: -f(r) * A, f(r) = sigmoid(t * (r - 1)) * 4 / t.

    From arXiv:2511.20347; the temperature t depends on the sign of the advantage. The gradient is
    PPO's at r = 1, and fades out on both sides. The paper's aggregation is
    sequence_mean_token_mean.
    """
    log_ratio, advantages = compute_log_ratios(inputs), inputs.advantages
    temperature = select_by_sign(
        advantages, settings.temperature_positive, settings.temperature_negative
    )
    gate = torch.sigmoid(temperature * (log_ratio.exp() - 1)) * 4 / temperature
    return -gate * advantages, compute_ratio_metrics(log_ratio)


# Losses -w * A * log pi with weights w without gradient. Their values mean little.


@LOSSES.register("gpg")
@LOSSES.register("reinforce")
def reinforce(inputs: LossInputs) -> LossResult:
    """-A * log pi (Williams 1992): the policy gradient of on-policy samples, w = 1.

    Also the loss of GPG (arXiv:2504.02546), whose scale alpha is in the advantages.
    """
    weights = torch.ones_like(inputs.log_probs)
    return compute_policy_gradient(weights, inputs), compute_ratio_metrics(
        compute_log_ratios(inputs)
    )


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

    Equations 4 and 5 of MiniMax-M1 (arXiv:2506.13585), which in effect has no lower bound and does
    not give the upper one. The default, 5, is from ScaleRL (arXiv:2510.13786).
    """
    log_ratio = compute_log_ratios(inputs)
    ratio = log_ratio.detach().exp()
    weights = ratio.clamp(1 - settings.clip_ratio_low, 1 + settings.clip_ratio_high)
    metrics = compute_ratio_metrics(log_ratio) | {"clipped": weights != ratio}
    return compute_policy_gradient(weights, inputs), metrics


@dataclass(frozen=True)
class DPPOSettings:
    """Bounds beyond which a token is masked if its update would lead away from the old policy."""

    max_divergence_low: float = 0.15  # of tokens with a negative advantage
    max_divergence_high: float = 0.15  # of tokens with a positive advantage
    max_ratio: float = 20.0  # largest weight

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

    DPPO with binary total variation (arXiv:2602.04879), of the distribution {this token, any
    other}. Only tokens whose update leads further away have the bound: A > 0 and r > 1, or A < 0
    and r < 1. Weights are truncated as in section 5.4. The bounds are settings because the paper's
    depend on the model.
    """
    new, old = inputs.log_probs.detach().exp(), inputs.old_log_probs.exp()
    return _compute_dppo(inputs, settings, (new - old).abs())


@LOSSES.register("dppo_kl")
def dppo_kl(inputs: LossInputs, settings: DPPOKLSettings) -> LossResult:
    """DPPO as `dppo_tv`, with KL(old || new) of {this token, any other} as the divergence.

    The probability of any other token has 1e-8 added, so that the KL is finite at probability 1.
    """
    new, old = inputs.log_probs.detach().clamp(max=0), inputs.old_log_probs.clamp(max=0)
    rest_new, rest_old = 1e-8 - torch.expm1(new), 1e-8 - torch.expm1(old)
    divergence = old.exp() * (old - new) + (rest_old - 1e-8) * (rest_old / rest_new).log()
    return _compute_dppo(inputs, settings, divergence)


def _compute_dppo(inputs: LossInputs, settings: DPPOSettings, divergence: Tensor) -> LossResult:
    log_ratio = compute_log_ratios(inputs)
    low, high = settings.max_divergence_low, settings.max_divergence_high
    bound = select_by_sign(inputs.advantages, high, low)
    moves_away = torch.where(inputs.advantages > 0, log_ratio > 0, log_ratio < 0)
    masked = moves_away & (divergence > bound)
    weights = log_ratio.detach().exp().clamp(max=settings.max_ratio) * ~masked
    metrics = compute_ratio_metrics(log_ratio) | {"clipped": masked}
    return compute_policy_gradient(weights, inputs), metrics


@LOSSES.register("topr")
def topr(inputs: LossInputs) -> LossResult:
    """w = 1 for a positive advantage, min(R, 1) for a negative one; R is the sequence's ratio.

    Tapered off-policy REINFORCE, equation 8 of arXiv:2503.14286. R = exp(sum of its tokens' log
    ratios), not divided by the length. The paper's aggregation is sequence_mean_token_sum. The
    paper takes the sign of the reward minus a baseline, this the sign of the token's advantage.
    """
    log_ratio = compute_log_ratios(inputs)
    taper = inputs.sequence_sum(log_ratio.detach()).clamp(max=0).exp()
    weights = torch.where(inputs.advantages < 0, taper, 1)
    return compute_policy_gradient(weights, inputs), compute_ratio_metrics(log_ratio) | {
        "weight": weights
    }


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
    """w = R^k * exp(lambda * (1 - R)) with R the ratio of the sequence; k, lambda by the sign of A.

    Kernel of arXiv:2602.10693. R = exp(sum of its tokens' log ratios); the sum is clamped to +-20,
    as in the authors' code, which has these defaults.
    """
    log_ratio = compute_log_ratios(inputs)
    total = inputs.sequence_sum(log_ratio.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    k = select_by_sign(inputs.advantages, settings.k_positive, settings.k_negative)
    decay = select_by_sign(inputs.advantages, settings.lambda_positive, settings.lambda_negative)
    weights = (k * total + decay * (1 - total.exp())).exp()
    return compute_policy_gradient(weights, inputs), compute_ratio_metrics(log_ratio) | {
        "weight": weights
    }


@dataclass(frozen=True)
class DROSettings:
    beta: float  # weight of the squared log ratio

    def __post_init__(self) -> None:
        check_positive("beta", self.beta)


@LOSSES.register("dro")
def dro(inputs: LossInputs, settings: DROSettings) -> LossResult:
    """-A * log pi + beta / 2 * (log r)^2.

    Direct reward optimization: the policy's part of the loss of arXiv:2405.19107, whose value
    function is in A. The paper has the ratio of a sequence to a fixed reference; this, like verl,
    that of a token to the rollout policy. `kimi` is the form of sequences. log r is not clamped:
    its square is finite and must pull back a policy that has moved far.
    """
    log_ratio = compute_unclamped_log_ratios(inputs)
    loss = compute_policy_gradient(torch.ones_like(log_ratio), inputs)
    return loss + settings.beta / 2 * log_ratio.square(), compute_ratio_metrics(
        compute_log_ratios(inputs)
    )


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
    paper's aggregation is sequence_mean_token_mean. The log ratio of each token, and so their mean,
    is clamped to +-20. verl clamps only the mean, at 10 from above.

    Metrics: `ratio`, of the sequence; `clipped`; `approx_kl`, of the tokens.
    """
    log_ratio = compute_log_ratios(inputs)
    return _compute_gspo(inputs.sequence_mean(log_ratio).exp(), log_ratio, inputs, settings)


@LOSSES.register("gspo_token")
def gspo_token(inputs: LossInputs, settings: GSPOSettings) -> LossResult:
    """GSPO-token, equations 13 and 14: s_t = sg[s] * pi_t / sg[pi_t], for advantages of tokens.

    It has the values of `gspo`, and its gradients where all tokens of a sequence have the same
    advantage.
    """
    log_ratio = compute_log_ratios(inputs)
    straight_through = (log_ratio - log_ratio.detach()).exp()  # 1, with the token's gradient
    ratio = inputs.sequence_mean(log_ratio.detach()).exp() * straight_through
    return _compute_gspo(ratio, log_ratio, inputs, settings)


def _compute_gspo(
    ratio: Tensor, log_ratio: Tensor, inputs: LossInputs, settings: GSPOSettings
) -> LossResult:
    low, high = settings.clip_ratio_low, settings.clip_ratio_high
    loss, clipped = compute_clipped_surrogate(ratio, inputs.advantages, low, high)
    return loss, compute_ratio_metrics(log_ratio) | {"ratio": ratio.detach(), "clipped": clipped}


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
    return loss * _count_trained(inputs), metrics


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

    Objective of arXiv:2507.20673: log ratios of tokens are at most `high` where A > 0, at least
    -`low` where A < 0. A is the mean of the tokens' advantages; the paper has one per sequence. Its
    aggregation is sequence_mean_token_mean.
    """
    log_ratio, advantages = compute_log_ratios(inputs), inputs.advantages
    bounded = torch.where(
        advantages > 0,
        log_ratio.clamp(max=settings.clip_log_ratio_high),
        log_ratio.clamp(min=-settings.clip_log_ratio_low),
    )
    ratio = inputs.sequence_mean(bounded).exp()
    metrics = compute_ratio_metrics(log_ratio) | {"ratio": ratio.detach()}
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
    ratios of the tokens. The paper's loss is the sum over a sequence (aggregation
    sequence_mean_token_sum), its A the reward minus the mean of the group (grpo without
    normalize_by_std). It does not give a tau. As in `dro`, log ratios are not clamped.
    """
    total = inputs.sequence_sum(compute_unclamped_log_ratios(inputs))
    square = total.square() / _count_trained(inputs).clamp(min=1)
    loss = -inputs.advantages * inputs.log_probs + settings.tau / 2 * square
    return loss, compute_ratio_metrics(compute_log_ratios(inputs))


def _count_trained(inputs: LossInputs) -> Tensor:
    """Count the tokens to train on of each token's sequence: [tokens]."""
    return inputs.sequence_sum(torch.ones_like(inputs.log_probs.detach()))


# Losses that treat some tokens of the mini-batch differently, selected by the policy before the
# update, so that the selection does not depend on micro-batches and ranks.


@dataclass(frozen=True)
class ClipCovSettings(PPOClipSettings):
    fraction: float = 2e-4  # largest share of trained tokens to select
    covariance_low: float = 1.0  # tokens are selected from between these bounds
    covariance_high: float = 5.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_between("fraction", self.fraction, 0, 1)
        check_at_least("covariance_high", self.covariance_high, self.covariance_low)


def select_between(inputs: MiniBatchInputs, settings: ClipCovSettings) -> dict[str, Jagged]:
    """Select random tokens among those whose covariance is within the bounds, at least one.

    As in the authors' code, tokens that PPO clips are left out.
    """
    trained, covariances = _find_trained(inputs), _compute_covariances(inputs)
    ratio, advantages = np.exp(_compute_log_ratio(inputs)), inputs.advantages.values
    too_high = (advantages > 0) & (ratio > 1 + settings.clip_ratio_high)
    too_low = (advantages < 0) & (ratio < 1 - settings.clip_ratio_low)
    is_between = (covariances > settings.covariance_low) & (covariances < settings.covariance_high)
    indices = np.flatnonzero(trained & is_between & ~too_high & ~too_low)
    # Sorted, so that the draw does not depend on the order of samples.
    indices = indices[np.argsort(covariances[indices], kind="stable")]
    num = max(int(settings.fraction * trained.sum()), 1)
    return _build_selected(inputs, np.random.default_rng(inputs.seed).permutation(indices)[:num])


@LOSSES.register("clip_cov")
@prepared_by(select_between)
def clip_cov(inputs: LossInputs, settings: ClipCovSettings) -> LossResult:
    """ppo_clip without a few random tokens of high covariance, which reduce entropy the most.

    Clip-Cov of Cui et al. 2025 (arXiv:2505.22617, section 4). The covariance of a token is
    (log pi - its mean) * (A - its mean), with means over the mini-batch; the authors' are over the
    micro-batch.

    Metrics: those of ppo_clip, and `selected`.
    """
    loss, metrics = ppo_clip(inputs, settings)
    selected = inputs.prepared("selected") != 0
    return torch.where(selected, 0, loss), {**metrics, "selected": selected}


@dataclass(frozen=True)
class KLCovSettings:
    fraction: float = 2e-4  # share of trained tokens to select; 2e-3 for small models
    kl_coef: float = 1.0  # weight of their KL

    def __post_init__(self) -> None:
        check_between("fraction", self.fraction, 0, 1)
        check_at_least("kl_coef", self.kl_coef, 0)


def select_highest(inputs: MiniBatchInputs, settings: KLCovSettings) -> dict[str, Jagged]:
    """Select the tokens of the highest covariances, at least one."""
    indices = np.flatnonzero(_find_trained(inputs))
    order = np.argsort(-_compute_covariances(inputs)[indices], kind="stable")
    return _build_selected(inputs, indices[order][: max(int(settings.fraction * len(indices)), 1)])


@LOSSES.register("kl_cov")
@prepared_by(select_highest)
def kl_cov(inputs: LossInputs, settings: KLCovSettings) -> LossResult:
    """-r * A; at the tokens of the highest covariance also + kl_coef * |log r|.

    KL-Cov of Cui et al. 2025 (arXiv:2505.22617, section 4), covariances as for `clip_cov`. The
    paper has the KL to the old policy, its code |log r|. |log r| is not clamped.

    Metrics: also `selected`.
    """
    log_ratio = compute_log_ratios(inputs)
    selected = inputs.prepared("selected") != 0
    penalty = settings.kl_coef * compute_unclamped_log_ratios(inputs).abs()
    loss = -log_ratio.exp() * inputs.advantages + torch.where(selected, penalty, 0)
    return loss, compute_ratio_metrics(log_ratio) | {"selected": selected}


@dataclass(frozen=True)
class M2POSettings:
    max_second_moment: float = 0.04  # of the log ratios of the remaining tokens

    def __post_init__(self) -> None:
        check_positive("max_second_moment", self.max_second_moment)


def select_outliers(inputs: MiniBatchInputs, settings: M2POSettings) -> dict[str, Jagged]:
    """Select the largest (log r)^2 until the mean of the rest is at most max_second_moment.

    Among the tokens that a trust region is for: A > 0 and r > 1, or A < 0 and r < 1.
    """
    log_ratio, advantages = _compute_log_ratio(inputs), inputs.advantages.values
    indices = np.flatnonzero(_find_trained(inputs) & (log_ratio * advantages > 0))
    squares = log_ratio[indices] ** 2
    order = np.argsort(squares, kind="stable")
    means = np.cumsum(squares[order]) / np.arange(1, len(indices) + 1)
    return _build_selected(inputs, indices[order][means > settings.max_second_moment])


@LOSSES.register("m2po")
@prepared_by(select_outliers)
def m2po(inputs: LossInputs, settings: M2POSettings) -> LossResult:
    """-r * A without outliers, so that the second moment of the other log ratios is bounded.

    Second-moment trust policy optimization (arXiv:2510.01161): the largest are left out first. The
    paper selects anew in each micro-batch. As in the authors' code, tokens that PPO would clip are
    candidates; in AReaL's, all tokens.

    Metrics: also `clipped`, true where a token is left out.
    """
    log_ratio = compute_log_ratios(inputs)
    selected = inputs.prepared("selected") != 0
    loss = torch.where(selected, 0, -log_ratio.exp() * inputs.advantages)
    return loss, compute_ratio_metrics(log_ratio) | {"clipped": selected}


@dataclass(frozen=True)
class PositiveNLLSettings(PPOClipSettings):
    nll_coef: float = 0.1  # weight of the negative log-likelihood
    min_reward: float = 1.0  # least reward of a positive sample

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("nll_coef", self.nll_coef, 0)


def weigh_positive(inputs: MiniBatchInputs, settings: PositiveNLLSettings) -> dict[str, Jagged]:
    """Weigh tokens of positive samples by trained tokens / their number; others have 0."""
    mask = inputs.response_mask
    trained, is_positive = _find_trained(inputs), inputs.rewards >= settings.min_reward
    positive_tokens = trained & np.repeat(is_positive, mask.lengths)
    weights = positive_tokens * (trained.sum() / max(positive_tokens.sum(), 1))
    return {"nll_weights": mask.with_values(weights.astype(np.float32))}


@LOSSES.register("positive_nll")
@prepared_by(weigh_positive)
def positive_nll(inputs: LossInputs, settings: PositiveNLLSettings) -> LossResult:
    """ppo_clip + nll_coef * the mean of -log pi over the tokens of correct samples.

    Positive-example loss of VAPO (arXiv:2504.05118). As in the paper, the mean is over the
    mini-batch if the aggregation is token_mean.

    Metrics: those of ppo_clip, and `nll`, averaged over these tokens.
    """
    loss, metrics = ppo_clip(inputs, settings)
    nll = -inputs.prepared("nll_weights") * inputs.log_probs
    return loss + settings.nll_coef * nll, {**metrics, "nll": nll.detach()}


def _find_trained(inputs: MiniBatchInputs) -> npt.NDArray[np.bool_]:
    return np.asarray(inputs.loss_weights.values != 0)


def _compute_log_ratio(inputs: MiniBatchInputs) -> Floats:
    new, old = inputs.log_probs.values, inputs.old_log_probs.values
    log_ratio = np.subtract(new, old, dtype=np.float64)
    return log_ratio.clip(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _compute_covariances(inputs: MiniBatchInputs) -> Floats:
    """Compute (log pi - its mean) * (A - its mean), with means over the trained tokens."""
    columns, trained = (inputs.log_probs, inputs.advantages), _find_trained(inputs)
    values = [column.values.astype(np.float64) for column in columns]
    log_probs, advantages = (
        value - value[trained].sum() / max(trained.sum(), 1) for value in values
    )
    return np.asarray(log_probs * advantages)


def _build_selected(inputs: MiniBatchInputs, indices: npt.NDArray[np.integer]) -> dict[str, Jagged]:
    selected = np.zeros(len(inputs.response_mask.values), np.int8)
    selected[indices] = 1
    return {"selected": inputs.response_mask.with_values(selected)}


@dataclass(frozen=True, slots=True)
class ValueClipSettings:
    clip_range: float = 0.2  # largest change from the old value, in the unit of the returns


def value_clip(inputs: LossInputs, settings: ValueClipSettings) -> LossResult:
    """max((V - R)^2, (V_old + clip(V - V_old, -c, c) - R)^2) / 2.

    From the code of Schulman et al. 2017 (openai/baselines, ppo2/model.py), not their paper. A
    value that has moved by more than c towards its return gets no gradient, one that has moved away
    always does. An infinite c leaves (V - R)^2 / 2.

    Reads values, old_values and returns. Returns the loss of each token and, detached, per token:
    `value_clipped`, true where the loss is clipped and has no gradient; `value_error`, (V - R)^2.
    """
    values, returns = inputs.values, inputs.returns
    moved = values - inputs.old_values.detach()
    error = (values - returns).square()
    # Written so that a value within the clip stays bitwise equal.
    clipped = values + (moved.clamp(-settings.clip_range, settings.clip_range) - moved)
    clipped_error = (clipped - returns).square()
    metrics = {
        "value_clipped": clipped_error.detach() > error.detach(),
        "value_error": error.detach(),
    }
    return torch.maximum(error, clipped_error) / 2, metrics


def negative_log_likelihood(inputs: LossInputs) -> LossResult:
    """Return -log pi of each target token, in nats: the loss of supervised training."""
    return -inputs.log_probs, {}


def linear_in_scores(inputs: LossInputs) -> LossResult:
    """Return the log-prob or the value of each token.

    With the derivatives of a loss by these as loss_weights, the gradient is that of the loss.
    """
    [name] = inputs.scores.keys() & {"log_probs", "values"}
    return inputs.scores[name], {}
