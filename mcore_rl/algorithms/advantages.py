"""Advantages: how much better than expected each response, or each of its tokens, was."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from mcore_rl.algorithms import group_advantages, token_level_advantages
from mcore_rl.algorithms.inputs import AdvantageInputs, Estimates
from mcore_rl.algorithms.registry import Registry
from mcore_rl.config.errors import ConfigError
from mcore_rl.data.batch import Batch, Jagged
from mcore_rl.data.trajectories import Trajectories, compared

# One number a sample, or a row of one number a response token; or those with the returns.
Advantages = npt.NDArray[np.floating] | Jagged | Estimates
ADVANTAGES: Registry[Callable[[AdvantageInputs], Advantages]] = Registry(
    "algorithm.advantage", ("inputs",)
)
for _function in (
    group_advantages.gdpo,
    group_advantages.gpg,
    group_advantages.grpo,
    group_advantages.grpo_passk,
    group_advantages.lite_ppo,
    group_advantages.maxrl,
    group_advantages.opo,
    group_advantages.reinforce_plus_plus_baseline,
    group_advantages.rloo,
    token_level_advantages.gae,
    token_level_advantages.gigpo,
    token_level_advantages.optimal_token_baseline,
    token_level_advantages.reinforce_plus_plus,
    token_level_advantages.remax,
):
    ADVANTAGES.register(_function.__name__)(_function)


def token_advantages(batch: Batch, name: str, settings: Mapping[str, object]) -> dict[str, Jagged]:
    """The column advantages, by the function that algorithm.advantage names; returns if it has any.

    Both are float32, [response tokens]. An advantage of a sample applies to each of its tokens.
    Where a trajectory is several samples, the function gets it as one sample, all their tokens; and
    where a loop has several roles, the responses of each to a prompt are a group.

    Raises:
        ConfigError: the function raised, or returned something else than finite numbers, one a
            sample or one a response token.
    """
    advantage = ADVANTAGES.bound(name, settings)
    what = f"{ADVANTAGES.setting}={name!r}"
    trajectories = Trajectories(batch)
    whole = trajectories.joined()
    try:
        found = advantage(AdvantageInputs(compared(whole)))
    except ConfigError:
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"{what} raised {reason}") from error
    if isinstance(found, Estimates):
        columns = {"advantages": found.advantages, "returns": found.returns}
    else:
        columns = {"advantages": found}
    return {
        column: trajectories.split(_of_tokens(values, whole, what))
        for column, values in columns.items()
    }


def _of_tokens(found: object, batch: Batch, what: str) -> Jagged:
    responses = batch.jagged("response_ids")
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
