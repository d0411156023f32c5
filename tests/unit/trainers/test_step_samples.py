"""The samples of a step, from servers whose rewards are known by the prompt; and their rewards."""

from __future__ import annotations

import json

import numpy as np
import pytest

from mcore_rl.algorithms.sample_choice import CURRICULA
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import (
    AlgorithmConfig,
    CurriculumConfig,
    FilterConfig,
    ReplayConfig,
    RLConfig,
    TrainerConfig,
)
from mcore_rl.data.batch import Batch, Jagged
from mcore_rl.data.datasets import PromptDataset, PromptRow
from mcore_rl.data.prompt_batches import PromptBatches
from mcore_rl.data.sampler import CurriculumSampler
from mcore_rl.trainers.replay_buffer import ReplayBuffer
from mcore_rl.trainers.step_samples import (
    StepSampler,
    describe_samples,
    drop_failed_rewards,
    shuffle_rewards,
)
from mcore_rl.trainers.training_batch import add_advantages
from tests.unit.trainers.small_batches import REWARDS, build_rewarded_batch

NUM_ROWS = 40


class Pool:
    """Servers whose row r has r modulo 3 successes of 2; rows with 0 or 2 teach nothing."""

    def __init__(self):
        self.version, self.num_prompts = 0, []

    def generate(self, prompts: Batch, n: int, *, is_greedy=False) -> Batch:
        assert n == 2
        rows = np.repeat(prompts.array("rows"), n)
        self.num_prompts.append(len(prompts))
        tokens = Jagged.pack([[row] for row in rows], np.int64)
        return Batch(
            {
                "prompt_ids": tokens,
                "response_ids": tokens,
                "response_mask": tokens.with_values(np.ones(len(rows), np.int8)),
                "weight_versions": tokens.with_values(np.full(len(rows), self.version)),
                "rewards": (np.tile([0, 1], len(prompts)) < rows % 3).astype(np.float32),
                "group_ids": np.repeat(prompts.array("group_ids"), n),
                "finish_reasons": np.array(["stop"] * len(rows)),
            }
        )


def build_sampler(samples: FilterConfig, curriculum: CurriculumConfig | None = None) -> StepSampler:
    config = RLConfig(trainer=TrainerConfig(prompts_per_step=6))
    config.algorithm = AlgorithmConfig(group_size=2, filter=samples)
    data = PromptDataset([PromptRow([row], {}) for row in range(NUM_ROWS)])
    curriculum_sampler = None
    if curriculum is not None:
        config.data.curriculum = curriculum
        weight = CURRICULA.bind(curriculum.name, curriculum.settings)
        curriculum_sampler = CurriculumSampler(NUM_ROWS, 6, 0, curriculum, weight)
    prompts = PromptBatches(data, 6, 0, curriculum=curriculum_sampler)
    return StepSampler(config, Pool(), prompts, ReplayBuffer(samples.replay, 0, 60))


def collect(sampler: StepSampler, step: int):
    sampler.rollout.version = step - 1
    batch, metrics = sampler.collect(step)
    return np.unique(batch.array("group_ids")).tolist(), batch, metrics


