"""Losses of preference pairs and their derivatives, computed on the driver.

The loss of a pair is a function of two numbers, the summed log-probs of its responses. Its gradient
is the gradient of these sums times the derivative of the loss by them. The derivative is the weight
of each token of the response in an update with `losses.linear_in_scores`. It is computed before the
batch is split, so the responses of a pair may be in different micro-batches or on different ranks.

The rows of a batch of pairs are chosen, rejected, chosen, rejected, ...
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mcore_rl.algorithms.estimates import compute_ratio_error
from mcore_rl.algorithms.inputs import needs
from mcore_rl.algorithms.registry import Registry
from mcore_rl.config.checks import check_at_least, check_between, check_positive
from mcore_rl.config.errors import ConfigError
from mcore_rl.data.batch import Batch, Jagged

Floats = npt.NDArray[np.float64]
_MAX_MEAN_LOG_PROB = -1e-6  # in the odds of ORPO, which are infinite at probability 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PairInputs:
    """Log-probs and lengths of the responses of each pair: [pairs]."""

    chosen: Floats  # log-prob of the preferred response under the policy in training, in nats
    rejected: Floats  # log-prob of the rejected response
    chosen_lengths: Floats  # number of trained tokens
    rejected_lengths: Floats
    # Log-probs of chosen and rejected under the frozen reference model; None in a run without one.
    reference: tuple[Floats, Floats] | None = None

    def log_ratios(self, *, per_token: bool) -> tuple[Floats, Floats]:
        """Return log(policy / reference) of the chosen and of the rejected responses.

        Raises:
            ConfigError: there is no reference.
        """
        if self.reference is None:
            raise ConfigError(
                "loss asks for the reference model's log-probs, which this run does not have; "
                "allowed: a loss with @needs('reference_log_probs')"
            )
        ratios = self.chosen - self.reference[0], self.rejected - self.reference[1]
        return self.divide_by_length(*ratios) if per_token else ratios

    def divide_by_length(self, chosen: Floats, rejected: Floats) -> tuple[Floats, Floats]:
        """Divide values of the responses by their numbers of trained tokens."""
        return chosen / self.chosen_lengths, rejected / self.rejected_lengths


@dataclass(frozen=True, slots=True)
class PairLosses:
    """Loss of each pair and its derivatives: [pairs]."""

    loss: Floats
    chosen: Floats  # derivative of the loss by PairInputs.chosen
    rejected: Floats  # derivative of the loss by PairInputs.rejected
    reward_chosen: Floats  # implicit reward of each response, for metrics
    reward_rejected: Floats

    @property
    def metrics(self) -> dict[str, float]:
        """Means over the pairs; accuracy: share of pairs whose chosen response has more reward."""
        return {name: float(column.mean()) for name, column in self._columns.items()}

    @property
    def metrics_with_errors(self) -> dict[str, float]:
        """Means over the pairs, and NAME_stderr of loss and accuracy."""
        counts = np.ones(len(self.loss))
        return self.metrics | {
            f"{name}_stderr": compute_ratio_error(self._columns[name], counts)
            for name in ("loss", "accuracy")
        }

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
    label_smoothing: float = 0.0  # assumed share of pairs with swapped labels (cDPO)
    length_normalized: bool = False  # divide log-ratios by the number of tokens

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
    slopes = (slope, -slope)
    if settings.length_normalized:
        slopes = inputs.divide_by_length(*slopes)
    return PairLosses(loss, *slopes, beta * chosen, beta * rejected)


@dataclass(frozen=True, slots=True)
class IPOSettings:
    beta: float = 0.1  # tau of the paper: the target difference of log-ratios is 1 / (2 beta)
    length_normalized: bool = False  # divide log-ratios by the number of tokens

    def __post_init__(self) -> None:
        check_positive("beta", self.beta)


@PREFERENCE_LOSSES.register("ipo")
@needs("reference_log_probs")
def ipo(inputs: PairInputs, settings: IPOSettings) -> PairLosses:
    """(log-ratio chosen - log-ratio rejected - 1 / (2 beta))^2: equation 17 of arXiv:2310.12036.

    TRL's IPO has length_normalized=true.
    """
    chosen, rejected = inputs.log_ratios(per_token=settings.length_normalized)
    error = chosen - rejected - 1 / (2 * settings.beta)
    slopes = (2 * error, -2 * error)
    if settings.length_normalized:
        slopes = inputs.divide_by_length(*slopes)
    return PairLosses(error**2, *slopes, settings.beta * chosen, settings.beta * rejected)


@dataclass(frozen=True, slots=True)
class SimPOSettings:
    beta: float = 2.0  # factor of the mean log-probs
    gamma: float = 1.0  # target margin of beta * mean log-prob

    def __post_init__(self) -> None:
        check_positive("beta", self.beta)
        check_at_least("gamma", self.gamma, 0)


@PREFERENCE_LOSSES.register("simpo")
def simpo(inputs: PairInputs, settings: SimPOSettings) -> PairLosses:
    """-log sigmoid(beta (mean log-prob chosen - mean log-prob rejected) - gamma).

    Equation 6 of SimPO (arXiv:2405.14734). No reference model.
    """
    beta = settings.beta
    chosen, rejected = inputs.divide_by_length(inputs.chosen, inputs.rejected)
    h = beta * (chosen - rejected) - settings.gamma
    slope = -beta * _sigmoid(-h)
    slopes = inputs.divide_by_length(slope, -slope)
    return PairLosses(_softplus(-h), *slopes, beta * chosen, beta * rejected)


@dataclass(frozen=True, slots=True)
class ORPOSettings:
    lam: float = 0.1  # weight of the odds ratio beside the likelihood of the chosen response

    def __post_init__(self) -> None:
        check_at_least("lam", self.lam, 0)


@PREFERENCE_LOSSES.register("orpo")
def orpo(inputs: PairInputs, settings: ORPOSettings) -> PairLosses:
    """-m_w - lam log sigmoid(log odds(m_w) - log odds(m_l)), odds(m) = exp(m) / (1 - exp(m)).

    m is the mean log-prob of a response. Equations 4, 6 and 7 of ORPO (arXiv:2403.07691). Unlike
    the paper, m is at most -1e-6 in the odds, which are infinite at probability 1. No reference
    model.
    """
    means = inputs.divide_by_length(inputs.chosen, inputs.rejected)
    chosen, rejected = (np.minimum(mean, _MAX_MEAN_LOG_PROB) for mean in means)
    log_odds = tuple(mean - np.log(-np.expm1(mean)) for mean in (chosen, rejected))
    h = log_odds[0] - log_odds[1]
    loss = -means[0] + settings.lam * _softplus(-h)
    slopes = [
        -settings.lam * _sigmoid(-h) / -np.expm1(clipped) * (mean == clipped)
        for mean, clipped in zip(means, (chosen, rejected), strict=True)
    ]
    derivatives = inputs.divide_by_length(slopes[0] - 1, -slopes[1])
    return PairLosses(loss, *derivatives, *log_odds)


def bradley_terry(chosen: Floats, rejected: Floats, margins: Floats) -> PairLosses:
    """-log sigmoid(chosen - rejected - margin) of the scores of a reward model.

    Equation 1 of InstructGPT (arXiv:2203.02155); the margin is from equation 2 of Llama 2
    (arXiv:2307.09288), 0 for none. All are [pairs].
    """
    h = chosen - rejected - margins
    slope = -_sigmoid(-h)
    return PairLosses(_softplus(-h), slope, -slope, chosen, rejected)


def build_pair_inputs(batch: Batch) -> PairInputs:
    """Sum log_probs and, if the batch has them, reference_log_probs of each response.

    Raises:
        ConfigError: a response has no token to train on.
    """
    lengths = _sum_responses(batch.jagged("response_mask"), batch)
    if not lengths.all():
        row = int(np.flatnonzero(lengths == 0)[0])
        raise ConfigError(f"pair {row // 2} of the batch has a response without trained tokens")
    log_probs = _sum_responses(batch.jagged("log_probs"), batch)
    reference = None
    if "reference_log_probs" in batch:
        sums = _sum_responses(batch.jagged("reference_log_probs"), batch)
        reference = sums[::2], sums[1::2]
    return PairInputs(
        chosen=log_probs[::2],
        rejected=log_probs[1::2],
        chosen_lengths=lengths[::2],
        rejected_lengths=lengths[1::2],
        reference=reference,
    )


def compute_pair_weights(batch: Batch, losses: PairLosses) -> Jagged:
    """Differentiate the mean loss of the pairs by the score of each token: [response tokens].

    The score is a log-prob, or the score of a reward model. 0 where response_mask is 0.
    """
    mask, slopes = batch.jagged("response_mask"), np.empty(len(batch))
    slopes[::2], slopes[1::2] = losses.chosen, losses.rejected
    weights = np.repeat(slopes / len(losses.loss), mask.lengths) * (mask.values != 0)
    return mask.with_values(weights.astype(np.float32))


def _sum_responses(column: Jagged, batch: Batch) -> Floats:
    """Sum a column over the trained tokens of each row: [rows]."""
    mask = batch.jagged("response_mask")
    values = np.where(mask.values != 0, column.values, 0).astype(np.float64)
    rows = np.repeat(np.arange(len(mask)), mask.lengths)
    return np.bincount(rows, weights=values, minlength=len(mask)).astype(np.float64)


def _softplus(x: Floats) -> Floats:
    """Compute -log sigmoid(-x)."""
    return np.logaddexp(np.zeros_like(x), x)


def _sigmoid(x: Floats) -> Floats:
    return np.exp(-_softplus(-x))
