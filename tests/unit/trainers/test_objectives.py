"""Inputs of an update, and metrics of a step and an evaluation, with a model of a table."""

from __future__ import annotations

import numpy as np
import pytest

from mcore_rl.algorithms.preference import PREFERENCE_LOSSES, bradley_terry, build_pair_inputs
from mcore_rl.data.batch import Batch, Jagged
from mcore_rl.engine.worker import ModelWorker
from mcore_rl.observability.activity import Stopwatch
from mcore_rl.trainers import supervised
from mcore_rl.trainers.evaluation import compute_standard_error
from mcore_rl.trainers.objectives import (
    PreferenceObjective,
    Reference,
    RewardObjective,
    SupervisedObjective,
)
from tests.fakes import LocalGroup


class Model(LocalGroup):
    """Scores depend on the token alone. Every call is on record."""

    def __init__(self, shift: float = 0.0):
        self.shift, self.updates, self.moves = shift, [], []

    def compute_log_probs(self, batch, *, temperature):
        assert temperature == 1.0
        return batch.with_columns(log_probs=self._scores(batch))

    def compute_values(self, batch):
        last = [prompt[-1] for prompt in batch.jagged("prompt_ids")]
        return batch.with_columns(values=Jagged.pack([[n / 4] for n in last], np.float32))

    def update(self, batch, *, temperature=1.0):
        assert temperature == 1.0
        self.updates.append(batch)
        return [[{"loss": 99.0, "grad_norm": 1.0, "lr": 0.1}]]

    def to(self, place):
        self.moves.append(place)

    def _scores(self, batch):
        ids = batch.jagged("response_ids")
        return ids.with_values((-ids.values / 8 - self.shift).astype(np.float32))


def batch_of(*responses: list[int], mask: list[list[int]] | None = None) -> Batch:
    ids = Jagged.pack(responses, np.int64)
    full_mask = [[1] * len(row) for row in responses]
    return Batch(
        {
            "prompt_ids": Jagged.pack([[1, 2]] * len(responses), np.int64),
            "response_ids": ids,
            "response_mask": Jagged.pack(mask or full_mask, np.int8),
            "margins": np.repeat([0.5, 0.0], 2)[: len(responses)],
        }
    )


PAIRS = batch_of([3, 4], [9], [5], [6, 6, 2])


def test_masked_tokens_have_no_weight_and_the_others_share_it():
    model = Model()
    batch = batch_of([5, 6, 7], [8, 9], mask=[[1, 1, 0], [0, 1]])
    assert SupervisedObjective(model).step(batch, Stopwatch())["loss"] == 99.0
    weights = model.updates[0].jagged("loss_weights").values
    np.testing.assert_allclose(weights, np.array([1, 1, 0, 0, 1]) / 3, rtol=1e-6)


def test_an_evaluation_is_the_mean_over_the_trained_tokens_of_all_batches():
    batches = iter([batch_of([8, 80], [16], mask=[[1, 0], [1]]), batch_of([32])])
    assert SupervisedObjective(Model()).evaluate(batches)["loss"] == pytest.approx(7 / 3)


def test_a_step_on_pairs_tells_the_loss_of_the_pairs_not_of_the_update():
    model, reference = Model(), Model(shift=0.5)
    loss = PREFERENCE_LOSSES.bind("dpo", {"beta": 0.2})
    objective = PreferenceObjective(
        model, loss, Reference(reference, ModelWorker.compute_log_probs, is_offloaded=True)
    )
    metrics = objective.step(PAIRS, Stopwatch())
    [updated] = model.updates
    losses = loss(build_pair_inputs(updated))
    # The log-ratio of each response is half its number of tokens.
    margins = 0.2 * 0.5 * np.array([2 - 1, 1 - 3])
    assert metrics["loss"] == pytest.approx(np.log1p(np.exp(-margins)).mean())
    assert metrics["accuracy"] == 0.5
    assert metrics["grad_norm"] == 1.0
    slopes = np.repeat([losses.chosen, losses.rejected], 1, axis=1).T.reshape(-1) / 2
    weights = np.repeat(slopes, [2, 1, 1, 3])
    np.testing.assert_allclose(updated.jagged("loss_weights").values, weights, rtol=1e-6)
    assert reference.moves == ["host"]  # scoring has brought it to its device


def test_a_reward_model_is_scored_at_the_last_token_with_the_margin_of_each_pair():
    model = Model()
    metrics = RewardObjective(model).step(PAIRS, Stopwatch())
    losses = bradley_terry(np.array([1.0, 1.25]), np.array([2.25, 0.5]), np.array([0.5, 0.0]))
    assert metrics["loss"] == pytest.approx(losses.loss.mean())
    weights = model.updates[0].jagged("loss_weights")
    assert weights.lengths.tolist() == [1, 1, 1, 1]
    np.testing.assert_allclose(weights.values[::2], losses.chosen / 2, rtol=1e-6)
    np.testing.assert_allclose(weights.values[1::2], losses.rejected / 2, rtol=1e-6)


def test_an_evaluation_on_pairs_weighs_every_pair_alike():
    expected = RewardObjective(Model()).evaluate(iter([PAIRS]))
    batches = [PAIRS.take([0, 1]), PAIRS.take([2, 3])]
    assert RewardObjective(Model()).evaluate(iter(batches)) == pytest.approx(expected)


def test_a_loop_reports_each_step_with_its_times_and_its_rate():
    reports = {}
    batches = iter([batch_of([3]), batch_of([4, 5])])
    supervised.train(SupervisedObjective(Model()), batches, 2, reports.__setitem__)
    assert list(reports) == [1, 2]
    assert {"loss", "tokens_per_s", "time/data_s", "time/update_s"} <= set(reports[2])


def test_the_error_of_a_held_out_loss_takes_the_tokens_of_a_row_together():
    """The standard error is that of tokens clustered by row."""

    class Scored(LocalGroup):
        def compute_log_probs(self, batch, temperature):
            log_probs = batch.jagged("response_mask")
            values = -np.arange(len(log_probs.values), dtype=np.float32)
            return batch.with_columns(log_probs=log_probs.with_values(values))

    batches = [batch_of([7, 7, 7], [7]), batch_of([7, 7])]
    metrics = SupervisedObjective(Scored()).evaluate(iter(batches))
    values, rows = np.array([0, 1, 2, 3, 0, 1.0]), np.array([0, 0, 0, 1, 2, 2])
    assert metrics["loss"] == pytest.approx(values.mean())
    assert metrics["loss_stderr"] == pytest.approx(compute_standard_error(values, rows))


def test_the_error_of_a_loss_of_pairs_is_over_pairs():
    metrics = RewardObjective(Model()).evaluate(iter([PAIRS]))
    losses = bradley_terry(np.array([1.0, 1.25]), np.array([2.25, 0.5]), np.array([0.5, 0.0])).loss
    assert metrics["loss_stderr"] == pytest.approx(losses.std(ddof=1) / np.sqrt(2))
    assert metrics["accuracy_stderr"] == pytest.approx(0.5)
