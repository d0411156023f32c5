"""Generalized advantage estimation (Schulman et al. 2016, arXiv:1506.02438): one a token.

It needs the values of a critic, which `mcore-rl rl` does not train yet.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mcore_rl.algorithms.inputs import AdvantageInputs, needs
from mcore_rl.data.batch import Jagged

Floats = npt.NDArray[np.floating]


@dataclass(frozen=True)
class GAESettings:
    gamma: float = 1.0  # discount of a token
    lam: float = 0.95  # 0: one step of bootstrap; 1: the whole return less the value


@needs("values")
def gae(inputs: AdvantageInputs, settings: GAESettings) -> Jagged:
    """Equation 16: the discounted sum of delta_t = r_t + gamma * V_(t+1) - V_t.

    The reward of the response comes with the last token that the policy chose, and an episode ends
    there. Tokens that it did not choose (response_mask 0) are no steps: their advantage is 0.
    """
    columns = inputs.rewards, inputs.values, inputs.response_mask
    rows = [_of_response(*row, settings) for row in zip(*columns, strict=True)]
    return Jagged.of(rows, np.float64)


def _of_response(
    reward: np.floating, values: Floats, mask: Floats, settings: GAESettings
) -> Floats:
    advantages = np.zeros(len(values))
    advantage, next_value, last_reward = 0.0, 0.0, float(reward)
    for token in reversed(np.flatnonzero(mask)):
        delta = last_reward + settings.gamma * next_value - values[token]
        advantage = delta + settings.gamma * settings.lam * advantage
        advantages[token] = advantage
        next_value, last_reward = float(values[token]), 0.0
    return advantages
