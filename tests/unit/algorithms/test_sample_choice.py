"""Filters of groups, choices among responses, priorities, and the replay buffer."""

from __future__ import annotations

import itertools
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rl.algorithms.sample_choice import (
    CHOICES,
    CURRICULA,
    PRIORITIES,
    choose_responses,
    filter_groups,
)
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import FilterConfig, ReplayConfig
from mcore_rl.data.batch import Batch, Jagged
from mcore_rl.trainers.replay_buffer import ReplayBuffer

REWARDS = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0, -1.0]), min_size=1, max_size=7)
cases = settings(max_examples=1000, deadline=None, derandomize=True)


def batch(rewards, groups, version=0, **parts) -> Batch:
    rows = Jagged.pack([[i, i + 1] for i in range(len(rewards))], np.int64)
    return Batch(
        {
            "response_ids": rows,
            "response_mask": rows.with_values(np.ones(2 * len(rewards), np.int8)),
            "weight_versions": rows.with_values(np.full(2 * len(rewards), version)),
            "rewards": np.array(rewards, np.float32),
            "group_ids": np.array(groups, np.int64),
            "finish_reasons": np.array(["stop", "length"])[np.arange(len(rewards)) % 2],
            **{f"reward/{name}": np.array(part, np.float32) for name, part in parts.items()},
        }
    )


def ids(result: Batch) -> list[int]:
    return result.array("group_ids").tolist()


def test_uniform_groups_are_dropped_by_the_reward_or_a_part_of_it():
    # Groups 0 to 3; a reward of group 3 raised, which counts as 0.
    nan = float("nan")
    made = batch(
        [1, 0.5, 1, 1, 0, 2, 0, 0, 0], [0, 0, 1, 2, 2, 1, 3, 3, 9],
        answer=[1, 1, 0, 1, 1, 1, nan, 0, 1],
    )  # fmt: skip
    config = FilterConfig(group_filter="drop_uniform")
    assert ids(filter_groups(made, config)) == [0, 0, 1, 2, 2, 1]
    config.group_filter_settings = {"of": "answer"}
    assert ids(filter_groups(made, config)) == [1, 1]
    config.group_filter_settings = {"of": "format"}
    with pytest.raises(ConfigError, match=r"settings.of='format' .* allowed: reward, answer"):
        filter_groups(made, config)
    assert filter_groups(made, FilterConfig()) is made


def test_a_group_whose_rewards_have_all_failed_is_uniform_in_every_part():
    made = batch([0, 0], [0, 0]).with_columns(reward_errors=np.array(["late", "late"]))
    config = FilterConfig(group_filter="drop_uniform", group_filter_settings={"of": "answer"})
    assert ids(filter_groups(made, config)) == []


@pytest.mark.parametrize("body", ["batch.array('rewards')", "[True] * len(batch)", "None"])
def test_a_filter_of_ones_own_has_to_return_a_bool_a_sample(tmp_path, body):
    file = tmp_path / "own.py"
    file.write_text(f"def keep(batch):\n    return {body}\n")
    with pytest.raises(ConfigError, match=r"group_filter=.*allowed: an array of bool"):
        filter_groups(batch([1], [0]), FilterConfig(group_filter=f"{file}:keep"))


def test_a_group_stays_if_all_of_its_samples_do(tmp_path):
    file = tmp_path / "own.py"
    file.write_text("def keep(batch):\n    return batch.array('rewards') > 0\n")
    made = batch([1, 0, 1, 1], [0, 0, 1, 1])
    assert ids(filter_groups(made, FilterConfig(group_filter=f"{file}:keep"))) == [1, 1]


@cases
@given(REWARDS, st.integers(1, 7))
def test_max_variance_is_that_of_all_subsets(rewards, k):
    k = min(k, len(rewards))
    rows = CHOICES.bind("max_variance", {})(np.array(rewards), k, np.random.default_rng(0))
    most = max(statistics.pvariance(part) for part in itertools.combinations(rewards, k))
    assert statistics.pvariance([rewards[row] for row in rows]) == pytest.approx(most, abs=1e-12)
    assert len({*rows.tolist()}) == k


