"""Loss of each token, before any mask or mean: `aggregation` alone normalises."""

from __future__ import annotations

import torch
from torch import Tensor

# exp(20) = 5e8: no ratio of a healthy run comes near it, and beyond 88 float32 overflows to inf,
# whose gradient is nan even where the clip has discarded it.
MAX_LOG_RATIO = 20.0


def ppo_clip(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped surrogate of PPO: -min(ratio * A, clip(ratio, 1 - low, 1 + high) * A).

    Equation 7 of Schulman et al. 2017 (arXiv:1707.06347), which it leaves in two places: the clip
    may be asymmetric ("clip-higher", section 3.1 of DAPO, arXiv:2503.14476), and log ratios are
    clamped to +-20, so that a diverging policy gives a large loss rather than a nan.

    All tensors are [tokens]; only `log_probs` gets a gradient. Log-probs are in nats.
    Returns the loss of each token and, detached, per token: `ratio`; `clipped`, true where the clip
    holds and no gradient flows; `approx_kl`, the k3 estimate of KL(old || new).
    """
    log_ratio = (log_probs - old_log_probs.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    free = ratio * advantages
    bounded = ratio.clamp(1.0 - clip_ratio_low, 1.0 + clip_ratio_high) * advantages
    metrics = {
        "ratio": ratio.detach(),
        "clipped": bounded.detach() < free.detach(),
        "approx_kl": (torch.expm1(log_ratio) - log_ratio).detach(),
    }
    return -torch.minimum(free, bounded), metrics


def value_clip(
    values: Tensor, old_values: Tensor, returns: Tensor, *, clip_range: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped value loss: max((V - R)^2, (V_old + clip(V - V_old, -c, c) - R)^2) / 2.

    From the code of Schulman et al. 2017 (openai/baselines, ppo2/model.py), not their paper. The
    maximum makes it a bound: a value that has moved by more than c towards its return gets no
    gradient, one that has moved away from it always does. An infinite c leaves (V - R)^2 / 2.

    All tensors are [tokens], in the unit of the returns; only `values` gets a gradient. Returns the
    loss of each token and, detached, per token: `value_clipped`, true where the clip holds and no
    gradient flows; `value_error`, (V - R)^2.
    """
    moved = values - old_values.detach()
    free = (values - returns).square()
    # Written so that a value within the clip stays the same bits.
    bounded = values + (moved.clamp(-clip_range, clip_range) - moved)
    bounded_error = (bounded - returns).square()
    metrics = {
        "value_clipped": bounded_error.detach() > free.detach(),
        "value_error": free.detach(),
    }
    return torch.maximum(free, bounded_error) / 2, metrics


def sft(log_probs: Tensor) -> Tensor:
    """Negative log-likelihood of each target token, in nats: [tokens] to [tokens]."""
    return -log_probs
