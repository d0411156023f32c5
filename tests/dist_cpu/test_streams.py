"""Losses with weights of their own, over tokens of their own, against plain torch on sequences.

The policy is trained on some of the tokens that it chose, corrected; the KL and the entropy count
at all of them, and the cross entropy at those that it did not choose.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from test_algorithms import (
    ALONE,
    LAYOUTS,
    PACKS,
    Reference,
    assert_equals,
    assert_same_steps,
    gradients_of,
    rows_of,
    sampled_batch,
    trained,
)

from mcore_rl.config.schema import AlgorithmConfig, CorrectionConfig
from mcore_rl.data.batch import Batch
from mcore_rl.trainers.training_batch import add_corrections, add_loss_weights

ALGORITHM = AlgorithmConfig(
    loss_aggregation="sequence_mean_token_mean",
    kl_coef=0.2,
    entropy_coef=0.3,
    cross_entropy_coef=0.5,
    correction=CorrectionConfig(
        level="token", method="mask", weight_min=0.5, weight_max=2.0, unbiased_kl=True,
        reject={"sequence_mean_k1": [0.8, 2.0]},
    ),
)  # fmt: skip
READ = ("rollout_log_probs", "reference_log_probs")


def batch_of_all() -> Batch:
    batch = sampled_batch()
    log_probs = batch.jagged("log_probs")
    rng = np.random.default_rng(4)
    away = rng.normal(0, 0.5, len(log_probs.values)) + np.repeat(
        rng.normal(0, 0.3, len(batch)), log_probs.lengths
    )
    away[batch.jagged("response_mask").values == 0] = 7.0  # no server chose them
    rollout = (log_probs.values + away).astype(np.float32)
    reference = (log_probs.values + rng.normal(0, 0.4, len(away))).astype(np.float32)
    batch = batch.with_columns(
        rollout_log_probs=log_probs.with_values(rollout),
        reference_log_probs=log_probs.with_values(reference),
    )
    return add_loss_weights(add_corrections(batch, ALGORITHM)[0], ALGORITHM)[0]


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return tiny_models.save("qwen3", tmp_path_factory.mktemp("streams"))


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> Reference:
    """Each loss with its own mean over the sequences that have tokens of it."""
    model, batch = tiny_models.build("qwen3"), batch_of_all()
    entropies = iter(entropies_of(model, batch))
    losses: dict[str, list[torch.Tensor]] = {n: [] for n in ("policy", "kl", "entropy", "cross")}
    tokens: dict[str, list[torch.Tensor]] = {n: [] for n in (*losses, "ratio")}
    for index, row in enumerate(rows_of(model, batch)):
        mask, entropy = row["mask"], next(entropies)
        columns = (torch.from_numpy(batch.jagged(n)[index].copy()).double() for n in READ)
        rollout, frozen = columns
        new, advantage = row["new"], row["advantages"]
        ratio = (new - row["log_probs"]).exp()
        policy = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        kl = (new - rollout).exp() * ((frozen - new).exp() - 1 - (frozen - new))
        mismatch = (row["log_probs"] - rollout).float().double()
        if np.log(0.8) <= mismatch[mask].mean() <= np.log(2.0):
            within = (mismatch.exp() >= 0.5) & (mismatch.exp() <= 2.0)
            weight = torch.where(within, mismatch.exp(), 0.0)
            losses["policy"].append((policy * weight)[mask].mean())
            tokens["ratio"].append(ratio[mask & within])
        for name, value, used in (
            ("kl", kl, mask),
            ("entropy", -entropy, mask),
            ("cross", -new, ~mask),
        ):
            if used.any():
                losses[name].append(value[used].mean())
                tokens[name].append(value[used])
    sums = {name: torch.stack(values).mean() for name, values in losses.items()}
    coefs = {"policy": 1.0, "kl": 0.2, "entropy": 0.3, "cross": 0.5}
    total = torch.stack([coefs[name] * value for name, value in sums.items()]).sum()
    total.backward()
    means = {name: torch.cat(values).mean().item() for name, values in tokens.items() if values}
    metrics = {f"{name}_loss": coefs[name] * value.item() for name, value in sums.items()}
    metrics["cross_entropy_loss"] = metrics.pop("cross_loss")
    metrics |= {"reference_kl": means["kl"], "entropy": -means["entropy"], "ratio": means["ratio"]}
    metrics["cross_entropy"] = means["cross"]
    assert 2 < len(losses["policy"]) < len(batch)  # guards: some are rejected, and some are not
    assert 0 < len(torch.cat(tokens["ratio"])) < len(torch.cat(tokens["kl"]))
    assert len({len(torch.cat(values)) for values in tokens.values() if values}) == 3
    folder = tmp_path_factory.mktemp("gradients")
    return Reference(total.item(), metrics, gradients_of(model, folder))


def entropies_of(model: Any, batch: Batch) -> list[torch.Tensor]:
    entropies = []
    for prompt, response in zip(
        batch.jagged("prompt_ids"), batch.jagged("response_ids"), strict=True
    ):
        ids = torch.from_numpy(np.concatenate([prompt, response]))
        table = model(ids[None]).logits[0, len(prompt) - 1 : -1].double().log_softmax(-1)
        entropies.append(-(table.exp() * table).sum(-1))
    return entropies


@pytest.mark.parametrize(
    ("layout", "budget"), [("tp1", PACKS), ("cp2", PACKS), ("dp2", ALONE), ("pp2", PACKS)]
)
def test_each_loss_is_normalised_alone_and_its_metrics_are_of_its_own_tokens(
    path, reference, layout, budget
):
    assert_equals(trained(path, LAYOUTS[layout], batch_of_all(), ALGORITHM, budget), reference)


def test_two_steps_of_all_losses_on_two_ranks_equal_one(path):
    reference = trained(path, LAYOUTS["tp1"], batch_of_all(), ALGORITHM, PACKS)[0]
    assert_same_steps(trained(path, LAYOUTS["dp2"], batch_of_all(), ALGORITHM, ALONE), reference)
