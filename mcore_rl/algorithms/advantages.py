"""Advantages: how much better than expected each response, or each of its tokens, was.

r is a reward (`AdvantageInputs.scores`); mean and std are those of its group, n is the group's
size. std is the sample standard deviation (n - 1) + 1e-6: the papers do not say which, and verl and
TRL take this one. The advantage of a group of one is 0, where verl's functions take a mean of 0
(`id2mean[idx] = torch.tensor(0.0)`) and give it its reward.

r_t is the reward of a token (`AdvantageInputs.token_rewards`). Only tokens that the policy chose
are steps t; the advantage of tokens of tools and environments is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mcore_rl.algorithms.inputs import AdvantageInputs, Estimates, needs
from mcore_rl.algorithms.kl import compute_reference_kl
from mcore_rl.algorithms.reductions import (
    EPSILON,
    ChosenTokens,
    Floats,
    Groups,
    sum_by_index,
    sum_to_go,
    whiten,
)
from mcore_rl.algorithms.registry import Registry
from mcore_rl.config.checks import check_between
from mcore_rl.config.errors import ConfigError, describe_error
from mcore_rl.config.schema import AlgorithmConfig, GRPOSettings
from mcore_rl.data.batch import Batch, Jagged
from mcore_rl.data.trajectories import Trajectories, split_groups_by_role

# A number per sample or per response token, or these with the returns.
Advantages = npt.NDArray[np.floating] | Jagged | Estimates
ADVANTAGES: Registry[Callable[[AdvantageInputs], Advantages]] = Registry(
    "algorithm.advantage", ("inputs",)
)


def compute_advantages(
    batch: Batch, name: str, settings: Mapping[str, object]
) -> dict[str, Jagged]:
    """Compute the column advantages and, where the function gives them, returns.

    Both are float32, [response tokens]; the advantage of a sample applies to each of its tokens.
    The function gets a trajectory of several samples as one sample with all their tokens. Where an
    agent loop has several roles, the responses of each role to a prompt are a group.

    Args:
        batch: All samples of a step.
        name: Value of algorithm.advantage.
        settings: Settings of the function.

    Raises:
        ConfigError: the function raised, or did not return finite numbers, one per sample or one
            per response token.
    """
    advantage = ADVANTAGES.bind(name, settings)
    what = f"{ADVANTAGES.setting}={name!r}"
    trajectories = Trajectories(batch)
    joined = trajectories.join()
    try:
        result = advantage(AdvantageInputs(split_groups_by_role(joined)))
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{what} raised {describe_error(error)}") from error
    if isinstance(result, Estimates):
        columns = {"advantages": result.advantages, "returns": result.returns}
    else:
        columns = {"advantages": result}
    return {
        column: trajectories.split(_expand_to_tokens(values, joined, what))
        for column, values in columns.items()
    }


def _expand_to_tokens(result: object, batch: Batch, what: str) -> Jagged:
    """Return a function's result as float32 [response tokens]; `what` names it in errors."""
    responses = batch.jagged("response_ids")
    if isinstance(result, Jagged) and result.values.ndim == 1:
        if not np.array_equal(result.lengths, responses.lengths):
            raise ConfigError(
                f"{what} returned rows of {result.lengths.tolist()} tokens; allowed: those of the "
                f"responses, {responses.lengths.tolist()}"
            )
        values = result.values
    elif isinstance(result, np.ndarray) and result.shape == (len(batch),):
        values = np.repeat(result, responses.lengths)
    else:
        shown = result.shape if isinstance(result, np.ndarray) else type(result).__name__
        raise ConfigError(
            f"{what} returned {shown}; allowed: an array of [samples], which are {len(batch)}, or "
            "a Jagged with a number for each response token"
        )
    if not np.isfinite(values).all():
        raise ConfigError(f"{what} returned {values[~np.isfinite(values)][0]}; allowed: finite")
    return responses.with_values(values.astype(np.float32))


