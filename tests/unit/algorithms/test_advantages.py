from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from mcore_rl.algorithms.advantages import ADVANTAGES, compute_advantages, grpo
from mcore_rl.algorithms.inputs import AdvantageInputs
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import AlgorithmConfig, GRPOSettings
from mcore_rl.data.batch import Batch, Jagged
from mcore_rl.trainers.policy_loss import check_functions


def advantages_of(
    rewards: np.ndarray, group_ids: np.ndarray, *, normalize_by_std: bool
) -> np.ndarray:
    inputs = AdvantageInputs(Batch({"rewards": rewards, "group_ids": group_ids}))
    return grpo(inputs, GRPOSettings(normalize_by_std))


def test_grpo_matches_a_case_worked_by_hand():
    # Group 7: mean 0.25, sample variance (3 * 0.25^2 + 0.75^2) / 3 = 0.25, so std 0.5.
    # Group 4: mean 2, sample variance (1 + 1) / 1 = 2.
    rewards = np.array([1.0, 1.0, 0.0, 3.0, 0.0, 0.0], dtype=np.float32)
    group_ids = np.array([7, 4, 7, 4, 7, 7])
    expected = [1.5, -(0.5**0.5), -0.5, 0.5**0.5, -0.5, -0.5]
    advantages = advantages_of(rewards, group_ids, normalize_by_std=True)
    np.testing.assert_allclose(advantages, expected, rtol=1e-5)


def test_without_normalisation_only_the_mean_is_taken_off():
    advantages = advantages_of(
        np.array([1.0, 0.0, 5.0]), np.array([0, 0, 1]), normalize_by_std=False
    )
    np.testing.assert_array_equal(advantages, [0.5, -0.5, 0.0])


@pytest.mark.parametrize("normalize_by_std", [True, False])
def test_a_group_of_one_and_a_group_of_equal_rewards_have_no_advantage(normalize_by_std):
    # 0.1 is not exact in binary: rounding must not be blown up by the division by 1e-6.
    rewards = np.array([0.1] * 7 + [3.0], dtype=np.float32)
    group_ids = np.array([0] * 7 + [1])
    advantages = advantages_of(rewards, group_ids, normalize_by_std=normalize_by_std)
    np.testing.assert_allclose(advantages, 0.0, atol=1e-7)


def test_grpo_equals_a_plain_torch_reference():
    rewards = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
    grouped = torch.from_numpy(rewards)
    reference = (grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-6)
    advantages = advantages_of(rewards.ravel(), np.repeat(np.arange(16), 8), normalize_by_std=True)
    np.testing.assert_allclose(advantages, reference.numpy().ravel(), rtol=1e-5, atol=1e-6)


def test_the_order_of_samples_does_not_matter():
    rng = np.random.default_rng(1)
    rewards, group_ids = rng.normal(size=24), np.repeat(np.arange(6), 4)
    order = rng.permutation(24)
    np.testing.assert_allclose(
        advantages_of(rewards[order], group_ids[order], normalize_by_std=True),
        advantages_of(rewards, group_ids, normalize_by_std=True)[order],
        rtol=1e-5,
    )


def test_an_unknown_advantage_names_the_setting_and_what_is_allowed():
    with pytest.raises(
        ConfigError, match=r"algorithm\.advantage='gea' is unknown; allowed: gae, gdpo"
    ):
        ADVANTAGES["gea"]


