"""Rollout correction: importance weights and rejection where servers and trainer disagree.

Kernels, precision and old weights make the rollout policy differ from the trainer's. Weights and
rejection are functions of the ratios of a step, the trainer's probability divided by the server's,
computed once, before the first update. Log-probs are in nats.

Same results as verl's rollout_corr_helper.py (0.9.1) where it has the same method. Its bounds of k1
are for the inverse ratio, server / trainer: use 1 / bound here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from mcore_rl.algorithms.losses import MAX_LOG_RATIO
from mcore_rl.algorithms.reductions import ChosenTokens, Floats, sum_by_index
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import CorrectionConfig
from mcore_rl.data.batch import Batch

Bools = npt.NDArray[np.bool_]
Bound = float | tuple[float, float]  # largest value, or smallest and largest ratio

_MIN_PROBABILITY = 1e-6  # of each event of a binary KL, which is infinite at 0


def clamp(logs: Floats) -> Floats:
    """Clamp log ratios to +-20, so that their exponential is finite."""
    return logs.clip(-MAX_LOG_RATIO, MAX_LOG_RATIO)


@dataclass(frozen=True, slots=True, eq=False)
class Ratios:
    """Ratios trainer / server of the chosen tokens of a batch."""

    tokens: ChosenTokens
    log_probs: Floats  # by the trainer: [chosen tokens]
    rollout_log_probs: Floats  # by the server: [chosen tokens]

    @classmethod
    def build(cls, batch: Batch) -> Ratios:
        """Read the chosen tokens of a batch."""
        tokens = ChosenTokens(batch.jagged("response_mask"))
        columns = (batch.jagged(name) for name in ("log_probs", "rollout_log_probs"))
        return cls(tokens, *(tokens.select(column) for column in columns))

    @property
    def logs(self) -> Floats:
        """Log ratios: [chosen tokens]."""
        return self.log_probs - self.rollout_log_probs

    @property
    def rows(self) -> npt.NDArray[np.int64]:
        """Sequence of each token: [chosen tokens]."""
        return self.tokens.rows

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """Number of chosen tokens of each sequence: [sequences]."""
        return self.tokens.counts

    def sum(self, values: Floats) -> Floats:
        """Sum over each sequence: [chosen tokens] to [sequences]."""
        return sum_by_index(self.rows, values, len(self.counts))

    def mean(self, values: Floats) -> Floats:
        """Average over each sequence; 0 if it has no chosen token."""
        means: Floats = self.sum(values) / np.maximum(self.counts, 1)
        return means

    def max(self, values: Floats) -> Floats:
        """Take the maximum over each sequence of values from 0 on."""
        maxima = np.zeros(len(self.counts))
        np.maximum.at(maxima, self.rows, values)
        return maxima


@dataclass(frozen=True, slots=True)
class RejectionRule:
    """Rule of algorithm.correction.reject. A rejected sequence fails with all its tokens."""

    passes: Callable[[Ratios, Bound], Bools]  # [chosen tokens]
    num_bounds: int = 1  # 2: the smallest and the largest ratio
    is_for_negative: bool = False  # only tokens of negative advantage can fail
    is_excluded_from_mean: bool = True  # failing tokens do not count in the mean of the loss


def check_bound(key: str, rule: RejectionRule, bound: object) -> None:
    """Raise ConfigError for a bound that the rule does not take."""
    values = bound if isinstance(bound, (list, tuple)) else (bound,)
    are_positive = all(type(value) in (int, float) and 0 < value < math.inf for value in values)
    if not are_positive or len(values) != rule.num_bounds or values[0] > values[-1]:
        allowed = "a number above 0" if rule.num_bounds == 1 else "two ratios, such as [0.5, 2.0]"
        raise ConfigError(f"{key}={bound!r}; allowed: {allowed}")


def _compute_k1(ratios: Ratios) -> Floats:
    """Return the log ratio, which is minus k1 of KL(server || trainer)."""
    return clamp(ratios.logs)


def _compute_k2(ratios: Ratios) -> Floats:
    return clamp(ratios.logs) ** 2 / 2


def _compute_k3(ratios: Ratios) -> Floats:
    logs = clamp(ratios.logs)
    return np.asarray(np.expm1(logs) - logs)


_STATISTICS: dict[str, Callable[[Ratios], Floats]] = {
    "k1": _compute_k1,
    "k2": _compute_k2,
    "k3": _compute_k3,
}
_OVER_SEQUENCES: dict[str, Callable[[Ratios, Floats], Floats]] = {
    "sequence_sum": Ratios.sum,
    "sequence_mean": Ratios.mean,
    "sequence_max": Ratios.max,
}


def _check_kl(level: str, statistic: str, ratios: Ratios, bound: Bound) -> Bools:
    """Compare the KL(server || trainer) of a token, or its sum, mean or maximum over a sequence.

    k1 is compared as the log ratio, its bounds are ratios. Rejection by k1, k2 and k3: Liu et al.
    2025, "When speed kills stability" (richardli.xyz/rl-collapse), and verl's token_k1 to
    seq_max_k3.
    """
    values = _STATISTICS[statistic](ratios)
    if level != "token":
        values = _OVER_SEQUENCES[level](ratios, values)[ratios.rows]
    return _check_within(values, bound)


def _check_within(values: Floats, bound: Bound) -> Bools:
    if isinstance(bound, (int, float)):
        return np.asarray(values <= bound)
    low, high = bound
    return np.asarray((values >= math.log(low)) & (values <= math.log(high)))


def _check_veto(ratios: Ratios, bound: Bound) -> Bools:
    """Reject sequences with any token out of bounds."""
    fails = (~_check_within(_compute_k1(ratios), bound)).astype(np.float64)
    return np.asarray(ratios.max(fails)[ratios.rows] == 0)


def _check_binary_kl(ratios: Ratios, bound: Bound) -> Bools:
    """Check the KL of two events, this token or any other, in both directions.

    KPop (Guo et al. 2026, ringtech.notion.site/kpop, with the bound 0.1), a trust region that
    adapts to the token: with p of the trainer and q of the server, a token passes if neither
    p log(p/q) + (1-p) log((1-p)/(1-q)) nor the same with p and q exchanged is above the bound.
    Probabilities are clipped to 1e-6 and 1 - 1e-6.
    """
    logs = (ratios.log_probs, ratios.rollout_log_probs)
    p, q = (np.exp(x).clip(_MIN_PROBABILITY, 1 - _MIN_PROBABILITY) for x in logs)
    this, other = np.log(p / q), np.log((1 - p) / (1 - q))
    return _check_within(np.maximum(p * this + (1 - p) * other, -q * this - (1 - q) * other), bound)


def _check_sequence_drift(ratios: Ratios, bound: Bound) -> Bools:
    """Check the mean of log(server / trainer) of each sequence.

    Off-policy sequence masking of DeepSeek-V3.2 (arXiv:2512.02556, equations 8 and 9), for
    sequences of negative advantage. The paper takes the policy in training, this the policy before
    the first update of the step, so that loss weights stay fixed.
    """
    return _check_within(-ratios.mean(ratios.logs)[ratios.rows], bound)


RULES = {
    f"{level}_{statistic}": RejectionRule(
        partial(_check_kl, level, statistic), 2 if statistic == "k1" else 1
    )
    for level in ("token", *_OVER_SEQUENCES)
    for statistic in _STATISTICS
    if (level, statistic) != ("sequence_max", "k1")  # the same as veto
} | {
    "veto": RejectionRule(_check_veto, 2),
    "token_binary_kl": RejectionRule(_check_binary_kl, is_excluded_from_mean=False),
    "negative_sequence_k1": RejectionRule(
        _check_sequence_drift, is_for_negative=True, is_excluded_from_mean=False
    ),
}


def compute_mismatch(batch: Batch) -> dict[str, float]:
    """Compute the metrics mismatch/... of trainer and servers; none without a chosen token.

    kl and k3_kl: estimates of KL(server || trainer) per token, in nats. log_ratio_pNN: percentiles
    over tokens. effective_sample_size: (sum w)^2 / (n sum w^2) with w the ratios of the n tokens,
    or of sequences: the share of the batch that importance weights would leave.
    """
    ratios = Ratios.build(batch)
    if not len(ratios.rows):
        return {}
    logs = clamp(ratios.logs)
    sequence_logs = clamp(ratios.sum(ratios.logs)[ratios.counts > 0])
    metrics = {"kl": -ratios.logs.mean(), "k3_kl": (np.expm1(logs) - logs).mean()}
    for percent in (1, 50, 99):
        metrics[f"log_ratio_p{percent:02}"] = np.percentile(ratios.logs, percent)
    metrics["effective_sample_size"] = _compute_effective_share(np.exp(logs))
    metrics["effective_sample_size_sequences"] = _compute_effective_share(np.exp(sequence_logs))
    return {f"mismatch/{name}": float(value) for name, value in metrics.items()}


def apply_correction(batch: Batch, config: CorrectionConfig) -> tuple[Batch, dict[str, float]]:
    """Add the columns correction_weights and policy_mask, if any method is set.

    correction_weights multiply the policy loss: importance weights, 0 at masked tokens. policy_mask
    is the response_mask without rejected tokens: the policy loss is normalised over it. Other
    losses have all tokens.

    Reads log_probs, rollout_log_probs and response_mask, and advantages for negative_sequence_k1.

    Returns:
        The batch and the metrics correction/..., as shares of the chosen tokens.
    """
    if not (config.has_weights or config.reject):
        return batch, {}
    ratios = Ratios.build(batch)
    if not len(ratios.rows):
        return batch, {}
    weights, metrics = compute_importance_weights(ratios, config)
    is_accepted = np.ones(len(weights), bool)
    for name, bound in config.reject.items():
        rule = RULES[name]
        passes = rule.passes(ratios, bound)
        if rule.is_for_negative:
            passes |= ratios.tokens.select(batch.jagged("advantages")) >= 0
        metrics[name] = float(1 - passes.mean())
        if rule.is_excluded_from_mean:
            is_accepted &= passes
        else:
            weights = np.where(passes, weights, 0)
    is_trained = is_accepted & (weights != 0)
    has_trained = ratios.max(is_trained.astype(np.float64))[ratios.counts > 0]
    metrics["rejected_tokens"] = float(1 - is_trained.mean())
    metrics["rejected_sequences"] = float(1 - has_trained.mean())
    for name, values in {"correction_weights": weights, "policy_mask": is_accepted}.items():
        column = ratios.tokens.scatter(values.astype(np.float64))
        column = column.with_values(column.values.astype(np.float32))
        batch = batch.with_columns(**{name: column})
    return batch, {f"correction/{name}": value for name, value in metrics.items()}


def compute_importance_weights(
    ratios: Ratios, config: CorrectionConfig
) -> tuple[Floats, dict[str, float]]:
    """Compute the weight of each of [chosen tokens], and metrics; all weights are 1 for level off.

    rho is the ratio of the token, or the product or geometric mean of the ratios of its sequence,
    by level.

    truncate: min(rho, weight_max). Truncated importance sampling, TIS: Yao et al. 2025, "Your
    efficient RL framework secretly brings you off-policy RL training"
    (fengyao.notion.site/off-policy-rl); of sequences, Liu et al. 2025, "When speed kills stability"
    (richardli.xyz/rl-collapse).
    mask: rho where weight_min <= rho <= weight_max, else 0, without a new normalisation. Of tokens
    with both bounds it is IcePop (arXiv:2510.18855), with weight_max alone masked importance
    sampling, MIS (Liu et al. 2025).

    normalize divides by the mean of the weights over tokens, or over sequences for their levels.
    Log ratios are clamped to +-20 after summing.
    """
    if not config.has_weights:
        return np.ones(len(ratios.rows)), {}
    logs = ratios.logs
    if config.level != "token":
        reduce = ratios.sum if config.level == "sequence" else ratios.mean
        logs = reduce(logs)[ratios.rows]
    raw = np.exp(clamp(logs))
    is_beyond: Bools = raw > config.weight_max
    if config.method == "truncate":
        weights = np.minimum(raw, config.weight_max)
    else:
        is_beyond = is_beyond | (raw < config.weight_min)
        weights = np.where(is_beyond, 0, raw)
    metrics = {
        "weight_mean": float(weights.mean()),
        "clipped": float(is_beyond.mean()),
        "effective_sample_size": _compute_effective_share(weights),
    }
    if config.normalize and weights.any():
        is_of_tokens = config.level == "token"
        averaged = weights if is_of_tokens else ratios.mean(weights)[ratios.counts > 0]
        weights = weights / averaged.mean()
    return weights, metrics


def find_gaps_beyond(gaps: Mapping[str, float], bounds: Mapping[str, float]) -> list[str]:
    """Return the names of gaps that are larger than the bounds of these names."""
    # NaN is beyond any bound.
    return [name for name, gap in gaps.items() if not gap <= bounds[name]]


def check_rules(config: CorrectionConfig) -> None:
    """Raise ConfigError for a rule that does not exist, or a bound that it does not take."""
    key = "algorithm.correction.reject"
    for name, bound in config.reject.items():
        if name not in RULES:
            raise ConfigError(f"{key}.{name} is no rule; allowed: {', '.join(RULES)}")
        check_bound(f"{key}.{name}", RULES[name], bound)


def _compute_effective_share(weights: Floats) -> float:
    """Compute (sum w)^2 / (n sum w^2); 0 where all weights are 0."""
    squares = len(weights) * np.square(weights).sum()
    return float(weights.sum() ** 2 / squares) if squares else 0.0
