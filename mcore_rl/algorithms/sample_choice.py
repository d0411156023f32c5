"""Selection of the samples of a step: group filters, choices of responses, replay priorities.

Each is a pure function that a setting names; docs/sample_policies.md has the formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mcore_rl.algorithms.inputs import get_reward_part, list_reward_parts
from mcore_rl.algorithms.reductions import Floats, Groups
from mcore_rl.algorithms.registry import Registry
from mcore_rl.config.checks import check_between
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import FilterConfig, ReplayConfig
from mcore_rl.data.batch import Batch
from mcore_rl.data.trajectories import Trajectories, split_groups_by_role

CHOICE_STREAM = 0x63686F69  # separates random choices from other draws of the seed and step
Bools = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.int64]

# Returns [samples]: true to keep a sample. A group stays if all of its samples do.
GROUP_FILTERS: Registry[Callable[[Batch], Bools]] = Registry(
    "algorithm.filter.group_filter", ("batch",)
)
# Takes the rewards of a group, returns the indices of k responses.
CHOICES: Registry[Callable[[Floats, int, np.random.Generator], Rows]] = Registry(
    "algorithm.filter.keep_by", ("rewards", "k", "rng")
)
# Takes the rewards of a group, returns its weight in the draw of groups to replay.
PRIORITIES: Registry[Callable[[Floats], float]] = Registry(
    "algorithm.filter.replay.priority", ("rewards",)
)
# Takes the success rates of prompts, returns their weights in the draw of prompts.
CURRICULA: Registry[Callable[[Floats], Floats]] = Registry(
    "data.curriculum.name", ("rates",), "data.curriculum.settings"
)


@dataclass(frozen=True)
class DropUniformSettings:
    of: str = "reward"  # compare the reward, or the part of it with this name


@GROUP_FILTERS.register("drop_uniform")
def drop_uniform(batch: Batch, settings: DropUniformSettings) -> Bools:
    """Drop groups whose rewards are all equal: their advantages are 0.

    DAPO (arXiv:2503.14476), equation 11, for any rewards: 0 < |correct| < n with rewards of 0 and
    1. A group of one is uniform. A part of a failed reward counts as 0.
    """
    values = get_reward_or_part(batch, settings.of, f"{GROUP_FILTERS.settings_key}.of")
    return ~Groups(batch.array("group_ids")).is_uniform(values)


@CHOICES.register("best")
def select_best(rewards: Floats, k: int, rng: np.random.Generator) -> Rows:
    """Select the k highest rewards; of equal rewards the first."""
    return np.argsort(-rewards, kind="stable")[:k]


@CHOICES.register("best_and_worst")
def select_best_and_worst(rewards: Floats, k: int, rng: np.random.Generator) -> Rows:
    """Select the k - k // 2 highest and the k // 2 lowest rewards."""
    order = np.argsort(-rewards, kind="stable")
    return np.concatenate([order[: k - k // 2], order[len(order) - k // 2 :]])


@CHOICES.register("max_variance")
def select_max_variance(rewards: Floats, k: int, rng: np.random.Generator) -> Rows:
    """Select the k rewards of the largest variance.

    PODS, Xu et al. 2025 (arXiv:2504.13818), algorithm 2: they are the i highest and the k - i
    lowest for some i.
    """
    order = np.argsort(-rewards, kind="stable")
    subsets = [np.concatenate([order[:i], order[len(order) - k + i :]]) for i in range(k, -1, -1)]
    return max(subsets, key=lambda rows: float(rewards[rows].var()))


@CHOICES.register("random")
def select_random(rewards: Floats, k: int, rng: np.random.Generator) -> Rows:
    """Select k responses at random, as a control."""
    return rng.choice(len(rewards), k, replace=False)


@PRIORITIES.register("spread")
def compute_spread(rewards: Floats) -> float:
    """Return the mean of |r - mean|, the size of advantages; 2 p (1 - p) for rewards of 0 and 1."""
    return float(np.abs(rewards - rewards.mean()).mean())


@PRIORITIES.register("rare_success")
def compute_rare_success(rewards: Floats) -> float:
    """Return 1 - p, and 0 where p is 0; p is the mean of the rewards clipped to 0 and 1."""
    rate = float(np.clip(rewards, 0, 1).mean())
    return 1 - rate if rate > 0 else 0.0


@PRIORITIES.register("uniform")
def get_uniform(rewards: Floats) -> float:
    """Return 1 for any group."""
    return 1.0


@CURRICULA.register("learnability")
def compute_learnability(rates: Floats) -> Floats:
    """Return 4 p (1 - p): 1 where half of the responses succeed.

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
def apply_window(rates: Floats, settings: WindowSettings) -> Floats:
    """Return 1 where low <= p <= high, else 0."""
    return np.asarray((settings.low <= rates) & (rates <= settings.high), np.float64)


def get_reward_or_part(batch: Batch, name: str, setting: str) -> Floats:
    """Return the reward ("reward") or a part of it, 0 where the reward failed: [samples].

    Raises:
        ConfigError: the reward has no part of that name.
    """
    if name == "reward":
        return np.nan_to_num(batch.array("rewards").astype(np.float64))
    if (part := get_reward_part(batch, name)) is None:
        known = ", ".join(["reward", *list_reward_parts(batch)])
        raise ConfigError(f"{setting}={name!r} is no part of the reward; allowed: {known}")
    return part


def filter_groups(batch: Batch, config: FilterConfig) -> Batch:
    """Drop groups that do not pass algorithm.filter.group_filter.

    Raises:
        ConfigError: the filter did not return one bool per sample.
    """
    if not config.group_filter:
        return batch
    trajectories = Trajectories(batch)
    joined = split_groups_by_role(trajectories.join())
    mask = GROUP_FILTERS.bind(config.group_filter, config.group_filter_settings)(joined)
    if not isinstance(mask, np.ndarray) or mask.dtype != bool or mask.shape != (len(joined),):
        raise ConfigError(
            f"{GROUP_FILTERS.setting}={config.group_filter!r} returned {_describe(mask)}; allowed: "
            f"an array of bool of [samples], here [{len(joined)}]"
        )
    groups = Groups(joined.array("group_ids"))
    num_passed = groups.sum(mask.astype(np.float64))
    return batch.take(trajectories.find_rows(np.flatnonzero(num_passed == groups.sizes)))


def choose_responses(batch: Batch, config: FilterConfig, seed: Sequence[int]) -> Batch:
    """Select at most keep_responses trajectories of each group by algorithm.filter.keep_by.

    keep_responses=0 keeps all.

    Raises:
        ConfigError: the function did not return so many different rows.
    """
    k = config.keep_responses
    if not k:
        return batch
    choose = CHOICES.bind(config.keep_by, config.keep_by_settings)
    rng = np.random.default_rng(seed)
    trajectories = Trajectories(batch)
    joined = split_groups_by_role(trajectories.join())
    rewards, index = joined.array("rewards").astype(np.float64), Groups(joined.array("group_ids"))
    rows: list[int] = []
    for group in range(len(joined) and int(index.index.max()) + 1):
        group_rows = np.flatnonzero(index.index == group)
        if len(group_rows) > k:
            chosen = np.asarray(choose(rewards[group_rows], k, rng)).tolist()
            if len(chosen) != k or len({*range(len(group_rows))} & {*chosen}) != k:
                raise ConfigError(
                    f"{CHOICES.setting}={config.keep_by!r} returned {chosen}; allowed: {k} "
                    f"different numbers from 0 to {len(group_rows) - 1}"
                )
            group_rows = group_rows[chosen]
        rows += group_rows.tolist()
    return batch.take(trajectories.find_rows(np.array(rows, np.int64)))


def check_sample_functions(samples: FilterConfig) -> None:
    """Raise ConfigError, before a run starts, if a function or its settings are not valid."""
    if samples.group_filter:
        GROUP_FILTERS.bind(samples.group_filter, samples.group_filter_settings)
    CHOICES.bind(samples.keep_by, samples.keep_by_settings)
    PRIORITIES.bind(samples.replay.priority, samples.replay.priority_settings)


def compute_priority(rewards: Floats, config: ReplayConfig) -> float:
    """Compute the replay priority of a group.

    Raises:
        ConfigError: the function did not return a number from 0 on.
    """
    priority = PRIORITIES.bind(config.priority, config.priority_settings)(rewards)
    if not isinstance(priority, int | float) or not 0 <= priority < np.inf:
        raise ConfigError(
            f"{PRIORITIES.setting}={config.priority!r} returned {_describe(priority)}; allowed: a "
            "number from 0 on"
        )
    return float(priority)


def _describe(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype} of {[*value.shape]}"
    return repr(value) if isinstance(value, int | float) else type(value).__name__
