"""Rollout correction, KL estimates and aggregation against those of the verl package.

verl's rows are padded; ours are not. verl's bounds of k1 are one over ours.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import (
    compute_offpolicy_metrics,
    compute_rollout_correction_weights,
    compute_rollout_rejection_mask,
)

from mcore_rl.algorithms.advantages import add_token_rewards
from mcore_rl.algorithms.aggregation import compute_loss_weights
from mcore_rl.algorithms.controllers import Coefficients, measure
from mcore_rl.algorithms.correction import apply_correction, compute_mismatch
from mcore_rl.algorithms.inputs import AdvantageInputs
from mcore_rl.algorithms.kl import KL_ESTIMATORS
from mcore_rl.config.schema import AlgorithmConfig, CorrectionConfig
from mcore_rl.data.batch import Batch, Jagged
from tests.unit.algorithms.correction_cases import random_batch, random_bound


def padded(column: Jagged) -> torch.Tensor:
    result = np.zeros((len(column), max(column.lengths.max(), 1)))
    for row, values in enumerate(column):
        result[row, : len(values)] = np.nan_to_num(values)
    return torch.from_numpy(result)


def rows(values: torch.Tensor, column: Jagged) -> np.ndarray:
    return np.concatenate([row[:n].numpy() for row, n in zip(values, column.lengths, strict=True)])


def cases(num: int) -> list[tuple[np.random.Generator, Batch, torch.Tensor, torch.Tensor]]:
    """Return batches with a chosen token, and their padded log ratio and mask."""
    values = []
    for seed in range(num):
        rng = np.random.default_rng(seed)
        batch = random_batch(rng)
        if batch.jagged("response_mask").values.any():
            trainer, server = (padded(batch.jagged(n)) for n in ("log_probs", "rollout_log_probs"))
            values.append((rng, batch, trainer - server, padded(batch.jagged("response_mask"))))
    return values


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("low", [None, 0.5])
@pytest.mark.parametrize("normalize", [False, True])
def test_importance_weights(level, low, normalize):
    config = CorrectionConfig(level=level, weight_max=3.0, normalize=normalize)
    if low is not None:
        config.method, config.weight_min = "mask", low
    for _, batch, log_ratio, mask in cases(100):
        corrected, metrics = apply_correction(batch, config)
        weights = corrected.jagged("correction_weights")
        if not weights.values.any():  # verl divides by zero
            continue
        bound = "3.0" if low is None else f"{low}_3.0"
        expected, verl_metrics = compute_rollout_correction_weights(
            log_ratio, mask, level, bound, normalize
        )
        np.testing.assert_allclose(weights.values, rows(expected, weights), rtol=1e-5, atol=1e-7)
        mean = verl_metrics["rollout_is_mean"]
        assert metrics["correction/weight_mean"] == pytest.approx(mean, rel=1e-6)
        share = verl_metrics["rollout_is_eff_sample_size"]
        assert metrics["correction/effective_sample_size"] == pytest.approx(share, rel=1e-4)


NAMES = {
    f"{name}_k{n}": f"{verl_name}_k{n}"
    for name, verl_name in {
        "token": "token",
        "sequence_sum": "seq_sum",
        "sequence_mean": "seq_mean",
        "sequence_max": "seq_max",
    }.items()
    for n in (1, 2, 3)
    if (name, n) != ("sequence_max", 1)
}


@pytest.mark.parametrize("rule", NAMES)
def test_rejection(rule):
    selected = []
    for rng, batch, log_ratio, mask in cases(100):
        bound = random_bound(rng, rule)
        verl = f"{1 / bound[1]}_{1 / bound[0]}" if isinstance(bound, list) else bound
        expected, verl_metrics = compute_rollout_rejection_mask(log_ratio, mask, NAMES[rule], verl)
        corrected, metrics = apply_correction(batch, CorrectionConfig(reject={rule: bound}))
        column = corrected.jagged("policy_mask")
        np.testing.assert_array_equal(column.values, rows(expected, column))
        share = verl_metrics["rollout_rs_masked_fraction"]
        assert metrics[f"correction/{rule}"] == pytest.approx(share, rel=1e-6, abs=1e-7)
        selected.append(1 - share)
    assert 0.02 < np.mean(selected) < 0.98


def test_the_kl_of_trainer_and_server():
    for _, batch, log_ratio, mask in cases(100):
        if log_ratio[mask != 0].abs().max() > 20:  # verl does not clamp these
            continue
        server = padded(batch.jagged("rollout_log_probs"))
        expected = compute_offpolicy_metrics(log_ratio + server, server, mask)
        metrics = compute_mismatch(batch)
        assert metrics["mismatch/kl"] == pytest.approx(expected["kl"], rel=1e-5, abs=1e-7)
        assert metrics["mismatch/k3_kl"] == pytest.approx(expected["k3_kl"], rel=1e-5, abs=1e-7)


@pytest.mark.parametrize(
    ("name", "verl_name"),
    [
        ("k1", "kl"), ("k2", "mse"), ("low_variance", "k3"), ("abs", "abs"),
        ("k1+", "k1+"), ("low_variance+", "k3+"), ("abs+", "abs+"),
    ],
)  # fmt: skip
def test_kl_estimates_and_their_gradients(name, verl_name):
    rng = np.random.default_rng(0)
    policy, reference = (torch.from_numpy(rng.normal(-3, 3, 1000)) for _ in range(2))
    policy[:4] += torch.tensor([30.0, -30.0, 19.0, -4.0])
    policy.requires_grad_()
    result = KL_ESTIMATORS[name](policy, reference)
    expected = core_algos.kl_penalty(policy, reference, verl_name)
    torch.testing.assert_close(result, expected)
    gradients = [torch.autograd.grad(value.sum(), policy)[0] for value in (result, expected)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize(
    ("mode", "verl_mode"),
    [
        ("token_mean", "token-mean"),
        ("sequence_mean_token_mean", "seq-mean-token-mean"),
        ("sequence_mean_token_sum", "seq-mean-token-sum"),
        ("sequence_sum_fixed_length", "seq-mean-token-sum-norm"),
    ],
)
def test_aggregation(mode, verl_mode):
    settings = {"length": 9} if mode == "sequence_sum_fixed_length" else {}
    for rng, batch, _, mask in cases(100):
        column = batch.jagged("response_mask")
        losses = column.with_values(rng.normal(size=len(column.values)))
        expected = core_algos.agg_loss(padded(losses), mask, verl_mode, loss_scale_factor=9)
        result = compute_loss_weights(column, mode, settings).values @ losses.values
        assert result == pytest.approx(expected.item(), rel=1e-5, abs=1e-6)


def with_reference(rng: np.random.Generator, batch: Batch) -> Batch:
    mask = batch.jagged("response_mask")
    nearby = np.nan_to_num(batch.jagged("log_probs").values) + rng.normal(0, 0.3, len(mask.values))
    return batch.with_columns(
        reference_log_probs=mask.with_values(nearby.astype(np.float32)),
        rewards=rng.normal(size=len(batch)).astype(np.float32),
    )


def test_the_kl_controller_and_rewards_of_tokens():
    algorithm = AlgorithmConfig(
        kl_coef=0.2,
        kl_placement="reward",
        kl_target=0.05,
        kl_horizon=300,
        kl_estimator="low_variance",
    )
    coefficients, controller = (
        Coefficients(algorithm),
        core_algos.AdaptiveKLController(0.2, 0.05, 300),
    )
    values = set()
    for rng, batch, _, mask in cases(100):
        if not mask.any(-1).all():  # verl counts sequences without a token as of no KL
            continue
        batch = with_reference(rng, batch)
        settings, _ = coefficients.update(measure(batch, algorithm), len(batch))
        assert settings.kl_coef == pytest.approx(controller.value, rel=1e-5)
        old, reference = (padded(batch.jagged(n)) for n in ("log_probs", "reference_log_probs"))
        kl = core_algos.kl_penalty(old, reference, "low_var_kl") * mask
        scores = torch.zeros_like(mask)
        for row, reward in enumerate(batch.array("rewards")):
            scores[row, int(mask[row].nonzero()[-1])] = float(reward)
        result = add_token_rewards(batch, settings)
        column = result.jagged("token_rewards")
        expected = scores - controller.value * kl
        np.testing.assert_allclose(column.values, rows(expected, column), rtol=1e-4, atol=1e-5)
        scores = AdvantageInputs(result).scores
        np.testing.assert_allclose(scores, expected.sum(-1), rtol=1e-4, atol=1e-5)
        controller.update((kl.sum(-1) / mask.sum(-1)).mean().item(), len(batch))
        values.add(controller.value)
    assert len(values) > 50