@cases
@given(REWARDS, st.integers(1, 7))
def test_the_best_and_the_worst_are_the_ends_of_the_sorted_rewards(rewards, k):
    k = min(k, len(rewards))
    ordered, rng = sorted(rewards, reverse=True), np.random.default_rng(0)
    best = CHOICES.bind("best", {})(np.array(rewards), k, rng)
    assert sorted((rewards[row] for row in best), reverse=True) == ordered[:k]
    both = CHOICES.bind("best_and_worst", {})(np.array(rewards), k, rng).tolist()
    high = (k + 1) // 2
    assert [rewards[row] for row in both[:high]] == ordered[:high]
    assert [rewards[row] for row in both[high:]] == ordered[len(rewards) - (k - high) :]
    assert len({*both}) == k


def test_each_group_keeps_k_responses_and_smaller_ones_all():
    made = batch([0, 3, 1, 2, 5, 4], [7, 8, 7, 7, 9, 7])
    selected = choose_responses(made, FilterConfig(keep_responses=2, keep_by="best"), [0])
    assert list(zip(ids(selected), selected.array("rewards").tolist(), strict=True)) == [
        (8, 3), (7, 2), (9, 5), (7, 4),
    ]  # fmt: skip
    config = FilterConfig(keep_responses=2, keep_by="random")
    drawn = [
        choose_responses(made, config, [0, s]).array("rewards").tolist() for s in (*range(9), 0)
    ]
    assert drawn[0] == drawn[-1] and len({tuple(values) for values in drawn}) > 2
    assert all(len(values) == 4 for values in drawn)
    assert not len(choose_responses(made.take([]), config, [0]))


@pytest.mark.parametrize("rows", ["[0, 0]", "[0]", "[0, 9]", "[-1, 0]"])
def test_a_choice_of_ones_own_has_to_be_k_different_rows(tmp_path, rows):
    file = tmp_path / "own.py"
    file.write_text(f"def choose(rewards, k, rng):\n    return {rows}\n")
    config = FilterConfig(keep_responses=2, keep_by=f"{file}:choose")
    with pytest.raises(ConfigError, match="allowed: 2 different numbers from 0 to 2"):
        choose_responses(batch([0, 1, 2], [0, 0, 0]), config, [0])


def test_priorities_and_weights_by_hand():
    # One of four right: p is 1/4.
    rewards = np.array([1.0, 0, 0, 0])
    assert PRIORITIES.bind("spread", {})(rewards) == pytest.approx(2 * 0.25 * 0.75)
    assert PRIORITIES.bind("rare_success", {})(rewards) == 0.75
    assert PRIORITIES.bind("rare_success", {})(0 * rewards) == 0
    rates = np.array([0, 0.25, 0.5, 1.0])
    assert CURRICULA.bind("learnability", {})(rates).tolist() == [0, 0.75, 1, 0]
    assert CURRICULA.bind("window", {"low": 0.25, "high": 0.5})(rates).tolist() == [0, 1, 1, 0]
    with pytest.raises(ConfigError, match=r"curriculum\.settings\.high=0\.1"):
        CURRICULA.bind("window", {"low": 0.25, "high": 0.1})


def test_a_rare_success_is_counted_in_rewards_within_0_and_1():
    # A reward of 3 is one success, and one below 0 none.
    assert PRIORITIES.bind("rare_success", {})(np.array([3.0, -1, 0, 0])) == 0.75


def test_responses_of_each_role_are_chosen_on_their_own():
    made = batch([3, 2, 1, 0], [7, 7, 7, 7])
    made = made.with_columns(roles=np.array(["asks", "asks", "answers", "answers"]))
    selected = choose_responses(made, FilterConfig(keep_responses=1, keep_by="best"), [0])
    assert selected.array("rewards").tolist() == [3, 1]


def buffer(**changed) -> ReplayBuffer:
    return ReplayBuffer(ReplayConfig(**{"share": 0.5, "max_age": 2, **changed}), seed=0, call_s=60)


