"""The loss of a policy update, composed from the algorithms and their settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

from mcore_rl.algorithms.advantages import ADVANTAGES
from mcore_rl.algorithms.aggregation import AGGREGATIONS
from mcore_rl.algorithms.correction import check_rules
from mcore_rl.algorithms.distillation import top_tokens_loss
from mcore_rl.algorithms.inputs import (
    LOSS_WEIGHTS,
    Losses,
    LossInputs,
    Metric,
    check_needs,
    needs_of,
)
from mcore_rl.algorithms.kl import KL_ESTIMATORS
from mcore_rl.algorithms.losses import LOSSES, MAX_LOG_RATIO
from mcore_rl.algorithms.sample_choice import check_choices
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.import_path import is_import_path
from mcore_rl.config.schema import AlgorithmConfig, RLConfig
from mcore_rl.data.batch import Batch, Samples

B = TypeVar("B", bound=Samples)

# Along response tokens: what samples are chosen, scored and weighed by before an update.
EARLIER = (
    "weight_versions", "turn_numbers", "state_ids", "process_rewards", "token_rewards", "entropy",
    "sum_pi_squared", "policy_mask", "cross_entropy_mask", "top_entropy_mask", "current_log_probs",
)  # fmt: skip


def read_by_loss(batch: B, loss: str) -> B:
    """Without the columns that no loss of this package reads; one of one's own may read any.

    A batch that is here stays as it is.
    """
    return batch if isinstance(batch, Batch) or is_import_path(loss) else batch.without(*EARLIER)


# Of metrics of other losses than the one that algorithm.loss names: the column of its weights.
COLUMN_OF_METRIC = {
    "reference_kl": "kl_weights",
    "entropy": "entropy_weights",
    "distillation_kl": "distillation_weights",
    "cross_entropy": "cross_entropy_weights",
}


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """The loss that algorithm.loss names; those of KL, entropy, distillation and cross entropy.

    Each has a column of weights, its coefficient in them; what a batch has no column for is not
    computed. It travels to the ranks as its settings: each rank finds the functions by their names
    or import paths.
    """

    config: AlgorithmConfig

    @property
    def needs(self) -> frozenset[str]:
        """Inputs that not every run has: see registry.needs."""
        config = self.config
        found = set(needs_of(LOSSES[config.loss]))
        if config.kl_coef and config.kl_placement == "loss":
            found.add("reference_log_probs")
        is_scored = not config.correction.use_rollout_log_probs  # which gives the entropy, too
        if config.entropy_coef or config.entropy_target is not None or not is_scored:
            found.add("entropy")
        return frozenset(found)

    def __call__(self, inputs: LossInputs) -> Losses:
        columns = inputs.columns
        loss, metrics = self._policy_loss(inputs)
        if "correction_weights" in columns:
            loss = loss * columns["correction_weights"]
        losses = {LOSS_WEIGHTS: loss}
        if "kl_weights" in columns:
            losses["kl_weights"] = kl = self._reference_kl(inputs)
            metrics["reference_kl"] = "kl_weights", kl
        if "entropy_weights" in columns:
            losses["entropy_weights"] = -inputs.entropy
            metrics["entropy"] = "entropy_weights", inputs.entropy
        elif self.config.correction.use_rollout_log_probs:
            metrics.setdefault("entropy", (LOSS_WEIGHTS, inputs.entropy.detach()))
        if "distillation_weights" in columns:
            kl = top_tokens_loss(inputs, self.config.distillation.loss)
            losses["distillation_weights"] = kl
            metrics["distillation_kl"] = "distillation_weights", kl
        if "cross_entropy_weights" in columns:
            losses["cross_entropy_weights"] = -inputs.log_probs
            metrics["cross_entropy"] = "cross_entropy_weights", -inputs.log_probs
        return losses, metrics

    def _reference_kl(self, inputs: LossInputs) -> torch.Tensor:
        """[tokens]; with correction.unbiased_kl times the ratio of the policy and the server's.

        DeepSeek-V3.2 (arXiv:2512.02556, equation 7), where the estimator is k3: k3's gradient is
        that of KL(policy || reference) again, whatever policy generated. Log ratios are clamped to
        +-20.
        """
        name = self.config.kl_estimator
        estimator = KL_ESTIMATORS.bound(name, self.config.kl_estimator_settings)
        kl = estimator(inputs.log_probs, inputs.reference_log_probs)
        _check(kl, "the KL", inputs, f"{KL_ESTIMATORS.setting}={name!r}")
        if self.config.correction.unbiased_kl:
            log_ratio = inputs.log_probs - inputs.rollout_log_probs
            kl = kl * log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        return kl

    def _policy_loss(self, inputs: LossInputs) -> tuple[torch.Tensor, dict[str, Metric]]:
        name = self.config.loss
        found = LOSSES.bound(name, self.config.loss_settings)(inputs)
        what = f"{LOSSES.setting}={name!r}"
        if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[1], Mapping):
            raise ConfigError(
                f"{what} returned {type(found).__name__}; allowed: a loss and a dict of metrics"
            )
        metrics = found[1]
        loss = _check(found[0], "the loss", inputs, what)
        for key, value in metrics.items():
            _check(value, key, inputs, what)
        return loss, dict(metrics)


def _check(value: object, called: str, inputs: LossInputs, what: str) -> torch.Tensor:
    shape = inputs.sequence_ids.shape
    if not isinstance(value, torch.Tensor) or value.shape != shape:
        found = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise ConfigError(
            f"{what} returned {found} for {called}; allowed: a tensor of [tokens], here {[*shape]}"
        )
    return value


def reads_squares(config: AlgorithmConfig) -> bool:
    """Whether the actor's log-probs have to come with sum_pi_squared."""
    return "sum_pi_squared" in needs_of(ADVANTAGES[config.advantage])


