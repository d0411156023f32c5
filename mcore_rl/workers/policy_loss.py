"""The loss of a policy update, composed from the algorithms and their settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from mcore_rl.algorithms.advantages import ADVANTAGES
from mcore_rl.algorithms.aggregation import AGGREGATIONS
from mcore_rl.algorithms.inputs import LossInputs, LossResult, check_needs, needs_of
from mcore_rl.algorithms.kl import KL_ESTIMATORS
from mcore_rl.algorithms.losses import LOSSES
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import AlgorithmConfig


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """The loss that algorithm.loss names, plus kl_coef times the KL to the reference model.

    Minus entropy_coef times the entropy. It travels to the ranks as its settings: each rank finds
    the functions by their names or import paths.
    """

    config: AlgorithmConfig

    @property
    def needs(self) -> frozenset[str]:
        """Inputs that not every run has: see registry.needs."""
        found = set(needs_of(LOSSES[self.config.loss]))
        if self.config.kl_coef:
            found.add("reference_log_probs")
        if self.config.entropy_coef:
            found.add("entropy")
        return frozenset(found)

    def __call__(self, inputs: LossInputs) -> LossResult:
        config = self.config
        loss, metrics = self._policy_loss(inputs)
        if config.kl_coef:
            estimator = KL_ESTIMATORS.bound(config.kl_estimator, config.kl_estimator_settings)
            kl = estimator(inputs.log_probs, inputs.reference_log_probs)
            _check(kl, "the KL", inputs, f"{KL_ESTIMATORS.setting}={config.kl_estimator!r}")
            metrics["reference_kl"] = kl.detach()
            loss = loss + config.kl_coef * kl
        if config.entropy_coef:
            metrics["entropy"] = inputs.entropy.detach()
            loss = loss - config.entropy_coef * inputs.entropy
        return loss, metrics

    def _policy_loss(self, inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        name = self.config.loss
        found = LOSSES.bound(name, self.config.loss_settings)(inputs)
        what = f"{LOSSES.setting}={name!r}"
        if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[1], Mapping):
            raise ConfigError(
                f"{what} returned {type(found).__name__}; allowed: a loss and a dict of metrics"
            )
        loss, metrics = found
        _check(loss, "the loss", inputs, what)
        for key, value in metrics.items():
            _check(value, key, inputs, what)
        return loss, dict(metrics)


def _check(value: object, called: str, inputs: LossInputs, what: str) -> None:
    shape = inputs.sequence_ids.shape
    if not isinstance(value, torch.Tensor) or value.shape != shape:
        found = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise ConfigError(
            f"{what} returned {found} for {called}; allowed: a tensor of [tokens], here {[*shape]}"
        )


def check_functions(config: AlgorithmConfig) -> None:
    """Find all functions of an algorithm and fill in their settings, before a run starts.

    Raises:
        ConfigError: one does not exist, its settings do not fit it, or it needs what a run with
            these settings does not have.
    """
    LOSSES.bound(config.loss, config.loss_settings)
    ADVANTAGES.bound(config.advantage, config.advantage_settings)
    AGGREGATIONS.bound(config.loss_aggregation, config.loss_aggregation_settings)
    KL_ESTIMATORS.bound(config.kl_estimator, config.kl_estimator_settings)
    given = {"entropy", "reference_log_probs"} if config.kl_coef else {"entropy"}
    check_needs(PolicyLoss(config).needs, given, f"{LOSSES.setting}={config.loss!r}")
    needed = needs_of(ADVANTAGES[config.advantage])
    given = given - {"entropy"} | {"values", "baseline_rewards"}  # what is needed, a run makes
    check_needs(needed, given, f"{ADVANTAGES.setting}={config.advantage!r}")
