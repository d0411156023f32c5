"""The losses that verl has as well, on the same mini-batches, padded as verl wants them.

Values and gradients are the same at log ratios within +-10; docs/algorithms.md says what clamps
where beyond that. Where verl takes a choice of tokens in each micro-batch, ours is that of the
mini-batch; it is one micro-batch here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from mcore_rl.algorithms.aggregation import compute_loss_weights
from mcore_rl.algorithms.losses import LOSSES, ValueClipSettings, value_clip
from mcore_rl.data.batch import Batch
from tests.unit.algorithms.loss_cases import (
    batch_of,
    inputs_of,
    loss_of,
    prepared,
    random_case,
)

LOW, HIGH = 0.15, 0.25
CLIP = {"clip_ratio_low": LOW, "clip_ratio_high": HIGH}
BOUNDS = {"max_divergence_low": LOW, "max_divergence_high": HIGH, "max_ratio": 1.8}
COVARIANCES = {"fraction": 1.0, "covariance_low": -0.1, "covariance_high": 0.4}
# Ours, its settings, verl's, and what verl calls them.
SAME: list[tuple[str, dict[str, float], str, dict[str, float]]] = [
    ("ppo_clip", CLIP | {"dual_clip": 1.8}, "vanilla", {}),
    ("gspo_token", CLIP, "gspo", {}),
    ("sapo", {"temperature_positive": 0.7, "temperature_negative": 1.3}, "sapo",
     {"tau_pos": 0.7, "tau_neg": 1.3}),
    ("gpg", {}, "gpg", {}),
    ("clip_cov", CLIP | COVARIANCES, "clip_cov",
     {"clip_cov_ratio": 1.0, "clip_cov_lb": -0.1, "clip_cov_ub": 0.4}),
    ("kl_cov", {"fraction": 0.4, "kl_coef": 0.6}, "kl_cov",
     {"kl_cov_ratio": 0.4, "ppo_kl_coef": 0.6}),
    ("gmpo", {"clip_log_ratio_low": LOW, "clip_log_ratio_high": HIGH}, "geo_mean", {}),
    ("cispo", CLIP, "cispo", {}),
    ("dppo_tv", BOUNDS, "dppo_tv", {}),
    ("dppo_kl", BOUNDS, "dppo_kl", {}),
    ("dro", {"beta": 0.3}, "dro", {"dro_beta": 0.3}),
]  # fmt: skip


def aggregated(batch: Batch, mode: str) -> Batch:
    weights = compute_loss_weights(batch.jagged("response_mask"), mode)
    return batch.with_columns(loss_weights=weights.with_values(weights.values.astype(np.float64)))


def padded(batch: Batch, name: str, fill: float = 0.0) -> torch.Tensor:
    column = batch.jagged(name)
    result = torch.full((len(column), int(column.lengths.max())), fill, dtype=torch.float64)
    for row, values in enumerate(column):
        result[row, : len(values)] = torch.from_numpy(values.copy())
    return result


def random_batch(seed: int) -> Batch:
    """Draw a batch whose responses have trained tokens, with different covariances."""
    case, rng = random_case(seed, scale=0.4), np.random.default_rng(seed)
    advantages = [[a + 0.1 * rng.normal() for a in row] for row in case.advantages]
    mask = [[1.0, *row[1:]] for row in case.mask]
    return batch_of(replace(case, advantages=advantages, mask=mask))


def verl_config(changes: dict[str, float]) -> Any:
    from verl.workers.config import ActorConfig
    from verl.workers.config.actor import PolicyLossConfig

    names = {name for name in changes if not name.startswith("tau")}
    return ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=LOW,
        clip_ratio_high=HIGH,
        clip_ratio_c=1.8,
        policy_loss=PolicyLossConfig(**{name: changes[name] for name in names}),
        **{name: value for name, value in changes.items() if name not in names},
    )


MODES = {"token_mean": "token-mean", "sequence_mean_token_mean": "seq-mean-token-mean"}
ONE_MODE = ("sapo", "gmpo")  # verl aggregates these in one way


@pytest.mark.parametrize(
    ("name", "given", "verl_name", "config", "mode"),
    [
        pytest.param(*row, mode, id=f"{row[0]}-{mode}")
        for mode in MODES
        for row in SAME
        if mode != "token_mean" or row[0] not in ONE_MODE
    ],
)
def test_loss_and_gradient_are_those_of_verl(name, given, verl_name, config, mode):
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    settings, verl = LOSSES.build_settings(name, given), get_policy_loss_fn(verl_name)
    clipped, of_verl = [], []
    for seed in range(40):
        batch = prepared(aggregated(random_batch(seed), mode), name, settings)
        new = torch.from_numpy(batch.jagged("current_log_probs").values.copy()).requires_grad_()
        inputs = inputs_of(batch, new)
        loss, metrics = loss_of(name, settings, inputs)
        total = (loss * inputs.loss_weights).sum()
        (gradient,) = torch.autograd.grad(total, new)

        log_probs = padded(batch, "current_log_probs").requires_grad_()
        mask = padded(batch, "response_mask")
        expected, reported = verl(
            padded(batch, "log_probs"), log_probs, padded(batch, "advantages"), mask,
            MODES[mode], verl_config(config),
        )  # fmt: skip
        (slopes,) = torch.autograd.grad(expected, log_probs)
        assert total.item() == pytest.approx(expected.item(), rel=1e-5, abs=1e-7)
        is_token = (
            torch.arange(mask.shape[1]) < torch.tensor(batch.jagged("log_probs").lengths)[:, None]
        )
        torch.testing.assert_close(gradient, slopes[is_token], rtol=1e-5, atol=1e-7)
        if "clipped" in metrics and verl_name not in ("geo_mean", "clip_cov"):
            clipped.append(metrics["clipped"][inputs.response_mask].double().mean().item())
            of_verl.append(reported["actor/pg_clipfrac"])
    if clipped:
        assert clipped == pytest.approx(of_verl, abs=1e-6) and 0 < np.mean(clipped) < 1


@pytest.mark.parametrize("away", [19.0, 30.0, -30.0])
def test_dro_is_that_of_verl_at_any_log_ratio(away):
    """verl clamps none in dro, and neither do we: a square is finite."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    batch = aggregated(random_batch(3), "token_mean")
    old = batch.jagged("current_log_probs")
    batch = batch.with_columns(log_probs=old.with_values(old.values - away))
    new = torch.from_numpy(old.values.copy()).requires_grad_()
    inputs = inputs_of(batch, new)
    loss, _ = loss_of("dro", LOSSES.build_settings("dro", {"beta": 0.3}), inputs)
    (gradient,) = torch.autograd.grad((loss * inputs.loss_weights).sum(), new)
    columns = ("log_probs", "current_log_probs", "advantages", "response_mask")
    given = [padded(batch, name) for name in columns]
    log_probs, mask = given[1].requires_grad_(), given[3]
    expected, _ = get_policy_loss_fn("dro")(*given, "token-mean", verl_config({"dro_beta": 0.3}))
    (slopes,) = torch.autograd.grad(expected, log_probs)
    torch.testing.assert_close(gradient[inputs.response_mask], slopes[mask != 0])


