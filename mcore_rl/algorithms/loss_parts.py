"""What the losses of a policy share: their registry, ratios of probabilities, PPO's clip."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mcore_rl.algorithms.inputs import LossInputs, LossResult
from mcore_rl.algorithms.registry import Registry

LOSSES: Registry[Callable[[LossInputs], LossResult]] = Registry("algorithm.loss", ("inputs",))

# exp(20) = 5e8: no ratio of a healthy run comes near it, and beyond 88 float32 overflows to inf,
# whose gradient is nan even where the clip has discarded it.
MAX_LOG_RATIO = 20.0


def unclamped_log_ratios(inputs: LossInputs) -> Tensor:
    """[tokens]: log(policy / policy that generated), with gradient.

    For penalties of log ratios, which are finite without a clamp; beyond one they would not pull.
    """
    return inputs.log_probs - inputs.old_log_probs.detach()


def log_ratios(inputs: LossInputs) -> Tensor:
    """[tokens]: the same, clamped to +-20, so that its exponential is finite."""
    return unclamped_log_ratios(inputs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def ratio_metrics(log_ratio: Tensor) -> dict[str, Tensor]:
    """`ratio`, and `approx_kl`: the k3 estimate of KL(old || new)."""
    log_ratio = log_ratio.detach()
    return {"ratio": log_ratio.exp(), "approx_kl": torch.expm1(log_ratio) - log_ratio}


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """-min(ratio * A, clip(ratio, 1 - low, 1 + high) * A), and where it is clipped."""
    free = ratio * advantages
    bounded = ratio.clamp(1.0 - low, 1.0 + high) * advantages
    return -torch.minimum(free, bounded), bounded.detach() < free.detach()


def by_sign(advantages: Tensor, positive: float, negative: float) -> Tensor:
    """[tokens]: `positive` where the advantage is above 0, else `negative`."""
    return torch.full_like(advantages, negative).masked_fill(advantages > 0, positive)


def policy_gradient(weights: Tensor, inputs: LossInputs) -> Tensor:
    """-weight * A * log pi; weights have no gradient."""
    return -weights * inputs.advantages * inputs.log_probs
