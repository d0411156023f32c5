"""Estimates of KL(policy || reference) at each token, from one sample of the policy.

From J. Schulman, "Approximating KL Divergence" (joschu.net/blog/kl-approx.html), with r the
probability of the token under the reference divided by that under the policy. All take and return
[tokens], log-probs in nats. The estimate and its gradient differ: added to a loss on
policy samples, k1 has zero gradient on average, k2 has the gradient of KL(policy || reference),
k3 that of KL(reference || policy). Those named with a + have the value of one and the gradient of
k2, which is the right one for a loss.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mcore_rl.algorithms.losses import MAX_LOG_RATIO
from mcore_rl.algorithms.registry import Registry

KLEstimator = Callable[[Tensor, Tensor], Tensor]
KL_ESTIMATORS: Registry[KLEstimator] = Registry(
    "algorithm.kl_estimator", ("log_probs", "reference_log_probs")
)


@KL_ESTIMATORS.register("k1")
def k1(log_probs: Tensor, reference_log_probs: Tensor) -> Tensor:
    """-log r: unbiased, negative at times, of high variance."""
    return log_probs - reference_log_probs


@KL_ESTIMATORS.register("k2")
def k2(log_probs: Tensor, reference_log_probs: Tensor) -> Tensor:
    """(log r)^2 / 2: biased, never negative, of low variance."""
    return 0.5 * (log_probs - reference_log_probs).square()


@KL_ESTIMATORS.register("k3")
def k3(log_probs: Tensor, reference_log_probs: Tensor) -> Tensor:
    """r - 1 - log r: unbiased, never negative; equation 4 of GRPO (arXiv:2402.03300).

    log r is clamped to +-20, as in the policy loss: there the estimate would be 5e8 nats.
    """
    log_r = (reference_log_probs - log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(log_r) - log_r


@KL_ESTIMATORS.register("low_variance")
def low_variance(log_probs: Tensor, reference_log_probs: Tensor) -> Tensor:
    """k3, at most 10 nats, beyond which it has no gradient: what verl calls k3 and low_var_kl."""
    return k3(log_probs, reference_log_probs).clamp(-10.0, 10.0)


@KL_ESTIMATORS.register("abs")
def absolute(log_probs: Tensor, reference_log_probs: Tensor) -> Tensor:
    """|log r|: no estimate of the KL, but a distance; as in the code of TRL and verl."""
    return (log_probs - reference_log_probs).abs()


def _with_gradient_of_k2(value: KLEstimator) -> KLEstimator:
    """The value of an estimator with the gradient of k2, straight through."""

    def estimate(log_probs: Tensor, reference_log_probs: Tensor) -> Tensor:
        source = k2(log_probs, reference_log_probs)
        return value(log_probs, reference_log_probs).detach() + (source - source.detach())

    return estimate


for _name, _value in {"k1": k1, "k3": k3, "low_variance": low_variance, "abs": absolute}.items():
    KL_ESTIMATORS.register(f"{_name}+")(_with_gradient_of_k2(_value))
