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

    def step_rewards(self, response: Response) -> list[float]:
        """Return the reward of each step."""
        if self.process:
            return [response.token_rewards[place] for place in response.steps]
        return [0.0] * (len(response.steps) - 1) + [response.reward] if response.steps else []

    def score(self, response: Response) -> float:
        return (
            math.fsum(self.step_rewards(response))
            if self.process and response.steps
            else response.reward
        )

    def group_scores(self, response: Response) -> list[float]:
        """Return the scores of the whole group of a response."""
        return [self.score(other) for other in self.responses if other.group == response.group]


def build_batch(case: Case) -> Batch:
    def column(name: str, kind: type) -> Jagged:
        return Jagged.pack([getattr(response, name) for response in case.responses], kind)

    masks = column("mask", np.int8)
    batch = Batch(
        {
            "response_ids": masks.with_values(np.arange(len(masks.values))),
            "response_mask": masks,
            "group_ids": np.array([response.group for response in case.responses], np.int64),
            "rewards": np.array([response.reward for response in case.responses], np.float32),
            "baseline_rewards": np.array(
                [response.greedy_reward for response in case.responses], np.float32
            ),
            "values": column("values", np.float32),
            "log_probs": column("log_probs", np.float32),
            "sum_pi_squared": column("squares", np.float32),
            "state_ids": column("states", np.int64),
            **{
                f"reward/{part}": np.array(
                    [response.parts[part] for response in case.responses], np.float32
                )
                for part in ("accuracy", "format")
            },
        }
    )
    if case.process:
        batch = batch.with_columns(token_rewards=column("token_rewards", np.float32))
    return batch


def float32(values: np.ndarray) -> list[float]:
    """Return Python floats that float32 represents exactly."""
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
    return [(case, build_batch(case)) for case in cases]


def std(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def whiten(rows: Rows, case: Case) -> Rows:
    """Whiten over the steps of all rows."""
    pairs = zip(rows, case.responses, strict=True)
    steps = [row[place] for row, response in pairs for place in response.steps]
    mean = math.fsum(steps) / max(len(steps), 1)
    scale = math.sqrt(std(steps) ** 2 + 1e-8)
    advantages = [[0.0] * len(row) for row in rows]
    for row, response, out in zip(rows, case.responses, advantages, strict=True):
        for place in response.steps:
            out[place] = (row[place] - mean) / scale
    return advantages


def expand_steps(case: Case, advantages: list[list[float]]) -> Rows:
    """Put values of steps at their tokens, and 0 elsewhere."""
    rows = []
    for response, numbers in zip(case.responses, advantages, strict=True):
        row = [0.0] * len(response.mask)
        for place, number in zip(response.steps, numbers, strict=True):
            row[place] = number
        rows.append(row)
    return rows


def grpo(case: Case, settings: Settings) -> list[float]:
    advantages = []
    for response in case.responses:
        group = case.group_scores(response)
        scale = std(group) + 1e-6 if settings["normalize_by_std"] else 1.0
        advantages.append((case.score(response) - statistics.fmean(group)) / scale)
    return advantages


def grpo_passk(case: Case, settings: Settings) -> list[float]:
    """Subtract the highest of the rest from the highest of all: pass@k lost without a response."""
    advantages = []
    for response in case.responses:
        group = case.group_scores(response)
        if len(group) == 1:
            advantages.append(0.0)
            continue
        rest = [
            case.score(other)
            for other in case.responses
            if other.group == response.group and other is not response
        ]
        scale = std(group) + 1e-6 if settings["normalize_by_std"] else 1.0
        advantages.append((max(group) - max(rest)) / scale)
    return advantages


def rloo(case: Case, settings: Settings) -> list[float]:
    advantages = []
    for response in case.responses:
        rest = [
            case.score(other)
            for other in case.responses
            if other.group == response.group and other is not response
        ]
        advantages.append(case.score(response) - statistics.fmean(rest) if rest else 0.0)
    return advantages


def reinforce_plus_plus_baseline(case: Case, settings: Settings) -> Rows:
    rows = [
        [case.score(response) - statistics.fmean(case.group_scores(response))] * len(response.mask)
        for response in case.responses
    ]
    return whiten(rows, case)


def opo(case: Case, settings: Settings) -> list[float]:
    advantages = []
    for response in case.responses:
        group = [other for other in case.responses if other.group == response.group]
        length = sum(len(other.steps) for other in group)
        weighted = math.fsum(len(other.steps) * case.score(other) for other in group)
        advantages.append(case.score(response) - (weighted / length if length else 0.0))
    return advantages


def gpg(case: Case, settings: Settings) -> list[float]:
    batch = len(case.responses)
    useless = sum(len(set(case.group_scores(response))) == 1 for response in case.responses)
    alpha = batch / (batch - useless) if useless < batch else 1.0
    return [alpha * value for value in grpo(case, settings)]


def gdpo(case: Case, settings: Settings) -> Rows:
    rows = []
    for response in case.responses:
        total = 0.0
        for part, weight in (("accuracy", 1.0), ("format", 0.5)):
            group = [other.parts[part] for other in case.responses if other.group == response.group]
            scale = std(group) + 1e-6 if settings.get("normalize_by_std", True) else 1.0
            total += weight * (response.parts[part] - statistics.fmean(group)) / scale
        rows.append([total] * len(response.mask))
    return whiten(rows, case)


def maxrl(case: Case, settings: Settings) -> list[float]:
    advantages = []
    for response in case.responses:
        mean = statistics.fmean(case.group_scores(response))
        advantages.append((case.score(response) - mean) / mean if mean else 0.0)
    return advantages


def lite_ppo(case: Case, settings: Settings) -> list[float]:
    scale = std([case.score(response) for response in case.responses]) + 1e-6
    return [
        (case.score(response) - statistics.fmean(case.group_scores(response))) / scale
        for response in case.responses
    ]


def gae(case: Case, settings: Settings) -> tuple[Rows, Rows]:
    gamma, lam = float(settings["gamma"]), float(settings["lam"])
    advantages, returns = [], []
    for response in case.responses:
        rewards = case.step_rewards(response)
        values = [response.values[place] for place in response.steps]
        after = [*values[1:], 0.0]
        deltas = [r + gamma * v2 - v1 for r, v1, v2 in zip(rewards, values, after, strict=False)]
        n = len(values)
        sums = [
            math.fsum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, n)) for t in range(n)
        ]
        advantages.append(sums)
        returns.append([a + v for a, v in zip(sums, values, strict=True)])
    rows = expand_steps(case, advantages)
    return whiten(rows, case) if settings["whiten"] else rows, expand_steps(case, returns)