def test_what_is_replayed_is_whole_marked_and_not_too_old():
    # Added in step 1 with version 0, and so on; of step s the version before is s - 1.
    replay = buffer(priority="uniform")
    for step in (1, 2, 3):
        made = batch([1, 0, 0, 1], [2 * step, 2 * step + 1] * 2, version=step - 1)
        replay.add(made.with_columns(**{f"reward/{step}": np.ones(4, np.float32)}), step)
    result = replay.draw(9, 4)
    assert sorted(ids(result)) == [4, 4, 5, 5, 6, 6, 7, 7]  # of the steps 2 and 3
    assert result.array("replayed").tolist() == [1] * 8
    assert set(result.jagged("weight_versions").values.tolist()) == {1, 2}
    drawn = replay.draw(1, 4)
    assert len(drawn) == 2 and len({*ids(drawn)}) == 1
    assert replay.draw(0, 4) is None and buffer().draw(3, 4) is None


def test_a_group_comes_by_the_sum_of_the_priorities_of_its_roles():
    """Rewards are compared within a role: 1/2 + 1/2, 1/2 and, where roles differ alone, 0."""
    replay = buffer()
    made = batch([1, 0, 1, 0, 1, 0, 1, 1, 0, 0], [0, 0, 0, 0, 1, 1, 2, 2, 2, 2])
    roles = np.array(["asks", "asks", "answers", "answers", "asks", "asks", *["asks"] * 2])
    replay.add(made.with_columns(roles=np.append(roles, ["answers"] * 2)), 1)
    drawn = [ids(replay.draw(1, step))[0] for step in range(2, 602)]
    assert drawn.count(0) == pytest.approx(400, abs=40)
    assert drawn.count(1) == pytest.approx(200, abs=40)
    assert {*ids(replay.draw(3, 2))} == {0, 1}


def test_a_group_is_as_old_as_its_oldest_token():
    # One token of version 0 among those of version 3; what the policy did not choose has none.
    made = batch([1, 0, 1, 0], [4, 4, 5, 5], version=3)
    versions, mask = (made.jagged(n) for n in ("weight_versions", "response_mask"))
    old, unchosen = versions.values.copy(), mask.values.copy()
    old[[1, 5]], unchosen[5] = 0, 0
    made = made.with_columns(
        weight_versions=versions.with_values(old), response_mask=mask.with_values(unchosen)
    )
    replay = buffer(priority="uniform")
    replay.add(made, 3)
    assert ids(replay.draw(9, 4)) == [5, 5]


def test_groups_come_as_often_as_their_priority_says():
    # Rewards of 1 and 0, of 3/4 and 1/4, and equal ones: priorities 1/2, 1/4 and 0.
    replay = buffer()
    replay.add(batch([1, 0, 0.75, 0.25, 1, 1], [0, 0, 1, 1, 2, 2]), 1)
    drawn = [ids(replay.draw(1, step))[0] for step in range(2, 602)]
    assert drawn.count(0) == pytest.approx(400, abs=40)
    assert drawn.count(1) == pytest.approx(200, abs=40)
    assert {*ids(replay.draw(3, 2))} == {0, 1}


def test_a_buffer_that_goes_on_from_its_arrays_draws_the_same():
    first, second = buffer(), buffer()
    first.add(batch([1, 0, 0, 0.5], [5, 5, 6, 6]), 1)
    second.load_state_dict(first.state_dict())
    for replay in (first, second):
        replay.add(batch([1, 0], [7, 7], version=1), 2)
    left, right = first.draw(2, 3), second.draw(2, 3)
    for name, column in left.columns.items():
        other = right[name]
        if isinstance(column, Jagged):
            column, other = column.values, other.values
        assert column.dtype == other.dtype and column.tolist() == other.tolist(), name
    off = ReplayBuffer(ReplayConfig(), 0, 60)
    off.load_state_dict(first.state_dict())
    off.add(batch([1, 0], [7, 7]), 2)
    assert off.state_dict() == {"samples": None}