def answered(lengths: list[int], seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    mask = [rng.integers(0, 2, n) for n in lengths]
    responses = Jagged.pack([np.arange(n) for n in lengths], np.int64)
    values = rng.normal(size=len(responses.values)).astype(np.float32)
    return Batch(
        {
            "rewards": rng.normal(size=len(lengths)).astype(np.float32),
            "group_ids": np.zeros(len(lengths), np.int64),
            "response_ids": responses,
            "response_mask": Jagged.pack(mask, np.int8),
            "values": responses.with_values(values),
        }
    )


def test_the_advantage_of_a_sample_is_that_of_each_of_its_tokens():
    batch = answered([2, 0, 3])
    expected = grpo(AdvantageInputs(batch), GRPOSettings())
    advantages = compute_advantages(batch, "grpo", {})["advantages"]
    assert advantages.values.dtype == np.float32
    assert advantages.values.tolist() == np.repeat(expected.astype(np.float32), [2, 0, 3]).tolist()


def columns(masks: list[list[int]], **given: object) -> Batch:
    """Build a batch; jagged columns have a number per response token, in order."""
    mask = Jagged.pack(masks, np.int8)
    jagged = {name: mask.with_values(np.array(rows)) for name, rows in given.items()}
    return Batch({"response_ids": mask, "response_mask": mask, **jagged})


def test_gae_matches_a_case_worked_by_hand():
    """gamma 0.5, lambda 0.5, reward 2; the policy did not choose the third token.

    deltas: 0 + 0.5 * 3 - 1 = 0.5; 0 + 0.5 * 2 - 3 = -2; 2 + 0 - 2 = 0.
    advantages, from the last: 0; -2 + 0.25 * 0 = -2; 0.5 + 0.25 * -2 = 0. Plus the values: returns.
    """
    batch = columns([[1, 1, 0, 1]], values=[1.0, 3.0, 9.0, 2.0]).with_columns(rewards=np.array([2]))
    advantages = compute_advantages(batch, "gae", {"gamma": 0.5, "lam": 0.5, "whiten": False})
    assert advantages["advantages"][0].tolist() == [0.0, -2.0, 0.0, 0.0]
    assert advantages["returns"][0].tolist() == [1.0, 1.0, 0.0, 2.0]
    assert advantages["returns"].values.dtype == np.float32


def test_gigpo_compares_turns_of_a_group_that_were_taken_in_one_state():
    """gamma 0.5, omega 2. Each response has two turns with a token of the environment between.

    Returns of the turns, 1 + 0.5 * 3 = 2.5 and 3; 0 + 0.5 * 1 = 0.5 and 1. Both begin in state 7:
    2.5 and 0.5 are 1 and -1 off the mean. States 8 and 9 were seen once, and state 8 of the other
    group is another one. Sums of the rewards, 4 and 1, are 1.5 and -1.5 off the mean.
    """
    batch = columns(
        [[1, 0, 1], [1, 0, 1], [1]],
        token_rewards=[1.0, 0.0, 3.0, 0.0, 5.0, 1.0, 4.0],
        state_ids=[7, 0, 8, 7, 0, 9, 8],
    ).with_columns(group_ids=np.array([3, 3, 4]), rewards=np.array([4.0, 1.0, 4.0]))
    settings = {"gamma": 0.5, "step_weight": 2, "normalize_by_std": False}
    advantages = compute_advantages(batch, "gigpo", settings)["advantages"]
    assert [row.tolist() for row in advantages] == [[3.5, 0, 1.5], [-3.5, 0, -1.5], [0]]


def test_gpg_makes_up_for_samples_that_teach_nothing():
    # Two of six are in a group of equal rewards, so alpha is 6 / 4 = 1.5.
    rewards, group_ids = np.array([1.0, 0, 0, 1, 1, 1]), np.array([0, 0, 0, 0, 1, 1])
    mask = Jagged.pack([[1]] * 6, np.int8)
    batch = Batch({"response_ids": mask, "rewards": rewards, "group_ids": group_ids})
    advantages = compute_advantages(batch, "gpg", {})["advantages"]
    assert advantages.values.tolist() == [0.75, -0.75, -0.75, 0.75, 0, 0]


def test_maxrl_weighs_a_success_by_how_rare_it_is():
    # One success of four: (1 - 0.25) / 0.25 = 3. No success: 0. A reward below 0 is refused.
    rewards, group_ids = np.array([0.0, 0, 1, 0, 0, 0]), np.array([5, 5, 5, 5, 6, 6])
    mask = Jagged.pack([[1]] * 6, np.int8)
    batch = Batch({"response_ids": mask, "rewards": rewards, "group_ids": group_ids})
    advantages = compute_advantages(batch, "maxrl", {})["advantages"]
    assert advantages.values.tolist() == [-1, -1, 3, -1, 0, 0]
    with pytest.raises(ConfigError, match=r"advantage='maxrl' was given the reward -1; allowed: 0"):
        compute_advantages(batch.with_columns(rewards=rewards - 1), "maxrl", {})


@pytest.mark.parametrize("parts", ["", "accuracy,", "accuracy=x", "a,a", "a=inf", "=1"])
def test_parts_that_are_no_names_with_weights_are_refused(parts):
    message = rf"algorithm.advantage_settings.parts={parts!r}; allowed: names, each once, with"
    with pytest.raises(ConfigError, match=message):
        ADVANTAGES.bind("gdpo", {"parts": parts})


def test_a_part_that_the_reward_does_not_give_is_named():
    batch = answered([2, 1]).with_columns(**{"reward/format": np.zeros(2)})
    with pytest.raises(ConfigError, match=r"the part 'speed' of the reward; reward.name gives fo"):
        compute_advantages(batch, "gdpo", {"parts": "format,speed"})


def test_the_parts_of_a_failed_reward_count_as_0():
    # Whether it failed for one response, whose part is NaN, or for all, without a part.
    batch = answered([2, 1]).with_columns(reward_errors=np.array(["", "raised"]))
    failed = batch.with_columns(**{"reward/right": np.array([1.0, np.nan])})
    as_zero = batch.with_columns(**{"reward/right": np.array([1.0, 0.0])})
    result, expected = (
        compute_advantages(item, "gdpo", {"parts": "right"})["advantages"].values
        for item in (failed, as_zero)
    )
    assert result.tolist() == expected.tolist() and result.any()
    all_failed = batch.with_columns(reward_errors=np.array(["raised", "raised"]))
    assert not compute_advantages(all_failed, "gdpo", {"parts": "right"})["advantages"].values.any()


def test_the_reward_of_a_response_is_at_its_last_chosen_token():
    batch = columns([[1, 1, 0], [], [0, 0], [0, 1]]).with_columns(rewards=np.array([5.0, 6, 7, 8]))
    rows = [row.tolist() for row in AdvantageInputs(batch).token_rewards]
    assert rows == [[0, 5, 0], [], [0, 0], [0, 8]]
    assert AdvantageInputs(batch).scores.tolist() == [5, 6, 7, 8]


def test_rewards_of_tokens_that_the_policy_did_not_choose_do_not_count():
    batch = columns([[1, 1, 0], [], [0, 1]], token_rewards=[1.0, 2, 50, 50, 4])
    batch = batch.with_columns(rewards=np.zeros(3))
    assert AdvantageInputs(batch).scores.tolist() == [3, 0, 4]


def test_the_example_of_the_page_is_an_advantage(tmp_path):
    page = (Path(__file__).parents[3] / "docs" / "algorithms.md").read_text()
    code = page.partition("## An advantage\n\n```python\n")[2].partition("```")[0]
    (tmp_path / "own.py").write_text(code)
    batch = answered([2, 1, 3]).with_columns(rewards=np.array([3.0, 1, 2]))
    advantages = compute_advantages(batch, f"{tmp_path / 'own.py'}:above_median", {})["advantages"]
    assert advantages.values.tolist() == [1, 1, -1, -1, -1, -1]


USER_FILE = """
import numpy as np
from mcore_rl.data.batch import Jagged

def short(inputs):
    return inputs.rewards[1:]

def rows(inputs):
    return Jagged.pack([[0.0]] * len(inputs.rewards), np.float32)

def listed(inputs):
    return inputs.rewards.tolist()

def nothing(inputs):
    return inputs.rewards / 0.0 * 0.0

def token_nan(inputs):
    return inputs.values.with_values(np.full(len(inputs.values.values), np.nan))

def wrong(inputs):
    return {}["length"]

def lacking(inputs):
    return inputs.state_ids
"""


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("short", r"returned \(2,\); allowed: an array of \[samples\], which are 3, or a Jagged"),
        ("rows", r"returned rows of \[1, 1, 1\] tokens; allowed: those of the .*, \[2, 1, 3\]"),
        ("listed", r"returned list; allowed: an array of \[samples\]"),
        ("nothing", r"returned nan; allowed: finite"),
        ("token_nan", r"returned nan; allowed: finite"),
        ("wrong", r"raised KeyError: 'length'"),
    ],
)
def test_an_invalid_advantage_is_refused_by_its_name(tmp_path, name, message):
    path = tmp_path / "own.py"
    path.write_text(USER_FILE)
    with pytest.raises(ConfigError, match=rf"algorithm.advantage='{path}:{name}' {message}"):
        compute_advantages(answered([2, 1, 3]), f"{path}:{name}", {})


