"""The samples of a step, from servers whose rewards are known by the prompt."""

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
from mcore_rl.data.curriculum import CurriculumSampler
from mcore_rl.data.datasets import PromptDataset, PromptRow
from mcore_rl.data.prompt_batches import PromptBatches
from mcore_rl.trainers.replay_buffer import ReplayBuffer
from mcore_rl.trainers.step_samples import samples_of_step

NUM_ROWS = 40


class Pool:
    """Of the responses to row r, r modulo 3 of 2 succeed; 0 and 2 of 2 teach nothing."""

    def __init__(self):
        self.version, self.asked = 0, []

    def generate(self, prompts: Batch, n: int, *, is_greedy=False) -> Batch:
        assert n == 2
        rows = np.repeat(prompts.array("rows"), n)
        self.asked.append(len(prompts))
        tokens = Jagged.of([[row] for row in rows], np.int64)
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


def run_of(samples: FilterConfig, curriculum: CurriculumConfig | None = None):
    config = RLConfig(trainer=TrainerConfig(prompts_per_step=6))
    config.algorithm = AlgorithmConfig(group_size=2, filter=samples)
    data = PromptDataset([PromptRow([row], {}) for row in range(NUM_ROWS)])
    sampler = None
    if curriculum is not None:
        config.data.curriculum = curriculum
        weight = CURRICULA.bound(curriculum.name, curriculum.settings)
        sampler = CurriculumSampler(NUM_ROWS, 6, 0, curriculum, weight)
    prompts = PromptBatches(data, 6, 0, curriculum=sampler)
    return config, Pool(), prompts, ReplayBuffer(samples.replay, 0, 60)


def stepped(run, step):
    run[1].version = step - 1
    batch, metrics = samples_of_step(*run, step)
    return np.unique(batch.array("group_ids")).tolist(), batch, metrics


def test_rounds_of_generation_fill_a_step_with_groups_that_differ():
    """The first six that pass, of the prompts in their order; and no prompt is skipped after it."""
    run = run_of(FilterConfig(group_filter="drop_uniform", max_rounds=9))
    groups, batch, metrics = stepped(run, 1)
    plain = PromptBatches(run[2]._dataset, 6, 0)
    order = [int(row) for _ in range(6) for row in next(plain).array("rows")]
    passing = [group for group, row in enumerate(order) if row % 3 == 1]
    rounds = -(-(passing[5] + 1) // 6)
    assert groups == passing[:6] and len(batch) == 12
    assert run[1].asked == [6] * rounds and rounds > 2
    num_passed = sum(group < 6 * rounds for group in passing)
    assert metrics["samples/rounds"] == rounds and metrics["samples/groups"] == 6 * rounds
    assert metrics["samples/passed"] == num_passed / (6 * rounds)
    assert metrics["samples/dropped_surplus"] == num_passed - 6
    assert metrics["generated_tokens"] == 6 * rounds * 2 * 2
    rewards = [order[group] % 3 / 2 for group in range(6 * rounds)]
    assert metrics["reward"] == pytest.approx(np.mean(rewards))
    assert int(run[2].take(1).array("rows")[0]) == order[6 * rounds]


def test_rounds_may_ask_for_more_prompts_than_a_step_has():
    run = run_of(FilterConfig(group_filter="drop_uniform", max_rounds=2, prompts_per_round=30))
    assert len(stepped(run, 1)[0]) == 6
    assert run[1].asked == [30]


def test_a_step_that_stays_short_is_trained_on_or_ends_the_run():
    policy = FilterConfig(group_filter="drop_uniform", max_rounds=1)
    groups, _, metrics = stepped(run_of(policy), 1)
    assert 0 < len(groups) < 6 and metrics["samples/dropped_surplus"] == 0
    policy.if_short = "stop"
    told = rf"step 1: {len(groups)} of 6 groups .* in 1 rounds, of 6 that the step needs; allowed:"
    with pytest.raises(ConfigError, match=told):
        stepped(run_of(policy), 1)


def test_if_no_group_passes_the_first_of_them_are_there_to_be_shown():
    run = run_of(FilterConfig(group_filter="drop_uniform"))
    answer = run[1].generate

    def uniform(*asked, **how):
        made = answer(*asked, **how)
        return made.with_columns(rewards=np.ones(len(made), np.float32))

    run[1].generate = uniform
    groups, batch, metrics = stepped(run, 1)
    assert groups == [0, 1, 2, 3, 4, 5] and batch.array("left_out").all()
    assert metrics["samples/passed"] == 0


def test_replayed_groups_take_the_place_of_new_ones():
    replay = ReplayConfig(share=0.5, max_age=1, priority="uniform")
    run = run_of(FilterConfig(replay=replay))
    assert stepped(run, 1)[0] == [0, 1, 2, 3, 4, 5]
    for step, first in ((2, 6), (3, 9), (4, 12)):
        groups, batch, metrics = stepped(run, step)
        new = list(range(first, first + 3))
        assert groups[3:] == new and metrics["samples/replayed"] == 3
        is_old = batch.array("replayed") != 0
        assert set(batch.array("group_ids")[~is_old].tolist()) == set(new)
        ages = step - 1 - batch.jagged("weight_versions").values
        assert (ages == is_old).all() and metrics["samples/replayed_age"] == 1
        assert len(batch) == 12


def test_a_curriculum_comes_to_the_prompts_that_succeed_half_of_the_time():
    curriculum = CurriculumConfig(name="window", settings={"low": 0.3}, min_weight=0.01)
    run = run_of(FilterConfig(), curriculum)
    rows = [stepped(run, step)[1].jagged("response_ids").values for step in range(1, 201)]
    shares = [np.mean(np.concatenate(part) % 3 == 1) for part in (rows[:2], rows[100:])]
    assert shares[0] < 0.6 and shares[1] > 0.9


def test_a_resumed_state_draws_and_replays_what_would_have_come():
    policy = FilterConfig(
        group_filter="drop_uniform", max_rounds=9, replay=ReplayConfig(share=0.4, max_age=2)
    )
    whole, begun, resumed = (run_of(policy, CurriculumConfig(name="window")) for _ in range(3))
    wanted = [stepped(whole, step)[0] for step in range(1, 9)]
    assert [stepped(begun, step)[0] for step in range(1, 5)] == wanted[:4]
    resumed[2].load_state_dict(begun[2].state_dict())
    resumed[3].load_state_dict(begun[3].state_dict())
    stepped(begun, 5)  # what was saved does not change with the run
    assert [stepped(resumed, step)[0] for step in range(5, 9)] == wanted[4:]


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


@pytest.mark.parametrize("found", [np.array([1.0, np.nan, 0]), np.ones(2), [1.0, 1, 1]])
def test_weights_of_ones_own_have_to_be_finite_one_a_row(found):
    sampler = CurriculumSampler(3, 2, 0, CurriculumConfig(name="own"), lambda rates: found)
    with pytest.raises(ConfigError, match=r"data.curriculum.name='own' returned .*; allowed: "):
        sampler.take(2)


def test_a_curriculum_draws_by_the_larger_of_weight_and_least_weight():
    """Weights 0.5, 0.1 and 0 with a least weight of 0.5 are equal chances."""
    config = CurriculumConfig(min_weight=0.5)
    sampler = CurriculumSampler(3, 1, 0, config, lambda rates: np.array([0.5, 0.1, 0.0]))
    drawn = [row for _ in range(3000) for row in sampler.take(1)]
    assert np.bincount(drawn).tolist() == pytest.approx([1000] * 3, abs=80)
