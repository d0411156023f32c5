"""Random ragged mini-batches, and each loss of a policy as plain loops over their tokens.

The loops are written from the papers, in float64. `at` is the mini-batch at which everything
without a gradient is taken: the same one, but while a derivative is approximated by differences.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from mcore_rl.algorithms.inputs import LossInputs, MiniBatchInputs
from mcore_rl.algorithms.losses import LOSSES
from mcore_rl.data.batch import Batch, Jagged

Rows = list[list[float]]
COLUMNS = ("current_log_probs", "log_probs", "rollout_log_probs", "advantages", "response_mask")


@dataclass
class Case:
    """Rows of samples: numbers of their response tokens."""

    new: Rows
    old: Rows
    rollout: Rows
    advantages: Rows
    mask: Rows  # 1 or 0
    rewards: list[float]
    weights: Rows  # of the tokens' losses; 0 where the mask is

    def tokens(self) -> list[tuple[int, int]]:
        """(row, place) of those to train on."""
        n = range(len(self.new))
        return [(i, t) for i in n for t in range(len(self.new[i])) if self.mask[i][t]]

    def gap(self, i: int, t: int) -> float:
        return self.new[i][t] - self.old[i][t]

    def log_ratio(self, i: int, t: int) -> float:
        return max(-20.0, min(20.0, self.gap(i, t)))

    def trained(self, i: int) -> list[int]:
        return [t for t in range(len(self.new[i])) if self.mask[i][t]]

    def moved(self, i: int, t: int, by: float) -> Case:
        new = [list(row) for row in self.new]
        new[i][t] += by
        return replace(self, new=new)


@functools.cache
def random_case(seed: int, scale: float | None = None) -> Case:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 6, rng.integers(1, 5))
    spread = scale or rng.choice([0.05, 0.5, 2.0])
    per_token = rng.random() < 0.5

    def rows(draw: Callable[[int], Any]) -> Rows:
        return [[float(x) for x in draw(n)] for n in lengths]

    old = rows(lambda n: -rng.exponential(1.0, n))
    mask = rows(lambda n: rng.random(n) < 0.8)
    mask[0][0] = 1.0
    advantages = rows(lambda n: rng.normal(size=n if per_token else 1) * np.ones(n))
    if rng.random() < 0.2:
        advantages[0] = [0.0] * int(lengths[0])
    return Case(
        new=[[min(x + spread * rng.normal(), -1e-3) for x in row] for row in old],
        old=old,
        rollout=[[x + 0.3 * rng.normal() for x in row] for row in old],
        advantages=advantages,
        mask=mask,
        rewards=[float(r) for r in rng.integers(0, 2, len(lengths))],
        weights=[[m * float(w) for m, w in zip(r, rng.random(len(r)), strict=True)] for r in mask],
    )


def batch_of(case: Case, dtype: Any = np.float64) -> Batch:
    rows = (case.new, case.old, case.rollout, case.advantages, case.mask)
    result = {n: Jagged.pack(r, dtype) for n, r in zip(COLUMNS, rows, strict=True)}
    return Batch(
        {
            **result,
            "response_ids": result["advantages"],
            "loss_weights": Jagged.pack(case.weights, dtype),
            "entropy": result["log_probs"],
            "rewards": np.array(case.rewards),
        }
    )


def prepared(batch: Batch, name: str, settings: object, seed: Sequence[int] = (7,)) -> Batch:
    """Add the prepared columns of the loss, if it has any."""
    if not hasattr(LOSSES[name], "prepare"):
        return batch
    return batch.with_columns(**LOSSES[name].prepare(MiniBatchInputs(batch, seed), settings))


def inputs_of(batch: Batch, log_probs: torch.Tensor) -> LossInputs:
    lengths = batch.jagged("response_ids").lengths
    return LossInputs(
        scores={"log_probs": log_probs},
        columns={
            name: torch.from_numpy(column.values.copy())
            for name, column in batch.columns.items()
            if isinstance(column, Jagged)
        },
        sequence_ids=torch.from_numpy(np.repeat(np.arange(len(batch)), lengths)),
        num_sequences=len(batch),
    )


def loss_of(name: str, settings: object, inputs: LossInputs) -> tuple[torch.Tensor, Any]:
    function = LOSSES[name]
    return function(inputs) if settings is None else function(inputs, settings)


# --- the losses of one token (i, t)


def clip_min(ratio: float, advantage: float, low: float, high: float) -> float:
    return -min(ratio * advantage, max(1 - low, min(1 + high, ratio)) * advantage)


def ppo_clip(c: Case, constants: Case, s: Any, i: int, t: int) -> float:
    a = c.advantages[i][t]
    loss = clip_min(math.exp(c.log_ratio(i, t)), a, s.clip_ratio_low, s.clip_ratio_high)
    if s.dual_clip is not None and a < 0:
        return -max(-loss, s.dual_clip * a)
    return loss


def decoupled_ppo(c: Case, constants: Case, s: Any, i: int, t: int) -> float:
    weight = math.exp(c.old[i][t]) / math.exp(c.rollout[i][t])
    if s.weight_cap is not None and weight > s.weight_cap:
        weight = s.weight_cap
    return weight * ppo_clip(c, constants, s, i, t)


def sapo(c: Case, constants: Case, s: Any, i: int, t: int) -> float:
    a = c.advantages[i][t]
    tau = s.temperature_positive if a > 0 else s.temperature_negative
    r = math.exp(c.log_ratio(i, t))
    return -a * 4 / tau / (1 + math.exp(-tau * (r - 1)))


def reinforce(c: Case, constants: Case, s: Any, i: int, t: int) -> float:
    return -c.advantages[i][t] * c.new[i][t]


def cispo(c: Case, constants: Case, s: Any, i: int, t: int) -> float:
    weight = math.exp(constants.log_ratio(i, t))
    weight = max(weight, 1 - s.clip_ratio_low)
    weight = min(weight, 1 + s.clip_ratio_high)
    return -weight * c.advantages[i][t] * c.new[i][t]


def total_variation(p: float, q: float) -> float:
    return (abs(p - q) + abs((1 - p) - (1 - q))) / 2


def binary_kl(p: float, q: float) -> float:
    """Return KL(p || q) of two events."""
    return p * math.log(p / q) + (1 - p) * math.log((1 - p + 1e-8) / (1 - q + 1e-8))


def dppo(divergence: Callable[[float, float], float]) -> Any:
    def loss(c: Case, constants: Case, s: Any, i: int, t: int) -> float:
        old, new = math.exp(constants.old[i][t]), math.exp(constants.new[i][t])
        a, d = c.advantages[i][t], divergence(old, new)
        if a > 0 and new > old and d > s.max_divergence_high:
            return 0.0
        if a < 0 and new < old and d > s.max_divergence_low:
            return 0.0
        return -min(math.exp(constants.log_ratio(i, t)), s.max_ratio) * a * c.new[i][t]

    return loss


def sequence_ratio(c: Case, i: int) -> float:
    product = 1.0
    for t in c.trained(i):
        product *= math.exp(c.log_ratio(i, t))
    return product


def topr(c: Case, constants: Case, s: Any, i: int, t: int) -> float:
    a = c.advantages[i][t]
    weight = 1.0 if a >= 0 else min(sequence_ratio(constants, i), 1.0)
    return -weight * a * c.new[i][t]


def vespo(c: Case, constants: Case, s: Any, i: int, t: int) -> float:
    a, w = c.advantages[i][t], sequence_ratio(constants, i)
    k, decay = (s.k_positive, s.lambda_positive) if a > 0 else (s.k_negative, s.lambda_negative)
    return -(w**k) * math.exp(decay * (1 - w)) * a * c.new[i][t]


def dro(c: Case, constants: Case, s: Any, i: int, t: int) -> float:
    return -c.advantages[i][t] * c.new[i][t] + s.beta * c.gap(i, t) ** 2 / 2


def gspo_ratio(c: Case, i: int) -> float:
    return sequence_ratio(c, i) ** (1 / len(c.trained(i)))


def gspo(c: Case, constants: Case, s: Any, i: int, t: int) -> float:
    return clip_min(gspo_ratio(c, i), c.advantages[i][t], s.clip_ratio_low, s.clip_ratio_high)


def gspo_token(c: Case, constants: Case, s: Any, i: int, t: int) -> float:
    ratio = gspo_ratio(constants, i) * math.exp(c.new[i][t]) / math.exp(constants.new[i][t])
    return clip_min(ratio, c.advantages[i][t], s.clip_ratio_low, s.clip_ratio_high)


def luspo(c: Case, constants: Case, s: Any, i: int, t: int) -> float:
    return len(c.trained(i)) * gspo(c, constants, s, i, t)


def gmpo(c: Case, constants: Case, s: Any, i: int, t: int) -> float:
    """Clip each token's ratio, to the power of the sign, from above; take the geometric mean."""
    product, mean = 1.0, 0.0
    for u in c.trained(i):
        a, r = c.advantages[i][u], math.exp(c.log_ratio(i, u))
        sign = 1 if a > 0 else -1
        bound = s.clip_log_ratio_high if a > 0 else s.clip_log_ratio_low
        product *= min(r**sign, math.exp(bound)) ** sign
        mean += a / len(c.trained(i))
    return -mean * product ** (1 / len(c.trained(i)))