def test_rounds_of_generation_fill_a_step_with_groups_that_differ():
    """The first six that pass, of the prompts in their order; and no prompt is skipped after it."""
    sampler = build_sampler(FilterConfig(group_filter="drop_uniform", max_rounds=9))
    groups, batch, metrics = collect(sampler, 1)
    plain = PromptBatches(sampler.prompts._dataset, 6, 0)
    order = [int(row) for _ in range(6) for row in next(plain).array("rows")]
    passing = [group for group, row in enumerate(order) if row % 3 == 1]
    rounds = -(-(passing[5] + 1) // 6)
    assert groups == passing[:6] and len(batch) == 12
    assert sampler.rollout.num_prompts == [6] * rounds and rounds > 2
    num_passed = sum(group < 6 * rounds for group in passing)
    assert metrics["samples/rounds"] == rounds and metrics["samples/groups"] == 6 * rounds
    assert metrics["samples/passed"] == num_passed / (6 * rounds)
    assert metrics["samples/dropped_surplus"] == num_passed - 6
    assert metrics["generated_tokens"] == 6 * rounds * 2 * 2
    rewards = [order[group] % 3 / 2 for group in range(6 * rounds)]
    assert metrics["reward"] == pytest.approx(np.mean(rewards))
    assert int(sampler.prompts.take(1).array("rows")[0]) == order[6 * rounds]


def test_rounds_may_ask_for_more_prompts_than_a_step_has():
    sampler = build_sampler(
        FilterConfig(group_filter="drop_uniform", max_rounds=2, prompts_per_round=30)
    )
    assert len(collect(sampler, 1)[0]) == 6
    assert sampler.rollout.num_prompts == [30]


def test_a_step_that_stays_short_is_trained_on_or_ends_the_run():
    policy = FilterConfig(group_filter="drop_uniform", max_rounds=1)
    groups, _, metrics = collect(build_sampler(policy), 1)
    assert 0 < len(groups) < 6 and metrics["samples/dropped_surplus"] == 0
    policy.if_short = "stop"
    message = (
        rf"step 1: {len(groups)} of 6 groups .* in 1 rounds, of 6 that the step needs; allowed:"
    )
    with pytest.raises(ConfigError, match=message):
        collect(build_sampler(policy), 1)


def test_if_no_group_passes_the_first_of_them_are_there_to_be_shown():
    sampler = build_sampler(FilterConfig(group_filter="drop_uniform"))
    generate = sampler.rollout.generate

    def generate_uniform(*args, **kwargs):
        batch = generate(*args, **kwargs)
        return batch.with_columns(rewards=np.ones(len(batch), np.float32))

    sampler.rollout.generate = generate_uniform
    groups, batch, metrics = collect(sampler, 1)
    assert groups == [0, 1, 2, 3, 4, 5] and batch.array("left_out").all()
    assert metrics["samples/passed"] == 0


def test_replayed_groups_take_the_place_of_new_ones():
    replay = ReplayConfig(share=0.5, max_age=1, priority="uniform")
    sampler = build_sampler(FilterConfig(replay=replay))
    assert collect(sampler, 1)[0] == [0, 1, 2, 3, 4, 5]
    for step, first in ((2, 6), (3, 9), (4, 12)):
        groups, batch, metrics = collect(sampler, step)
        new = list(range(first, first + 3))
        assert groups[3:] == new and metrics["samples/replayed"] == 3
        is_old = batch.array("replayed") != 0
        assert set(batch.array("group_ids")[~is_old].tolist()) == set(new)
        ages = step - 1 - batch.jagged("weight_versions").values
        assert (ages == is_old).all() and metrics["samples/replayed_age"] == 1
        assert len(batch) == 12


def test_a_curriculum_comes_to_the_prompts_that_succeed_half_of_the_time():
    curriculum = CurriculumConfig(name="window", settings={"low": 0.3}, min_weight=0.01)
    sampler = build_sampler(FilterConfig(), curriculum)
    rows = [collect(sampler, step)[1].jagged("response_ids").values for step in range(1, 201)]
    shares = [np.mean(np.concatenate(part) % 3 == 1) for part in (rows[:2], rows[100:])]
    assert shares[0] < 0.6 and shares[1] > 0.9


def test_a_curriculum_forgets_each_prompt_that_was_generated(monkeypatch):
    """Also those whose greedy response got no reward (ReMax), of which no sample is left."""
    sampler = build_sampler(FilterConfig(), CurriculumConfig(name="window"))
    sampler.config.algorithm.advantage = "remax"
    generate = Pool.generate

    def fail_first(self, prompts, n, *, is_greedy=False):
        batch = generate(self, prompts, 2).take([*range(0, 2 * len(prompts), 3 - n)])
        errors = np.array(["late" if is_greedy else ""] + [""] * (len(batch) - 1))
        return batch.with_columns(reward_errors=errors)

    monkeypatch.setattr(Pool, "generate", fail_first)
    for step in range(1, 5):
        assert len(collect(sampler, step)[0]) == 5
        assert sampler.prompts.state_dict()["drawn"] == []
    assert sampler.prompts.state_dict()["sampler"]["responses"].sum() > 0


def test_a_resumed_state_draws_and_replays_what_would_have_come():
    policy = FilterConfig(
        group_filter="drop_uniform", max_rounds=9, replay=ReplayConfig(share=0.4, max_age=2)
    )
    uninterrupted, begun, resumed = (
        build_sampler(policy, CurriculumConfig(name="window")) for _ in range(3)
    )
    expected = [collect(uninterrupted, step)[0] for step in range(1, 9)]
    assert [collect(begun, step)[0] for step in range(1, 5)] == expected[:4]
    resumed.prompts.load_state_dict(begun.prompts.state_dict())
    resumed.replay.load_state_dict(begun.replay.state_dict())
    collect(begun, 5)  # what was saved does not change with the run
    assert [collect(resumed, step)[0] for step in range(5, 9)] == expected[4:]


def test_a_curriculum_of_other_data_is_refused():
    config = CurriculumConfig(name="window")
    state = CurriculumSampler(5, 2, 0, config, lambda rates: rates).state_dict()
    with pytest.raises(ConfigError, match="num_rows=5, this run has num_rows=6"):
        CurriculumSampler(6, 2, 0, config, lambda rates: rates).load_state_dict(state)


def test_the_counts_of_a_prompt_fade_when_it_is_drawn_again():
    sampler = CurriculumSampler(3, 2, 0, CurriculumConfig(decay=0.5), lambda rates: rates)
    sampler.observe(1, 3, 4)
    assert sampler.rates.tolist() == [0.5, 4 / 6, 0.5]
    sampler.observe(1, 0, 4)
    assert sampler.rates.tolist() == [0.5, 2.5 / 8, 0.5]
    assert json.dumps(sampler.take(3)) and sorted(sampler.take(3)) == [0, 1, 2]


@pytest.mark.parametrize("weights", [np.array([1.0, np.nan, 0]), np.ones(2), [1.0, 1, 1]])
def test_weights_of_ones_own_have_to_be_finite_one_a_row(weights):
    sampler = CurriculumSampler(3, 2, 0, CurriculumConfig(name="own"), lambda rates: weights)
    with pytest.raises(ConfigError, match=r"data.curriculum.name='own' returned .*; allowed: "):
        sampler.take(2)


def test_a_curriculum_draws_by_the_larger_of_weight_and_least_weight():
    """Weights 0.5, 0.1 and 0 with a least weight of 0.5 are equal chances."""
    config = CurriculumConfig(min_weight=0.5)
    sampler = CurriculumSampler(3, 1, 0, config, lambda rates: np.array([0.5, 0.1, 0.0]))
    drawn = [row for _ in range(3000) for row in sampler.take(1)]
    assert np.bincount(drawn).tolist() == pytest.approx([1000] * 3, abs=80)


def test_samples_without_a_reward_are_dropped_or_stay_and_their_share_is_reported():
    errors = np.array(["", "", "late", "", "late", "late"])
    batch = build_rewarded_batch().with_columns(reward_errors=errors)
    assert drop_failed_rewards(batch, "stop") == (batch, {})
    assert drop_failed_rewards(batch, "zero") == (batch, {"reward_errors": 0.5})
    left, metrics = drop_failed_rewards(batch, "drop")
    assert left.array("group_ids").tolist() == [0, 0, 1]
    assert metrics == {"reward_errors": 0.5, "dropped": 3.0}
    scored = add_advantages(left, AlgorithmConfig()).jagged("advantages")
    high = 0.5 / (np.sqrt(0.5) + 1e-6)  # of group 0, which is whole; one of group 1 is left
    assert [row.tolist() for row in scored] == [
        pytest.approx(r) for r in ([high] * 2, [-high], [0])
    ]


def test_a_step_without_any_reward_is_an_error_that_shows_one():
    batch = build_rewarded_batch().with_columns(
        reward_errors=np.array(["reward.name='x' raised E"] * 6)
    )
    with pytest.raises(ConfigError, match=r"none of the 6 responses.*the first: reward.name='x' r"):
        drop_failed_rewards(batch, "drop")


def test_parts_are_means_over_the_samples_that_got_a_reward():
    parts = {"reward/format": np.array([1, 0, np.nan, 1, np.nan, np.nan], np.float32)}
    finish_reasons = np.array(["stop"] * 6)
    metrics = describe_samples(
        build_rewarded_batch().with_columns(finish_reasons=finish_reasons, **parts)
    )
    assert metrics["reward/format"] == pytest.approx(2 / 3)
    assert metrics["reward"] == pytest.approx(0.5)


def test_parts_that_no_sample_got_are_no_metric():
    """Such as the scores of a reward model where each response failed."""
    parts = {"reward/model": np.full(6, np.nan, np.float32)}
    batch = build_rewarded_batch().with_columns(finish_reasons=np.array(["stop"] * 6), **parts)
    assert {*describe_samples(batch)} == {*describe_samples(batch.drop_columns("reward/model"))}


def test_turns_are_counted_a_trajectory_and_not_a_sample():
    """The first of three trajectories has two samples; its reward stands in both."""
    batch = (
        build_rewarded_batch()
        .take([0, 1, 2, 4])
        .with_columns(
            finish_reasons=np.array(["length", "stop", "length", "stop"]),
            trajectories=np.array([0, 0, 1, 0]),
            segments=np.array([0, 1, 0, 0]),
            group_ids=np.array([0, 0, 0, 1]),
            turns=np.array([3, 2, 1, 1]),
            rewards=np.array([1.0, 1.0, 0.0, 0.5], np.float32),
            roles=np.array(["asks", "asks", "answers", "asks"]),
        )
    )
    metrics = describe_samples(batch)
    assert metrics["turns"] == pytest.approx(7 / 3)
    assert metrics["samples_per_trajectory"] == pytest.approx(4 / 3)
    assert metrics["reward"] == pytest.approx(0.5)
    assert metrics["truncated"] == pytest.approx(1 / 3)
    assert (metrics["role/asks/reward"], metrics["role/answers/reward"]) == (0.75, 0.0)
    assert "turns" not in describe_samples(batch.with_columns(turns=np.array([1, 1, 1, 0])))


def test_shuffled_rewards_are_the_same_rewards_elsewhere():
    shuffled = [
        shuffle_rewards(build_rewarded_batch(), [0, step]).array("rewards") for step in (1, 1, 2)
    ]
    assert all(sorted(rewards) == sorted(REWARDS) for rewards in shuffled)
    np.testing.assert_array_equal(shuffled[0], shuffled[1])
    assert not np.array_equal(shuffled[0], shuffled[2])
    ids = build_rewarded_batch().jagged("response_ids")
    of_turns = build_rewarded_batch().with_columns(
        process_rewards=ids.with_values(np.ones(len(ids.values)))
    )
    assert "process_rewards" not in shuffle_rewards(of_turns, [0, 1])
