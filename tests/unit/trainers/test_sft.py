"""Supervised training: what an update gets."""

from __future__ import annotations

import numpy as np

from mcore_rl.data.batch import Batch, Jagged
from mcore_rl.trainers import sft


class Model:
    def __init__(self):
        self.updates: list[tuple[Batch, float]] = []

    def update(self, batch, *, temperature):
        self.updates.append((batch, temperature))
        return [{"loss": float(len(self.updates))}]


def test_masked_tokens_have_no_weight_and_the_others_share_it_at_temperature_1():
    mask = Jagged.of([[1, 1, 0], [0, 1], [1, 1, 1, 1]], np.int8)
    examples = Batch({"response_mask": mask, "row": np.arange(3)})
    model, reports = Model(), []
    sft.train(
        model, examples, num_steps=2, batch_size=3, seed=0,
        report=lambda step, metrics: reports.append((step, metrics)),
    )  # fmt: skip
    assert reports == [(1, {"loss": 1.0}), (2, {"loss": 2.0})]
    for batch, temperature in model.updates:
        assert temperature == 1.0
        assert sorted(batch.array("row")) == [0, 1, 2]
        mask, weights = (batch.jagged(name).values for name in ("response_mask", "loss_weights"))
        np.testing.assert_allclose(weights, mask / 7, rtol=1e-6)
