"""A policy update at temperature 2 and its metrics, against plain torch on transformers.

Losses are aggregated by sequence_mean_token_sum, whose weights do not sum to one.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import policy_jobs
import pytest
import ranks
import tiny_models
import torch
from safetensors.torch import load_file

from mcore_rl.algorithms.aggregation import compute_loss_weights
from mcore_rl.config.schema import Layout
from mcore_rl.data.batch import Batch

LAYOUTS = {
    "tp1": Layout(),
    "tp2": Layout(tp=2),
    "dp2": Layout(dp=2),
    "cp2": Layout(cp=2),
    "pp2": Layout(pp=2),
    "cp2dp2": Layout(cp=2, dp=2),
}
METRICS = ("ratio", "clipped", "approx_kl", "reference_kl", "entropy")
MODEL = "qwen3_moe"


@dataclass
class Reference:
    """By plain torch, in float64: each [response tokens], but loss and gradients."""

    scores: dict[str, torch.Tensor]
    metrics: dict[str, torch.Tensor]
    loss: float
    gradients: dict[str, torch.Tensor]


def reference_update(batch: Batch, folder: Path) -> Reference:
    model = tiny_models.build(MODEL)
    parts = [_forward(model, batch, row) for row in range(len(batch))]
    log_probs, entropy = (torch.cat(columns) for columns in zip(*parts, strict=True))
    old, reference, advantages, weights = (
        torch.from_numpy(batch.jagged(name).values.copy()).double()
        for name in ("log_probs", "reference_log_probs", "advantages", "loss_weights")
    )
    ratio, clipped = (log_probs - old).exp(), (log_probs - old).exp().clamp(0.8, 1.2)
    policy = -torch.min(ratio * advantages, clipped * advantages)
    kl = (reference - log_probs).exp() - 1 - (reference - log_probs)
    loss = ((policy + 0.1 * kl - 0.3 * entropy) * weights).sum()
    loss.backward()
    metrics = {
        "ratio": ratio,
        "clipped": (clipped * advantages < ratio * advantages).double(),
        "approx_kl": ratio - 1 - ratio.log(),
        "reference_kl": kl,
        "entropy": entropy,
    }
    return Reference(
        {"log_probs": log_probs.detach(), "entropy": entropy.detach()},
        {name: values.detach() for name, values in metrics.items()},
        loss.item(),
        _gradients(model, folder),
    )


def _gradients(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    """By the names of a checkpoint: transformers writes them as if they were the weights."""
    for parameter in model.parameters():
        parameter.data = parameter.grad
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def _forward(model: Any, batch: Batch, row: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies of softmax(logits / temperature)."""
    prompt, response = (batch.jagged(name)[row] for name in ("prompt_ids", "response_ids"))
    logits = model(torch.from_numpy(np.concatenate([prompt, response]))[None]).logits
    table = (logits[0, len(prompt) - 1 : -1].double() / policy_jobs.TEMPERATURE).log_softmax(-1)
    targets = torch.from_numpy(response.copy())[:, None]
    return table.gather(1, targets)[:, 0], -(table.exp() * table).sum(-1)


@dataclass
class Runs:
    batch: Batch
    results: dict[str, list[dict[str, Any]]]
    reference: Reference


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policy")
    path, batch = tiny_models.save(MODEL, folder), tiny_models.make_batch()
    weights = compute_loss_weights(batch.jagged("response_mask"), "sequence_mean_token_sum")
    batch = batch.with_columns(
        loss_weights=weights,
        kl_weights=weights.with_values(0.1 * weights.values),
        entropy_weights=weights.with_values(0.3 * weights.values),
    )
    jobs: dict[int, dict[str, Any]] = {1: {}, 2: {}, 4: {}}
    for name, layout in LAYOUTS.items():
        for job in (policy_jobs.update, policy_jobs.gradients):
            key = f"{job.__name__}/{name}"
            jobs[layout.world_size][key] = ranks.make_job(job, path, layout, batch)
    examples = batch.select("prompt_ids", "response_ids", "response_mask")
    for temperature in (1.0, 2.0):
        jobs[1][f"supervised/{temperature}"] = ranks.make_job(
            policy_jobs.supervised, path, examples, temperature, folder / str(temperature)
        )
    results = {key: r for size in jobs for key, r in ranks.spawn(size, jobs[size]).items()}
    return Runs(batch, results, reference_update(batch, folder / "gradients"))


@pytest.mark.parametrize("name", ["log_probs", "entropy"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_are_those_of_the_divided_logits(runs, layout, name):
    lengths = runs.batch.jagged("response_ids").lengths.tolist()
    expected, seen = runs.reference.scores[name].split(lengths), set()
    for result in runs.results[f"update/{layout}"]:
        for row, values in result.get(name, {}).items():
            assert values == pytest.approx(expected[row].tolist(), abs=1e-5)
            seen.add(row)
    assert seen == set(range(len(runs.batch)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_those_of_the_divided_logits(runs, layout):
    actual = runs.results[f"gradients/{layout}"][0]["gradients"]
    expected = runs.reference.gradients
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (actual[name] - gradient).norm() <= 1e-4 * gradient.norm(), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_loss_keeps_its_weights(runs, layout):
    steps = [result["metrics"] for result in runs.results[f"update/{layout}"]]
    losses = [step["loss"] for step in steps if "loss" in step]
    assert losses == pytest.approx([runs.reference.loss] * len(losses), rel=1e-5)
    assert len(losses) == (1 if layout == "pp2" else LAYOUTS[layout].world_size)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_metrics_are_means_over_trained_tokens(runs, layout, metric):
    trained = torch.from_numpy(runs.batch.jagged("response_mask").values != 0)
    expected = runs.reference.metrics[metric][trained].mean().item()
    for result in runs.results[f"update/{layout}"]:
        if "loss" in result["metrics"]:
            assert result["metrics"][metric] == pytest.approx(expected, rel=1e-4)


def test_the_weights_are_such_that_a_weighted_mean_would_be_another(runs):
    """Guards the test above."""
    weights = torch.from_numpy(runs.batch.jagged("loss_weights").values.copy())
    assert weights.sum() > 2
    for metric, values in runs.reference.metrics.items():
        mean, weighted = values[weights != 0].mean(), (values * weights).sum()
        assert abs(weighted - mean) > 0.1 * mean.abs(), metric


def test_supervised_training_does_not_depend_on_the_temperature_of_sampling(runs):
    """The loss of the first step is the plain negative log-likelihood of transformers."""
    [first], [second] = (runs.results[f"supervised/{t}"] for t in (1.0, 2.0))
    assert first["losses"] == second["losses"]
    _, log_probs, _ = tiny_models.reference_scores(tiny_models.build(MODEL), runs.batch)
    trained = runs.batch.jagged("response_mask").values != 0
    assert first["losses"][0] == pytest.approx(-log_probs[trained].mean(), rel=1e-5)
    assert first["losses"][1] < first["losses"][0]