def kimi(c: Case, constants: Case, s: Any, i: int, t: int) -> float:
    places = c.trained(i)
    total = sum(c.gap(i, u) for u in places)
    return -c.advantages[i][t] * c.new[i][t] + s.tau / 2 * total**2 / len(places)


# --- those that select tokens of the mini-batch


def covariances(c: Case) -> dict[tuple[int, int], float]:
    places = c.tokens()
    mean_new = sum(c.new[i][t] for i, t in places) / len(places)
    mean_a = sum(c.advantages[i][t] for i, t in places) / len(places)
    return {(i, t): (c.new[i][t] - mean_new) * (c.advantages[i][t] - mean_a) for i, t in places}


def clip_cov_candidates(c: Case, s: Any) -> set[tuple[int, int]]:
    values = set()
    for (i, t), value in covariances(c).items():
        a, r = c.advantages[i][t], math.exp(c.log_ratio(i, t))
        is_clipped = (a > 0 and r > 1 + s.clip_ratio_high) or (a < 0 and r < 1 - s.clip_ratio_low)
        if s.covariance_low < value < s.covariance_high and not is_clipped:
            values.add((i, t))
    return values


def kl_cov_selected(c: Case, s: Any) -> set[tuple[int, int]]:
    ranked = sorted(covariances(c).items(), key=lambda item: -item[1])
    return {place for place, _ in ranked[: max(1, int(len(ranked) * s.fraction))]}


