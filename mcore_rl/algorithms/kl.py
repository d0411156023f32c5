"""KL(policy || reference) at each token: estimators from one sample of the policy.

From J. Schulman, "Approximating KL Divergence" (joschu.net/blog/kl-approx.html), with r the
probability of the token under the reference divided by that under the policy. All take and return
[tokens], log-probs in nats. As a loss on policy samples, k1 has zero gradient on average, k2 the
gradient of KL(policy || reference), k3 that of KL(reference || policy). NAME+ has the value of NAME
and the gradient of k2, the right one for a loss.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from mcore_rl.algorithms.losses import MAX_LOG_RATIO
from mcore_rl.algorithms.reductions import ChosenTokens, sum_by_index
from mcore_rl.algorithms.registry import Registry
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import AlgorithmConfig
from mcore_rl.data.batch import Batch, Jagged

KLEstimator = Callable[[Tensor, Tensor], Tensor]
KL_ESTIMATORS: Registry[KLEstimator] = Registry(
    "algorithm.kl_estimator", ("log_probs", "reference_log_probs")
)


@KL_ESTIMATORS.register("k1")
def k1(log_probs: Tensor, reference_log_probs: Tensor) -> Tensor:
    """-log r: unbiased, can be negative, high variance."""
    return log_probs - reference_log_probs


@KL_ESTIMATORS.register("k2")
def k2(log_probs: Tensor, reference_log_probs: Tensor) -> Tensor:
    """(log r)^2 / 2: biased, never negative, low variance."""
    return 0.5 * (log_probs - reference_log_probs).square()


@KL_ESTIMATORS.register("k3")
def k3(log_probs: Tensor, reference_log_probs: Tensor) -> Tensor:
    """r - 1 - log r: unbiased, never negative; equation 4 of GRPO (arXiv:2402.03300).

    log r is clamped to +-20, as in policy losses; the estimate at 20 is 5e8 nats.
    """
    log_r = (reference_log_probs - log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(log_r) - log_r


@KL_ESTIMATORS.register("low_variance")
def low_variance(log_probs: Tensor, reference_log_probs: Tensor) -> Tensor:
    """k3 clamped to 10 nats, without gradient beyond: verl's k3 and low_var_kl."""
    return k3(log_probs, reference_log_probs).clamp(-10.0, 10.0)


@KL_ESTIMATORS.register("abs")
def absolute(log_probs: Tensor, reference_log_probs: Tensor) -> Tensor:
    """|log r|: a distance, not an estimate of the KL; as in the code of TRL and verl."""
    return (log_probs - reference_log_probs).abs()


def _replace_gradient(value: KLEstimator) -> KLEstimator:
    """Return an estimator with this value and the gradient of k2, straight through."""

    def estimate(log_probs: Tensor, reference_log_probs: Tensor) -> Tensor:
        source = k2(log_probs, reference_log_probs)
        return value(log_probs, reference_log_probs).detach() + (source - source.detach())

    return estimate


for _name, _value in {"k1": k1, "k3": k3, "low_variance": low_variance, "abs": absolute}.items():
    KL_ESTIMATORS.register(f"{_name}+")(_replace_gradient(_value))


def compute_reference_kl(batch: Batch, algorithm: AlgorithmConfig) -> Jagged:
    """Estimate the KL before the first update with algorithm.kl_estimator: [response tokens].

    Tokens that the policy did not choose have 0.

    Raises:
        ConfigError: the estimator did not return one number per token.
    """
    name, mask = algorithm.kl_estimator, batch.jagged("response_mask")
    estimator = KL_ESTIMATORS.bind(name, algorithm.kl_estimator_settings)
    columns = (batch.jagged(column).values for column in ("log_probs", "reference_log_probs"))
    kl = estimator(*(torch.from_numpy(values.copy()) for values in columns))
    if not isinstance(kl, torch.Tensor) or kl.shape != mask.values.shape:
        shown = list(kl.shape) if isinstance(kl, torch.Tensor) else type(kl).__name__
        raise ConfigError(
            f"{KL_ESTIMATORS.setting}={name!r} returned {shown}; allowed: a tensor of [tokens], "
            f"here {[*mask.values.shape]}"
        )
    return mask.with_values(np.where(mask.values != 0, kl.numpy(), 0))


def compute_sequence_mean(values: Jagged, mask: Jagged) -> float:
    """Average over sequences the mean over their chosen tokens; 0 if no token is chosen.

    Sequences without a chosen token do not count.
    """
    tokens = ChosenTokens(mask)
    sums, is_used = sum_by_index(tokens.rows, tokens.select(values), len(mask)), tokens.counts > 0
    return float((sums[is_used] / tokens.counts[is_used]).mean()) if is_used.any() else 0.0