def reads_greedy(config: AlgorithmConfig) -> bool:
    """Whether the advantage compares with greedy responses, which then have to be generated."""
    return "baseline_rewards" in needs_of(ADVANTAGES[config.advantage])


def check_greedy(config: RLConfig) -> None:
    """Raises ConfigError for an advantage of greedy responses in a run that makes none for it."""
    if not reads_greedy(config.algorithm):
        return
    asks = f"{ADVANTAGES.setting}={config.algorithm.advantage!r} compares with greedy responses"
    if config.trainer.mode == "fully_async":
        raise ConfigError(
            f"{asks}, and with trainer.mode='fully_async' these would be of another version; "
            "allowed: another advantage"
        )
    if path := config.reward_model.model_path:
        raise ConfigError(
            f"{asks}, which reward_model.model_path={path!r} does not score; allowed: another "
            "advantage"
        )


def check_functions(config: AlgorithmConfig, agent_loop: str = "single_turn") -> None:
    """Find all functions of an algorithm and fill in their settings, before a run starts.

    `agent_loop` is agent.loop of the run.

    Raises:
        ConfigError: one does not exist, its settings do not fit it, or it needs what a run with
            these settings does not have.
    """
    LOSSES.bound(config.loss, config.loss_settings)
    ADVANTAGES.bound(config.advantage, config.advantage_settings)
    AGGREGATIONS.bound(config.loss_aggregation, config.loss_aggregation_settings)
    KL_ESTIMATORS.bound(config.kl_estimator, config.kl_estimator_settings)
    check_rules(config.correction)
    check_choices(config.filter)
    if config.loss == "decoupled_ppo" and config.correction.has_weights:
        raise ConfigError(
            "algorithm.loss='decoupled_ppo' has importance weights of its own; allowed: "
            "algorithm.correction.level='off'"
        )
    given = {"reference_log_probs"} if config.kl_coef else set()
    needed = PolicyLoss(config).needs
    check_needs(needed, given | {"entropy"}, f"{LOSSES.setting}={config.loss!r}")
    needed = needs_of(ADVANTAGES[config.advantage])
    given |= {"values", "baseline_rewards"}  # made where needed; see check_greedy
    if not config.correction.use_rollout_log_probs:
        given.add("sum_pi_squared")
    if agent_loop == "environment" or is_import_path(agent_loop):
        given.add("state_ids")
    check_needs(needed, given, f"{ADVANTAGES.setting}={config.advantage!r}")
    if config.filter.replay.share and "values" in needed:
        raise ConfigError(
            f"algorithm.filter.replay.share={config.filter.replay.share}: the returns of old "
            f"samples are not those of the policy that {ADVANTAGES.setting}={config.advantage!r} "
            "has values of; allowed: 0, or an advantage without a critic"
        )
