"""How much better than expected each response was: one scalar a sample."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from mcore_rl.algorithms.registry import Registry

_EPSILON = 1e-6  # keeps a group of equal rewards from dividing by zero


class GroupAdvantage(Protocol):
    def __call__(
        self,
        rewards: npt.NDArray[np.floating],
        group_ids: npt.NDArray[np.integer],
        *,
        normalize_by_std: bool,
    ) -> npt.NDArray[np.float32]: ...


ADVANTAGES: Registry[GroupAdvantage] = Registry("algorithm.advantage")


@ADVANTAGES.register("grpo")
def grpo(
    rewards: npt.NDArray[np.floating],
    group_ids: npt.NDArray[np.integer],
    *,
    normalize_by_std: bool,
) -> npt.NDArray[np.float32]:
    """Rewards relative to the other responses to the same prompt.

    advantage = (r - mean of the group) / (std of the group + 1e-6), the outcome-supervised GRPO of
    Shao et al. 2024 (DeepSeekMath, arXiv:2402.03300, section 4.1.2). The paper does not say which
    standard deviation; this is the sample one (n - 1), as in the reference implementations.
    Without `normalize_by_std` the division is left out (Dr. GRPO, arXiv:2503.20783).

    rewards and group_ids are [samples]; so is the result. Samples of a group may stand anywhere. A
    group of one sample has nothing to be compared with: its advantage is 0.
    """
    _, group, counts = np.unique(group_ids, return_inverse=True, return_counts=True)
    # float64, because the rounding of float32 means would be blown up by 1 / 1e-6 in equal groups.
    values = np.asarray(rewards, dtype=np.float64)
    centered: npt.NDArray[np.float64] = (
        values - (np.bincount(group, weights=values) / counts)[group]
    )
    if normalize_by_std:
        variance = np.bincount(group, weights=centered**2) / np.maximum(counts - 1, 1)
        centered = centered / (np.sqrt(variance)[group] + _EPSILON)
    return centered.astype(np.float32)


def uniform_groups(
    rewards: npt.NDArray[np.floating], group_ids: npt.NDArray[np.integer]
) -> npt.NDArray[np.bool_]:
    """[samples], true where every reward of the sample's group is the same.

    Such groups have zero advantage: training on them moves nothing.
    """
    _, group, counts = np.unique(group_ids, return_inverse=True, return_counts=True)
    lowest = np.full(len(counts), np.inf)
    highest = np.full(len(counts), -np.inf)
    np.minimum.at(lowest, group, rewards)
    np.maximum.at(highest, group, rewards)
    return np.asarray((lowest == highest)[group], dtype=np.bool_)
