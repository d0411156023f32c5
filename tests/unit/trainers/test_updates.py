"""Optimizer steps of mini-batches, and what a prepared loss gets of each."""

from __future__ import annotations

import numpy as np
import pytest

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import AlgorithmConfig
from mcore_rl.trainers.steps import with_each, with_loss_weights
from mcore_rl.trainers.updates import update, with_prepared_columns
from tests.unit.trainers.test_steps import batch, rewarded

PREPARED = """
import numpy as np
from mcore_rl.algorithms.inputs import prepared_by

def first(inputs):
    drawn = np.random.default_rng(inputs.seed).integers(0, 99, len(inputs.log_probs.values))
    return {"drawn": inputs.log_probs.with_values(drawn)}

@prepared_by(first)
def good(inputs):
    return inputs.prepared("drawn") * inputs.log_probs, {}

@prepared_by(lambda inputs: {"rewards": inputs.log_probs})
def taken(inputs):
    return inputs.log_probs, {}

@prepared_by(lambda inputs: {"ranks": inputs.log_probs.values})
def flat(inputs):
    return inputs.log_probs, {}

@prepared_by(lambda inputs: {"ranks": inputs.log_probs.with_values(np.full(9, np.nan))})
def nan(inputs):
    return inputs.log_probs, {}
"""


def before_update():
    log_probs = rewarded()["log_probs"]
    return rewarded().with_columns(current_log_probs=log_probs, entropy=log_probs)


def test_a_loss_outside_of_the_package_is_prepared_by_its_own_function(tmp_path):
    (tmp_path / "own.py").write_text(PREPARED)
    algorithm = AlgorithmConfig(loss=f"{tmp_path}/own.py:good")
    found, _ = with_prepared_columns(before_update(), algorithm, [0, 1, 1])
    wanted = np.random.default_rng([0, 1, 1]).integers(0, 99, 9)
    np.testing.assert_array_equal(found.jagged("drawn").values, wanted)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("taken", r"own.py:taken' prepares rewards, which is a column of the batch already"),
        ("flat", r"own.py:flat' prepares ranks; allowed: a Jagged with the responses' rows"),
        ("nan", r"own.py:nan' prepares ranks; allowed: a finite number for each token"),
    ],
)
def test_columns_of_another_form_are_refused(tmp_path, name, message):
    (tmp_path / "own.py").write_text(PREPARED)
    algorithm = AlgorithmConfig(loss=f"{tmp_path}/own.py:{name}")
    with pytest.raises(ConfigError, match=message):
        with_prepared_columns(before_update(), algorithm, [0])


class Actor:
    def __init__(self):
        self.updates = []

    def compute_log_probs(self, batch, *, temperature):
        log_probs = batch.jagged("response_ids")
        return batch.with_columns(log_probs=log_probs, entropy=log_probs)

    def update(self, batch, *, sizes=(0,), temperature):
        self.updates.append((batch, sizes))
        return [[{"loss": 1.0}] * len(sizes)]


def test_a_mini_batch_of_which_nothing_is_left_is_no_step():
    nothing = batch().jagged("response_mask")
    left = np.ones(9, np.int8)
    left[:3] = 0  # the first group
    made = batch().with_columns(
        policy_mask=nothing.with_values(left),
        correction_weights=nothing.with_values(np.ones(9, np.float32)),
        prompt_ids=nothing,
        response_ids=nothing,
    )
    for algorithm, num in ((AlgorithmConfig(), 2), (AlgorithmConfig(kl_coef=0.1), 3)):
        actor, algorithm.num_mini_batches = Actor(), 3
        weighed, counts = with_each(made, 3, [0], with_loss_weights, algorithm)
        update(actor, weighed, counts, algorithm, temperature=1.0, seed=[0])
        [(trained, sizes)] = actor.updates
        assert sizes == [2] * num and len(trained) == 2 * num
        assert "loss_weights" in trained
        groups = trained.array("group_ids").reshape(num, 2)
        order = [2, 0, 1] if num == 3 else [2, 1]  # by the seed
        assert groups.tolist() == [[group, group] for group in order]
    nobody = [dict.fromkeys(count, 0) for count in counts]
    assert update(actor, weighed, nobody, algorithm, temperature=1.0, seed=[0]) == {}
    assert len(actor.updates) == 1


def test_each_mini_batch_is_prepared_with_a_seed_of_its_own(tmp_path):
    """Made of its number, which does not change where another mini-batch has nothing to train."""
    (tmp_path / "own.py").write_text(PREPARED)
    algorithm = AlgorithmConfig(loss=f"{tmp_path}/own.py:good", num_mini_batches=3)
    made = before_update().drop_columns("current_log_probs")
    made = made.with_columns(prompt_ids=made["response_ids"])
    weighed, counts = with_each(made, 3, [5, 7], with_loss_weights, algorithm)
    for left_out in (None, 1):
        actor, trained = Actor(), list(counts)
        if left_out is not None:
            trained[left_out] = dict.fromkeys(counts[left_out], 0)
        update(actor, weighed, trained, algorithm, temperature=1.0, seed=[5, 7])
        numbers = [number for number in range(3) if number != left_out]
        for number, (trained_on, _) in zip(numbers, actor.updates, strict=True):
            drawn = trained_on.jagged("drawn").values
            wanted = np.random.default_rng([5, 7, 1 + number]).integers(0, 99, len(drawn))
            np.testing.assert_array_equal(drawn, wanted)