def add_token_rewards(batch: Batch, algorithm: AlgorithmConfig) -> Batch:
    """Add the column token_rewards if there are process_rewards or a KL penalty in the reward.

    Each chosen token has its process_rewards, if the batch has them, minus kl_coef times its KL
    (algorithm.kl_placement=reward): Ziegler et al. 2019 (arXiv:1909.08593), equation 2, token by
    token. The last chosen token of a trajectory also has the reward minus the sum of its
    process_rewards, so that they add up to the reward. Other tokens have 0. Float64, so that equal
    sums of parts stay equal. The column rewards stays without the KL penalty; advantages of
    responses read the sum, AdvantageInputs.scores.
    """
    is_penalised = bool(algorithm.kl_coef) and algorithm.kl_placement == "reward"
    if not is_penalised and "process_rewards" not in batch:
        return batch
    trajectories = Trajectories(batch)
    joined = trajectories.join()
    tokens = ChosenTokens(joined.jagged("response_mask"))
    rewards = tokens.select(AdvantageInputs(joined).token_rewards)  # all at the last token
    if "process_rewards" in joined:
        earned = tokens.select(joined.jagged("process_rewards"))
        rewards[tokens.last] -= sum_by_index(tokens.rows, earned, len(joined))[tokens.counts > 0]
        rewards += earned
    if is_penalised:
        rewards -= algorithm.kl_coef * tokens.select(compute_reference_kl(joined, algorithm))
    return batch.with_columns(token_rewards=trajectories.split(tokens.scatter(rewards)))


@ADVANTAGES.register("grpo")
def grpo(inputs: AdvantageInputs, settings: GRPOSettings) -> Floats:
    """(r - mean) / std: GRPO with outcome rewards.

    Shao et al. 2024 (DeepSeekMath, arXiv:2402.03300), section 4.1.2. Without `normalize_by_std`:
    r - mean, Dr. GRPO (arXiv:2503.20783). verl: grpo. Returns [samples].
    """
    groups = Groups(inputs.group_ids)
    return groups.normalize(inputs.scores, by_std=settings.normalize_by_std)


@dataclass(frozen=True)
class PassKSettings:
    normalize_by_std: bool = True  # divide by the standard deviation of the group


@ADVANTAGES.register("grpo_passk")
def grpo_passk(inputs: AdvantageInputs, settings: PassKSettings) -> Floats:
    """(highest r - second highest r) / std for the best response of a group, else 0.

    Tang et al. 2025 (arXiv:2503.19595): the leave-one-out advantage of pass@k with k = n, which is
    the highest r of all minus the highest of the rest. It is 0 if two are best. verl: grpo_passk,
    which refuses groups of one. Returns [samples].
    """
    groups, scores = Groups(inputs.group_ids), inputs.scores
    margins = np.zeros(len(scores))
    order = np.lexsort((scores, groups.index))  # by group, then from the lowest to the highest
    best = np.flatnonzero(np.diff(groups.index[order], append=-1))  # the last of each group
    best = best[groups.sizes[order[best]] > 1]
    margins[order[best]] = scores[order[best]] - scores[order[best - 1]]
    return margins / (groups.std(scores) + EPSILON) if settings.normalize_by_std else margins


@ADVANTAGES.register("rloo")
def rloo(inputs: AdvantageInputs) -> Floats:
    """r - mean of the rest of the group = n / (n - 1) * (r - mean): leave-one-out.

    Ahmadian et al. 2024 (arXiv:2402.14740). verl: rloo, rloo_vectorized. Returns [samples].
    """
    groups = Groups(inputs.group_ids)
    num_others: Floats = np.maximum(groups.sizes - 1, 1)
    return groups.center(inputs.scores) * groups.sizes / num_others


