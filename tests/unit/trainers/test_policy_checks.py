"""Versions and log-probs of samples, against those of the policy that is trained on them."""

from __future__ import annotations

import numpy as np
import pytest

from mcore_rl.config.schema import CorrectionConfig, TrainerConfig
from mcore_rl.controller.batch_ops import get_sample_columns
from mcore_rl.controller.remote_batch import RemoteBatch
from mcore_rl.trainers.policy_checks import (
    PolicyMismatchError,
    check_ages,
    check_gaps,
    check_versions,
    compute_gaps_and_mismatch,
    compute_logprob_gaps,
)
from tests.unit.trainers.small_batches import build_scored_batch


def test_the_gap_is_the_largest_difference_at_chosen_tokens():
    made = build_scored_batch()
    assert compute_logprob_gaps(made) == pytest.approx(
        {"max_logprob_gap": 0.25, "mean_logprob_gap": 0.25}
    )
    values = made.jagged("rollout_log_probs").values.copy()
    values[3] += 9.0
    mask = np.ones(9, np.int8)
    mask[3] = 0
    column = made.jagged("log_probs")
    masked = made.with_columns(
        rollout_log_probs=column.with_values(values), response_mask=column.with_values(mask)
    )
    assert compute_logprob_gaps(masked)["max_logprob_gap"] == pytest.approx(0.25)


def test_a_step_without_a_chosen_token_has_no_gap():
    """All trajectories of agents may fail, and reward.on_error=zero keep them."""
    column = build_scored_batch().jagged("response_mask")
    nothing = build_scored_batch().with_columns(
        response_mask=column.with_values(np.zeros(9, np.int8))
    )
    assert (
        compute_logprob_gaps(nothing) == compute_logprob_gaps(build_scored_batch().take([])) == {}
    )
    assert compute_gaps_and_mismatch(nothing, CorrectionConfig()) == ({}, {})


