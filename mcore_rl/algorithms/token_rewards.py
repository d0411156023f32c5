"""Rewards of tokens: what each has earned, what that leaves of a reward, and the KL taken off."""

from __future__ import annotations

import numpy as np
import torch

from mcore_rl.algorithms.inputs import AdvantageInputs
from mcore_rl.algorithms.kl import KL_ESTIMATORS
from mcore_rl.algorithms.reductions import ChosenTokens, totals
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import AlgorithmConfig
from mcore_rl.data.batch import Batch, Jagged
from mcore_rl.data.trajectories import Trajectories


def reference_kl(batch: Batch, algorithm: AlgorithmConfig) -> Jagged:
    """[response tokens] of algorithm.kl_estimator, before the first update; 0 at tokens not chosen.

    Raises:
        ConfigError: the estimator returned something else than a number a token.
    """
    name, mask = algorithm.kl_estimator, batch.jagged("response_mask")
    estimator = KL_ESTIMATORS.bound(name, algorithm.kl_estimator_settings)
    columns = (batch.jagged(column).values for column in ("log_probs", "reference_log_probs"))
    found = estimator(*(torch.from_numpy(values.copy()) for values in columns))
    if not isinstance(found, torch.Tensor) or found.shape != mask.values.shape:
        shown = list(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
        raise ConfigError(
            f"{KL_ESTIMATORS.setting}={name!r} returned {shown}; allowed: a tensor of [tokens], "
            f"here {[*mask.values.shape]}"
        )
    return mask.with_values(np.where(mask.values != 0, found.numpy(), 0))


def mean_over_sequences(values: Jagged, mask: Jagged) -> float:
    """The mean over sequences of the mean over their chosen tokens; 0 if no token is chosen.

    Sequences without a chosen token do not count.
    """
    tokens = ChosenTokens(mask)
    sums, is_used = totals(tokens.sample, tokens.of(values), len(mask)), tokens.counts > 0
    return float((sums[is_used] / tokens.counts[is_used]).mean()) if is_used.any() else 0.0


def with_token_rewards(batch: Batch, algorithm: AlgorithmConfig) -> Batch:
    """Adds the column token_rewards where rewards are not of whole responses only.

    At each chosen token the process_rewards, if the batch has them, minus kl_coef times the KL,
    with algorithm.kl_placement=reward; at the last chosen token of a trajectory also what
    process_rewards leave of its reward, so that they add up to it; 0 at other tokens. Float64:
    equal sums of parts stay equal. Ziegler et al. 2019 (arXiv:1909.08593), equation 2, token by
    token. Advantages of whole responses see the sum (AdvantageInputs.scores); the column rewards
    has no KL taken off.
    """
    is_penalised = bool(algorithm.kl_coef) and algorithm.kl_placement == "reward"
    if not is_penalised and "process_rewards" not in batch:
        return batch
    trajectories = Trajectories(batch)
    whole = trajectories.joined()
    tokens = ChosenTokens(whole.jagged("response_mask"))
    rewards = tokens.of(AdvantageInputs(whole).token_rewards)  # all at the last one
    if "process_rewards" in whole:
        earned = tokens.of(whole.jagged("process_rewards"))
        rewards[tokens.last] -= totals(tokens.sample, earned, len(whole))[tokens.counts > 0]
        rewards += earned
    if is_penalised:
        rewards -= algorithm.kl_coef * tokens.of(reference_kl(whole, algorithm))
    return batch.with_columns(token_rewards=trajectories.split(tokens.spread(rewards)))
