"""Rewards of turns in advantages: each counts once, at the end of its turn. Worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mcore_rl.algorithms.advantages import add_token_rewards, compute_advantages
from mcore_rl.algorithms.inputs import AdvantageInputs
from mcore_rl.config.schema import AlgorithmConfig
from mcore_rl.data.batch import Batch
from mcore_rl.data.sample import Sample
from mcore_rl.data.trajectories import Trajectories

NO_KL = AlgorithmConfig(kl_coef=0.0)


def sample(trajectory: int, segment: int, mask: list[int], earned: list[float], reward: float):
    unit = [1] * len(mask)
    return Sample(
        prompt_ids=[5],
        response_ids=unit,
        response_mask=mask,
        rollout_log_probs=[-1.0] * len(mask),
        weight_versions=unit,
        finish_reason="stop",
        group_id=0,
        reward=reward,
        trajectory=trajectory,
        segment=segment,
        process_rewards=earned,
    )


# Two turns that earn 0.25 and 0.5, then a segment of its own with one that earns 0.125; the outcome
# is worth another 2. Beside it a trajectory with the same reward that no turn has earned.
TURNS = [
    sample(0, 0, [1, 1, 0, 1], [0, 0.25, 0, 0.5], 2.875),
    sample(1, 0, [1, 1], [], 2.875),
    sample(0, 1, [1, 0, 1, 1], [0, 0, 0.125, 0], 2.875),
]


def test_tokens_have_what_their_turn_earned_and_the_last_one_what_is_left():
    batch = add_token_rewards(Batch.collate(TURNS), NO_KL)
    rows = [row.tolist() for row in batch.jagged("token_rewards")]
    assert rows == [[0, 0.25, 0, 0.5], [0, 2.875], [0, 0, 0.125, 2]]
    joined = AdvantageInputs(Trajectories(batch).join())
    assert joined.scores.tolist() == joined.rewards.tolist() == [2.875, 2.875]


def test_a_trajectory_of_several_segments_has_its_reward_once_with_a_kl_penalty():
    # A KL of 1 nat a token, of six and of two chosen ones.
    batch = Batch.collate(
        [sample(s.trajectory, s.segment, s.response_mask, [], 2.0) for s in TURNS]
    )
    result = penalised_batch(batch, 0.25)
    joined = AdvantageInputs(Trajectories(result).join())
    assert joined.scores.tolist() == [2 - 0.25 * 6, 2 - 0.25 * 2]


def test_advantages_of_responses_see_the_sum_and_those_of_tokens_what_is_to_come():
    batch = Batch.collate(TURNS)
    values = batch.jagged("rollout_log_probs")
    batch = batch.with_columns(values=values.with_values(np.zeros(len(values.values), np.float32)))
    rewarded = add_token_rewards(batch, NO_KL)
    grpo = compute_advantages(rewarded, "grpo", {})["advantages"]
    assert [row.tolist() for row in grpo] == [[0] * 4, [0] * 2, [0] * 4]
    gae = compute_advantages(rewarded, "gae", {"lam": 1.0, "whiten": False})["advantages"]
    # Of the tokens that were chosen: the sum of rewards from there to the end of the trajectory.
    assert [row.tolist() for row in gae] == [
        [2.875, 2.875, 0, 2.625], [2.875, 2.875], [2.125, 0, 2.125, 2],
    ]  # fmt: skip


def penalised_batch(batch: Batch, kl_coef: float) -> Batch:
    """Add token rewards with a KL of 1 nat per token."""
    served = batch.jagged("rollout_log_probs")
    zeros = served.with_values(served.values * 0)
    batch = batch.with_columns(log_probs=zeros, reference_log_probs=served)
    algorithm = AlgorithmConfig(kl_coef=kl_coef, kl_placement="reward", kl_estimator="k1")
    return add_token_rewards(batch, algorithm)


# Rewards 1, 0 and 0; of the first no token was chosen: an empty response, one of a tool alone, one
# whose tool earned something, a trajectory of two segments.
NO_CHOSEN_TOKEN = {
    "empty": [sample(0, 0, [], [], 1.0)],
    "tool": [sample(0, 0, [0, 0], [], 1.0)],
    "rewarded tool": [sample(0, 0, [0, 0], [0, 0.5], 1.0)],
    "segments": [sample(0, 0, [], [], 1.0), sample(0, 1, [0], [], 1.0)],
}


@pytest.mark.parametrize("kind", NO_CHOSEN_TOKEN)
@pytest.mark.parametrize("name", ["rloo", "grpo", "opo", "gpg"])
def test_a_response_without_a_chosen_token_keeps_its_reward_beside_token_rewards(kind, name):
    """So a KL penalty of almost 0, or a reward of a turn in the batch, moves no advantage."""
    beside = [sample(1, 0, [1, 1], [], 0.0), sample(2, 0, [1], [], 0.0)]
    batch = Batch.collate(NO_CHOSEN_TOKEN[kind] + beside)
    plain = compute_advantages(batch, name, {})["advantages"].values
    earned = batch.jagged("response_mask").with_values(np.zeros(len(plain)))
    rewarded = add_token_rewards(batch.with_columns(process_rewards=earned), NO_KL)
    for other in (penalised_batch(batch, 1e-9), rewarded):
        assert "token_rewards" in other
        advantages = compute_advantages(other, name, {})["advantages"].values
        assert advantages == pytest.approx(plain, abs=1e-6)
        scores = AdvantageInputs(Trajectories(other).join()).scores
        assert scores == pytest.approx([1, 0, 0], abs=1e-6)
    if name == "rloo":
        assert plain[-3:] == pytest.approx([-0.5] * 3)


def test_equal_rewards_of_unequal_turns_are_equal_to_the_last_digit():
    """0.1 + 0.2 + 0.3 in any order, else GRPO would divide rounding errors by one another."""
    orders = [(0.1, 0.2, 0.3), (0.3, 0.2, 0.1), (0.2, 0.3, 0.1)]
    samples = [sample(n, 0, [1] * 3, list(order), sum(orders[0])) for n, order in enumerate(orders)]
    rewarded = add_token_rewards(Batch.collate(samples), NO_KL)
    advantages = compute_advantages(rewarded, "grpo", {})["advantages"].values
    assert advantages == pytest.approx([0] * 9, abs=1e-9)


def test_batches_with_and_without_rewards_of_turns_are_joined_in_any_order():
    with_them, without = Batch.collate(TURNS[:1]), Batch.collate(TURNS[1:2])
    for parts, expected in (
        ([with_them, without], [0, 0.25, 0, 0.5, 0, 0]),
        ([without, with_them], [0, 0, 0, 0.25, 0, 0.5]),
    ):
        assert Batch.concat(parts).jagged("process_rewards").values.tolist() == expected
    assert "process_rewards" not in Batch.concat([without, without])


def test_batches_with_and_without_states_are_joined_in_any_order():
    """-1 is no state."""
    without = Batch.collate(TURNS[1:2])
    states = np.arange(len(TURNS[0].response_ids))
    given = replace(TURNS[0], state_ids=states.tolist())
    none = [-1] * len(TURNS[1].response_ids)
    for parts, expected in (
        ([Batch.collate([given]), without], [*states, *none]),
        ([without, Batch.collate([given])], [*none, *states]),
    ):
        assert Batch.concat(parts).jagged("state_ids").values.tolist() == expected
    assert Batch.collate([TURNS[1], given]).jagged("state_ids").values.tolist() == [*none, *states]
    assert "state_ids" not in Batch.concat([without, without])
