"""Losses of pairs against the formulas of their papers in torch, and autograd through those."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid

from mcore_rl.algorithms.inputs import get_needs
from mcore_rl.algorithms.preference import (
    PREFERENCE_LOSSES,
    PairInputs,
    bradley_terry,
    build_pair_inputs,
    compute_pair_weights,
)
from mcore_rl.config.errors import ConfigError
from mcore_rl.data.batch import Batch, Jagged
from tests.nightly import nightly

CASES = 1000


def dpo_of(policy, reference, settings):
    """Compute equation 7 of arXiv:2305.18290 for (chosen, rejected) log-probs of tokens."""
    sums = [(p - r).sum() for p, r in zip(policy, reference, strict=True)]
    if settings.get("length_normalized"):
        sums = [total / len(p) for total, p in zip(sums, policy, strict=True)]
    h, e = settings["beta"] * (sums[0] - sums[1]), settings.get("label_smoothing", 0.0)
    return -(1 - e) * logsigmoid(h) - e * logsigmoid(-h)


def ipo_of(policy, reference, settings):
    sums = [(p - r).sum() for p, r in zip(policy, reference, strict=True)]
    if settings.get("length_normalized"):
        sums = [total / len(p) for total, p in zip(sums, policy, strict=True)]
    return (sums[0] - sums[1] - 1 / (2 * settings["beta"])) ** 2


def simpo_of(policy, reference, settings):
    good, bad = (settings["beta"] / len(p) * p.sum() for p in policy)
    return -logsigmoid(good - bad - settings["gamma"])


def orpo_of(policy, reference, settings):
    """P is the geometric mean of the probabilities of the tokens."""
    probabilities = [p.mean().exp() for p in policy]
    odds = [p / (1 - p) for p in probabilities]
    ratio = odds[0] / odds[1]
    return -policy[0].mean() - settings["lam"] * logsigmoid(ratio.log())


LOSSES = {
    "dpo": ("dpo", dpo_of, {"beta": 0.3}),
    "cdpo": ("dpo", dpo_of, {"beta": 0.3, "label_smoothing": 0.2}),
    "dpo by length": ("dpo", dpo_of, {"beta": 2.0, "length_normalized": True}),
    "ipo": ("ipo", ipo_of, {"beta": 0.1}),
    "ipo by length": ("ipo", ipo_of, {"beta": 0.1, "length_normalized": True}),
    "simpo": ("simpo", simpo_of, {"beta": 2.5, "gamma": 0.7}),
    "orpo": ("orpo", orpo_of, {"lam": 0.4}),
}


def batch_of(rng, num_pairs, *, has_reference=True) -> Batch:
    """Build ragged responses with untrained tokens, some of which are not finite."""
    lengths = rng.integers(1, 6, 2 * num_pairs)
    mask = Jagged.pack([rng.integers(0, 2, n) | (np.arange(n) == n - 1) for n in lengths], np.int8)
    names = ["log_probs", "reference_log_probs"] if has_reference else ["log_probs"]
    columns = {"response_mask": mask, "response_ids": mask}
    for name in names:
        values = -rng.gamma(2.0, 1.0, len(mask.values))
        columns[name] = mask.with_values(np.where(mask.values, values, -np.inf))
    return Batch(columns)


def split_by_row(batch: Batch, name: str) -> list[torch.Tensor]:
    """Return the trained tokens of each row."""
    rows = zip(batch.jagged(name), batch.jagged("response_mask"), strict=True)
    return [torch.tensor(row[mask != 0], dtype=torch.float64) for row, mask in rows]


@pytest.mark.parametrize("num_cases", [CASES // 8, nightly(CASES)])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_and_the_weights_of_its_tokens_equal_torch_autograd(name, num_cases):
    key, formula, settings = LOSSES[name]
    loss, rng = PREFERENCE_LOSSES.bind(key, settings), np.random.default_rng(5)
    has_reference = bool(get_needs(PREFERENCE_LOSSES[key]))
    for _ in range(num_cases):
        batch = batch_of(rng, int(rng.integers(1, 4)), has_reference=has_reference)
        result = loss(build_pair_inputs(batch))
        weights = split_by_row(batch.with_columns(w=compute_pair_weights(batch, result)), "w")
        policy = [row.requires_grad_() for row in split_by_row(batch, "log_probs")]
        reference = split_by_row(batch, "reference_log_probs") if has_reference else policy
        expected = [
            formula(policy[i : i + 2], reference[i : i + 2], settings)
            for i in range(0, len(policy), 2)
        ]
        torch.stack(expected).mean().backward()
        np.testing.assert_allclose(result.loss, [w.item() for w in expected], rtol=1e-9, atol=1e-12)
        for row, weight in zip(policy, weights, strict=True):
            np.testing.assert_allclose(weight, row.grad, rtol=1e-6, atol=1e-9)  # float32


def test_bradley_terry_and_its_derivatives_equal_torch():
    rng = np.random.default_rng(6)
    for _ in range(CASES):
        chosen, rejected, margins = rng.normal(0, 3, (3, int(rng.integers(1, 5))))
        result = bradley_terry(chosen, rejected, margins)
        good, bad = (torch.tensor(s, requires_grad=True) for s in (chosen, rejected))
        expected = -logsigmoid(good - bad - torch.tensor(margins))
        expected.sum().backward()
        np.testing.assert_allclose(result.loss, expected.detach(), rtol=1e-9)
        np.testing.assert_allclose(result.chosen, good.grad, rtol=1e-9)
        np.testing.assert_allclose(result.rejected, bad.grad, rtol=1e-9)


def inputs_of(chosen, rejected) -> PairInputs:
    pair = np.array([chosen]), np.array([rejected])
    unit = np.ones(1)
    return PairInputs(
        chosen=pair[0], rejected=pair[1], chosen_lengths=unit, rejected_lengths=unit,
        reference=(np.zeros(1), np.zeros(1)),
    )  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("pair", [(-1e4, 0.0), (0.0, -1e4), (-1e4, -1e4), (0.0, 0.0)])
def test_extreme_log_probs_give_finite_losses_and_derivatives(name, pair):
    key, _, settings = LOSSES[name]
    losses = PREFERENCE_LOSSES.bind(key, settings)(inputs_of(*pair))
    for column in (losses.loss, losses.chosen, losses.rejected):
        assert np.isfinite(column).all()


def test_metrics_are_means_and_a_tie_is_half_right():
    result = bradley_terry(np.array([1.0, 2.0, 3.0]), np.array([0.0, 2.0, 4.0]), np.zeros(3))
    assert result.metrics["accuracy"] == 0.5
    assert result.metrics["margin"] == 0.0
    assert (result.metrics["reward_chosen"], result.metrics["reward_rejected"]) == (2.0, 2.0)


def test_a_loss_without_its_reference_and_a_response_without_tokens_are_refused():
    rng = np.random.default_rng(0)
    with pytest.raises(ConfigError, match="loss asks for the reference model's log-probs"):
        PREFERENCE_LOSSES.bind("dpo", {})(build_pair_inputs(batch_of(rng, 1, has_reference=False)))
    batch = batch_of(rng, 2)
    mask = batch.jagged("response_mask")
    empty = np.where(np.repeat(np.arange(4), mask.lengths) == 3, 0, mask.values)
    with pytest.raises(ConfigError, match="pair 1 of the batch has a response without trained"):
        build_pair_inputs(batch.with_columns(response_mask=mask.with_values(empty)))


@pytest.mark.parametrize(
    ("name", "settings"),
    [("dpo", {"beta": 0.0}), ("dpo", {"label_smoothing": 0.7}), ("orpo", {"lam": -1.0})],
)
def test_a_setting_out_of_range_is_refused(name, settings):
    with pytest.raises((ConfigError, ValueError), match="allowed"):
        PREFERENCE_LOSSES.bind(name, settings)
