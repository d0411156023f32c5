from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from mcore_rl.algorithms.advantages import ADVANTAGES, grpo, token_advantages, uniform_groups
from mcore_rl.algorithms.inputs import AdvantageInputs
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import GRPOSettings
from mcore_rl.data.batch import Batch, Jagged

GAE = f"{Path(__file__).parents[3] / 'examples' / 'gae.py'}:gae"


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
    assert advantages.dtype == np.float32
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


def test_uniform_groups_are_those_whose_rewards_are_all_equal():
    rewards = np.array([1.0, 0.0, 1.0, 1.0, 0.0, 9.0])
    group_ids = np.array([3, 5, 3, 5, 5, 8])
    expected = [True, False, True, False, False, True]
    assert uniform_groups(rewards, group_ids).tolist() == expected


def test_an_unknown_advantage_names_the_setting_and_what_is_allowed():
    with pytest.raises(ConfigError, match=r"algorithm\.advantage='gae' is unknown; allowed: grpo"):
        ADVANTAGES["gae"]


def answered(lengths: list[int], seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    mask = [rng.integers(0, 2, n) for n in lengths]
    responses = Jagged.of([np.arange(n) for n in lengths], np.int64)
    values = rng.normal(size=len(responses.values)).astype(np.float32)
    return Batch(
        {
            "rewards": rng.normal(size=len(lengths)).astype(np.float32),
            "group_ids": np.zeros(len(lengths), np.int64),
            "response_ids": responses,
            "response_mask": Jagged.of(mask, np.int8),
            "values": responses.with_values(values),
        }
    )


def test_the_advantage_of_a_sample_is_that_of_each_of_its_tokens():
    batch = answered([2, 0, 3])
    wanted = grpo(AdvantageInputs(batch), GRPOSettings())
    found = token_advantages(batch, "grpo", {})
    assert found.values.dtype == np.float32
    assert found.values.tolist() == np.repeat(wanted, [2, 0, 3]).tolist()


def test_gae_matches_a_case_worked_by_hand():
    """gamma 0.5, lambda 0.5, reward 2; the policy did not choose the third token.

    deltas: 0 + 0.5 * 3 - 1 = 0.5; 0 + 0.5 * 2 - 3 = -2; 2 + 0 - 2 = 0.
    advantages, from the last: 0; -2 + 0.25 * 0 = -2; 0.5 + 0.25 * -2 = 0.
    """
    rows = Jagged.of([[1.0, 3.0, 9.0, 2.0]], np.float32)
    mask = rows.with_values(np.array([1, 1, 0, 1], np.int8))
    columns = {"response_ids": rows, "values": rows, "response_mask": mask}
    batch = Batch({**columns, "rewards": np.array([2.0], np.float32)})
    found = token_advantages(batch, GAE, {"gamma": 0.5, "lam": 0.5})
    assert found[0].tolist() == [0.0, -2.0, 0.0, 0.0]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.8), (1.0, 1.0), (0.97, 0.0)])
def test_gae_equals_the_sum_of_its_definition_in_plain_torch(gamma, lam):
    batch = answered([5, 1, 0, 17, 8])
    found = token_advantages(batch, GAE, {"gamma": gamma, "lam": lam})
    for row, reward in enumerate(batch.array("rewards")):
        chosen = torch.from_numpy(batch.jagged("response_mask")[row].copy()) != 0
        values = torch.from_numpy(batch.jagged("values")[row].copy()).double()[chosen]
        rewards = torch.zeros(len(values), dtype=torch.float64)
        rewards[-1:] = float(reward)
        deltas = rewards + gamma * torch.cat([values[1:], torch.zeros(len(values[:1]))]) - values
        steps = torch.arange(len(values))
        powers = torch.triu((gamma * lam) ** (steps[None] - steps[:, None]).clamp(min=0).double())
        wanted = torch.zeros(len(chosen), dtype=torch.float64)
        wanted[chosen] = powers @ deltas
        np.testing.assert_allclose(found[row], wanted.numpy(), rtol=1e-5, atol=1e-6)


OWN = """
import numpy as np
from mcore_rl.data.batch import Jagged

def short(inputs):
    return inputs.rewards[1:]

def rows(inputs):
    return Jagged.of([[0.0]] * len(inputs.rewards), np.float32)

def listed(inputs):
    return inputs.rewards.tolist()

def nothing(inputs):
    return inputs.rewards / 0.0 * 0.0

def token_nan(inputs):
    return inputs.values.with_values(np.full(len(inputs.values.values), np.nan))

def wrong(inputs):
    return {}["length"]

def lacking(inputs):
    return inputs.token_rewards
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
def test_what_an_advantage_must_not_return_is_told_by_its_name(tmp_path, name, message):
    path = tmp_path / "own.py"
    path.write_text(OWN)
    with pytest.raises(ConfigError, match=rf"algorithm.advantage='{path}:{name}' {message}"):
        token_advantages(answered([2, 1, 3]), f"{path}:{name}", {})


def test_an_input_that_a_run_lacks_is_named_when_it_is_asked_for(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(OWN)
    with pytest.raises(ConfigError, match=r"advantage asks for token_rewards.*reward.name gives"):
        token_advantages(answered([2, 1, 3]), f"{path}:lacking", {})
