"""The loss of a policy update, composed from the algorithms and their settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from mcore_rl.algorithms.advantages import ADVANTAGES
from mcore_rl.algorithms.aggregation import AGGREGATIONS
from mcore_rl.algorithms.correction import check_rules
from mcore_rl.algorithms.distillation import compute_top_tokens_loss
from mcore_rl.algorithms.inputs import (
    LOSS_WEIGHTS,
    Losses,
    LossInputs,
    Metric,
    check_needs,
    get_needs,
    is_prepared,
)
from mcore_rl.algorithms.kl import KL_ESTIMATORS
from mcore_rl.algorithms.losses import LOSSES, MAX_LOG_RATIO
from mcore_rl.algorithms.sample_choice import check_sample_functions
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.import_path import is_import_path
from mcore_rl.config.rules import get_loop
from mcore_rl.config.schema import AlgorithmConfig, RLConfig

# By metric of the losses beside algorithm.loss: the column with the weights of its tokens.
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
        """Inputs that not every run has (algorithms/inputs.py)."""
        config = self.config
        names = set(get_needs(LOSSES[config.loss]))
        if config.kl_coef and config.kl_placement == "loss":
            names.add("reference_log_probs")
        is_scored = not config.correction.use_rollout_log_probs  # which gives the entropy, too
        if config.entropy_coef or config.entropy_target is not None or not is_scored:
            names.add("entropy")
        return frozenset(names)

    def __call__(self, inputs: LossInputs) -> Losses:
        columns = inputs.columns
        loss, metrics = self._compute_policy_loss(inputs)
        if "correction_weights" in columns:
            loss = loss * columns["correction_weights"]
        losses = {LOSS_WEIGHTS: loss}
        if "kl_weights" in columns:
            losses["kl_weights"] = kl = self._compute_reference_kl(inputs)
            metrics["reference_kl"] = "kl_weights", kl
        if "entropy_weights" in columns:
            losses["entropy_weights"] = -inputs.entropy
            metrics["entropy"] = "entropy_weights", inputs.entropy
        elif self.config.correction.use_rollout_log_probs:
            metrics.setdefault("entropy", (LOSS_WEIGHTS, inputs.entropy.detach()))
        if "distillation_weights" in columns:
            kl = compute_top_tokens_loss(inputs, self.config.distillation.loss)
            losses["distillation_weights"] = kl
            metrics["distillation_kl"] = "distillation_weights", kl
        if "cross_entropy_weights" in columns:
            losses["cross_entropy_weights"] = -inputs.log_probs
            metrics["cross_entropy"] = "cross_entropy_weights", -inputs.log_probs
        return losses, metrics

    def _compute_reference_kl(self, inputs: LossInputs) -> torch.Tensor:
        """Return the KL to the reference model, [tokens].

        With correction.unbiased_kl it is multiplied by the ratio of the policy and the server's.

        DeepSeek-V3.2 (arXiv:2512.02556, equation 7), where the estimator is k3: k3's gradient is
        that of KL(policy || reference) again, whatever policy generated. Log ratios are clamped to
        +-20.
        """
        name = self.config.kl_estimator
        estimator = KL_ESTIMATORS.bind(name, self.config.kl_estimator_settings)
        kl = estimator(inputs.log_probs, inputs.reference_log_probs)
        _check(kl, "the KL", inputs, f"{KL_ESTIMATORS.setting}={name!r}")
        if self.config.correction.unbiased_kl:
            log_ratio = inputs.log_probs - inputs.rollout_log_probs
            kl = kl * log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        return kl

    def _compute_policy_loss(self, inputs: LossInputs) -> tuple[torch.Tensor, dict[str, Metric]]:
        name = self.config.loss
        result = LOSSES.bind(name, self.config.loss_settings)(inputs)
        what = f"{LOSSES.setting}={name!r}"
        if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], Mapping):
            raise ConfigError(
                f"{what} returned {type(result).__name__}; allowed: a loss and a dict of metrics"
            )
        metrics = result[1]
        loss = _check(result[0], "the loss", inputs, what)
        for key, value in metrics.items():
            _check(value, key, inputs, what)
        return loss, dict(metrics)


def _check(value: object, called: str, inputs: LossInputs, what: str) -> torch.Tensor:
    shape = inputs.sequence_ids.shape
    if not isinstance(value, torch.Tensor) or value.shape != shape:
        kind = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise ConfigError(
            f"{what} returned {kind} for {called}; allowed: a tensor of [tokens], here {[*shape]}"
        )
    return value


def reads_squares(config: AlgorithmConfig) -> bool:
    """Return whether the actor's log-probs have to come with sum_pi_squared."""
    return "sum_pi_squared" in get_needs(ADVANTAGES[config.advantage])


def reads_greedy(config: AlgorithmConfig) -> bool:
    """Return whether the advantage compares with greedy responses, which are generated then."""
    return "baseline_rewards" in get_needs(ADVANTAGES[config.advantage])