def kl_cov(c: Case, constants: Case, s: Any, i: int, t: int) -> float:
    loss = -math.exp(c.log_ratio(i, t)) * c.advantages[i][t]
    if (i, t) in kl_cov_selected(constants, s):
        loss += s.kl_coef * abs(c.gap(i, t))
    return loss


def m2po_selected(c: Case, s: Any) -> set[tuple[int, int]]:
    """Select the largest second moment while their mean is too large."""
    left = {}
    for i, t in c.tokens():
        r, a = math.exp(c.log_ratio(i, t)), c.advantages[i][t]
        if (a > 0 and r > 1) or (a < 0 and r < 1):
            left[i, t] = math.log(r) ** 2
    gone = set()
    while left and sum(left.values()) / len(left) > s.max_second_moment:
        largest = max(left, key=lambda place: left[place])
        gone.add(largest)
        del left[largest]
    return gone


def m2po(c: Case, constants: Case, s: Any, i: int, t: int) -> float:
    if (i, t) in m2po_selected(constants, s):
        return 0.0
    return -math.exp(c.log_ratio(i, t)) * c.advantages[i][t]


def positive_nll(c: Case, constants: Case, s: Any, i: int, t: int) -> float:
    """Add a term whose mean over all tokens is the mean over tokens of positive samples."""
    positive = [(j, u) for j, u in c.tokens() if c.rewards[j] >= s.min_reward]
    loss = ppo_clip(c, constants, s, i, t)
    if (i, t) in positive:
        loss -= s.nll_coef * len(c.tokens()) / len(positive) * c.new[i][t]
    return loss


ORACLES = {
    "ppo_clip": ppo_clip,
    "decoupled_ppo": decoupled_ppo,
    "sapo": sapo,
    "reinforce": reinforce,
    "gpg": reinforce,
    "cispo": cispo,
    "dppo_tv": dppo(total_variation),
    "dppo_kl": dppo(binary_kl),
    "topr": topr,
    "vespo": vespo,
    "dro": dro,
    "gspo": gspo,
    "gspo_token": gspo_token,
    "luspo": luspo,
    "gmpo": gmpo,
    "kimi": kimi,
    "kl_cov": kl_cov,
    "m2po": m2po,
    "positive_nll": positive_nll,
}
