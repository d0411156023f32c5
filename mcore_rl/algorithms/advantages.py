"""Advantages: how much better than expected each response, or each of its tokens, was."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from mcore_rl.algorithms.inputs import AdvantageInputs
from mcore_rl.algorithms.registry import Registry
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import GRPOSettings
from mcore_rl.data.batch import Batch, Jagged

# One number a sample, or a row of one number a response token.
Advantages = npt.NDArray[np.floating] | Jagged
ADVANTAGES: Registry[Callable[[AdvantageInputs], Advantages]] = Registry(
    "algorithm.advantage", ("inputs",)
)

_EPSILON = 1e-6  # keeps a group of equal rewards from dividing by zero


def token_advantages(batch: Batch, name: str, settings: Mapping[str, object]) -> Jagged:
    """float32 advantages of the response tokens, by the function that algorithm.advantage names.

    An advantage of a sample applies to each of its tokens.

    Raises:
        ConfigError: the function raised, or returned something else than finite numbers, one a
            sample or one a response token.
    """
    advantage, responses = ADVANTAGES.bound(name, settings), batch.jagged("response_ids")
    what = f"{ADVANTAGES.setting}={name!r}"
    try:
        found = advantage(AdvantageInputs(batch))
    except ConfigError:
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"{what} raised {reason}") from error
    if isinstance(found, Jagged) and found.values.ndim == 1:
        if not np.array_equal(found.lengths, responses.lengths):
            raise ConfigError(
                f"{what} returned rows of {found.lengths.tolist()} tokens; allowed: those of the "
                f"responses, {responses.lengths.tolist()}"
            )
        values = found.values
    elif isinstance(found, np.ndarray) and found.shape == (len(batch),):
        values = np.repeat(found, responses.lengths)
    else:
        shown = found.shape if isinstance(found, np.ndarray) else type(found).__name__
        raise ConfigError(
            f"{what} returned {shown}; allowed: an array of [samples], which are {len(batch)}, or "
            "a Jagged with a number for each response token"
        )
    if not np.isfinite(values).all():
        raise ConfigError(f"{what} returned {values[~np.isfinite(values)][0]}; allowed: finite")
    return responses.with_values(values.astype(np.float32))


@ADVANTAGES.register("grpo")
def grpo(inputs: AdvantageInputs, settings: GRPOSettings) -> npt.NDArray[np.float32]:
    """Rewards relative to the other responses to the same prompt.

    advantage = (r - mean of the group) / (std of the group + 1e-6), the outcome-supervised GRPO of
    Shao et al. 2024 (DeepSeekMath, arXiv:2402.03300, section 4.1.2). The paper does not say which
    standard deviation; this is the sample one (n - 1), as in the reference implementations.
    Without `normalize_by_std` the division is left out (Dr. GRPO, arXiv:2503.20783).

    Returns one a sample. A group of one sample has nothing to be compared with: its advantage is 0.
    """
    _, group, counts = np.unique(inputs.group_ids, return_inverse=True, return_counts=True)
    # float64, because the rounding of float32 means would be blown up by 1 / 1e-6 in equal groups.
    values = np.asarray(inputs.scores, dtype=np.float64)
    centered: npt.NDArray[np.float64] = (
        values - (np.bincount(group, weights=values) / counts)[group]
    )
    if settings.normalize_by_std:
        variance = np.bincount(group, weights=centered**2) / np.maximum(counts - 1, 1)
        centered = centered / (np.sqrt(variance)[group] + _EPSILON)
    return centered.astype(np.float32)


def uniform_groups(
    rewards: npt.NDArray[np.floating], group_ids: npt.NDArray[np.integer]
) -> npt.NDArray[np.bool_]:
    """[samples], true where every reward of the sample's group is the same.

    Such groups have zero advantage: training on them has no effect.
    """
    _, group, counts = np.unique(group_ids, return_inverse=True, return_counts=True)
    lowest = np.full(len(counts), np.inf)
    highest = np.full(len(counts), -np.inf)
    np.minimum.at(lowest, group, rewards)
    np.maximum.at(highest, group, rewards)
    return np.asarray((lowest == highest)[group], dtype=np.bool_)