def test_the_value_loss_is_that_of_verl():
    from verl.trainer.ppo.core_algos import compute_value_loss

    for seed in range(40):
        batch = aggregated(random_batch(seed), "token_mean")
        batch = batch.with_columns(
            values=batch.jagged("log_probs"), returns=batch.jagged("advantages")
        )
        values = torch.from_numpy(batch.jagged("current_log_probs").values.copy()).requires_grad_()
        inputs = replace(inputs_of(batch, values), scores={"values": values})
        loss, metrics = value_clip(inputs, ValueClipSettings(clip_range=0.3))
        total = (loss * inputs.loss_weights).sum()
        (gradient,) = torch.autograd.grad(total, values)

        mask, predicted = padded(batch, "response_mask"), padded(batch, "current_log_probs")
        expected, fraction = compute_value_loss(
            predicted.requires_grad_(), padded(batch, "returns"), padded(batch, "values"), mask, 0.3
        )
        (slopes,) = torch.autograd.grad(expected, predicted)
        assert total.item() == pytest.approx(expected.item(), rel=1e-6)
        is_trained = inputs.response_mask
        torch.testing.assert_close(gradient[is_trained], slopes[mask != 0])
        clipped = metrics["value_clipped"][is_trained].double().mean().item()
        assert clipped == pytest.approx(fraction.item(), abs=1e-6)
