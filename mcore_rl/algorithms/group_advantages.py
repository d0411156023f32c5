"""Advantages of responses: their rewards compared with those of the other responses to a prompt.

r is a reward (`AdvantageInputs.scores`); mean and std are those of its group, n is the group's
size. std is the sample standard deviation (n - 1) + 1e-6: the papers do not say which, and verl and
TRL take this one. A group of one has nothing to be compared with, so its advantage is 0, where
verl's functions take a mean of 0 (`id2mean[idx] = torch.tensor(0.0)`) and give it its reward.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mcore_rl.algorithms.inputs import AdvantageInputs
from mcore_rl.algorithms.reductions import EPSILON, ChosenTokens, Floats, Groups, whitened
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import GRPOSettings
from mcore_rl.data.batch import Jagged


def grpo(inputs: AdvantageInputs, settings: GRPOSettings) -> Floats:
    """(r - mean) / std: GRPO with outcome rewards.

    Shao et al. 2024 (DeepSeekMath, arXiv:2402.03300), section 4.1.2. Without `normalize_by_std`:
    r - mean, Dr. GRPO (arXiv:2503.20783). verl: grpo. Returns [samples].
    """
    groups = Groups(inputs.group_ids)
    return groups.normalized(inputs.scores, by_std=settings.normalize_by_std)


@dataclass(frozen=True)
class PassKSettings:
    normalize_by_std: bool = True  # divide by the standard deviation of the group


def grpo_passk(inputs: AdvantageInputs, settings: PassKSettings) -> Floats:
    """(highest r - second highest r) / std for the best response of a group, else 0.

    Tang et al. 2025 (arXiv:2503.19595): the leave-one-out advantage of pass@k with k = n, which is
    the highest r of all less the highest of the others. If two are best, that is 0. verl:
    grpo_passk, which refuses groups of one. Returns [samples].
    """
    groups, scores = Groups(inputs.group_ids), inputs.scores
    gained = np.zeros(len(scores))
    order = np.lexsort((scores, groups.index))  # by group, then from the lowest to the highest
    best = np.flatnonzero(np.diff(groups.index[order], append=-1))  # the last of each group
    best = best[groups.sizes[order[best]] > 1]
    gained[order[best]] = scores[order[best]] - scores[order[best - 1]]
    return gained / (groups.std(scores) + EPSILON) if settings.normalize_by_std else gained


def rloo(inputs: AdvantageInputs) -> Floats:
    """r - mean of the others = n / (n - 1) * (r - mean): leave-one-out.

    Ahmadian et al. 2024 (arXiv:2402.14740). verl: rloo, rloo_vectorized. Returns [samples].
    """
    groups = Groups(inputs.group_ids)
    others: Floats = np.maximum(groups.sizes - 1, 1)
    return groups.centered(inputs.scores) * groups.sizes / others


def reinforce_plus_plus_baseline(inputs: AdvantageInputs) -> Jagged:
    """r - mean, whitened over all chosen tokens of the batch.

    Hu et al. 2025 (REINFORCE++ with baseline, arXiv:2501.03262). verl:
    reinforce_plus_plus_baseline. Returns [response tokens].
    """
    groups, tokens = Groups(inputs.group_ids), ChosenTokens(inputs.response_mask)
    return tokens.spread(whitened(groups.centered(inputs.scores)[tokens.sample]))


def opo(inputs: AdvantageInputs) -> Floats:
    """r - sum(length * r) / sum(length), sums over the group.

    Hao et al. 2025 (arXiv:2505.23585): the reward baseline of least gradient variance, if that of a
    response grows with its length. The length is the number of chosen tokens. verl: opo. Returns
    [samples].
    """
    groups, scores = Groups(inputs.group_ids), inputs.scores
    lengths = ChosenTokens(inputs.response_mask).counts.astype(np.float64)
    total: Floats = np.maximum(groups.sum(lengths), 1)  # 0 if no response has tokens
    return scores - groups.sum(lengths * scores) / total


@dataclass(frozen=True)
class GPGSettings:
    normalize_by_std: bool = False  # F_norm: the standard deviation of the group instead of 1


def gpg(inputs: AdvantageInputs, settings: GPGSettings) -> Floats:
    """alpha * (r - mean) / F_norm with alpha = B / (B - M).

    Chu et al. 2025 (arXiv:2504.02546): of the B samples of the batch, M are in groups of equal
    rewards and teach nothing; alpha makes up for them. If all do, all are 0. verl: gpg, which
    counts samples with a reward other than 0 instead (`m = torch.count_nonzero(scores)`), so that
    alpha there depends on the rewards and not on what they teach. Returns [samples].
    """
    groups, scores = Groups(inputs.group_ids), inputs.scores
    taught = len(scores) - int(equal_in_group(scores, groups).sum())
    alpha = len(scores) / max(taught, 1)
    return alpha * groups.normalized(scores, by_std=settings.normalize_by_std)


@dataclass(frozen=True)
class GDPOSettings:
    # Parts of the reward, by the names that the reward function gives them, each with an optional
    # weight: "accuracy,format=0.5".
    parts: str
    normalize_by_std: bool = True  # divide each part by its standard deviation in the group

    def __post_init__(self) -> None:
        self.weights()

    def weights(self) -> dict[str, float]:
        """The weight of each part."""
        pairs = [part.strip().partition("=") for part in self.parts.split(",")]
        try:
            found = {name.strip(): float(weight) if equals else 1 for name, equals, weight in pairs}
        except ValueError:
            found = {}
        if "" in found or len(found) != len(pairs) or not np.isfinite([*found.values()]).all():
            raise ValueError(
                f"parts={self.parts!r}; allowed: names, each once, with finite weights, such as "
                "'accuracy,format=0.5'"
            )
        return found


def gdpo(inputs: AdvantageInputs, settings: GDPOSettings) -> Jagged:
    """The sum over parts of weight * (part - mean) / std, whitened over all chosen tokens.

    Liu et al. 2026 (arXiv:2601.05242): parts of a reward are normalised in their groups before they
    are added up. The paper whitens over the responses of a batch; this, like verl's gdpo, over
    their tokens. Token rewards, and so a KL in the reward, are not used. Returns
    [response tokens].
    """
    groups, tokens = Groups(inputs.group_ids), ChosenTokens(inputs.response_mask)
    parts = (
        weight * groups.normalized(inputs.reward_part(name), by_std=settings.normalize_by_std)
        for name, weight in settings.weights().items()
    )
    return tokens.spread(whitened(sum(parts, np.zeros(len(groups.index)))[tokens.sample]))


def maxrl(inputs: AdvantageInputs) -> Floats:
    """(r - mean) / mean, and 0 where the mean is 0: maximum likelihood.

    Tajwar et al. 2026 (arXiv:2602.02710), algorithm 1, for rewards of 0 and 1: the mean estimates
    the probability of success, of which the logarithm is maximised. Of rewards between, the mean
    is. TRL's MaxRLTrainer adds a small number to the mean. verl has none. Returns [samples].

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
    return np.divide(groups.centered(scores), mean, out=np.zeros(len(scores)), where=mean > 0)


def lite_ppo(inputs: AdvantageInputs) -> Floats:
    """(r - mean of the group) / std of all rewards of the batch.

    Liu et al. 2025 (LitePPO, arXiv:2508.08221). TRL: GRPOTrainer with scale_rewards="batch". verl
    has none. Returns [samples].
    """
    scores = inputs.scores
    batch = Groups(np.zeros(len(scores), np.int64))
    return Groups(inputs.group_ids).centered(scores) / (batch.std(scores) + EPSILON)


def equal_in_group(values: npt.NDArray[np.floating], groups: Groups) -> npt.NDArray[np.bool_]:
    """[samples], true where every value of the group is the same."""
    lowest = np.full(len(values), np.inf)
    highest = np.full(len(values), -np.inf)
    np.minimum.at(lowest, groups.index, values)
    np.maximum.at(highest, groups.index, values)
    return np.asarray((lowest == highest)[groups.index], dtype=np.bool_)
