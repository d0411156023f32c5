"""Rules between the settings of an algorithm. Pure."""

from __future__ import annotations

from dataclasses import replace

from mcore_rl.config.checks import at_least, between, one_of, positive
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.samples_schema import SamplesConfig
from mcore_rl.config.schema import AlgorithmConfig, CorrectionConfig

KL_IN = ("loss", "reward")
CORRECTION_LEVELS = ("off", "token", "sequence", "geometric")
CORRECTION_METHODS = ("truncate", "mask")
IF_SHORT = ("train", "stop")
LOG_PROB_PASS = ("auto", "always")
ADVANTAGES_OF = ("kept", "generated")
# Advantages that compare the responses to one prompt.
OF_GROUPS = (
    "gdpo", "gpg", "grpo", "grpo_passk", "lite_ppo", "maxrl", "opo", "optimal_token_baseline",
    "reinforce_plus_plus_baseline", "rloo",
)  # fmt: skip


def with_level(config: AlgorithmConfig, staleness: int) -> AlgorithmConfig:
    """The same, with algorithm.correction.level decided where nobody has set it."""
    correction = config.correction
    if correction.level is not None:
        return config
    is_weighted = correction.use_rollout_log_probs or config.loss == "decoupled_ppo"
    level = "token" if staleness and not is_weighted else "off"
    return replace(config, correction=replace(correction, level=level))


def resolve_algorithm(config: AlgorithmConfig, staleness: int = 0) -> None:
    """`staleness`: how many versions older than the policy samples are."""
    config = with_level(config, staleness)
    fewest = 2 if config.advantage in OF_GROUPS else 1
    at_least("algorithm.group_size", config.group_size, fewest)
    at_least("algorithm.num_mini_batches", config.num_mini_batches, 1)
    one_of("algorithm.log_prob_pass", config.log_prob_pass, LOG_PROB_PASS)
    at_least("algorithm.kl_coef", config.kl_coef, 0)
    at_least("algorithm.entropy_coef", config.entropy_coef, 0)
    at_least("algorithm.cross_entropy_coef", config.cross_entropy_coef, 0)
    _resolve_kl(config)
    _resolve_entropy(config)
    _resolve_correction(config.correction)
    _resolve_samples(config.samples, config.group_size, fewest)
    _resolve_old_samples(config, staleness)


def _resolve_samples(config: SamplesConfig, group_size: int, fewest: int) -> None:
    key = "algorithm.samples"
    one_of(f"{key}.if_short", config.if_short, IF_SHORT)
    one_of(f"{key}.advantages_of", config.advantages_of, ADVANTAGES_OF)
    at_least(f"{key}.max_rounds", config.max_rounds, 1)
    at_least(f"{key}.prompts_per_round", config.prompts_per_round, 0)
    default = SamplesConfig()
    for name in ("max_rounds", "prompts_per_round", "if_short"):
        if not config.group_filter and (value := getattr(config, name)) != getattr(default, name):
            raise ConfigError(
                f"{key}.{name}={value!r} has no part without a filter; allowed: "
                f"{getattr(default, name)!r}, or {key}.group_filter='drop_uniform'"
            )
    if config.keep_responses:
        least = fewest if config.advantages_of == "kept" else 1
        between(f"{key}.keep_responses", config.keep_responses, least, group_size)


def _resolve_old_samples(config: AlgorithmConfig, staleness: int) -> None:
    """Old samples need the probability that they were generated with in the loss."""
    replay, key = config.samples.replay, "algorithm.samples.replay"
    between(f"{key}.share", replay.share, 0, 1)
    # One that is replayed is older by at least a step.
    at_least(f"{key}.max_age", replay.max_age, 1 + staleness if replay.share else 1)
    correction = config.correction
    is_weighted = correction.has_weights or correction.use_rollout_log_probs
    asked = f"trainer.staleness={staleness}" if staleness else f"{key}.share={replay.share}"
    if (replay.share or staleness) and not is_weighted and config.loss != "decoupled_ppo":
        raise ConfigError(
            f"{asked}: old samples would count as those of the policy; allowed: "
            "algorithm.correction.level='token', 'sequence' or 'geometric', "
            "algorithm.correction.use_rollout_log_probs=true, or algorithm.loss='decoupled_ppo'"
        )


def _resolve_kl(config: AlgorithmConfig) -> None:
    one_of("algorithm.kl_in", config.kl_in, KL_IN)
    at_least("algorithm.kl_horizon", config.kl_horizon, 1)
    if config.kl_target is not None:
        positive("algorithm.kl_target", config.kl_target)
    asked = {
        "kl_in": config.kl_in == "reward",
        "kl_target": config.kl_target is not None,
        "correction.unbiased_kl": config.correction.unbiased_kl,
    }
    for name, is_asked in asked.items():
        if is_asked and not config.kl_coef:
            raise ConfigError(
                f"algorithm.kl_coef=0: there is no KL for algorithm.{name}; allowed: above 0"
            )
    if config.correction.unbiased_kl and config.kl_in != "loss":
        raise ConfigError(
            f"algorithm.correction.unbiased_kl=true corrects a gradient, and algorithm.kl_in="
            f"{config.kl_in!r} has none; allowed: kl_in='loss'"
        )


def _resolve_entropy(config: AlgorithmConfig) -> None:
    share = config.top_entropy_share
    if not 0 < share <= 1:
        raise ConfigError(f"algorithm.top_entropy_share={share}; allowed: above 0, up to 1")
    positive("algorithm.entropy_coef_step", config.entropy_coef_step)
    positive("algorithm.entropy_coef_max", config.entropy_coef_max)
    if config.entropy_target is not None:
        positive("algorithm.entropy_target", config.entropy_target)
        between("algorithm.entropy_coef", config.entropy_coef, 0, config.entropy_coef_max)
    reads = {"entropy_target": config.entropy_target is not None, "top_entropy_share": share < 1}
    for name, is_read in reads.items():
        if is_read and config.correction.use_rollout_log_probs:
            raise ConfigError(
                f"algorithm.{name}={getattr(config, name)} reads the entropy that comes with the "
                "trainer's log-probs; allowed: algorithm.correction.use_rollout_log_probs=false"
            )


def _resolve_correction(config: CorrectionConfig) -> None:
    key = "algorithm.correction"
    one_of(f"{key}.level", config.level or "off", CORRECTION_LEVELS)
    one_of(f"{key}.method", config.method, CORRECTION_METHODS)
    positive(f"{key}.weight_max", config.weight_max)
    at_least(f"{key}.weight_min", config.weight_min, 0)
    if config.weight_min > (config.weight_max if config.method == "mask" else 0):
        raise ConfigError(
            f"{key}.weight_min={config.weight_min}; allowed: 0, or up to weight_max="
            f"{config.weight_max} with {key}.method='mask'"
        )
    if config.use_rollout_log_probs and (config.has_weights or config.reject):
        raise ConfigError(
            f"{key}.use_rollout_log_probs=true computes no log-probs that {key}.level and "
            f"{key}.reject could compare with the servers'; allowed: level='off' and no reject"
        )
