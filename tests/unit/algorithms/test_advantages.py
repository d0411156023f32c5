import numpy as np
import pytest
import torch

from mcore_rl.algorithms.advantages import ADVANTAGES, grpo, uniform_groups
from mcore_rl.config.errors import ConfigError


def test_grpo_matches_a_case_worked_by_hand():
    # Group 7: mean 0.25, sample variance (3 * 0.25^2 + 0.75^2) / 3 = 0.25, so std 0.5.
    # Group 4: mean 2, sample variance (1 + 1) / 1 = 2.
    rewards = np.array([1.0, 1.0, 0.0, 3.0, 0.0, 0.0], dtype=np.float32)
    group_ids = np.array([7, 4, 7, 4, 7, 7])
    expected = [1.5, -(0.5**0.5), -0.5, 0.5**0.5, -0.5, -0.5]
    advantages = grpo(rewards, group_ids, normalize_by_std=True)
    assert advantages.dtype == np.float32
    np.testing.assert_allclose(advantages, expected, rtol=1e-5)


def test_without_normalisation_only_the_mean_is_taken_off():
    advantages = grpo(np.array([1.0, 0.0, 5.0]), np.array([0, 0, 1]), normalize_by_std=False)
    np.testing.assert_array_equal(advantages, [0.5, -0.5, 0.0])


@pytest.mark.parametrize("normalize_by_std", [True, False])
def test_a_group_of_one_and_a_group_of_equal_rewards_have_no_advantage(normalize_by_std):
    # 0.1 is not exact in binary: rounding must not be blown up by the division by 1e-6.
    rewards = np.array([0.1] * 7 + [3.0], dtype=np.float32)
    group_ids = np.array([0] * 7 + [1])
    advantages = grpo(rewards, group_ids, normalize_by_std=normalize_by_std)
    np.testing.assert_allclose(advantages, 0.0, atol=1e-7)


def test_grpo_equals_a_plain_torch_reference():
    rewards = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
    grouped = torch.from_numpy(rewards)
    reference = (grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-6)
    advantages = grpo(rewards.ravel(), np.repeat(np.arange(16), 8), normalize_by_std=True)
    np.testing.assert_allclose(advantages, reference.numpy().ravel(), rtol=1e-5, atol=1e-6)


def test_the_order_of_samples_does_not_matter():
    rng = np.random.default_rng(1)
    rewards, group_ids = rng.normal(size=24), np.repeat(np.arange(6), 4)
    order = rng.permutation(24)
    np.testing.assert_allclose(
        grpo(rewards[order], group_ids[order], normalize_by_std=True),
        grpo(rewards, group_ids, normalize_by_std=True)[order],
        rtol=1e-5,
    )


def test_uniform_groups_are_those_whose_rewards_are_all_equal():
    rewards = np.array([1.0, 0.0, 1.0, 1.0, 0.0, 9.0])
    group_ids = np.array([3, 5, 3, 5, 5, 8])
    expected = [True, False, True, False, False, True]
    assert uniform_groups(rewards, group_ids).tolist() == expected


def test_an_unknown_advantage_names_the_setting_and_what_is_allowed():
    with pytest.raises(ConfigError, match=r"algorithm\.advantage='gae'.*allowed: grpo"):
        ADVANTAGES["gae"]
