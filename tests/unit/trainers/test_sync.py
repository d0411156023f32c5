"""The pure steps of the synchronous trainer."""

from __future__ import annotations

import numpy as np
import pytest

from mcore_rl.config.schema import RewardConfig, RLConfig, TrainerConfig
from mcore_rl.data.batch import Batch, Jagged
from mcore_rl.trainers.sync import (
    PolicyMismatchError,
    SyncTrainer,
    _check_versions,
    logprob_gaps,
    mini_batches,
)


def batch():
    rows = [[1.0, 2.0], [3.0], [4.0, 5.0, 6.0], [7.0], [8.0], [9.0]]
    column = Jagged.of(rows, np.float32)
    return Batch(
        {
            "group_ids": np.array([0, 0, 1, 1, 2, 2]),
            "log_probs": column,
            "rollout_log_probs": column.with_values(column.values + np.float32(0.25)),
            "response_mask": column.with_values(np.ones(9, np.int8)),
        }
    )


def test_mini_batches_keep_groups_whole_and_use_every_sample_once():
    parts = mini_batches(batch(), 2, [0, 1])
    groups = [set(part.array("group_ids").tolist()) for part in parts]
    assert sum(len(part) for part in parts) == 6
    assert set.union(*groups) == {0, 1, 2}
    assert not set.intersection(*groups)


def test_mini_batches_are_never_empty():
    assert len(mini_batches(batch(), 5, [0])) == 3
    assert mini_batches(batch().take([]), 2, [0]) == []


def test_the_gap_is_the_largest_difference_at_chosen_tokens():
    made = batch()
    assert logprob_gaps(made) == pytest.approx({"max_logprob_gap": 0.25, "mean_logprob_gap": 0.25})
    values = made.jagged("rollout_log_probs").values.copy()
    values[3] += 9.0
    mask = np.ones(9, np.int8)
    mask[3] = 0
    column = made.jagged("log_probs")
    masked = made.with_columns(
        rollout_log_probs=column.with_values(values), response_mask=column.with_values(mask)
    )
    assert logprob_gaps(masked)["max_logprob_gap"] == pytest.approx(0.25)


@pytest.mark.parametrize("column", ["log_probs", "rollout_log_probs"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_one_log_prob_that_is_not_finite_stops_the_run(column, value):
    values = batch().jagged(column).values.copy()
    values[4] = value
    broken = batch().with_columns(**{column: batch().jagged(column).with_values(values)})
    with pytest.raises(PolicyMismatchError, match=r"step 1: max_logprob_gap .* is (nan|inf) nats"):
        trainer(max_logprob_gap=1.0, mean_logprob_gap=1.0)._check_gaps(broken, 1)


def trainer(**bounds):
    config = RLConfig(trainer=TrainerConfig(**bounds))
    return SyncTrainer(config, None, None, None, None)


def test_a_gap_within_both_bounds_is_reported():
    gaps = trainer(max_logprob_gap=0.3, mean_logprob_gap=0.3)._check_gaps(batch(), 1)
    assert gaps == pytest.approx({"max_logprob_gap": 0.25, "mean_logprob_gap": 0.25})


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ({"max_logprob_gap": 0.2}, r"step 7: max_logprob_gap .* 0.25 nats; .*max_logprob_gap=0.2"),
        (
            {"mean_logprob_gap": 0.1},
            r"step 7: mean_logprob_gap .* 0.25 nats; .*mean_logprob_gap=0.1",
        ),
    ],
)
def test_a_gap_beyond_a_bound_stops_the_run(bounds, message):
    wide = {"max_logprob_gap": 1.0, "mean_logprob_gap": 1.0}
    with pytest.raises(PolicyMismatchError, match=message):
        trainer(**(wide | bounds))._check_gaps(batch(), 7)


def test_samples_of_other_weights_stop_the_run():
    versions = batch().jagged("log_probs").with_values(np.array([3] * 8 + [2]))
    with pytest.raises(PolicyMismatchError, match=r"version \[2, 3\]; expected 3"):
        _check_versions(batch().with_columns(weight_versions=versions), 3)


def test_advantages_are_those_of_the_group_on_every_token_of_the_response():
    rewards = np.array([1.0, 0.0, 1.0, 1.0, 0.0, 0.0], np.float32)
    column = batch().jagged("log_probs")
    made = batch().with_columns(rewards=rewards, response_ids=column)
    scored = trainer()._with_advantages(made, 1).jagged("advantages")
    high = 0.5 / (np.sqrt(0.5) + 1e-6)
    wanted = [[high] * 2, [-high], [0.0] * 3, [0.0], [0.0], [0.0]]
    assert [row.tolist() for row in scored] == [pytest.approx(row) for row in wanted]


