"""Rollout correction: what is done about servers whose probabilities are not the trainer's.

Kernels, precision and old weights make the policy that generated another one than the trainer's.
Importance weights and rejection are functions of the ratios of a step, the trainer's probability
divided by the server's, and are computed once, before the first update.

verl's rollout_corr_helper.py (0.9.1) gives the same where it has the same. One thing to translate:
its bounds of k1 are for the server's probability divided by the trainer's, each one over ours.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mcore_rl.algorithms.correction_rules import (
    RULES,
    Bools,
    Ratios,
    check_bound,
    clamped,
)
from mcore_rl.algorithms.reductions import Floats
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import CorrectionConfig
from mcore_rl.data.batch import Batch


def mismatch(batch: Batch) -> dict[str, float]:
    """How far trainer and servers are apart; nothing for a batch without a chosen token.

    kl and k3_kl: estimates of KL(server || trainer) a token, in nats. log_ratio_pNN: percentiles
    over tokens. effective_sample_size: (sum w)^2 / (n sum w^2) with w the ratios of the n tokens,
    or of whole sequences: the share of the batch that importance weights would leave.
    """
    ratios = Ratios.of(batch)
    if not len(ratios.rows):
        return {}
    logs = clamped(ratios.logs)
    of_sequences = clamped(ratios.sums(ratios.logs)[ratios.counts > 0])
    found = {"kl": -ratios.logs.mean(), "k3_kl": (np.expm1(logs) - logs).mean()}
    for percent in (1, 50, 99):
        found[f"log_ratio_p{percent:02}"] = np.percentile(ratios.logs, percent)
    found["effective_sample_size"] = _effective_share(np.exp(logs))
    found["effective_sample_size_sequences"] = _effective_share(np.exp(of_sequences))
    return {f"mismatch/{name}": float(value) for name, value in found.items()}


def corrected(batch: Batch, config: CorrectionConfig) -> tuple[Batch, dict[str, float]]:
    """Adds what the settings ask for, and gives its metrics, as shares of the chosen tokens.

    The column correction_weights multiplies the policy loss: importance weights, 0 at tokens that
    a method masks. The column policy_mask is the response_mask without what is rejected: the policy
    loss is normalised over it. Other losses have all tokens.

    Reads log_probs, rollout_log_probs and response_mask, and advantages for negative_sequence_k1.
    """
    if not (config.has_weights or config.reject):
        return batch, {}
    ratios = Ratios.of(batch)
    if not len(ratios.rows):
        return batch, {}
    weights, metrics = importance_weights(ratios, config)
    kept = np.ones(len(weights), bool)
    for name, bound in config.reject.items():
        rule = RULES[name]
        passes = rule.passes(ratios, bound)
        if rule.for_negative:
            passes |= ratios.tokens.of(batch.jagged("advantages")) >= 0
        metrics[name] = float(1 - passes.mean())
        if rule.normalised_over_rest:
            kept &= passes
        else:
            weights = np.where(passes, weights, 0)
    is_trained = kept & (weights != 0)
    is_left = ratios.largest(is_trained.astype(np.float64))[ratios.counts > 0]
    metrics["rejected_tokens"] = float(1 - is_trained.mean())
    metrics["rejected_sequences"] = float(1 - is_left.mean())
    for name, values in {"correction_weights": weights, "policy_mask": kept}.items():
        column = ratios.tokens.spread(values.astype(np.float64))
        column = column.with_values(column.values.astype(np.float32))
        batch = batch.with_columns(**{name: column})
    return batch, {f"correction/{name}": value for name, value in metrics.items()}


def importance_weights(ratios: Ratios, config: CorrectionConfig) -> tuple[Floats, dict[str, float]]:
    """[chosen tokens], and metrics; all 1 for level off.

    With rho the ratio of the token, the product of the ratios of its sequence, or their geometric
    mean, by level:

    truncate: min(rho, weight_max). Truncated importance sampling, TIS: Yao et al. 2025, "Your
    efficient RL framework secretly brings you off-policy RL training"
    (fengyao.notion.site/off-policy-rl); of sequences, Liu et al. 2025, "When speed kills stability"
    (richardli.xyz/rl-collapse).
    mask: rho where weight_min <= rho <= weight_max, else 0, without a new norm. Of tokens with both
    bounds it is IcePop (arXiv:2510.18855), with weight_max alone masked importance sampling, MIS
    (Liu et al. 2025).

    normalize divides by their mean, over tokens or, for the other levels, over sequences. Log
    ratios are clamped to +-20 after they have been summed.
    """
    if not config.has_weights:
        return np.ones(len(ratios.rows)), {}
    logs = ratios.logs
    if config.level != "token":
        over_sequences = ratios.sums if config.level == "sequence" else ratios.means
        logs = over_sequences(logs)[ratios.rows]
    raw = np.exp(clamped(logs))
    is_beyond: Bools = raw > config.weight_max
    if config.method == "truncate":
        weights = np.minimum(raw, config.weight_max)
    else:
        is_beyond = is_beyond | (raw < config.weight_min)
        weights = np.where(is_beyond, 0, raw)
    metrics = {
        "weight_mean": float(weights.mean()),
        "clipped": float(is_beyond.mean()),
        "effective_sample_size": _effective_share(weights),
    }
    if config.normalize and weights.any():
        each = weights if config.level == "token" else ratios.means(weights)[ratios.counts > 0]
        weights = weights / each.mean()
    return weights, metrics


def find_gaps_beyond(gaps: Mapping[str, float], bounds: Mapping[str, float]) -> list[str]:
    """Return the names of gaps that are larger than the bounds of these names."""
    # A gap that is not a number is no agreement either.
    return [name for name, gap in gaps.items() if not gap <= bounds[name]]


def check_rules(config: CorrectionConfig) -> None:
    """Raises ConfigError for a rule that does not exist, or with another bound than it takes."""
    key = "algorithm.correction.reject"
    for name, bound in config.reject.items():
        if name not in RULES:
            raise ConfigError(f"{key}.{name} is no rule; allowed: {', '.join(RULES)}")
        check_bound(f"{key}.{name}", RULES[name], bound)


def _effective_share(weights: Floats) -> float:
    """(sum w)^2 / (n sum w^2); 0 where all are 0."""
    squares = len(weights) * np.square(weights).sum()
    return float(weights.sum() ** 2 / squares) if squares else 0.0
