"""Which samples a step trains on: filters of groups, choices among responses, priorities.

Each is a pure function that a setting names; docs/sample_policies.md has the formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mcore_rl.algorithms.group_advantages import equal_in_group
from mcore_rl.algorithms.inputs import reward_part, reward_parts
from mcore_rl.algorithms.reductions import Floats, Groups
from mcore_rl.algorithms.registry import Registry
from mcore_rl.config.checks import check_between
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import FilterConfig, ReplayConfig
from mcore_rl.data.batch import Batch
from mcore_rl.data.trajectories import Trajectories, compared

CHOICE_STREAM = 0x63686F69  # sets random choices apart from others of the same seed and step
Bools = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.int64]

# [samples]: true for those that stay; a group stays if all of its samples do.
GROUP_FILTERS: Registry[Callable[[Batch], Bools]] = Registry(
    "algorithm.filter.group_filter", ("batch",)
)
# The rewards of a group: which k of them stay.
CHOICES: Registry[Callable[[Floats, int, np.random.Generator], Rows]] = Registry(
    "algorithm.filter.keep_by", ("rewards", "k", "rng")
)
# The rewards of a group: its weight among those that may be replayed.
PRIORITIES: Registry[Callable[[Floats], float]] = Registry(
    "algorithm.filter.replay.priority", ("rewards",)
)
# The success rates of prompts: the weight of each among those that may be drawn.
CURRICULA: Registry[Callable[[Floats], Floats]] = Registry(
    "data.curriculum.name", ("rates",), "data.curriculum.settings"
)


@dataclass(frozen=True)
class DropUniformSettings:
    of: str = "reward"  # what is compared: reward, or a part of it by its name


@GROUP_FILTERS.register("drop_uniform")
def drop_uniform(batch: Batch, settings: DropUniformSettings) -> Bools:
    """Groups of which not every reward is the same: the others have zero advantage.

    DAPO (arXiv:2503.14476), equation 11, for any rewards: 0 < |correct| < n of rewards of 0 and 1.
    A group of one is uniform. Where a reward raised, a part counts as 0.
    """
    values = reward_or_part(batch, settings.of, f"{GROUP_FILTERS.settings_key}.of")
    return ~equal_in_group(values, Groups(batch.array("group_ids")))


@CHOICES.register("best")
def best(rewards: Floats, k: int, rng: np.random.Generator) -> Rows:
    """The k highest rewards; of equal ones those that come first."""
    return np.argsort(-rewards, kind="stable")[:k]


@CHOICES.register("best_and_worst")
def best_and_worst(rewards: Floats, k: int, rng: np.random.Generator) -> Rows:
    """The k - k // 2 highest and the k // 2 lowest."""
    order = np.argsort(-rewards, kind="stable")
    return np.concatenate([order[: k - k // 2], order[len(order) - k // 2 :]])


@CHOICES.register("max_variance")
def max_variance(rewards: Floats, k: int, rng: np.random.Generator) -> Rows:
    """The k rewards of the largest variance.

    PODS, Xu et al. 2025 (arXiv:2504.13818), algorithm 2: they are the i highest and the k - i
    lowest, for one i.
    """
    order = np.argsort(-rewards, kind="stable")
    found = [np.concatenate([order[:i], order[len(order) - k + i :]]) for i in range(k, -1, -1)]
    return max(found, key=lambda rows: float(rewards[rows].var()))


@CHOICES.register("random")
def at_random(rewards: Floats, k: int, rng: np.random.Generator) -> Rows:
    """Any k: the control of the others."""
    return rng.choice(len(rewards), k, replace=False)


@PRIORITIES.register("spread")
def spread(rewards: Floats) -> float:
    """The mean of |r - mean|, the size of advantages; 2 p (1 - p) for rewards of 0 and 1."""
    return float(np.abs(rewards - rewards.mean()).mean())


@PRIORITIES.register("rare_success")
def rare_success(rewards: Floats) -> float:
    """1 - p, and 0 where p is 0; p is the mean of the rewards, within 0 and 1."""
    rate = float(np.clip(rewards, 0, 1).mean())
    return 1 - rate if rate > 0 else 0.0


@PRIORITIES.register("uniform")
def uniform(rewards: Floats) -> float:
    return 1.0


@CURRICULA.register("learnability")
def learnability(rates: Floats) -> Floats:
    """4 p (1 - p): 1 where half of the responses succeed.

    The variance of a success, Foster et al. 2025 (arXiv:2502.12272), scaled to at most 1.
    """
    return 4 * rates * (1 - rates)


@dataclass(frozen=True)
class WindowSettings:
    low: float = 0.2
    high: float = 0.8

    def __post_init__(self) -> None:
        check_between("low", self.low, 0, 1)
        check_between("high", self.high, self.low, 1)


@CURRICULA.register("window")
def window(rates: Floats, settings: WindowSettings) -> Floats:
    """1 where low <= p <= high, else 0."""
    return np.asarray((settings.low <= rates) & (rates <= settings.high), np.float64)


def reward_or_part(batch: Batch, name: str, setting: str) -> Floats:
    """[samples]: the reward, or what the reward function returned under a name; 0 where it raised.

    Raises:
        ConfigError: it returned nothing of that name.
    """
    if name == "reward":
        return np.nan_to_num(batch.array("rewards").astype(np.float64))
    if (found := reward_part(batch, name)) is None:
        known = ", ".join(["reward", *reward_parts(batch)])
        raise ConfigError(f"{setting}={name!r} is no part of the reward; allowed: {known}")
    return found


def kept_groups(batch: Batch, config: FilterConfig) -> Batch:
    """The groups that pass algorithm.filter.group_filter.

    Raises:
        ConfigError: the filter returned something else than a bool a sample.
    """
    if not config.group_filter:
        return batch
    trajectories = Trajectories(batch)
    whole = compared(trajectories.joined())
    keep = GROUP_FILTERS.bound(config.group_filter, config.group_filter_settings)(whole)
    if not isinstance(keep, np.ndarray) or keep.dtype != bool or keep.shape != (len(whole),):
        raise ConfigError(
            f"{GROUP_FILTERS.setting}={config.group_filter!r} returned {_shown(keep)}; allowed: an "
            f"array of bool of [samples], here [{len(whole)}]"
        )
    groups = Groups(whole.array("group_ids"))
    num_kept = groups.sum(keep.astype(np.float64))
    return batch.take(trajectories.rows_of(np.flatnonzero(num_kept == groups.sizes)))


def kept_responses(batch: Batch, config: FilterConfig, seed: Sequence[int]) -> Batch:
    """At most keep_responses trajectories of each group, by algorithm.filter.keep_by; 0: all.

    Raises:
        ConfigError: the function returned something else than as many different rows.
    """
    k = config.keep_responses
    if not k:
        return batch
    choose, rng = (
        CHOICES.bound(config.keep_by, config.keep_by_settings),
        np.random.default_rng(seed),
    )
    trajectories = Trajectories(batch)
    whole = compared(trajectories.joined())
    rewards, index = whole.array("rewards").astype(np.float64), Groups(whole.array("group_ids"))
    rows: list[int] = []
    for group in range(len(whole) and int(index.index.max()) + 1):
        of_group = np.flatnonzero(index.index == group)
        if len(of_group) > k:
            chosen = np.asarray(choose(rewards[of_group], k, rng)).tolist()
            if len(chosen) != k or len({*range(len(of_group))} & {*chosen}) != k:
                raise ConfigError(
                    f"{CHOICES.setting}={config.keep_by!r} returned {chosen}; allowed: {k} "
                    f"different numbers from 0 to {len(of_group) - 1}"
                )
            of_group = of_group[chosen]
        rows += of_group.tolist()
    return batch.take(trajectories.rows_of(np.array(rows, np.int64)))


def check_choices(samples: FilterConfig) -> None:
    """Find the functions of these settings, before a run starts; raises ConfigError."""
    if samples.group_filter:
        GROUP_FILTERS.bound(samples.group_filter, samples.group_filter_settings)
    CHOICES.bound(samples.keep_by, samples.keep_by_settings)
    PRIORITIES.bound(samples.replay.priority, samples.replay.priority_settings)


def priority_of(rewards: Floats, config: ReplayConfig) -> float:
    """Raises ConfigError where the function returned something else than a number from 0 on."""
    found = PRIORITIES.bound(config.priority, config.priority_settings)(rewards)
    if not isinstance(found, int | float) or not 0 <= found < np.inf:
        raise ConfigError(
            f"{PRIORITIES.setting}={config.priority!r} returned {_shown(found)}; allowed: a number "
            "from 0 on"
        )
    return float(found)


def _shown(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype} of {[*value.shape]}"
    return repr(value) if isinstance(value, int | float) else type(value).__name__
