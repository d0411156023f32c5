"""Every loss of a policy: against loops in float64, against differences, however it is split."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mcore_rl.algorithms.inputs import MiniBatchInputs, needs, prepared_by
from mcore_rl.algorithms.losses import LOSSES
from mcore_rl.config.errors import ConfigError
from mcore_rl.data.batch import Batch, Jagged
from tests.nightly import nightly
from tests.unit.algorithms import loss_cases as cases
from tests.unit.algorithms.loss_cases import (
    Case,
    batch_of,
    inputs_of,
    loss_of,
    prepared,
    random_case,
)

# Losses that hold a part of themselves constant: their gradient is not that of their value.
WITH_CONSTANTS = {"cispo", "dppo_tv", "dppo_kl", "gspo_token", "topr", "vespo"}
WITH_RATIO_OF_SEQUENCE = {"gspo", "gspo_token", "luspo", "gmpo"}
EVERY = LOSSES.names


def random_settings(name: str, seed: int) -> Any:
    """Draw settings with bounds within the range of random cases."""
    kind, rng = LOSSES.get_settings_class(name), np.random.default_rng(seed)
    if kind is None:
        return None
    values = {field.name: float(rng.uniform(0.05, 0.9)) for field in fields(kind)}
    values |= {name: None for name in ("dual_clip", "weight_cap") if name in values}
    if rng.random() < 0.7:
        values |= {
            name: rng.uniform(1, 2) for name in ("dual_clip", "weight_cap") if name in values
        }
    if "min_reward" in values:
        values["min_reward"] = 1.0
    if "max_ratio" in values:
        values["max_ratio"] = rng.uniform(1, 3)
    if "covariance_low" in values:
        values |= {"covariance_low": rng.uniform(-1, 0), "covariance_high": rng.uniform(0, 1)}
    return kind(**values)


def evaluated(name: str, settings: Any, batch: Batch) -> tuple[torch.Tensor, Any, torch.Tensor]:
    """Return loss of each token, metrics, and gradient of the weighted sum."""
    new = torch.from_numpy(batch.jagged("current_log_probs").values.copy()).requires_grad_()
    inputs = inputs_of(batch, new)
    loss, metrics = loss_of(name, settings, inputs)
    (gradient,) = torch.autograd.grad((loss * inputs.loss_weights).sum(), new)
    return loss.detach(), metrics, gradient


def oracle_sum(name: str, settings: Any, case: Case, constants: Case) -> float:
    oracle = cases.ORACLES[name]
    return sum(
        case.weights[i][t] * oracle(case, constants, settings, i, t) for i, t in case.tokens()
    )


def all_prepared(name: str, settings: Any, seeds: Sequence[int]) -> tuple[list[Case], Batch]:
    """Random cases, each a mini-batch of its own, and all of them packed into one micro-batch."""
    drawn = [random_case(seed) for seed in seeds]
    return drawn, Batch.concat([prepared(batch_of(case), name, settings) for case in drawn])


@pytest.mark.parametrize("num_cases", [300, nightly(1000)])
@pytest.mark.parametrize("name", sorted(cases.ORACLES))
def test_each_token_is_that_of_loops_over_the_tokens(name, num_cases):
    """Compare 4 cases in 100 with finite differences."""
    assert set(EVERY) == {*cases.ORACLES, "clip_cov"}
    for first in range(0, num_cases, 100):
        settings = random_settings(name, first)
        drawn, batch = all_prepared(name, settings, range(first, first + 100))
        trained = torch.from_numpy(batch.jagged("response_mask").values != 0)
        loss, metrics, gradient = evaluated(name, settings, batch)
        expected = [
            cases.ORACLES[name](case, case, settings, i, t)
            for case in drawn
            for i, t in case.tokens()
        ]
        np.testing.assert_allclose(loss[trained], expected, rtol=1e-6, atol=1e-7)
        assert loss.isfinite().all() and gradient.isfinite().all()
        for key, value in metrics.items():
            assert value.shape == loss.shape and not value.requires_grad, key
        moves = [case.log_ratio(i, t) for case in drawn for i, t in case.tokens()]
        kl = [math.exp(move) - 1 - move for move in moves]
        np.testing.assert_allclose(metrics["approx_kl"][trained], kl, rtol=1e-6, atol=1e-12)
        if name not in WITH_RATIO_OF_SEQUENCE:
            np.testing.assert_allclose(metrics["ratio"][trained], np.exp(moves))
        slopes = [slope for case in drawn[:4] for slope in differences(name, settings, case)]
        close = {"rtol": 1e-5, "atol": 1e-6}
        np.testing.assert_allclose(gradient[trained][: len(slopes)], slopes, **close)


def differences(name: str, settings: Any, case: Case, step: float = 1e-6) -> list[float]:
    """Differentiate the weighted sum by the log-prob of each trained token, numerically."""
    slopes = []
    for i, t in case.tokens():
        up, down = (oracle_sum(name, settings, case.moved(i, t, by), case) for by in (step, -step))
        slopes.append((up - down) / (2 * step))
    return slopes


@pytest.mark.parametrize("name", sorted(set(EVERY) - WITH_CONSTANTS))
def test_the_gradient_is_that_of_the_loss(name):
    for seed in range(2):
        settings = random_settings(name, seed)
        batch = prepared(batch_of(random_case(seed)), name, settings)
        new = torch.from_numpy(batch.jagged("current_log_probs").values.copy()).requires_grad_()

        def weigh(new: torch.Tensor, batch=batch, settings=settings) -> torch.Tensor:
            inputs = inputs_of(batch, new)
            return loss_of(name, settings, inputs)[0] * inputs.loss_weights

        assert torch.autograd.gradcheck(weigh, new, atol=1e-6)


def total(name: str, settings: Any, batch: Batch, parts: list[list[int]]) -> tuple[float, Any]:
    """Sum over micro-batches whose samples are prepared together; gradients by row."""
    batch = prepared(batch, name, settings)
    value, gradients = 0.0, {}
    for part in parts:
        micro = batch.take(part)
        loss, _, gradient = evaluated(name, settings, micro)
        value += float(loss.numpy() @ micro.jagged("loss_weights").values)
        rows = Jagged(gradient.numpy(), micro.jagged("response_ids").offsets)
        gradients |= {row: rows[place] for place, row in enumerate(part)}
    return value, gradients


@pytest.mark.parametrize("num_seeds", [10, nightly(30)])
@pytest.mark.parametrize("name", EVERY)
def test_neither_the_split_nor_the_order_of_samples_counts(name, num_seeds):
    for seed in range(num_seeds):
        batch, settings = batch_of(random_case(seed)), random_settings(name, seed)
        rows = list(range(len(batch)))
        value, gradients = total(name, settings, batch, [rows])
        order = np.random.default_rng(seed).permutation(rows).tolist()
        split = total(name, settings, batch, [order[:1], order[1:]] if order[1:] else [order])
        moved = total(name, settings, batch.take(order), [rows])
        moved = moved[0], {row: moved[1][place] for place, row in enumerate(order)}
        for values, slopes in (split, moved):
            assert values == pytest.approx(value, rel=1e-6, abs=1e-9), seed
            for row in rows:
                np.testing.assert_allclose(slopes[row], gradients[row], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("away", [100.0, -100.0])
def test_a_policy_that_ran_away_gives_finite_losses_and_gradients(name, away):
    # In float32, as in a run.
    case = random_case(3, scale=0.5)
    case = replace(case, new=[[-0.5] * len(row) for row in case.old])
    case = replace(case, old=[[min(x - away, -0.1 - away) for x in row] for row in case.new])
    batch = batch_of(case, np.float32)
    settings = LOSSES.build_settings(
        name, {"dro": {"beta": 0.1}, "kimi": {"tau": 0.1}}.get(name, {})
    )
    loss, metrics, gradient = evaluated(name, settings, prepared(batch, name, settings))
    assert loss.dtype == gradient.dtype == torch.float32
    assert loss.isfinite().all() and gradient.isfinite().all()
    assert all(torch.isfinite(value).all() for value in metrics.values())


# Of two tokens of weight 1 and advantage 0.5, both x beyond the old policy: the value of each, and
# the derivative of their sum by the log-prob of each. The log-prob is -1.
UNCLAMPED = {
    "dro": ({"beta": 0.3}, lambda x: (0.5 + 0.15 * x**2, -0.5 + 0.3 * x)),
    "kimi": ({"tau": 0.3}, lambda x: (0.5 + 0.15 * (2 * x) ** 2 / 2, -0.5 + 2 * 0.3 * x)),
    "kl_cov": (
        {"fraction": 1.0, "kl_coef": 2.0},
        lambda x: (-0.5 * math.exp(math.copysign(20, x)) + 2 * abs(x), math.copysign(2, x)),
    ),
}


@pytest.mark.parametrize("name", UNCLAMPED)
@pytest.mark.parametrize("away", [25.0, -25.0, 400.0, -400.0])
def test_a_penalty_of_log_ratios_pulls_back_a_policy_beyond_20_nats(name, away):
    # Clamped, it would not depend on the policy any more, and have no gradient.
    given, worked_out = UNCLAMPED[name]
    new, old, unit = [[-1.0, -1.0]], [[-1.0 - away] * 2], [[1.0, 1.0]]
    batch = batch_of(Case(new, old, old, [[0.5, 0.5]], unit, [1.0], unit))
    settings = LOSSES.build_settings(name, given)
    loss, _, gradient = evaluated(name, settings, prepared(batch, name, settings))
    value, slope = worked_out(away)
    assert loss.tolist() == pytest.approx([value] * 2)
    assert gradient.tolist() == pytest.approx([slope] * 2)


def test_clip_cov_drops_so_many_tokens_at_random_of_those_between_the_bounds():
    for first in range(0, 1000, 100):
        settings = random_settings("clip_cov", first)
        drawn, batch = all_prepared("clip_cov", settings, range(first, first + 100))
        loss, _, gradient = evaluated("clip_cov", settings, batch)
        columns = [batch.jagged("selected").values, loss.numpy(), gradient.numpy()]
        trained = batch.jagged("response_mask").values != 0
        assert not columns[0][~trained].any()
        rows = zip(*(column[trained].tolist() for column in columns), strict=True)
        for case in drawn:
            candidates = cases.clip_cov_candidates(case, settings)
            num = min(max(int(settings.fraction * len(case.tokens())), 1), len(candidates))
            for (i, t), (selected, of_token, slope) in zip(case.tokens(), rows, strict=False):
                plain = cases.ppo_clip(case, case, settings, i, t)
                assert of_token == pytest.approx(0 if selected else plain, rel=1e-6)
                assert not selected or (slope == 0 and (i, t) in candidates)
                num -= selected
            assert num == 0


def test_clip_cov_draws_by_the_seed_of_the_mini_batch():
    wide = LOSSES.build_settings("clip_cov", {"covariance_low": -9, "covariance_high": 9})
    case, drawn = random_case(5), set()
    for seed in range(20):
        column = prepared(batch_of(case), "clip_cov", wide, (0, seed)).jagged("selected")
        again = prepared(batch_of(case), "clip_cov", wide, (0, seed)).jagged("selected")
        np.testing.assert_array_equal(column.values, again.values)
        drawn.add(int(column.values.argmax()))
    assert len(drawn) > 1


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov", "m2po", "positive_nll"])
def test_tokens_that_are_not_trained_on_have_no_part_in_the_choice(name):
    # Rejected ones have no weight; it is as if the policy had not chosen them.
    for seed in range(100):
        case, settings = random_case(seed), random_settings(name, seed)
        places = case.tokens()[1:] or case.tokens()
        i, t = places[seed % len(places)]
        weights = [list(row) for row in case.weights]
        mask = [list(row) for row in case.mask]
        weights[i][t] = mask[i][t] = 0.0
        rejected = prepared(batch_of(replace(case, weights=weights)), name, settings)
        unchosen = prepared(batch_of(replace(case, weights=weights, mask=mask)), name, settings)
        for column in {"selected", "nll_weights"} & set(rejected.columns):
            result = rejected.jagged(column)
            assert result[i][t] == 0
            np.testing.assert_array_equal(result.values, unchosen.jagged(column).values)


def test_the_example_of_the_page_is_gspo():
    settings, batch = random_settings("gspo", 1), batch_of(random_case(1))
    user_file = f"{Path(__file__).parents[3] / 'examples' / 'gspo.py'}:gspo"
    own_settings = LOSSES.build_settings(user_file, vars(settings))
    for values, expected in zip(
        evaluated(user_file, own_settings, batch), evaluated("gspo", settings, batch), strict=True
    ):
        if isinstance(values, torch.Tensor):
            torch.testing.assert_close(values, expected)


def test_luspo_is_gspo_summed_over_the_tokens():
    case = random_case(11)
    settings = random_settings("gspo", 11)
    batch = batch_of(case)
    longer = evaluated("luspo", LOSSES.get_settings_class("luspo")(**vars(settings)), batch)[0]
    lengths = np.repeat([len(case.trained(i)) for i in range(len(batch))], [*map(len, case.new)])
    plain = evaluated("gspo", settings, batch)[0]
    np.testing.assert_allclose(longer, plain * torch.from_numpy(lengths))


def test_gspo_token_has_the_gradient_of_gspo_with_an_advantage_a_sequence():
    for seed in range(50):
        case, settings = random_case(seed), random_settings("gspo", seed)
        case = replace(case, advantages=[[row[0]] * len(row) for row in case.advantages])
        weights = [
            [sum(w) / (sum(m) or 1)] * len(w) for w, m in zip(case.weights, case.mask, strict=True)
        ]
        weights = [
            [w * m for w, m in zip(*row, strict=True)]
            for row in zip(weights, case.mask, strict=True)
        ]
        batch = batch_of(replace(case, weights=weights))
        sequence, token = (evaluated(name, settings, batch) for name in ("gspo", "gspo_token"))
        torch.testing.assert_close(sequence[0], token[0])
        torch.testing.assert_close(sequence[2], token[2])


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("ppo_clip", {"dual_clip": 0.5}, r"loss_settings.dual_clip=0.5; allowed: at least 1"),
        ("dro", {}, r"algorithm.loss_settings.beta is needed by algorithm.loss='dro'"),
        ("kimi", {"tau": 0}, r"loss_settings.tau=0.0; allowed: above 0"),
        ("clip_cov", {"covariance_low": 7}, r"covariance_high=5.0; allowed: at least 7"),
        ("kl_cov", {"fraction": 2}, r"loss_settings.fraction=2.0; allowed: 0 to 1"),
        ("decoupled_ppo", {"weight_cap": 0}, r"weight_cap=0.0; allowed: above 0"),
        ("reinforce", {"beta": 1}, r"algorithm.loss='reinforce' has no settings"),
    ],
)
def test_settings_that_cannot_be_are_refused(name, given, message):
    with pytest.raises(ConfigError, match=message):
        LOSSES.bind(name, given)


def test_what_prepares_a_loss_takes_inputs_and_maybe_settings():
    def prepare(batch: Batch) -> dict[str, Jagged]:
        return {}

    with pytest.raises(ConfigError, match=r"@prepared_by of prepare\(batch: .*; allowed: \(inp"):
        prepared_by(prepare)


def test_a_prepared_loss_may_need_inputs_as_any_other():
    @needs("entropy")
    @prepared_by(lambda inputs: {})
    def loss(inputs):
        return inputs.entropy, {}

    assert loss.needs == {"entropy"} and loss.prepare(None) == {}


def test_what_is_not_there_is_named():
    inputs = MiniBatchInputs(Batch({"rewards": np.zeros(1)}), (0,))
    with pytest.raises(ConfigError, match=r"asks for rollout_log_probs, which this run does not"):
        _ = inputs.rollout_log_probs
