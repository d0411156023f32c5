"""Settings that name a part of the reward, checked before a run starts where parts are known."""

from __future__ import annotations

from mcore_rl.algorithms.advantages import ADVANTAGES, GDPOSettings
from mcore_rl.algorithms.sample_choice import GROUP_FILTERS, DropUniformSettings
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.resolve_rollout import list_reward_terms
from mcore_rl.config.schema import RewardConfig, RLConfig
from mcore_rl.rewards.registry import get_parts

# Those whose trajectories get what config.reward finds; others may have rewards of their own.
REWARDED_LOOPS = ("single_turn", "tools", "program", "user")


def check_reward_parts(config: RLConfig) -> None:
    """Raises ConfigError for a name that no reward of the run returns.

    What a function outside of the package returns shows only when it is called.
    """
    if config.agent.loop not in REWARDED_LOOPS:
        return
    known, is_open = _parts(config.reward)
    if is_open:
        return
    for setting, names in _of_rewards(config).items():
        _refuse_others(setting, names, ["reward", *known])
    advantage = config.algorithm.advantage
    given = ADVANTAGES.build_settings(advantage, config.algorithm.advantage_settings)
    if isinstance(given, GDPOSettings):
        scored = ["model"] if config.reward_model.model_path else []
        _refuse_others(f"{ADVANTAGES.settings_key}.parts", [*given.weights()], known + scored)


def _of_rewards(config: RLConfig) -> dict[str, list[str]]:
    """What settings compare, `reward` or a part of it, by their keys."""
    found, samples, curriculum = {}, config.algorithm.filter, config.data.curriculum
    if samples.group_filter:
        settings = GROUP_FILTERS.build_settings(samples.group_filter, samples.group_filter_settings)
        if isinstance(settings, DropUniformSettings):
            found[f"{GROUP_FILTERS.settings_key}.of"] = [settings.of]
    if curriculum.name:
        found["data.curriculum.success"] = [curriculum.success]
    return found


def _parts(config: RewardConfig) -> tuple[list[str], bool]:
    """The names of parts that are known, and whether there may be others."""
    known, is_open = list[str](), False
    for name, term in list_reward_terms(config).items():
        parts = get_parts(f"reward.terms.{name}" if name else "reward", term.name)
        known += [name] if name else []
        known += [f"{name}/{part}" if name else part for part in parts or ()]
        is_open = is_open or parts is None
    return known, is_open


def _refuse_others(setting: str, names: list[str], allowed: list[str]) -> None:
    for name in names:
        if name not in allowed:
            told = ", ".join(allowed) or "none, as the reward has no parts"
            raise ConfigError(f"{setting} names {name!r}, no part of the reward; allowed: {told}")
