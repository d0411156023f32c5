"""A loss of your own: group sequence policy optimization (Zheng et al. 2025, arXiv:2507.18071).

The package has it as algorithm.loss=gspo. This is how to write such a function in your own file:

    mcore-rl rl recipe=quickstart algorithm.loss=examples/gspo.py:gspo \\
        algorithm.loss_aggregation=sequence_mean_token_mean
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mcore_rl.algorithms.inputs import LossInputs, LossResult


@dataclass(frozen=True)
class GSPOSettings:
    clip_ratio_low: float = 3e-4  # section 5.1
    clip_ratio_high: float = 4e-4


def gspo(inputs: LossInputs, settings: GSPOSettings) -> LossResult:
    """-min(s * A, clip(s, 1 - low, 1 + high) * A) at each token, as equation 5.

    s is the ratio of the sequence that the token is of: exp(mean of its tokens' log ratios),
    equation 7. The objective weighs all sequences alike, so its aggregation is
    sequence_mean_token_mean.
    """
    ratio = inputs.sequence_mean(inputs.log_probs - inputs.old_log_probs).exp()
    free = ratio * inputs.advantages
    low, high = 1.0 - settings.clip_ratio_low, 1.0 + settings.clip_ratio_high
    bounded = ratio.clamp(low, high) * inputs.advantages
    metrics = {"ratio": ratio.detach(), "clipped": bounded.detach() < free.detach()}
    return -torch.minimum(free, bounded), metrics
