"""Each advantage worked out from its paper, response by response in Python floats; random cases."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from mcore_rl.data.batch import Batch, Jagged

Rows = list[list[float]]
Settings = Mapping[str, object]


@dataclass
class Response:
    group: int
    mask: list[int]
    reward: float
    parts: dict[str, float]
    greedy_reward: float
    token_rewards: list[float]  # one a token, as are those below
    values: list[float]
    log_probs: list[float]
    squares: list[float]
    states: list[int]

    @property
    def steps(self) -> list[int]:
        return [place for place, chosen in enumerate(self.mask) if chosen]


@dataclass
class Case:
    responses: list[Response]
    process: bool  # whether there are rewards of tokens

    def rewards_of_tokens(self, of: Response) -> list[float]:
        """At each step."""
        if self.process:
            return [of.token_rewards[place] for place in of.steps]
        return [0.0] * (len(of.steps) - 1) + [of.reward] if of.steps else []

    def score(self, of: Response) -> float:
        return math.fsum(self.rewards_of_tokens(of)) if self.process and of.steps else of.reward

    def others(self, of: Response) -> list[float]:
        """Scores of the whole group."""
        return [self.score(other) for other in self.responses if other.group == of.group]


def batch_of(case: Case) -> Batch:
    def column(name: str, kind: type) -> Jagged:
        return Jagged.of([getattr(one, name) for one in case.responses], kind)

    masks = column("mask", np.int8)
    batch = Batch(
        {
            "response_ids": masks.with_values(np.arange(len(masks.values))),
            "response_mask": masks,
            "group_ids": np.array([one.group for one in case.responses], np.int64),
            "rewards": np.array([one.reward for one in case.responses], np.float32),
            "baseline_rewards": np.array([one.greedy_reward for one in case.responses], np.float32),
            "values": column("values", np.float32),
            "log_probs": column("log_probs", np.float32),
            "sum_pi_squared": column("squares", np.float32),
            "state_ids": column("states", np.int64),
            **{
                f"reward/{part}": np.array([one.parts[part] for one in case.responses], np.float32)
                for part in ("accuracy", "format")
            },
        }
    )
    if case.process:
        batch = batch.with_columns(token_rewards=column("token_rewards", np.float32))
    return batch


def float32(values: np.ndarray) -> list[float]:
    """Python floats that a float32 column has exactly."""
    return [float(value) for value in np.asarray(values, np.float32)]


def random_case(seed: int, nonnegative: bool) -> Case:
    """Uneven groups, groups of one, empty responses, masks with holes and of several turns."""
    rng = np.random.default_rng(seed)
    names = rng.integers(-(10**9), 10**9, size=rng.integers(1, 5))
    binary = rng.random() < 0.5
    responses = []
    for _ in range(rng.integers(1, 11)):
        length = int(rng.integers(0, 9))
        turns = np.repeat(np.arange(length + 1), rng.integers(1, 4, length + 1))[:length]
        kind = rng.integers(3)  # all chosen, turns of tool and model, or holes anywhere
        mask = [np.ones(length), turns % 2, rng.integers(0, 2, length)][kind].astype(int)
        states = rng.integers(0, 3, length + 1)[turns]
        probabilities = rng.dirichlet(np.ones(4), length)
        choice = rng.integers(0, 4, length)
        rewards = rng.integers(0, 2, 4) if binary else rng.normal(size=4)
        of_tokens = rng.normal(size=length) * rng.integers(0, 2, length)
        if nonnegative:
            rewards, of_tokens = abs(rewards), abs(of_tokens)
        reward, greedy, *parts = float32(rewards)
        responses.append(
            Response(
                group=int(rng.choice(names)),
                mask=mask.tolist(),
                reward=reward,
                parts=dict(zip(("accuracy", "format"), parts, strict=True)),
                greedy_reward=greedy,
                token_rewards=float32(of_tokens),
                values=float32(rng.normal(size=length)),
                log_probs=float32(np.log(probabilities[np.arange(length), choice])),
                squares=float32((probabilities**2).sum(1)),
                states=states.tolist(),
            )
        )
    return Case(responses, process=bool(rng.random() < 0.5))


@functools.cache
def random_cases(*, nonnegative: bool = False) -> list[tuple[Case, Batch]]:
    cases = [random_case(seed, nonnegative) for seed in range(1000)]
    return [(case, batch_of(case)) for case in cases]


def std(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def whiten(rows: Rows, case: Case) -> Rows:
    """Over the steps of all rows."""
    pairs = zip(rows, case.responses, strict=True)
    steps = [row[place] for row, one in pairs for place in one.steps]
    mean = math.fsum(steps) / max(len(steps), 1)
    scale = math.sqrt(std(steps) ** 2 + 1e-8)
    found = [[0.0] * len(row) for row in rows]
    for row, one, out in zip(rows, case.responses, found, strict=True):
        for place in one.steps:
            out[place] = (row[place] - mean) / scale
    return found


def at_steps(case: Case, found: list[list[float]]) -> Rows:
    """From numbers at steps to numbers at tokens."""
    rows = []
    for one, numbers in zip(case.responses, found, strict=True):
        row = [0.0] * len(one.mask)
        for place, number in zip(one.steps, numbers, strict=True):
            row[place] = number
        rows.append(row)
    return rows


def grpo(case: Case, settings: Settings) -> list[float]:
    found = []
    for one in case.responses:
        group = case.others(one)
        scale = std(group) + 1e-6 if settings["normalize_by_std"] else 1.0
        found.append((case.score(one) - statistics.fmean(group)) / scale)
    return found


def grpo_passk(case: Case, settings: Settings) -> list[float]:
    """The highest of all less the highest of the others: what pass@k loses without a response."""
    found = []
    for one in case.responses:
        group = case.others(one)
        if len(group) == 1:
            found.append(0.0)
            continue
        rest = [
            case.score(other)
            for other in case.responses
            if other.group == one.group and other is not one
        ]
        scale = std(group) + 1e-6 if settings["normalize_by_std"] else 1.0
        found.append((max(group) - max(rest)) / scale)
    return found


def rloo(case: Case, settings: Settings) -> list[float]:
    found = []
    for one in case.responses:
        rest = [
            case.score(other)
            for other in case.responses
            if other.group == one.group and other is not one
        ]
        found.append(case.score(one) - statistics.fmean(rest) if rest else 0.0)
    return found


def reinforce_plus_plus_baseline(case: Case, settings: Settings) -> Rows:
    rows = [
        [case.score(one) - statistics.fmean(case.others(one))] * len(one.mask)
        for one in case.responses
    ]
    return whiten(rows, case)


def opo(case: Case, settings: Settings) -> list[float]:
    found = []
    for one in case.responses:
        group = [other for other in case.responses if other.group == one.group]
        length = sum(len(other.steps) for other in group)
        weighted = math.fsum(len(other.steps) * case.score(other) for other in group)
        found.append(case.score(one) - (weighted / length if length else 0.0))
    return found


def gpg(case: Case, settings: Settings) -> list[float]:
    batch = len(case.responses)
    useless = sum(len(set(case.others(one))) == 1 for one in case.responses)
    alpha = batch / (batch - useless) if useless < batch else 1.0
    return [alpha * value for value in grpo(case, settings)]


def gdpo(case: Case, settings: Settings) -> Rows:
    rows = []
    for one in case.responses:
        total = 0.0
        for part, weight in (("accuracy", 1.0), ("format", 0.5)):
            group = [other.parts[part] for other in case.responses if other.group == one.group]
            scale = std(group) + 1e-6 if settings.get("normalize_by_std", True) else 1.0
            total += weight * (one.parts[part] - statistics.fmean(group)) / scale
        rows.append([total] * len(one.mask))
    return whiten(rows, case)


def maxrl(case: Case, settings: Settings) -> list[float]:
    found = []
    for one in case.responses:
        mean = statistics.fmean(case.others(one))
        found.append((case.score(one) - mean) / mean if mean else 0.0)
    return found


def lite_ppo(case: Case, settings: Settings) -> list[float]:
    scale = std([case.score(one) for one in case.responses]) + 1e-6
    return [
        (case.score(one) - statistics.fmean(case.others(one))) / scale for one in case.responses
    ]


def gae(case: Case, settings: Settings) -> tuple[Rows, Rows]:
    gamma, lam = float(settings["gamma"]), float(settings["lam"])
    found, returns = [], []
    for one in case.responses:
        rewards = case.rewards_of_tokens(one)
        values = [one.values[place] for place in one.steps]
        after = [*values[1:], 0.0]
        deltas = [r + gamma * v2 - v1 for r, v1, v2 in zip(rewards, values, after, strict=False)]
        n = len(values)
        sums = [
            math.fsum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, n)) for t in range(n)
        ]
        found.append(sums)
        returns.append([a + v for a, v in zip(sums, values, strict=True)])
    rows = at_steps(case, found)
    return whiten(rows, case) if settings["whiten"] else rows, at_steps(case, returns)


def returns_to_go(case: Case, gamma: float) -> list[list[float]]:
    found = []
    for one in case.responses:
        rewards = case.rewards_of_tokens(one)
        n = len(rewards)
        found.append(
            [math.fsum(gamma ** (k - t) * rewards[k] for k in range(t, n)) for t in range(n)]
        )
    return found


def reinforce_plus_plus(case: Case, settings: Settings) -> Rows:
    return whiten(at_steps(case, returns_to_go(case, float(settings["gamma"]))), case)


def remax(case: Case, settings: Settings) -> Rows:
    pairs = zip(case.responses, returns_to_go(case, 1.0), strict=True)
    return at_steps(case, [[value - one.greedy_reward for value in row] for one, row in pairs])


def optimal_token_baseline(case: Case, settings: Settings) -> Rows:
    returns, energies = returns_to_go(case, 1.0), []
    for one in case.responses:
        norms = [1 - 2 * math.exp(one.log_probs[at]) + one.squares[at] for at in one.steps]
        energies.append([math.fsum(norms[: t + 1]) for t in range(len(norms))])
    found = []
    for one, row in zip(case.responses, returns, strict=True):
        numbers = []
        for t, value in enumerate(row):
            same = [
                (returns[j][t], energies[j][t])
                for j, other in enumerate(case.responses)
                if other.group == one.group and len(returns[j]) > t
            ]
            weight = math.fsum(energy for _, energy in same)
            known = len(same) > 1 and weight > 0
            base = math.fsum(g * energy for g, energy in same) / weight if known else 0.0
            numbers.append(value - base)
        found.append(numbers)
    return at_steps(case, found)


def gigpo(case: Case, settings: Settings) -> Rows:
    gamma, by_std = float(settings["gamma"]), settings["normalize_by_std"]
    turns = []  # response, places of its tokens, state, return
    for number, one in enumerate(case.responses):
        mine: list[list[int]] = []
        for place in one.steps:
            if mine and mine[-1][-1] == place - 1 and one.states[place - 1] == one.states[place]:
                mine[-1].append(place)
            else:
                mine.append([place])
        rewards = dict(zip(one.steps, case.rewards_of_tokens(one), strict=True))
        earned = [math.fsum(rewards[place] for place in places) for places in mine]
        for t, places in enumerate(mine):
            total = math.fsum(gamma ** (k - t) * earned[k] for k in range(t, len(mine)))
            turns.append((number, places, (one.group, one.states[places[0]]), total))
    rows = [[0.0] * len(one.mask) for one in case.responses]
    of_responses = grpo(case, settings)
    for number, places, state, total in turns:
        same = [other_total for _, _, other_state, other_total in turns if other_state == state]
        scale = std(same) + 1e-6 if by_std else 1.0
        advantage = (total - statistics.fmean(same)) / scale
        for place in places:
            rows[number][place] = of_responses[number] + float(settings["step_weight"]) * advantage
    return rows


BY_STD, NOT_BY_STD = {"normalize_by_std": True}, {"normalize_by_std": False}
# Names of advantages and settings, given in full.
CHECKED: list[tuple[Callable[..., object], Settings]] = [
    (gae, {"gamma": 1.0, "lam": 0.95, "whiten": True}),
    (gae, {"gamma": 0.9, "lam": 0.7, "whiten": False}),
    (gdpo, {"parts": "accuracy, format=0.5"}),
    (gdpo, {"parts": "accuracy,format=0.5", **NOT_BY_STD}),
    (gigpo, {"gamma": 0.95, "step_weight": 1.0, **BY_STD}),
    (gigpo, {"gamma": 0.8, "step_weight": 0.3, **NOT_BY_STD}),
    (gpg, BY_STD),
    (gpg, NOT_BY_STD),
    (grpo, BY_STD),
    (grpo, NOT_BY_STD),
    (grpo_passk, BY_STD),
    (grpo_passk, NOT_BY_STD),
    (lite_ppo, {}),
    (maxrl, {}),
    (opo, {}),
    (optimal_token_baseline, {}),
    (reinforce_plus_plus, {"gamma": 1.0}),
    (reinforce_plus_plus, {"gamma": 0.9}),
    (reinforce_plus_plus_baseline, {}),
    (remax, {}),
    (rloo, {}),
]
