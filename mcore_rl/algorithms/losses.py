"""Loss of each token, before any mask or mean: only `aggregation` normalises.

The same contract applies to a loss outside the package: docs/algorithms.md. Importing this module
registers all losses. In them r is pi / pi_old, the ratio of a token to the policy that generated;
log r is clamped to +-20, so that a diverging policy gives a large loss rather than a nan. Metrics
of each: `ratio`, `approx_kl` (the k3 estimate of KL(old || new)), and `clipped` where there is one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mcore_rl.algorithms import policy_gradients, ppo, selected_losses, sequence_losses
from mcore_rl.algorithms.inputs import LossInputs, LossResult
from mcore_rl.algorithms.loss_parts import LOSSES, MAX_LOG_RATIO
from mcore_rl.algorithms.ppo import ppo_clip

__all__ = [
    "LOSSES",
    "MAX_LOG_RATIO",
    "ValueClipSettings",
    "negative_log_likelihood",
    "policy_gradients",
    "ppo",
    "ppo_clip",
    "selected_losses",
    "sequence_losses",
    "value_clip",
]


@dataclass(frozen=True, slots=True)
class ValueClipSettings:
    clip_range: float = 0.2  # of the move from the old value, in the unit of the returns


def value_clip(inputs: LossInputs, settings: ValueClipSettings) -> LossResult:
    """PPO's clipped value loss: max((V - R)^2, (V_old + clip(V - V_old, -c, c) - R)^2) / 2.

    From the code of Schulman et al. 2017 (openai/baselines, ppo2/model.py), not their paper. The
    maximum makes it a bound: a value that has moved by more than c towards its return gets no
    gradient, one that has moved away from it always does. An infinite c leaves (V - R)^2 / 2.

    Reads values, old_values and returns. Returns the loss of each token and, detached, per token:
    `value_clipped`, true where the loss is clipped and has no gradient; `value_error`, (V - R)^2.
    """
    values, returns = inputs.values, inputs.returns
    moved = values - inputs.old_values.detach()
    free = (values - returns).square()
    # Written so that a value within the clip stays the same bits.
    bounded = values + (moved.clamp(-settings.clip_range, settings.clip_range) - moved)
    bounded_error = (bounded - returns).square()
    metrics = {
        "value_clipped": bounded_error.detach() > free.detach(),
        "value_error": free.detach(),
    }
    return torch.maximum(free, bounded_error) / 2, metrics


def negative_log_likelihood(inputs: LossInputs) -> LossResult:
    """Of each target token, in nats: the loss of supervised training."""
    return -inputs.log_probs, {}


def linear_in_scores(inputs: LossInputs) -> LossResult:
    """The log-prob or the value of each token.

    With loss_weights that are the derivatives of a loss by them, its gradient is that loss's.
    """
    [name] = inputs.scores.keys() & {"log_probs", "values"}
    return inputs.scores[name], {}