def test_an_error_names_the_input_that_a_run_lacks(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(USER_FILE)
    with pytest.raises(ConfigError, match=r"advantage asks for state_ids, .*agent.loop=env"):
        compute_advantages(answered([2, 1, 3]), f"{path}:lacking", {})


def test_an_error_names_states_if_a_turn_has_none():
    batch = columns([[1, 0, 1]], token_rewards=[1.0, 0.0, 3.0], state_ids=[7, -1, -1])
    batch = batch.with_columns(group_ids=np.array([3]))
    with pytest.raises(ConfigError, match=r"advantage asks for state_ids, which this run does not"):
        compute_advantages(batch, "gigpo", {})


def test_an_advantage_whose_input_a_run_lacks_is_refused_before_it_starts():
    lacks = r"advantage='gigpo' asks for state_ids, .* not have: agent.loop=environment gives it"
    for loop in ("single_turn", "tools", "user"):
        with pytest.raises(ConfigError, match=lacks):
            check_functions(AlgorithmConfig(advantage="gigpo"), loop)
    for loop in ("environment", "own/loop.py:Loop"):
        check_functions(AlgorithmConfig(advantage="gigpo"), loop)
    algorithm = AlgorithmConfig(advantage="optimal_token_baseline")
    check_functions(algorithm)
    algorithm.correction.use_rollout_log_probs = True
    lacks = r"'optimal_token_baseline' asks for sum_pi_squared, .*use_rollout_log_probs=true leaves"
    with pytest.raises(ConfigError, match=lacks):
        check_functions(algorithm)
