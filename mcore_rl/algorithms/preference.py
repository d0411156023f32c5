"""Losses of preference pairs, with their derivatives, on the driver.

A loss of a pair reads nothing of a response but its log-prob: the sum over its trained tokens. So
its gradient is the gradient of that sum, times the derivative of the loss, which is a number. That
number is the weight of each token of the response in an update with `linear_in_scores`. It is
known before the batch is split, so no pair has to stay together in a micro-batch or on a rank.

The rows of a batch of pairs are chosen, rejected, chosen, rejected, ...
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mcore_rl.algorithms.estimates import ratio_error
from mcore_rl.algorithms.inputs import needs
from mcore_rl.algorithms.registry import Registry
from mcore_rl.config.checks import check_at_least, check_between, check_positive
from mcore_rl.config.errors import ConfigError
from mcore_rl.data.batch import Batch, Jagged

Floats = npt.NDArray[np.float64]
_MAX_MEAN_LOG_PROB = -1e-6  # where the odds of ORPO end: those of probability 1 are infinite


@dataclass(frozen=True, slots=True, kw_only=True)
class PairInputs:
    """Of each pair, [pairs] each."""

    chosen: Floats  # log-prob of the preferred response under the policy in training, in nats
    rejected: Floats  # of the other one
    chosen_lengths: Floats  # trained tokens of each
    rejected_lengths: Floats
    # The two log-prob columns under the frozen reference model; None in a run that has none.
    reference: tuple[Floats, Floats] | None = None

    def log_ratios(self, *, per_token: bool) -> tuple[Floats, Floats]:
        """log(policy / reference) of the chosen and of the rejected responses.

        Raises:
            ConfigError: there is no reference.
        """
        if self.reference is None:
            raise ConfigError(
                "loss asks for the reference model's log-probs, which this run does not have; "
                "allowed: a loss with @needs('reference_log_probs')"
            )
        ratios = self.chosen - self.reference[0], self.rejected - self.reference[1]
        return self.by_length(*ratios) if per_token else ratios

    def by_length(self, chosen: Floats, rejected: Floats) -> tuple[Floats, Floats]:
        return chosen / self.chosen_lengths, rejected / self.rejected_lengths


@dataclass(frozen=True, slots=True)
class PairLosses:
    """[pairs] each."""

    loss: Floats
    chosen: Floats  # derivative of the loss with respect to PairInputs.chosen
    rejected: Floats  # and to PairInputs.rejected
    reward_chosen: Floats  # what the loss takes for the reward of each response: for metrics
    reward_rejected: Floats

    @property
    def metrics(self) -> dict[str, float]:
        """Means over the pairs. `accuracy` is the share whose chosen response has more reward."""
        return {name: float(column.mean()) for name, column in self._columns.items()}

    @property
    def metrics_with_errors(self) -> dict[str, float]:
        """The same, and NAME_stderr of loss and accuracy, over the pairs."""
        ones, told = np.ones(len(self.loss)), ("loss", "accuracy")
        errors = {f"{name}_stderr": ratio_error(self._columns[name], ones) for name in told}
        return self.metrics | errors

    @property
    def _columns(self) -> dict[str, Floats]:
        margin = self.reward_chosen - self.reward_rejected
        return {
            "loss": self.loss,
            "accuracy": (margin > 0) + 0.5 * (margin == 0),
            "margin": margin,
            "reward_chosen": self.reward_chosen,
            "reward_rejected": self.reward_rejected,
        }


PreferenceLoss = Callable[[PairInputs], PairLosses]
PREFERENCE_LOSSES: Registry[PreferenceLoss] = Registry("loss", ("inputs",))


@dataclass(frozen=True, slots=True)
class DPOSettings:
    beta: float = 0.1  # strength of the tie to the reference model
    label_smoothing: float = 0.0  # assumed share of pairs whose labels are swapped (cDPO)
    length_normalized: bool = False  # log-ratios divided by the number of tokens

    def __post_init__(self) -> None:
        check_positive("beta", self.beta)
        check_between("label_smoothing", self.label_smoothing, 0, 0.5)


@PREFERENCE_LOSSES.register("dpo")
@needs("reference_log_probs")
def dpo(inputs: PairInputs, settings: DPOSettings) -> PairLosses:
    """-(1 - e) log sigmoid(h) - e log sigmoid(-h).

    h = beta (log-ratio chosen - log-ratio rejected).
    Equation 7 of DPO (arXiv:2305.18290). With a label_smoothing e above 0 it is cDPO, equation 3 of
    E. Mitchell, "A note on DPO with noisy preferences" (2023). Length-normalised log-ratios are
    those of section 5.1.2 of Tulu 3 (arXiv:2411.15124).
    """
    beta, smoothing = settings.beta, settings.label_smoothing
    chosen, rejected = inputs.log_ratios(per_token=settings.length_normalized)
    h = beta * (chosen - rejected)
    loss = (1 - smoothing) * _softplus(-h) + smoothing * _softplus(h)
    slope = beta * (_sigmoid(h) - (1 - smoothing))
    found = (slope, -slope)
    if settings.length_normalized:
        found = inputs.by_length(*found)
    return PairLosses(loss, *found, beta * chosen, beta * rejected)


@dataclass(frozen=True, slots=True)
class IPOSettings:
    beta: float = 0.1  # tau of the paper: the log-ratios are to differ by 1 / (2 beta)
    length_normalized: bool = False  # log-ratios divided by the number of tokens

    def __post_init__(self) -> None:
        check_positive("beta", self.beta)


@PREFERENCE_LOSSES.register("ipo")
@needs("reference_log_probs")
def ipo(inputs: PairInputs, settings: IPOSettings) -> PairLosses:
    """(log-ratio chosen - log-ratio rejected - 1 / (2 beta))^2: equation 17 of arXiv:2310.12036.

    TRL's IPO has length_normalized=true.
    """
    chosen, rejected = inputs.log_ratios(per_token=settings.length_normalized)
    away = chosen - rejected - 1 / (2 * settings.beta)
    found = (2 * away, -2 * away)
    if settings.length_normalized:
        found = inputs.by_length(*found)
    return PairLosses(away**2, *found, settings.beta * chosen, settings.beta * rejected)


@dataclass(frozen=True, slots=True)
class SimPOSettings:
    beta: float = 2.0  # factor of the mean log-probs
    gamma: float = 1.0  # margin by which the chosen response is to be ahead, in that unit

    def __post_init__(self) -> None:
        check_positive("beta", self.beta)
        check_at_least("gamma", self.gamma, 0)


@PREFERENCE_LOSSES.register("simpo")
def simpo(inputs: PairInputs, settings: SimPOSettings) -> PairLosses:
    """-log sigmoid(beta (mean log-prob chosen - mean log-prob rejected) - gamma).

    Equation 6 of SimPO (arXiv:2405.14734). No reference model.
    """
    beta = settings.beta
    chosen, rejected = inputs.by_length(inputs.chosen, inputs.rejected)
    h = beta * (chosen - rejected) - settings.gamma
    slope = -beta * _sigmoid(-h)
    found = inputs.by_length(slope, -slope)
    return PairLosses(_softplus(-h), *found, beta * chosen, beta * rejected)


@dataclass(frozen=True, slots=True)
class ORPOSettings:
    lam: float = 0.1  # weight of the odds ratio beside the likelihood of the chosen response

    def __post_init__(self) -> None:
        check_at_least("lam", self.lam, 0)


@PREFERENCE_LOSSES.register("orpo")
def orpo(inputs: PairInputs, settings: ORPOSettings) -> PairLosses:
    """-m_w - lam log sigmoid(log odds(m_w) - log odds(m_l)), odds(m) = exp(m) / (1 - exp(m)).

    m is the mean log-prob of a response. Equations 4, 6 and 7 of ORPO (arXiv:2403.07691). It leaves
    the paper in one place: m is at most -1e-6 in the odds, which are infinite at probability 1. No
    reference model.
    """
    means = inputs.by_length(inputs.chosen, inputs.rejected)
    chosen, rejected = (np.minimum(mean, _MAX_MEAN_LOG_PROB) for mean in means)
    log_odds = tuple(mean - np.log(-np.expm1(mean)) for mean in (chosen, rejected))
    h = log_odds[0] - log_odds[1]
    loss = -means[0] + settings.lam * _softplus(-h)
    slopes = [
        -settings.lam * _sigmoid(-h) / -np.expm1(held) * (mean == held)
        for mean, held in zip(means, (chosen, rejected), strict=True)
    ]
    found = inputs.by_length(slopes[0] - 1, -slopes[1])
    return PairLosses(loss, *found, *log_odds)


def bradley_terry(chosen: Floats, rejected: Floats, margins: Floats) -> PairLosses:
    """-log sigmoid(chosen - rejected - margin) of the scores that a reward model gives.

    Equation 1 of InstructGPT (arXiv:2203.02155); the margin is that of equation 2 of Llama 2
    (arXiv:2307.09288), 0 for none. All are [pairs].
    """
    h = chosen - rejected - margins
    slope = -_sigmoid(-h)
    return PairLosses(_softplus(-h), slope, -slope, chosen, rejected)


def pair_inputs(batch: Batch) -> PairInputs:
    """Of a batch of pairs with log_probs and, where there is a reference, reference_log_probs.

    Raises:
        ConfigError: a response has no token to train on.
    """
    lengths = _sums(batch.jagged("response_mask"), batch)
    if not lengths.all():
        row = int(np.flatnonzero(lengths == 0)[0])
        raise ConfigError(f"pair {row // 2} of the batch has a response without trained tokens")
    log_probs = _sums(batch.jagged("log_probs"), batch)
    reference = None
    if "reference_log_probs" in batch:
        found = _sums(batch.jagged("reference_log_probs"), batch)
        reference = found[::2], found[1::2]
    return PairInputs(
        chosen=log_probs[::2],
        rejected=log_probs[1::2],
        chosen_lengths=lengths[::2],
        rejected_lengths=lengths[1::2],
        reference=reference,
    )


def pair_weights(batch: Batch, losses: PairLosses) -> Jagged:
    """[response tokens] derivative of the mean loss of the pairs by the score of each token.

    The score is a log-prob, or that of a reward model. 0 wherever response_mask is.
    """
    mask, slopes = batch.jagged("response_mask"), np.empty(len(batch))
    slopes[::2], slopes[1::2] = losses.chosen, losses.rejected
    weights = np.repeat(slopes / len(losses.loss), mask.lengths) * (mask.values != 0)
    return mask.with_values(weights.astype(np.float32))


def _sums(column: Jagged, batch: Batch) -> Floats:
    """[rows] over the trained tokens of each."""
    mask = batch.jagged("response_mask")
    values = np.where(mask.values != 0, column.values, 0).astype(np.float64)
    rows = np.repeat(np.arange(len(mask)), mask.lengths)
    return np.bincount(rows, weights=values, minlength=len(mask)).astype(np.float64)


def _softplus(x: Floats) -> Floats:
    """-log sigmoid(-x)"""
    return np.logaddexp(np.zeros_like(x), x)


def _sigmoid(x: Floats) -> Floats:
    return np.exp(-_softplus(-x))
