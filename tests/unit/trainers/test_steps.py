"""The steps that loops are made of."""

from __future__ import annotations

import numpy as np
import pytest

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import (
    AlgorithmConfig,
    CorrectionConfig,
    FilterConfig,
    RLConfig,
    TrainerConfig,
)
from mcore_rl.data.batch import Batch, Jagged
from mcore_rl.data.sample import Sample
from mcore_rl.trainers.policy_checks import (
    PolicyMismatchError,
    check_gaps,
    check_versions,
    checked_age,
    gaps_and_mismatch,
    logprob_gaps,
)
from mcore_rl.trainers.steps import (
    describe,
    doubts,
    judged,
    mini_batches,
    shuffled_rewards,
    with_advantages,
    with_log_probs,
    with_loss_weights,
    without_truncated,
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
    groups = [set(batch().take(rows).array("group_ids").tolist()) for rows in parts]
    assert sorted(row for rows in parts for row in rows) == list(range(6))
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


def test_a_step_without_a_chosen_token_has_no_gap():
    """As where all trajectories of agents have failed and reward.on_error=zero keeps them."""
    column = batch().jagged("response_mask")
    nothing = batch().with_columns(response_mask=column.with_values(np.zeros(9, np.int8)))
    assert logprob_gaps(nothing) == logprob_gaps(batch().take([])) == {}
    assert gaps_and_mismatch(nothing, CorrectionConfig()) == ({}, {})


@pytest.mark.parametrize("column", ["log_probs", "rollout_log_probs"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_one_log_prob_that_is_not_finite_stops_the_run(column, value):
    values = batch().jagged(column).values.copy()
    values[4] = value
    broken = batch().with_columns(**{column: batch().jagged(column).with_values(values)})
    with pytest.raises(PolicyMismatchError, match=r"step 1: max_logprob_gap .* is (nan|inf) nats"):
        check_gaps(
            logprob_gaps(broken), TrainerConfig(max_logprob_gap=1.0, mean_logprob_gap=1.0), 1
        )


def test_a_gap_within_both_bounds_is_reported():
    gaps = logprob_gaps(batch())
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
        check_gaps(logprob_gaps(batch()), TrainerConfig(**(wide | bounds)), 7)


def test_samples_of_other_weights_stop_the_run():
    versions = batch().jagged("log_probs").with_values(np.array([3] * 8 + [2]))
    with pytest.raises(PolicyMismatchError, match=r"version \[2, 3\]; expected 3"):
        check_versions(batch().with_columns(weight_versions=versions), 3)


def test_samples_that_are_too_old_for_the_policy_or_newer_stop_the_run():
    """Replayed ones have an age of their own, tokens that the policy did not choose have none."""
    made = batch().with_columns(replayed=np.array([0, 0, 0, 0, 0, 1]))
    column = made.jagged("log_probs")
    mask = np.ones(9, np.int8)
    mask[0] = 0

    def checked(versions, version, max_age):
        columns = dict(weight_versions=versions, response_mask=mask)
        found = {name: column.with_values(np.array(values)) for name, values in columns.items()}
        return checked_age(made.with_columns(**found), version, max_age)

    versions = [0, 3, 3, 3, 3, 2, 2, 3, 0]
    assert checked(versions, 3, 1) == {"samples/age": 2 / 5}  # of samples
    assert checked([0, *[3] * 7, 0], 3, 0) == {}
    for version, max_age, ages in ((3, 0, "0 to 1"), (4, 1, "1 to 2"), (2, 1, "-1 to 0")):
        with pytest.raises(PolicyMismatchError, match=rf"from {ages} versions old; allowed: up to"):
            checked(versions, version, max_age)


REWARDS = np.array([1.0, 0.0, 1.0, 1.0, 0.0, 0.0], np.float32)


def rewarded() -> Batch:
    return batch().with_columns(rewards=REWARDS, response_ids=batch().jagged("log_probs"))


def test_samples_without_a_reward_are_dropped_or_stay_and_their_share_is_told():
    errors = np.array(["", "", "late", "", "late", "late"])
    batch = rewarded().with_columns(reward_errors=errors)
    assert judged(batch, "stop") == (batch, {})
    assert judged(batch, "zero") == (batch, {"reward_errors": 0.5})
    left, metrics = judged(batch, "drop")
    assert left.array("group_ids").tolist() == [0, 0, 1]
    assert metrics == {"reward_errors": 0.5, "dropped": 3.0}
    scored = with_advantages(left, AlgorithmConfig()).jagged("advantages")
    high = 0.5 / (np.sqrt(0.5) + 1e-6)  # of group 0, which is whole; one of group 1 is left
    assert [row.tolist() for row in scored] == [
        pytest.approx(r) for r in ([high] * 2, [-high], [0])
    ]


def test_a_step_without_any_reward_is_an_error_that_shows_one():
    batch = rewarded().with_columns(reward_errors=np.array(["reward.name='x' raised E"] * 6))
    with pytest.raises(ConfigError, match=r"none of the 6 responses.*the first: reward.name='x' r"):
        judged(batch, "drop")


def test_parts_are_means_over_the_samples_that_got_a_reward():
    parts = {"reward/format": np.array([1, 0, np.nan, 1, np.nan, np.nan], np.float32)}
    finish_reasons = np.array(["stop"] * 6)
    found = describe(rewarded().with_columns(finish_reasons=finish_reasons, **parts))
    assert found["reward/format"] == pytest.approx(2 / 3)
    assert found["reward"] == pytest.approx(0.5)


def test_advantages_are_those_of_the_group_on_every_token_of_the_response():
    scored = with_advantages(rewarded(), AlgorithmConfig()).jagged("advantages")
    high = 0.5 / (np.sqrt(0.5) + 1e-6)
    wanted = [[high] * 2, [-high], [0.0] * 3, [0.0], [0.0], [0.0]]
    assert [row.tolist() for row in scored] == [pytest.approx(row) for row in wanted]


def test_an_advantage_with_a_critic_gives_the_returns_as_well():
    values = batch().jagged("log_probs")
    known = rewarded().with_columns(
        values=values, response_mask=values.with_values(values.values != 0)
    )
    found = with_advantages(known, AlgorithmConfig(advantage="gae"))
    assert found.jagged("returns").lengths.tolist() == values.lengths.tolist()
    assert "returns" not in with_advantages(rewarded(), AlgorithmConfig())


def test_settings_of_the_advantage_count():
    algorithm = AlgorithmConfig(advantage_settings={"normalize_by_std": False})
    scored = with_advantages(rewarded(), algorithm).jagged("advantages")
    assert scored[0].tolist() == [0.5, 0.5]


def test_shuffled_rewards_are_the_same_rewards_elsewhere():
    found = [shuffled_rewards(rewarded(), [0, step]).array("rewards") for step in (1, 1, 2)]
    assert all(sorted(rewards) == sorted(REWARDS) for rewards in found)
    np.testing.assert_array_equal(found[0], found[1])
    assert not np.array_equal(found[0], found[2])
    ids = rewarded().jagged("response_ids")
    of_turns = rewarded().with_columns(process_rewards=ids.with_values(np.ones(len(ids.values))))
    assert "process_rewards" not in shuffled_rewards(of_turns, [0, 1])


def test_replayed_samples_and_only_they_may_be_of_older_weights():
    versions = batch().jagged("log_probs").with_values(np.array([3, 3, 3, 1, 1, 1, 2, 3, 3]))
    is_replayed = np.array([0, 0, 1, 1, 0, 0], np.int8)
    mixed = batch().with_columns(weight_versions=versions, replayed=is_replayed)
    check_versions(mixed, 3, max_age=2)
    with pytest.raises(PolicyMismatchError, match=r"replayed .*\[1, 2\]; expected: from 2 to 2"):
        check_versions(mixed, 3, max_age=1)
    for wrong in ([0, 0, 1, 0, 0, 0], [0, 0, 0, 1, 0, 0]):
        with pytest.raises(PolicyMismatchError, match="servers answered"):
            check_versions(mixed.with_columns(replayed=np.array(wrong)), 3, max_age=2)
    with pytest.raises(PolicyMismatchError, match="replayed"):  # of this step, marked as old
        check_versions(mixed.with_columns(replayed=np.ones(6, np.int8)), 3, max_age=2)


def test_the_gap_of_replayed_samples_is_no_mismatch():
    made = batch().with_columns(replayed=np.array([0, 0, 1, 1, 1, 1], np.int8))
    values = made.jagged("rollout_log_probs").values.copy()
    values[3:] += 9.0
    made = made.with_columns(rollout_log_probs=made.jagged("log_probs").with_values(values))
    gaps, _ = gaps_and_mismatch(made, CorrectionConfig())
    assert gaps["max_logprob_gap"] == pytest.approx(0.25)
    old = made.with_columns(replayed=np.ones(6, np.int8))
    assert gaps_and_mismatch(old, CorrectionConfig()) == ({}, {})


def test_gaps_are_those_of_samples_of_the_policy_alone_where_there_are_older_ones():
    """The mismatch is of all: it says how far what is trained on is from the policy."""
    made = batch()
    far = made.jagged("rollout_log_probs").values.copy()
    far[:2] += 9.0
    column = made.jagged("log_probs")
    versions = column.with_values(np.array([3, 4, *[4] * 7]))  # a sample with a token of version 3
    made = made.with_columns(rollout_log_probs=column.with_values(far), weight_versions=versions)
    for version, gap in ((4, 0.25), (3, 9.25), (None, 9.25), (5, None)):
        gaps, found = gaps_and_mismatch(made, CorrectionConfig(), version)
        assert gaps.get("max_logprob_gap") == (gap and pytest.approx(gap)), version
        assert found["mismatch/kl"] == pytest.approx(0.25 + 2 * 9 / 9)


def test_a_truncated_response_has_no_loss_of_any_kind():
    """A token mean over the rest; the token that the policy did not choose keeps its own loss."""
    mask = np.array([1, 0, 1, 1, 0, 1, 1, 1, 1], np.int8)
    reasons = np.array(["stop", "stop", "length", "stop", "length", "stop"])
    made = rewarded().with_columns(
        response_mask=batch().jagged("log_probs").with_values(mask), finish_reasons=reasons
    )
    settings = dict(cross_entropy_coef=2.0, entropy_coef=1.0, kl_coef=0.5)
    kept = without_truncated(made, FilterConfig(mask_truncated=True))
    found, _ = with_loss_weights(kept, AlgorithmConfig(**settings))
    fourth = [0.25, 0, 0.25, 0, 0, 0, 0.25, 0, 0.25]
    assert found.jagged("loss_weights").values.tolist() == fourth
    assert found.jagged("entropy_weights").values.tolist() == fourth
    assert found.jagged("kl_weights").values.tolist() == [w / 2 for w in fourth]
    assert found.jagged("cross_entropy_weights").values.tolist() == [0, 2, *[0] * 7]
    assert without_truncated(made, FilterConfig()) is made


def test_an_aborted_response_is_neither_cut_off_nor_at_its_end():
    """So it is trained on with mask_truncated, and its only token is no end of a turn."""
    reasons = np.array(["abort", "length", "abort", "abort", "abort", "abort"])
    made = rewarded().with_columns(finish_reasons=reasons)
    kept = without_truncated(made, FilterConfig(mask_truncated=True)).jagged("response_mask")
    assert [row.tolist() for row in kept] == [[1, 1], [0], [1, 1, 1], [1], [1], [1]]
    assert describe(made)["truncated"] == pytest.approx(1 / 6)
    scored = with_advantages(made, AlgorithmConfig())
    assert doubts(scored) == {}
    ended = scored.with_columns(finish_reasons=np.array(["stop"] * 6))
    assert [*doubts(ended).values()] == ["4 of 6 responses are empty"]


@pytest.mark.parametrize(
    ("reasons", "num_trained"),
    [
        ({(0, 0): ["stop", "length"], (0, 1): ["stop"]}, {(0, 0): 0, (0, 1): 2}),
        # An earlier turn that was cut off is one like others.
        ({(0, 0): ["length", "stop"], (0, 1): ["length"]}, {(0, 0): 4, (0, 1): 0}),
        ({(0, 0): ["stop", "stop", "length"], (1, 0): ["stop", "stop"]}, {(0, 0): 0, (1, 0): 4}),
        # Of another trajectory of the group, and of the same number in another group.
        (
            {(0, 0): ["stop", "stop"], (0, 1): ["stop", "length"], (1, 1): ["stop", "stop"]},
            {(0, 0): 4, (0, 1): 0, (1, 1): 4},
        ),
    ],
)
def test_mask_truncated_masks_all_samples_of_a_trajectory_whose_last_turn_is_cut_off(
    reasons, num_trained
):
    samples = [
        Sample([7], [1, 2], [1, 1], [0.0] * 2, [0, 0], reason, group, trajectory=t, segment=i)
        for (group, t), of_segments in reasons.items()
        for i, reason in enumerate(of_segments)
    ]
    made = Batch.of(samples[::-1])  # in any order
    kept = without_truncated(made, FilterConfig(mask_truncated=True))
    found = dict.fromkeys(reasons, 0)
    rows = zip(kept.array("group_ids"), kept.array("trajectories"), strict=True)
    for key, mask in zip(rows, kept.jagged("response_mask"), strict=True):
        found[tuple(map(int, key))] += int(mask.sum())
    assert found == num_trained


def test_an_aggregation_outside_of_the_package_weighs_tokens_by_its_settings(tmp_path):
    """A sum of losses over a fixed number of tokens, as Dr. GRPO has it (arXiv:2503.20783)."""
    (tmp_path / "own.py").write_text(
        "from dataclasses import dataclass\n\n"
        "@dataclass(frozen=True)\nclass Settings:\n    num_tokens: int\n\n"
        "def fixed(counts, settings: Settings):\n"
        "    return counts * 0 + 1 / (len(counts) * settings.num_tokens)\n\n"
        "def total(counts):\n    return counts.sum()\n"
    )
    algorithm = AlgorithmConfig(
        loss_aggregation=f"{tmp_path}/own.py:fixed", loss_aggregation_settings={"num_tokens": 4}
    )
    weights = with_loss_weights(batch(), algorithm)[0].jagged("loss_weights").values
    assert set(weights.tolist()) == {np.float32(1 / 24)}
    algorithm = AlgorithmConfig(loss_aggregation=f"{tmp_path}/own.py:total")
    with pytest.raises(ConfigError, match=r"own.py:total' returned 9.0 .* a finite weight for ea"):
        with_loss_weights(batch(), algorithm)


def test_each_loss_has_weights_of_its_own_times_its_coefficient():
    mask = Jagged.of([[1, 1, 0], [1], [1, 1]], np.int8)
    made = Batch(
        {
            "response_mask": mask,
            "policy_mask": mask.with_values(np.array([1, 1, 0, 1, 0, 0], np.int8)),
            "correction_weights": mask.with_values(np.array([2, 0, 0, 1, 1, 1], np.float32)),
            "top_entropy_mask": mask.with_values(np.array([1, 1, 0, 0, 1, 1], np.int8)),
        }
    )
    algorithm = AlgorithmConfig(kl_coef=0.5, entropy_coef=0.1, cross_entropy_coef=2.0)
    found, _ = with_loss_weights(made, algorithm)
    wanted = {
        "loss_weights": [1 / 3, 0, 0, 0, 0, 0],  # a mean over three, of which two are masked
        "kl_weights": [0.1, 0.1, 0, 0.1, 0.1, 0.1],
        "entropy_weights": [0.02, 0.02, 0, 0.02, 0.02, 0.02],
        "cross_entropy_weights": [0, 0, 2, 0, 0, 0],
    }
    for name, weights in wanted.items():
        assert found.jagged(name).values.tolist() == pytest.approx(weights, rel=1e-6), name
    mine = made.with_columns(cross_entropy_mask=mask)
    weights = with_loss_weights(mine, algorithm)[0].jagged("cross_entropy_weights").values
    assert weights.tolist() == pytest.approx([0.4, 0.4, 0, 0.4, 0.4, 0.4])
    found, _ = with_loss_weights(made, AlgorithmConfig(kl_coef=0.5, kl_placement="reward"))
    assert found.columns.keys() - made.columns.keys() == {"loss_weights"}


def test_the_log_probs_of_the_servers_are_taken_and_nothing_is_checked():
    config = RLConfig()
    config.algorithm.correction.use_rollout_log_probs = True
    found = with_log_probs(batch(), None, config.algorithm, 1.0)
    wanted = batch().jagged("rollout_log_probs").values
    np.testing.assert_array_equal(found.jagged("log_probs").values, wanted)
    assert gaps_and_mismatch(found, config.algorithm.correction) == ({}, {})


def test_the_mismatch_is_reported_and_its_gaps_are_checked():
    bounds = TrainerConfig(max_logprob_gap=0.3, mean_logprob_gap=0.3)
    gaps, found = gaps_and_mismatch(batch(), CorrectionConfig())
    check_gaps(gaps, bounds, 1)
    assert gaps["max_logprob_gap"] == found["mismatch/kl"] == pytest.approx(0.25)
    bounds.mean_logprob_gap = 0.1
    with pytest.raises(PolicyMismatchError):
        check_gaps(gaps, bounds, 1)