@ADVANTAGES.register("reinforce_plus_plus_baseline")
def reinforce_plus_plus_baseline(inputs: AdvantageInputs) -> Jagged:
    """r - mean, whitened over all chosen tokens of the batch.

    Hu et al. 2025 (REINFORCE++ with baseline, arXiv:2501.03262). verl:
    reinforce_plus_plus_baseline. Returns [response tokens].
    """
    groups, tokens = Groups(inputs.group_ids), ChosenTokens(inputs.response_mask)
    return tokens.scatter(whiten(groups.center(inputs.scores)[tokens.rows]))


@ADVANTAGES.register("opo")
def opo(inputs: AdvantageInputs) -> Floats:
    """r - sum(length * r) / sum(length), sums over the group.

    Hao et al. 2025 (arXiv:2505.23585): the reward baseline of least gradient variance, if the
    gradient variance of a response grows with its length, the number of chosen tokens. verl: opo.
    Returns [samples].
    """
    groups, scores = Groups(inputs.group_ids), inputs.scores
    lengths = ChosenTokens(inputs.response_mask).counts.astype(np.float64)
    total: Floats = np.maximum(groups.sum(lengths), 1)  # 0 if no response has tokens
    return scores - groups.sum(lengths * scores) / total


@dataclass(frozen=True)
class GPGSettings:
    normalize_by_std: bool = False  # F_norm: the standard deviation of the group instead of 1


@ADVANTAGES.register("gpg")
def gpg(inputs: AdvantageInputs, settings: GPGSettings) -> Floats:
    """alpha * (r - mean) / F_norm with alpha = B / (B - M).

    Chu et al. 2025 (arXiv:2504.02546): M of the B samples of the batch are in groups of equal
    rewards, without a gradient; alpha makes up for them. If all are, all advantages are 0. verl:
    gpg, whose M is the number of samples with a reward other than 0
    (`m = torch.count_nonzero(scores)`). Returns [samples].
    """
    groups, scores = Groups(inputs.group_ids), inputs.scores
    num_trained = len(scores) - int(groups.is_uniform(scores).sum())
    alpha = len(scores) / max(num_trained, 1)
    return alpha * groups.normalize(scores, by_std=settings.normalize_by_std)


@dataclass(frozen=True)
class GDPOSettings:
    # Names of parts of the reward, each with an optional weight: "accuracy,format=0.5".
    parts: str
    normalize_by_std: bool = True  # divide each part by its standard deviation in the group

    def __post_init__(self) -> None:
        self.weights()

    def weights(self) -> dict[str, float]:
        """Return the weight of each part."""
        pairs = [part.strip().partition("=") for part in self.parts.split(",")]
        try:
            weights = {
                name.strip(): float(weight) if equals else 1 for name, equals, weight in pairs
            }
        except ValueError:
            weights = {}
        is_finite = np.isfinite([*weights.values()]).all()
        if "" in weights or len(weights) != len(pairs) or not is_finite:
            raise ValueError(
                f"parts={self.parts!r}; allowed: names, each once, with finite weights, such as "
                "'accuracy,format=0.5'"
            )
        return weights


@ADVANTAGES.register("gdpo")
def gdpo(inputs: AdvantageInputs, settings: GDPOSettings) -> Jagged:
    """Sum weight * (part - mean) / std over the parts, whitened over all chosen tokens.

    Liu et al. 2026 (arXiv:2601.05242): parts of a reward are normalised in their groups before they
    are added up. The paper whitens over the responses of a batch; this, like verl's gdpo, over
    their tokens. Token rewards, and so a KL in the reward, are not used. Returns
    [response tokens].
    """
    groups, tokens = Groups(inputs.group_ids), ChosenTokens(inputs.response_mask)
    parts = (
        weight * groups.normalize(inputs.reward_part(name), by_std=settings.normalize_by_std)
        for name, weight in settings.weights().items()
    )
    return tokens.scatter(whiten(sum(parts, np.zeros(len(groups.index)))[tokens.rows]))


