"""Rules by which rollout correction leaves tokens and sequences out, and the ratios they read.

The ratio of a token is the trainer's probability divided by the server's. Log-probs are in nats.
Each rule says which tokens pass a bound; those of a sequence that is rejected all fail.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from mcore_rl.algorithms.reductions import ChosenTokens, Floats, totals
from mcore_rl.config.errors import ConfigError
from mcore_rl.data.batch import Batch

Bools = npt.NDArray[np.bool_]
Bound = float | tuple[float, float]  # the largest value, or the smallest and the largest ratio

_MAX_LOG_RATIO = 20.0  # as in losses.py
_LEAST_PROBABILITY = 1e-6  # of the two events of a binary KL, which is infinite without one


def clamped(logs: Floats) -> Floats:
    """Log ratios whose exponential is a number."""
    return logs.clip(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)


@dataclass(frozen=True, slots=True, eq=False)
class Ratios:
    """Of the chosen tokens of a batch."""

    tokens: ChosenTokens
    log_probs: Floats  # [chosen tokens] of the trainer
    rollout_log_probs: Floats  # [chosen tokens] of the server

    @classmethod
    def of(cls, batch: Batch) -> Ratios:
        tokens = ChosenTokens(batch.jagged("response_mask"))
        columns = (batch.jagged(name) for name in ("log_probs", "rollout_log_probs"))
        return cls(tokens, *(tokens.of(column) for column in columns))

    @property
    def logs(self) -> Floats:
        """[chosen tokens]: log ratios."""
        return self.log_probs - self.rollout_log_probs

    @property
    def rows(self) -> npt.NDArray[np.int64]:
        """[chosen tokens]: the sequence of each."""
        return self.tokens.sample

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """[sequences]: chosen tokens of each."""
        return self.tokens.counts

    def sums(self, values: Floats) -> Floats:
        """[chosen tokens] to [sequences]."""
        return totals(self.rows, values, len(self.counts))

    def means(self, values: Floats) -> Floats:
        """[chosen tokens] to [sequences]; 0 where none is chosen."""
        means: Floats = self.sums(values) / np.maximum(self.counts, 1)
        return means

    def largest(self, values: Floats) -> Floats:
        """[chosen tokens], none of them negative, to [sequences]."""
        found = np.zeros(len(self.counts))
        np.maximum.at(found, self.rows, values)
        return found


@dataclass(frozen=True, slots=True)
class RejectionRule:
    passes: Callable[[Ratios, Bound], Bools]  # [chosen tokens]
    num_bounds: int = 1  # 2: the smallest and the largest ratio
    for_negative: bool = False  # only tokens of negative advantage can fail
    normalised_over_rest: bool = True  # what fails does not count in the mean of the loss


def check_bound(key: str, rule: RejectionRule, bound: object) -> None:
    """Raises ConfigError for another bound than the rule takes."""
    values = bound if isinstance(bound, (list, tuple)) else (bound,)
    are_positive = all(type(value) in (int, float) and 0 < value < math.inf for value in values)
    if not are_positive or len(values) != rule.num_bounds or values[0] > values[-1]:
        allowed = "a number above 0" if rule.num_bounds == 1 else "two ratios, such as [0.5, 2.0]"
        raise ConfigError(f"{key}={bound!r}; allowed: {allowed}")


def _k1(ratios: Ratios) -> Floats:
    """The log ratio, minus k1 of KL(server || trainer)."""
    return clamped(ratios.logs)


def _k2(ratios: Ratios) -> Floats:
    return clamped(ratios.logs) ** 2 / 2


def _k3(ratios: Ratios) -> Floats:
    logs = clamped(ratios.logs)
    return np.asarray(np.expm1(logs) - logs)


_STATISTICS: dict[str, Callable[[Ratios], Floats]] = {"k1": _k1, "k2": _k2, "k3": _k3}
_OVER_SEQUENCES: dict[str, Callable[[Ratios, Floats], Floats]] = {
    "sequence_sum": Ratios.sums,
    "sequence_mean": Ratios.means,
    "sequence_max": Ratios.largest,
}


def _passes(level: str, statistic: str, ratios: Ratios, bound: Bound) -> Bools:
    """Estimates of KL(server || trainer): of a token, or their sum, mean or maximum of a sequence.

    Those of k1 are logs of ratios, and so is their bound. Rejection by k1, k2 and k3: Liu et al.
    2025, "When speed kills stability" (richardli.xyz/rl-collapse), and verl's token_k1 to
    seq_max_k3.
    """
    values = _STATISTICS[statistic](ratios)
    if level != "token":
        values = _OVER_SEQUENCES[level](ratios, values)[ratios.rows]
    return _within(values, bound)


def _within(values: Floats, bound: Bound) -> Bools:
    if isinstance(bound, (int, float)):
        return np.asarray(values <= bound)
    low, high = bound
    return np.asarray((values >= math.log(low)) & (values <= math.log(high)))


def _veto(ratios: Ratios, bound: Bound) -> Bools:
    """One token out of bounds rejects its sequence."""
    fails = (~_within(_k1(ratios), bound)).astype(np.float64)
    return np.asarray(ratios.largest(fails)[ratios.rows] == 0)


def _binary_kl(ratios: Ratios, bound: Bound) -> Bools:
    """KPop (Guo et al. 2026, ringtech.notion.site/kpop): a trust region that adapts to the token.

    KL of two events, this token or any other, p for the trainer and q for the server: a token
    passes if neither p log(p/q) + (1-p) log((1-p)/(1-q)) nor the same with p and q exchanged is
    above the bound, 0.1 there. Probabilities are kept 1e-6 away from 0 and 1.
    """
    logs = (ratios.log_probs, ratios.rollout_log_probs)
    p, q = (np.exp(x).clip(_LEAST_PROBABILITY, 1 - _LEAST_PROBABILITY) for x in logs)
    this, other = np.log(p / q), np.log((1 - p) / (1 - q))
    return _within(np.maximum(p * this + (1 - p) * other, -q * this - (1 - q) * other), bound)


def _sequence_drift(ratios: Ratios, bound: Bound) -> Bools:
    """Off-policy sequence masking of DeepSeek-V3.2 (arXiv:2512.02556, equations 8 and 9).

    A sequence of negative advantage is masked if the mean of log(server / trainer) is above the
    bound. There the trainer's policy is the one in training; here it is that before the first
    update of the step, so that the weights of the loss stay fixed.
    """
    return _within(-ratios.means(ratios.logs)[ratios.rows], bound)


RULES = {
    f"{level}_{statistic}": RejectionRule(
        partial(_passes, level, statistic), 2 if statistic == "k1" else 1
    )
    for level in ("token", *_OVER_SEQUENCES)
    for statistic in _STATISTICS
    if (level, statistic) != ("sequence_max", "k1")  # that is veto
} | {
    "veto": RejectionRule(_veto, 2),
    "token_binary_kl": RejectionRule(_binary_kl, normalised_over_rest=False),
    "negative_sequence_k1": RejectionRule(
        _sequence_drift, for_negative=True, normalised_over_rest=False
    ),
}