def test_shuffled_rewards_are_the_same_rewards_elsewhere():
    config = RLConfig(reward=RewardConfig(shuffle=True))
    config.algorithm.normalize_by_std = False
    rewards = np.array([1.0, 0.0, 1.0, 1.0, 0.0, 0.0], np.float32)
    made = batch().with_columns(rewards=rewards, response_ids=batch().jagged("log_probs"))
    trainers = SyncTrainer(config, None, None, None, None)
    first = [
        trainers._with_advantages(made, step).jagged("advantages").values for step in (1, 1, 2)
    ]
    np.testing.assert_array_equal(first[0], first[1])
    assert not np.array_equal(first[0], first[2])


def test_uniform_groups_are_left_out_when_asked():
    config = RLConfig()
    config.algorithm.drop_uniform_groups = True
    rewards = np.array([1.0, 0.0, 1.0, 1.0, 0.0, 0.0], np.float32)
    made = batch().with_columns(rewards=rewards, response_ids=batch().jagged("log_probs"))
    kept = SyncTrainer(config, None, None, None, None)._with_advantages(made, 1)
    assert kept.array("group_ids").tolist() == [0, 0]


class Model:
    """A worker group whose model gives every token the same log-prob; keeps what it is asked."""

    def __init__(self, log_prob: float):
        self.log_prob = log_prob
        self.temperatures: list[float] = []
        self.updates: list[Batch] = []

    def compute_log_probs(self, batch, *, temperature):
        self.temperatures.append(temperature)
        responses = batch.jagged("response_ids")
        values = np.full(len(responses.values), self.log_prob, np.float32)
        return batch.with_columns(log_probs=responses.with_values(values))

    def update(self, batch, *, temperature):
        self.temperatures.append(temperature)
        self.updates.append(batch)
        return [{"loss": 0.0}]


class Servers:
    """A pool that answers with `batch`, whatever is asked; takes new weights."""

    def __init__(self, batch: Batch):
        self.batch, self.versions = batch, []

    def generate(self, prompts, n):
        return self.batch

    def push(self, version):
        self.versions.append(version)


def answered() -> Batch:
    """Three groups of two; the policy has not chosen the third token of the third response."""
    column, mask = batch().jagged("log_probs"), np.ones(9, np.int8)
    mask[5] = 0
    return batch().with_columns(
        prompt_ids=Jagged.of([[1, 2]] * 6, np.int64),
        response_ids=column.with_values(np.arange(9)),
        response_mask=column.with_values(mask),
        rollout_log_probs=column.with_values(np.full(9, -1.0, np.float32)),
        weight_versions=column.with_values(np.zeros(9, np.int64)),
        rewards=np.array([1.0, 0.0, 1.0, 1.0, 0.0, 0.0], np.float32),
        finish_reasons=np.array(["stop"] * 6),
    )


@pytest.fixture
def one_step():
    """The actor, the reference and the batch of the only update, after one step."""
    bounds = {"max_logprob_gap": 9.0, "mean_logprob_gap": 9.0}
    config = RLConfig(trainer=TrainerConfig(num_steps=1, **bounds))
    config.rollout.temperature = 0.7
    config.algorithm.kl_coef = 0.1
    config.algorithm.loss_aggregation = "sequence_mean_token_sum"
    actor, reference, servers = Model(-1.0625), Model(-3.5), Servers(answered())
    trained = SyncTrainer(config, actor, reference, servers, servers)
    trained.train(iter([None]), lambda step, metrics: None)
    assert servers.versions == [1]
    [update] = actor.updates
    return actor, reference, update


def test_an_update_has_the_log_probs_of_the_actor_and_those_of_the_reference(one_step):
    _, reference, update = one_step
    assert set(update.jagged("log_probs").values.tolist()) == {-1.0625}
    assert set(update.jagged("reference_log_probs").values.tolist()) == {-3.5}
    assert reference.updates == []


def test_every_call_has_the_temperature_of_the_sampling(one_step):
    actor, reference, _ = one_step
    assert actor.temperatures == [0.7, 0.7]
    assert reference.temperatures == [0.7]


def test_tokens_that_the_policy_did_not_choose_have_no_weight(one_step):
    """Each of the six sequences weighs a sixth, and so does each of its tokens: a sum, no mean."""
    update = one_step[2]
    weights, mask = update.jagged("loss_weights"), update.jagged("response_mask")
    assert 0 in mask.values
    np.testing.assert_allclose(weights.values, mask.values / 6, rtol=1e-6)
