"""Losses that treat some tokens of the mini-batch in another way: which is known before the update.

So the choice does not depend on how the mini-batch is split over micro-batches and ranks. It is
that of the policy before the update.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from mcore_rl.algorithms.inputs import LossInputs, LossResult
from mcore_rl.algorithms.loss_parts import (
    LOSSES,
    MAX_LOG_RATIO,
    log_ratios,
    ratio_metrics,
    unclamped_log_ratios,
)
from mcore_rl.algorithms.ppo import ppo_clip
from mcore_rl.algorithms.prepared import MiniBatchInputs, prepared_by
from mcore_rl.config.checks import check_at_least, check_between, check_positive
from mcore_rl.config.schema import PPOClipSettings
from mcore_rl.data.batch import Jagged

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ClipCovSettings(PPOClipSettings):
    fraction: float = 2e-4  # most tokens that are selected, of all trained ones
    covariance_low: float = 1.0  # tokens are selected between these
    covariance_high: float = 5.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_between("fraction", self.fraction, 0, 1)
        check_at_least("covariance_high", self.covariance_high, self.covariance_low)


def select_between(inputs: MiniBatchInputs, settings: ClipCovSettings) -> dict[str, Jagged]:
    """`selected`: tokens at random among those whose covariance is within the bounds.

    As in the authors' code, tokens that PPO clips already are left out, and it is one at least.
    """
    trained, covariances = _trained(inputs), _covariances(inputs)
    ratio, advantages = np.exp(_log_ratio(inputs)), inputs.advantages.values
    too_high = (advantages > 0) & (ratio > 1 + settings.clip_ratio_high)
    too_low = (advantages < 0) & (ratio < 1 - settings.clip_ratio_low)
    among = (covariances > settings.covariance_low) & (covariances < settings.covariance_high)
    places = np.flatnonzero(trained & among & ~too_high & ~too_low)
    # In an order that does not depend on that of the samples.
    places = places[np.argsort(covariances[places], kind="stable")]
    num = max(int(settings.fraction * trained.sum()), 1)
    return _selected(inputs, np.random.default_rng(inputs.seed).permutation(places)[:num])


@LOSSES.register("clip_cov")
@prepared_by(select_between)
def clip_cov(inputs: LossInputs, settings: ClipCovSettings) -> LossResult:
    """ppo_clip without a few tokens at random, of high covariance: they cost the most entropy.

    Clip-Cov of Cui et al. 2025 (arXiv:2505.22617, section 4). The covariance of a token is
    (log pi - its mean) * (A - its mean); means are over the tokens of the mini-batch. The authors
    take those of a micro-batch.

    Metrics: those of ppo_clip, and `selected`.
    """
    loss, metrics = ppo_clip(inputs, settings)
    selected = inputs.prepared("selected") != 0
    return torch.where(selected, 0, loss), {**metrics, "selected": selected}


@dataclass(frozen=True)
class KLCovSettings:
    fraction: float = 2e-4  # tokens that are selected, of all trained ones; 2e-3 for small models
    kl_coef: float = 1.0  # weight of their KL

    def __post_init__(self) -> None:
        check_between("fraction", self.fraction, 0, 1)
        check_at_least("kl_coef", self.kl_coef, 0)


def select_highest(inputs: MiniBatchInputs, settings: KLCovSettings) -> dict[str, Jagged]:
    """`selected`: the tokens of the highest covariances, one at least."""
    places = np.flatnonzero(_trained(inputs))
    order = np.argsort(-_covariances(inputs)[places], kind="stable")
    return _selected(inputs, places[order][: max(int(settings.fraction * len(places)), 1)])


@LOSSES.register("kl_cov")
@prepared_by(select_highest)
def kl_cov(inputs: LossInputs, settings: KLCovSettings) -> LossResult:
    """-r * A; at the tokens of the highest covariance also + kl_coef * |log r|.

    KL-Cov of Cui et al. 2025 (arXiv:2505.22617, section 4), covariances as for `clip_cov`. The
    paper has the KL to the old policy there, and |log r| in its code. |log r| is not clamped.

    Metrics: also `selected`.
    """
    log_ratio = log_ratios(inputs)
    selected = inputs.prepared("selected") != 0
    penalty = settings.kl_coef * unclamped_log_ratios(inputs).abs()
    loss = -log_ratio.exp() * inputs.advantages + torch.where(selected, penalty, 0)
    return loss, ratio_metrics(log_ratio) | {"selected": selected}


@dataclass(frozen=True)
class M2POSettings:
    max_second_moment: float = 0.04  # of the log ratios that are left

    def __post_init__(self) -> None:
        check_positive("max_second_moment", self.max_second_moment)


def select_outliers(inputs: MiniBatchInputs, settings: M2POSettings) -> dict[str, Jagged]:
    """`selected`: the tokens to leave out, until the mean of (log r)^2 of the rest is small enough.

    Of the tokens that a trust region is for: A > 0 and r > 1, or A < 0 and r < 1.
    """
    log_ratio, advantages = _log_ratio(inputs), inputs.advantages.values
    places = np.flatnonzero(_trained(inputs) & (log_ratio * advantages > 0))
    squares = log_ratio[places] ** 2
    order = np.argsort(squares, kind="stable")
    means = np.cumsum(squares[order]) / np.arange(1, len(places) + 1)
    return _selected(inputs, places[order][means > settings.max_second_moment])


@LOSSES.register("m2po")
@prepared_by(select_outliers)
def m2po(inputs: LossInputs, settings: M2POSettings) -> LossResult:
    """-r * A without the outliers: the second moment of the other log ratios is bounded.

    Second-moment trust policy optimization (arXiv:2510.01161): the largest are left out first. The
    paper recomputes the choice in each micro-batch. As in the authors' code, it is among the
    tokens that PPO would clip; AReaL's takes all tokens.

    Metrics: also `clipped`, true where a token is left out.
    """
    log_ratio = log_ratios(inputs)
    selected = inputs.prepared("selected") != 0
    loss = torch.where(selected, 0, -log_ratio.exp() * inputs.advantages)
    return loss, ratio_metrics(log_ratio) | {"clipped": selected}


@dataclass(frozen=True)
class PositiveNLLSettings(PPOClipSettings):
    nll_coef: float = 0.1  # weight of the negative log-likelihood
    min_reward: float = 1.0  # samples with this reward or more are positive

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("nll_coef", self.nll_coef, 0)


def weigh_positive(inputs: MiniBatchInputs, settings: PositiveNLLSettings) -> dict[str, Jagged]:
    """`nll_weights`: at tokens of positive samples, all trained tokens by theirs; else 0."""
    mask = inputs.response_mask
    trained, is_positive = _trained(inputs), inputs.rewards >= settings.min_reward
    chosen = trained & np.repeat(is_positive, mask.lengths)
    weights = chosen * (trained.sum() / max(chosen.sum(), 1))
    return {"nll_weights": mask.with_values(weights.astype(np.float32))}


@LOSSES.register("positive_nll")
@prepared_by(weigh_positive)
def positive_nll(inputs: LossInputs, settings: PositiveNLLSettings) -> LossResult:
    """ppo_clip + nll_coef * the mean of -log pi over the tokens of correct samples.

    The positive-example loss of VAPO (arXiv:2504.05118), which is of the mini-batch, as in the
    paper, with the aggregation token_mean.

    Metrics: those of ppo_clip, and `nll`, whose mean is that of these tokens.
    """
    loss, metrics = ppo_clip(inputs, settings)
    nll = -inputs.prepared("nll_weights") * inputs.log_probs
    return loss + settings.nll_coef * nll, {**metrics, "nll": nll.detach()}


def _trained(inputs: MiniBatchInputs) -> Bools:
    return np.asarray(inputs.loss_weights.values != 0)


def _log_ratio(inputs: MiniBatchInputs) -> Floats:
    new, old = inputs.log_probs.values, inputs.old_log_probs.values
    log_ratio = np.subtract(new, old, dtype=np.float64)
    return log_ratio.clip(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _covariances(inputs: MiniBatchInputs) -> Floats:
    """[response tokens]: (log pi - its mean) * (A - its mean), means over the trained tokens."""
    columns, trained = (inputs.log_probs, inputs.advantages), _trained(inputs)
    values = [column.values.astype(np.float64) for column in columns]
    log_probs, advantages = (
        value - value[trained].sum() / max(trained.sum(), 1) for value in values
    )
    return np.asarray(log_probs * advantages)


def _selected(inputs: MiniBatchInputs, places: npt.NDArray[np.integer]) -> dict[str, Jagged]:
    selected = np.zeros(len(inputs.response_mask.values), np.int8)
    selected[places] = 1
    return {"selected": inputs.response_mask.with_values(selected)}