@pytest.mark.parametrize("column", ["log_probs", "rollout_log_probs"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_one_log_prob_that_is_not_finite_stops_the_run(column, value):
    values = build_scored_batch().jagged(column).values.copy()
    values[4] = value
    broken = build_scored_batch().with_columns(
        **{column: build_scored_batch().jagged(column).with_values(values)}
    )
    with pytest.raises(PolicyMismatchError, match=r"step 1: max_logprob_gap .* is (nan|inf) nats"):
        check_gaps(
            compute_logprob_gaps(broken),
            TrainerConfig(max_logprob_gap=1.0, mean_logprob_gap=1.0),
            1,
        )


def test_a_gap_within_both_bounds_is_reported():
    gaps = compute_logprob_gaps(build_scored_batch())
    check_gaps(gaps, TrainerConfig(max_logprob_gap=0.3, mean_logprob_gap=0.3), 1)
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
        check_gaps(compute_logprob_gaps(build_scored_batch()), TrainerConfig(**(wide | bounds)), 7)


def test_samples_of_other_weights_stop_the_run():
    versions = build_scored_batch().jagged("log_probs").with_values(np.array([3] * 8 + [2]))
    with pytest.raises(PolicyMismatchError, match=r"version \[2, 3\]; expected 3"):
        check_versions(build_scored_batch().with_columns(weight_versions=versions), 3)


def test_samples_that_are_too_old_for_the_policy_or_newer_stop_the_run():
    """Replayed ones have an age of their own, tokens that the policy did not choose have none."""
    made = build_scored_batch().with_columns(replayed=np.array([0, 0, 0, 0, 0, 1]))
    column = made.jagged("log_probs")
    mask = np.ones(9, np.int8)
    mask[0] = 0

    def compute_metrics(versions, version, max_age):
        columns = dict(weight_versions=versions, response_mask=mask)
        jagged = {name: column.with_values(np.array(values)) for name, values in columns.items()}
        return check_ages(made.with_columns(**jagged), version, max_age)

    versions = [0, 3, 3, 3, 3, 2, 2, 3, 0]
    assert compute_metrics(versions, 3, 1) == {"samples/age": 2 / 5}  # of samples
    assert compute_metrics([0, *[3] * 7, 0], 3, 0) == {}
    for version, max_age, ages in ((3, 0, "0 to 1"), (4, 1, "1 to 2"), (2, 1, "-1 to 0")):
        with pytest.raises(PolicyMismatchError, match=rf"from {ages} versions old; allowed: up to"):
            compute_metrics(versions, version, max_age)


@pytest.mark.parametrize("is_remote", [False, True], ids=["here", "elsewhere"])
def test_a_newer_token_stops_the_run_in_a_sample_that_begins_with_older_weights(is_remote):
    made = build_scored_batch()
    versions = made.jagged("log_probs").with_values(np.array([3, 3, 3, 2, 3, 4, 3, 3, 3]))
    made = made.with_columns(weight_versions=versions)
    batch = RemoteBatch(get_sample_columns(made), {}) if is_remote else made
    assert check_ages(batch, 4, 2) == {"samples/age": pytest.approx(7 / 6)}
    with pytest.raises(PolicyMismatchError, match="from -1 to 1 versions old"):
        check_ages(batch, 3, 2)
    for expected in (2, 3, 4):
        with pytest.raises(PolicyMismatchError, match=r"version \[2, 3, 4\]; expected"):
            check_versions(batch, expected)
    replayed = batch.with_columns(replayed=np.ones(len(batch), np.int8))
    check_versions(replayed, 5, max_age=3)
    with pytest.raises(PolicyMismatchError, match=r"\[2, 3, 4\]; expected: from 1 to 3"):
        check_versions(replayed, 4, max_age=3)


def test_replayed_samples_and_only_they_may_be_of_older_weights():
    versions = (
        build_scored_batch().jagged("log_probs").with_values(np.array([3, 3, 3, 1, 1, 1, 2, 3, 3]))
    )
    is_replayed = np.array([0, 0, 1, 1, 0, 0], np.int8)
    mixed = build_scored_batch().with_columns(weight_versions=versions, replayed=is_replayed)
    check_versions(mixed, 3, max_age=2)
    with pytest.raises(PolicyMismatchError, match=r"replayed .*\[1, 2\]; expected: from 2 to 2"):
        check_versions(mixed, 3, max_age=1)
    for wrong in ([0, 0, 1, 0, 0, 0], [0, 0, 0, 1, 0, 0]):
        with pytest.raises(PolicyMismatchError, match="servers answered"):
            check_versions(mixed.with_columns(replayed=np.array(wrong)), 3, max_age=2)
    with pytest.raises(PolicyMismatchError, match="replayed"):  # of this step, marked as old
        check_versions(mixed.with_columns(replayed=np.ones(6, np.int8)), 3, max_age=2)


def test_the_gap_of_replayed_samples_is_no_mismatch():
    made = build_scored_batch().with_columns(replayed=np.array([0, 0, 1, 1, 1, 1], np.int8))
    values = made.jagged("rollout_log_probs").values.copy()
    values[3:] += 9.0
    made = made.with_columns(rollout_log_probs=made.jagged("log_probs").with_values(values))
    gaps, _ = compute_gaps_and_mismatch(made, CorrectionConfig())
    assert gaps["max_logprob_gap"] == pytest.approx(0.25)
    old = made.with_columns(replayed=np.ones(6, np.int8))
    assert compute_gaps_and_mismatch(old, CorrectionConfig()) == ({}, {})


def test_gaps_are_those_of_samples_of_the_policy_alone_where_there_are_older_ones():
    """The mismatch is of all: it says how far what is trained on is from the policy."""
    made = build_scored_batch()
    far = made.jagged("rollout_log_probs").values.copy()
    far[:2] += 9.0
    column = made.jagged("log_probs")
    versions = column.with_values(np.array([3, 4, *[4] * 7]))  # a sample with a token of version 3
    made = made.with_columns(rollout_log_probs=column.with_values(far), weight_versions=versions)
    for version, gap in ((4, 0.25), (3, 9.25), (None, 9.25), (5, None)):
        gaps, metrics = compute_gaps_and_mismatch(made, CorrectionConfig(), version)
        assert gaps.get("max_logprob_gap") == (gap and pytest.approx(gap)), version
        assert metrics["mismatch/kl"] == pytest.approx(0.25 + 2 * 9 / 9)


def test_the_mismatch_is_reported_and_its_gaps_are_checked():
    bounds = TrainerConfig(max_logprob_gap=0.3, mean_logprob_gap=0.3)
    gaps, metrics = compute_gaps_and_mismatch(build_scored_batch(), CorrectionConfig())
    check_gaps(gaps, bounds, 1)
    assert gaps["max_logprob_gap"] == metrics["mismatch/kl"] == pytest.approx(0.25)
    bounds.mean_logprob_gap = 0.1
    with pytest.raises(PolicyMismatchError):
        check_gaps(gaps, bounds, 1)