def check_greedy(config: RLConfig) -> None:
    """Check that a run can generate the greedy responses that its advantage compares with.

    Raises:
        ConfigError: It cannot.
    """
    if not reads_greedy(config.algorithm):
        return
    need = f"{ADVANTAGES.setting}={config.algorithm.advantage!r} compares with greedy responses"
    if get_loop(config.trainer) == "fully_async":
        raise ConfigError(
            f"{need}, and with trainer.mode='fully_async' these would be of another version; "
            "allowed: another advantage"
        )
    if path := config.reward_model.model_path:
        raise ConfigError(
            f"{need}, which reward_model.model_path={path!r} does not score; allowed: another "
            "advantage"
        )


def check_functions(config: AlgorithmConfig, agent_loop: str = "single_turn") -> None:
    """Find all functions of an algorithm and fill in their settings, before a run starts.

    `agent_loop` is agent.loop of the run.

    Raises:
        ConfigError: one does not exist, its settings do not fit it, or it needs what a run with
            these settings does not have.
    """
    LOSSES.bind(config.loss, config.loss_settings)
    ADVANTAGES.bind(config.advantage, config.advantage_settings)
    AGGREGATIONS.bind(config.loss_aggregation, config.loss_aggregation_settings)
    KL_ESTIMATORS.bind(config.kl_estimator, config.kl_estimator_settings)
    check_rules(config.correction)
    check_sample_functions(config.filter)
    if config.loss == "decoupled_ppo" and config.correction.has_weights:
        raise ConfigError(
            "algorithm.loss='decoupled_ppo' has importance weights of its own; allowed: "
            "algorithm.correction.level='off'"
        )
    given = {"reference_log_probs"} if config.kl_coef else set()
    needed = PolicyLoss(config).needs
    check_needs(needed, given | {"entropy"}, f"{LOSSES.setting}={config.loss!r}")
    needed = get_needs(ADVANTAGES[config.advantage])
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


def needs_log_prob_pass(config: RLConfig) -> bool:
    """Return whether log-probs are computed, or taken from the servers, before the update.

    With one optimizer step per trainer step the policy that is updated is the policy that the
    log-probs are of: the forward pass of the update gives the same numbers, so that ratios are 1,
    as in TRL where a batch is used once (BaseEngine.train_batch_with_scores).
    """
    return bool(find_log_prob_pass_reason(config))


def find_log_prob_pass_reason(config: RLConfig) -> str:
    """Return the first setting that needs log-probs or entropies before the update; "" for none.

    Samples of old versions need none by themselves: their weights are those of a correction, or of
    algorithm.loss="decoupled_ppo", whose proximal policy is the one that is updated.
    """
    algorithm = config.algorithm
    replay, keys = config.actor.moe.router_replay, config.actor.indexer_replay
    correction, samples = algorithm.correction, algorithm.filter
    advantage, loss = ADVANTAGES[algorithm.advantage], LOSSES[algorithm.loss]
    # Functions outside of the package may read any column.
    is_read_by_loss = is_import_path(algorithm.loss) or is_prepared(loss)
    is_read_by_advantage = is_import_path(algorithm.advantage) or reads_squares(algorithm)
    has_critic = "values" in get_needs(advantage)  # which learns before the actor is checked
    # Gaps and entropies are of responses, too, that no update has.
    has_more = bool(samples.keep_responses) and samples.advantages_of == "generated"
    entropy_target, share = algorithm.entropy_target, algorithm.top_entropy_share
    teacher_loss = algorithm.distillation.loss
    settings: list[tuple[str, object, bool]] = [
        ("algorithm.log_prob_pass", algorithm.log_prob_pass, algorithm.log_prob_pass == "always"),
        ("algorithm.num_mini_batches", algorithm.num_mini_batches, algorithm.num_mini_batches > 1),
        ("algorithm.correction.use_rollout_log_probs", True, correction.use_rollout_log_probs),
        ("algorithm.correction.level", correction.level, correction.has_weights),
        ("algorithm.correction.reject", correction.reject, bool(correction.reject)),
        ("algorithm.loss", algorithm.loss, is_read_by_loss),
        ("algorithm.advantage", algorithm.advantage, is_read_by_advantage or has_critic),
        ("algorithm.kl_placement", algorithm.kl_placement, algorithm.kl_placement == "reward"),
        ("algorithm.kl_target", algorithm.kl_target, algorithm.kl_target is not None),
        ("algorithm.entropy_target", entropy_target, entropy_target is not None),
        ("algorithm.top_entropy_share", share, share < 1),
        ("algorithm.distillation.loss", teacher_loss, teacher_loss != "off"),
        ("algorithm.filter.advantages_of", samples.advantages_of, has_more),
        ("actor.moe.router_replay", replay, replay == "record"),
        ("actor.indexer_replay", keys, keys == "record"),
    ]
    return next((f"{name}={value!r}" for name, value, is_needed in settings if is_needed), "")
