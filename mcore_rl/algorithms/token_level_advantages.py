"""Advantages of tokens, from rewards of tokens.

r_t is the reward of a token (`AdvantageInputs.token_rewards`). Only tokens that the policy chose
are steps t; those of tools and environments in between are left out, and their advantage is 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mcore_rl.algorithms.inputs import AdvantageInputs, Estimates, needs
from mcore_rl.algorithms.reductions import ChosenTokens, Groups, sums_to_go, totals, whitened
from mcore_rl.config.checks import check_between
from mcore_rl.data.batch import Jagged


@dataclass(frozen=True)
class GAESettings:
    gamma: float = 1.0  # discount of a token
    lam: float = 0.95  # 0: one step of bootstrap; 1: the whole return less the value
    whiten: bool = True  # mean 0 and variance 1 over all chosen tokens of the batch

    def __post_init__(self) -> None:
        check_between("gamma", self.gamma, 0, 1)
        check_between("lam", self.lam, 0, 1)


@needs("values")
def gae(inputs: AdvantageInputs, settings: GAESettings) -> Estimates:
    """A_t = sum over k of (gamma * lam)^k * delta_(t+k); delta_t = r_t + gamma * V_(t+1) - V_t.

    Schulman et al. 2016 (arXiv:1506.02438), equation 16. The episode ends with the last token: V is
    0 after it. The returns are A_t + V_t. Then A is whitened, which is not in the paper, as in verl
    (gae) and TRL's PPO. Both are [response tokens].
    """
    tokens = ChosenTokens(inputs.response_mask)
    values = tokens.of(inputs.values)
    following = np.append(values[1:], 0)[: len(values)]
    following[tokens.last] = 0
    deltas = tokens.of(inputs.token_rewards) + settings.gamma * following - values
    advantages = sums_to_go(deltas, tokens.offsets, settings.gamma * settings.lam)
    returns = advantages + values
    if settings.whiten:
        advantages = whitened(advantages)
    return Estimates(tokens.spread(advantages), tokens.spread(returns))


@dataclass(frozen=True)
class ReinforceSettings:
    gamma: float = 1.0  # discount of a token

    def __post_init__(self) -> None:
        check_between("gamma", self.gamma, 0, 1)


def reinforce_plus_plus(inputs: AdvantageInputs, settings: ReinforceSettings) -> Jagged:
    """sum over k of gamma^k * r_(t+k), whitened over all chosen tokens of the batch.

    Hu et al. 2025 (arXiv:2501.03262), where gamma is 1 and r_t has a KL penalty. verl:
    reinforce_plus_plus.
    """
    tokens = ChosenTokens(inputs.response_mask)
    rewards = tokens.of(inputs.token_rewards)
    return tokens.spread(whitened(sums_to_go(rewards, tokens.offsets, settings.gamma)))


@needs("baseline_rewards")
def remax(inputs: AdvantageInputs) -> Jagged:
    """sum over k of r_(t+k), less the reward of the greedy response to the same prompt.

    Li et al. 2023 (arXiv:2310.10505), algorithm 1. verl: remax.
    """
    tokens = ChosenTokens(inputs.response_mask)
    returns = sums_to_go(tokens.of(inputs.token_rewards), tokens.offsets)
    return tokens.spread(returns - inputs.baseline_rewards[tokens.sample])


@needs("sum_pi_squared")
def optimal_token_baseline(inputs: AdvantageInputs) -> Jagged:
    """G_t - B_t with B_t = sum(G_t * W_t) / sum(W_t) over the responses of the group.

    Li et al. 2026 (arXiv:2602.07078). G_t is the sum of the rewards from step t on. W_t, the sum up
    to step t of 1 - 2 * pi + sum_pi_squared, stands for the squared norm of the gradient so far: pi
    is the probability of the token, sum_pi_squared the sum of the squared probabilities of all.
    Where one response only has a step t, or all W_t are 0, B_t is 0.

    verl: tir_optimal_token_baseline, with its handle_zero_tail; optimal_token_baseline too, if no
    response has tokens of a tool. verl can also weigh W_t by the squared importance weight of the
    rollout (`rollout_is_weights`); this does not.
    """
    tokens = ChosenTokens(inputs.response_mask)
    returns = sums_to_go(tokens.of(inputs.token_rewards), tokens.offsets)
    energy = 1 - 2 * np.exp(tokens.of(inputs.log_probs)) + tokens.of(inputs.sum_pi_squared)
    energy = np.maximum(energy, 0)  # below 0 by rounding only
    weights = sums_to_go(energy[::-1], len(energy) - tokens.offsets[::-1])[::-1]  # from the start
    steps = np.arange(len(returns)) - tokens.offsets[tokens.sample]
    group = Groups(inputs.group_ids).index[tokens.sample]
    key = group * (steps.max(initial=0) + 1) + steps
    total, weighted = totals(key, weights)[key], totals(key, weights * returns)[key]
    known = (np.bincount(key)[key] > 1) & (total > 0)
    baseline = np.divide(weighted, total, out=np.zeros(len(returns)), where=known)
    return tokens.spread(returns - baseline)


@dataclass(frozen=True)
class GiGPOSettings:
    gamma: float = 0.95  # discount of a turn
    step_weight: float = 1.0  # omega: weight of the advantage of a turn
    normalize_by_std: bool = True  # divide by standard deviations, of responses and of turns

    def __post_init__(self) -> None:
        check_between("gamma", self.gamma, 0, 1)


@needs("state_ids")
def gigpo(inputs: AdvantageInputs, settings: GiGPOSettings) -> Jagged:
    """That of the response among its group, plus omega times that of the turn.

    Feng et al. 2025 (arXiv:2505.10978), equations 3 to 8. Of the response: (R - mean) / std of the
    sums R of its rewards, as GRPO. Of the turn: the same of its return, the sum over turns k from
    it on of gamma^k * (sum of the rewards of the tokens of the turn), among all turns of the group
    of responses that were taken in the same state (the anchor state), twice in one response if it
    came back. A turn whose state no other turn has gets 0. A turn is a stretch of chosen tokens in
    one state.

    verl has none. Its authors' implementation (verl-agent) counts a response once for each of its
    turns in the mean and standard deviation of responses; this, like the paper, once.
    """
    tokens, groups = ChosenTokens(inputs.response_mask), Groups(inputs.group_ids)
    states, sample = inputs.state_ids.values[tokens.at], tokens.sample
    start = np.ones(len(states), np.bool_)  # whether the token is the first of a turn
    start[1:] = (np.diff(tokens.at) > 1) | (np.diff(states) != 0) | (np.diff(sample) != 0)
    turn = np.cumsum(start) - 1
    of_turn = sample[start]
    rewards = totals(turn, tokens.of(inputs.token_rewards))
    offsets = np.searchsorted(of_turn, np.arange(len(groups.index) + 1))
    returns = sums_to_go(rewards, offsets, settings.gamma)
    anchors = Groups(np.stack([groups.index[of_turn], states[start]], axis=1))
    by_std = settings.normalize_by_std
    of_response = groups.normalized(inputs.scores, by_std=by_std)
    of_step = anchors.normalized(returns, by_std=by_std)
    return tokens.spread(of_response[sample] + settings.step_weight * of_step[turn])