@ADVANTAGES.register("maxrl")
def maxrl(inputs: AdvantageInputs) -> Floats:
    """(r - mean) / mean, and 0 where the mean is 0: maximum likelihood.

    Tajwar et al. 2026 (arXiv:2602.02710), algorithm 1, for rewards of 0 and 1: the mean estimates
    the probability of success, whose logarithm is maximised; for rewards between 0 and 1, the
    logarithm of the mean. TRL's MaxRLTrainer adds a small number to the mean. verl has none.
    Returns [samples].

    Raises:
        ConfigError: a reward is below 0.
    """
    groups, scores = Groups(inputs.group_ids), inputs.scores
    if (scores < 0).any():
        raise ConfigError(
            f"algorithm.advantage='maxrl' was given the reward {scores.min():g}; allowed: 0 or "
            "more, since it divides by the mean of a group"
        )
    mean = groups.mean(scores)
    return np.divide(groups.center(scores), mean, out=np.zeros(len(scores)), where=mean > 0)


@ADVANTAGES.register("lite_ppo")
def lite_ppo(inputs: AdvantageInputs) -> Floats:
    """(r - mean of the group) / std of all rewards of the batch.

    Liu et al. 2025 (LitePPO, arXiv:2508.08221). TRL: GRPOTrainer with scale_rewards="batch". verl
    has none. Returns [samples].
    """
    scores = inputs.scores
    batch = Groups(np.zeros(len(scores), np.int64))
    return Groups(inputs.group_ids).center(scores) / (batch.std(scores) + EPSILON)


@dataclass(frozen=True)
class GAESettings:
    gamma: float = 1.0  # discount of a token
    lam: float = 0.95  # 0: one step of bootstrap; 1: return minus value
    whiten: bool = True  # mean 0 and variance 1 over all chosen tokens of the batch

    def __post_init__(self) -> None:
        check_between("gamma", self.gamma, 0, 1)
        check_between("lam", self.lam, 0, 1)


@ADVANTAGES.register("gae")
@needs("values")
def gae(inputs: AdvantageInputs, settings: GAESettings) -> Estimates:
    """A_t = sum over k of (gamma * lam)^k * delta_(t+k); delta_t = r_t + gamma * V_(t+1) - V_t.

    Schulman et al. 2016 (arXiv:1506.02438), equation 16. The episode ends with the last token: V is
    0 after it. The returns are A_t + V_t. Then A is whitened, which is not in the paper, as in verl
    (gae) and TRL's PPO. Both are [response tokens].
    """
    tokens = ChosenTokens(inputs.response_mask)
    values = tokens.select(inputs.values)
    next_values = np.append(values[1:], 0)[: len(values)]
    next_values[tokens.last] = 0
    deltas = tokens.select(inputs.token_rewards) + settings.gamma * next_values - values
    advantages = sum_to_go(deltas, tokens.offsets, settings.gamma * settings.lam)
    returns = advantages + values
    if settings.whiten:
        advantages = whiten(advantages)
    return Estimates(tokens.scatter(advantages), tokens.scatter(returns))


@dataclass(frozen=True)
class ReinforceSettings:
    gamma: float = 1.0  # discount of a token

    def __post_init__(self) -> None:
        check_between("gamma", self.gamma, 0, 1)


@ADVANTAGES.register("reinforce_plus_plus")
def reinforce_plus_plus(inputs: AdvantageInputs, settings: ReinforceSettings) -> Jagged:
    """sum over k of gamma^k * r_(t+k), whitened over all chosen tokens of the batch.

    Hu et al. 2025 (arXiv:2501.03262), where gamma is 1 and r_t has a KL penalty. verl:
    reinforce_plus_plus.
    """
    tokens = ChosenTokens(inputs.response_mask)
    rewards = tokens.select(inputs.token_rewards)
    return tokens.scatter(whiten(sum_to_go(rewards, tokens.offsets, settings.gamma)))