def returns_to_go(case: Case, gamma: float) -> list[list[float]]:
    advantages = []
    for response in case.responses:
        rewards = case.step_rewards(response)
        n = len(rewards)
        advantages.append(
            [math.fsum(gamma ** (k - t) * rewards[k] for k in range(t, n)) for t in range(n)]
        )
    return advantages


def reinforce_plus_plus(case: Case, settings: Settings) -> Rows:
    return whiten(expand_steps(case, returns_to_go(case, float(settings["gamma"]))), case)


def remax(case: Case, settings: Settings) -> Rows:
    pairs = zip(case.responses, returns_to_go(case, 1.0), strict=True)
    return expand_steps(
        case, [[value - response.greedy_reward for value in row] for response, row in pairs]
    )


def optimal_token_baseline(case: Case, settings: Settings) -> Rows:
    returns, energies = returns_to_go(case, 1.0), []
    for response in case.responses:
        norms = [
            1 - 2 * math.exp(response.log_probs[place]) + response.squares[place]
            for place in response.steps
        ]
        energies.append([math.fsum(norms[: t + 1]) for t in range(len(norms))])
    advantages = []
    for response, row in zip(case.responses, returns, strict=True):
        numbers = []
        for t, value in enumerate(row):
            same = [
                (returns[j][t], energies[j][t])
                for j, other in enumerate(case.responses)
                if other.group == response.group and len(returns[j]) > t
            ]
            weight = math.fsum(energy for _, energy in same)
            known = len(same) > 1 and weight > 0
            base = math.fsum(g * energy for g, energy in same) / weight if known else 0.0
            numbers.append(value - base)
        advantages.append(numbers)
    return expand_steps(case, advantages)


def gigpo(case: Case, settings: Settings) -> Rows:
    gamma, by_std = float(settings["gamma"]), settings["normalize_by_std"]
    turns = []  # response, places of its tokens, state, return
    for number, response in enumerate(case.responses):
        spans: list[list[int]] = []
        for place in response.steps:
            if (
                spans
                and spans[-1][-1] == place - 1
                and response.states[place - 1] == response.states[place]
            ):
                spans[-1].append(place)
            else:
                spans.append([place])
        rewards = dict(zip(response.steps, case.step_rewards(response), strict=True))
        earned = [math.fsum(rewards[place] for place in places) for places in spans]
        for t, places in enumerate(spans):
            total = math.fsum(gamma ** (k - t) * earned[k] for k in range(t, len(spans)))
            turns.append((number, places, (response.group, response.states[places[0]]), total))
    rows = [[0.0] * len(response.mask) for response in case.responses]
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
