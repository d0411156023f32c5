"""Distillation losses with their gradients, and log-probs of teachers, against transformers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ranks
import tiny_models
import torch

from mcore_rl.config.schema import AlgorithmConfig, DistillationConfig, Layout
from mcore_rl.data.batch import Batch
from mcore_rl.engine.base import create_engine
from mcore_rl.trainers.policy_loss import PolicyLoss
from tests.dist_cpu.test_objectives import (
    assert_gradients,
    ids_of,
    reference_gradients,
)

LAYOUTS = {
    "tp1": Layout(),
    "tp2": Layout(tp=2),
    "pp2": Layout(pp=2),
    "cp2": Layout(cp=2),
    "tp2pp2": Layout(tp=2, pp=2),
}
KINDS = ("reverse_kl", "forward_kl")
K, TEMPERATURE = 7, 2.0
SHARES = (1.0, 0.5)  # of two teachers


@ranks.spawn_on_ranks()
def top_log_probs(path: Path, layout: Layout, batch: Batch) -> ranks.Result:
    """By row: log-probs of the tokens, and the likeliest with their ids."""
    spec = replace(ranks.build_engine_spec(path, layout), num_top_log_probs=K, total_steps=0)
    engine = ranks.start_engine(spec, partial(create_engine, "language_model"))
    scored = engine.infer_batch(batch, temperature=TEMPERATURE)
    names = "log_probs", "top_log_probs", "top_ids"
    return {n: torch.from_numpy(scored[n].values.copy()) for n in names} if scored else {}


@ranks.spawn_on_ranks()
def gradients(path: Path, layout: Layout, batch: Batch, kind: str) -> ranks.Result:
    engine = ranks.start_engine(ranks.build_engine_spec(path, layout))
    engine.optimizer_zero_grad()
    loss = PolicyLoss(AlgorithmConfig(distillation=DistillationConfig(loss=kind)))
    results = engine.forward_backward_batch(
        batch, loss, forward_only=False, temperature=TEMPERATURE
    )
    return {"metrics": engine._reduce_metrics(results), "gradients": ranks.read_gradients(engine)}


def table_of(model: Any, batch: Batch) -> torch.Tensor:
    """[response tokens, vocabulary], float64 log-probs by transformers."""
    tables = []
    for row in range(len(batch)):
        start = len(batch.jagged("prompt_ids")[row]) - 1
        logits = model(ids_of(batch, row)).logits[0, start:-1].double()
        tables.append((logits / TEMPERATURE).log_softmax(-1))
    return torch.cat(tables)


def teachers() -> list[Any]:
    """Build two teachers with other weights, the second of another architecture."""
    return [tiny_models.build("qwen3", seed=5), tiny_models.build("qwen3_moe", seed=6)]


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """The policy's checkpoint, and a batch with what transformers says of both teachers."""
    batch = tiny_models.make_batch()
    with torch.no_grad():
        tops = [table_of(model, batch).topk(K) for model in teachers()]
    column = batch.jagged("response_ids")
    ids = torch.stack([top.indices for top in tops], 1).numpy()
    log_probs = torch.stack([top.values for top in tops], 1).float().numpy()
    shares = np.tile(np.array(SHARES, np.float32), (len(column.values), 1))
    weights = batch.jagged("loss_weights")
    batch = batch.select(
        "prompt_ids", "response_ids", "response_mask", "log_probs", "advantages"
    ).with_columns(
        teacher_ids=column.with_values(ids),
        teacher_top_log_probs=column.with_values(log_probs),
        teacher_shares=column.with_values(shares),
        loss_weights=weights.with_values(np.zeros_like(weights.values)),
        distillation_weights=weights.with_values(0.3 * weights.values),
    )
    folder = tmp_path_factory.mktemp("distillation")
    return tiny_models.save("qwen3", folder), batch, folder


def loss_by_torch(model: Any, batch: Batch, kind: str) -> torch.Tensor:
    """Token by token: the KL of the distributions over k tokens and 'any other'."""
    table = table_of(model, batch).exp()
    ids = torch.from_numpy(batch.jagged("teacher_ids").values)
    teacher_probs = torch.from_numpy(batch.jagged("teacher_top_log_probs").values).double().exp()
    total = torch.zeros((), dtype=torch.float64)
    for t, weight in enumerate(batch.jagged("distillation_weights").values.tolist()):
        for teacher, share in enumerate(SHARES):
            probs = [table[t, i] for i in ids[t, teacher].tolist()]
            target_probs = [*teacher_probs[t, teacher]]
            probs, target_probs = [*probs, 1 - sum(probs)], [*target_probs, 1 - sum(target_probs)]
            pairs = zip(probs, target_probs, strict=True)
            for p, q in pairs if kind == "reverse_kl" else ((b, a) for a, b in pairs):
                total = total + weight * share * p * (p.log() - q.log())
    return total


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_and_gradients_equal_torch_on_transformers(case, kind, layout):
    path, batch, folder = case
    model = tiny_models.build("qwen3")
    loss = loss_by_torch(model, batch, kind)
    results = gradients(path, LAYOUTS[layout], batch, kind)
    metrics = [f["metrics"] for f in results if f["metrics"]]
    for rank_metrics in metrics:
        assert rank_metrics["distillation_loss"] == pytest.approx(loss.item(), rel=1e-4)
        assert rank_metrics["policy_loss"] == 0
    assert loss.item() > 0.001
    expected = reference_gradients(model, loss, folder / f"{kind}-{layout}")
    assert_gradients(results, expected)


@pytest.mark.parametrize("layout", ["tp2", "cp2", "pp2"])
def test_what_a_teacher_gives_equals_transformers(case, layout):
    _, batch, folder = case
    path = tiny_models.save("qwen3", folder, seed=5)
    with torch.no_grad():
        table = table_of(teachers()[0], batch)
    sampled = torch.from_numpy(batch.jagged("response_ids").values)
    inputs = batch.select("prompt_ids", "response_ids")
    for scored in filter(None, top_log_probs(path, LAYOUTS[layout], inputs)):
        top = scored["top_log_probs"].double()
        torch.testing.assert_close(top, table.topk(K).values, rtol=0, atol=1e-4)
        torch.testing.assert_close(top, table.gather(1, scored["top_ids"]), rtol=0, atol=1e-4)
        expected = table.gather(1, sampled[:, None])[:, 0]
        torch.testing.assert_close(scored["log_probs"].double(), expected, rtol=0, atol=1e-4)