@ADVANTAGES.register("remax")
@needs("baseline_rewards")
def remax(inputs: AdvantageInputs) -> Jagged:
    """sum over k of r_(t+k), minus the reward of the greedy response to the same prompt.

    Li et al. 2023 (arXiv:2310.10505), algorithm 1. verl: remax.
    """
    tokens = ChosenTokens(inputs.response_mask)
    returns = sum_to_go(tokens.select(inputs.token_rewards), tokens.offsets)
    return tokens.scatter(returns - inputs.baseline_rewards[tokens.rows])


@ADVANTAGES.register("optimal_token_baseline")
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
    returns = sum_to_go(tokens.select(inputs.token_rewards), tokens.offsets)
    energy = 1 - 2 * np.exp(tokens.select(inputs.log_probs)) + tokens.select(inputs.sum_pi_squared)
    energy = np.maximum(energy, 0)  # below 0 by rounding only
    weights = sum_to_go(energy[::-1], len(energy) - tokens.offsets[::-1])[::-1]  # from the start
    steps = np.arange(len(returns)) - tokens.offsets[tokens.rows]
    group = Groups(inputs.group_ids).index[tokens.rows]
    key = group * (steps.max(initial=0) + 1) + steps
    total, weighted = sum_by_index(key, weights)[key], sum_by_index(key, weights * returns)[key]
    has_baseline = (np.bincount(key)[key] > 1) & (total > 0)
    baseline = np.divide(weighted, total, out=np.zeros(len(returns)), where=has_baseline)
    return tokens.scatter(returns - baseline)


@dataclass(frozen=True)
class GiGPOSettings:
    gamma: float = 0.95  # discount of a turn
    step_weight: float = 1.0  # omega: weight of the advantage of a turn
    normalize_by_std: bool = True  # divide by standard deviations, of responses and of turns

    def __post_init__(self) -> None:
        check_between("gamma", self.gamma, 0, 1)


@ADVANTAGES.register("gigpo")
@needs("state_ids")
def gigpo(inputs: AdvantageInputs, settings: GiGPOSettings) -> Jagged:
    """Advantage of the response in its group, plus omega times the advantage of the turn.

    Feng et al. 2025 (arXiv:2505.10978), equations 3 to 8. Response: (R - mean) / std with R the sum
    of its rewards, as in GRPO. Turn: the same with the return of the turn, the sum over this and
    later turns k of gamma^k * (sum of the token rewards of turn k), compared with all turns of the
    group in the same state (the anchor state); a response may be in a state twice. A turn whose
    state no other turn has gets 0. A turn is a run of consecutive chosen tokens in one state.

    verl has none. Its authors' implementation (verl-agent) counts a response once per turn in the
    mean and standard deviation of responses; this, like the paper, counts it once.
    """
    tokens, groups = ChosenTokens(inputs.response_mask), Groups(inputs.group_ids)
    states, rows = inputs.state_ids.values[tokens.positions], tokens.rows
    is_first = np.ones(len(states), np.bool_)  # first token of a turn
    is_first[1:] = (np.diff(tokens.positions) > 1) | (np.diff(states) != 0) | (np.diff(rows) != 0)
    turns = np.cumsum(is_first) - 1
    turn_rows = rows[is_first]
    rewards = sum_by_index(turns, tokens.select(inputs.token_rewards))
    offsets = np.searchsorted(turn_rows, np.arange(len(groups.index) + 1))
    returns = sum_to_go(rewards, offsets, settings.gamma)
    anchors = Groups(np.stack([groups.index[turn_rows], states[is_first]], axis=1))
    by_std = settings.normalize_by_std
    responses = groups.normalize(inputs.scores, by_std=by_std)
    steps = anchors.normalize(returns, by_std=by_std)
    return tokens.scatter(responses[rows] + settings.step_weight * steps[turns])
