"""Loss of each token, before any mask or mean: only `aggregation` normalises.

The same contract applies to a loss outside the package: docs/algorithms.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from mcore_rl.algorithms.inputs import LossInputs, LossResult
from mcore_rl.algorithms.registry import Registry
from mcore_rl.config.schema import PPOClipSettings

LOSSES: Registry[Callable[[LossInputs], LossResult]] = Registry("algorithm.loss", ("inputs",))

# exp(20) = 5e8: no ratio of a healthy run comes near it, and beyond 88 float32 overflows to inf,
# whose gradient is nan even where the clip has discarded it.
MAX_LOG_RATIO = 20.0


@LOSSES.register("ppo_clip")
def ppo_clip(inputs: LossInputs, settings: PPOClipSettings) -> LossResult:
    """The clipped surrogate of PPO: -min(ratio * A, clip(ratio, 1 - low, 1 + high) * A).

    Equation 7 of Schulman et al. 2017 (arXiv:1707.06347), which it leaves in two places: the clip
    may be asymmetric ("clip-higher", section 3.1 of DAPO, arXiv:2503.14476), and log ratios are
    clamped to +-20, so that a diverging policy gives a large loss rather than a nan.

    Reads log_probs, old_log_probs and advantages. Returns the loss of each token and, detached, per
    token: `ratio`; `clipped`, true where the loss is clipped and has no gradient; `approx_kl`, the
    k3 estimate of KL(old || new).
    """
    old_log_probs, advantages = inputs.old_log_probs.detach(), inputs.advantages
    log_ratio = (inputs.log_probs - old_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    free = ratio * advantages
    low, high = settings.clip_ratio_low, settings.clip_ratio_high
    bounded = ratio.clamp(1.0 - low, 1.0 + high) * advantages
    metrics = {
        "ratio": ratio.detach(),
        "clipped": bounded.detach() < free.detach(),
        "approx_kl": (torch.expm1(log_ratio) - log_ratio).detach(),
    }
    return -torch.minimum(free, bounded), metrics


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
