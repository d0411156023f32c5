"""Length shaping against its papers, worked by hand, and against verl."""

import math

import numpy as np
import pytest

from mcore_rl.config.schema import RewardConfig
from mcore_rl.rewards.registry import get_reward
from tests.unit.rewards.judging import compute_rewards, response


def punishment(num_tokens: int, longest: int, cache: int) -> float:
    """Equation 13 of DAPO, case by case."""
    if num_tokens <= longest - cache:
        return 0.0
    if num_tokens <= longest:
        return ((longest - cache) - num_tokens) / cache
    return -1.0


@pytest.mark.parametrize(("longest", "cache"), [(20, 5), (16, 16), (7, 1), (20480, 4096)])
def test_overlong_is_equation_13_of_dapo(longest, cache):
    reward = get_reward("overlong", {"buffer_tokens": cache})
    for num_tokens in range(0, 2 * longest + 1, max(1, longest // 100)):
        result = reward("", {}, "stop", num_tokens=num_tokens, max_tokens=longest)
        assert result == {"reward": pytest.approx(punishment(num_tokens, longest, cache))}


@pytest.mark.nightly  # 20 seconds of imports
def test_overlong_is_verls():
    # Its formula of reward_manager/dapo.py, with penalty_factor 1.
    import torch
    from verl import DataProto
    from verl.workers.reward_manager.dapo import DAPORewardManager

    class Tokenizer:
        eos_token = "</s>"

        def decode(self, ids, skip_special_tokens):
            return "x"

    class Buffer:
        enable, len, penalty_factor, log = True, 6, 1.0, False

    manager = DAPORewardManager(
        Tokenizer(), 0, lambda **_: 0.0, max_resp_len=16, overlong_buffer_cfg=Buffer()
    )
    lengths = range(1, 17)
    mask = torch.tensor([[1] + [1] * n + [0] * (16 - n) for n in lengths])
    data = DataProto.from_single_dict(
        {
            "prompts": torch.ones(16, 1, dtype=torch.long),
            "responses": torch.ones(16, 16, dtype=torch.long),
            "attention_mask": mask,
        }
    )
    data.non_tensor_batch = {
        "reward_model": np.array([{"ground_truth": ""}] * 16, dtype=object),
        "data_source": np.array(["x"] * 16, dtype=object),
    }
    expected = manager(data).sum(-1).tolist()
    reward = get_reward("overlong", {"buffer_tokens": 6})
    result = [reward("", {}, "", num_tokens=n, max_tokens=16)["reward"] for n in lengths]
    assert result == pytest.approx(expected)


@pytest.mark.parametrize(
    ("num_tokens", "right", "reward"),
    [
        (0, True, 2.0),
        (8, True, 1.5),
        (4, True, 1 + (1 + math.sqrt(0.5)) / 2),
        (0, False, -10.0),
        (8, False, -5.0),
        (12, False, -10 * (1 - math.sqrt(0.5)) / 2),
        (16, True, -7.0),
        (16, False, -7.0),
    ],
)
def test_cosine_of_short_and_long_right_and_wrong_responses(num_tokens, right, reward):
    """Yeo et al., section 4: right from 2 to 1, wrong from -10 to 0, and -7 at the limit."""
    settings = {
        "term": "right", "right_short": 2.0, "right_long": 1.0, "wrong_short": -10.0,
        "wrong_long": 0.0, "overlong": -7.0,
    }  # fmt: skip
    terms = {
        "right": {"name": "substring", "weight": 0.0},
        "cosine": {"settings": settings},
    }
    text = "7" if right else "8"
    [sample] = compute_rewards(RewardConfig(terms=terms), [text], [response(num_tokens=num_tokens)])
    assert sample.reward == pytest.approx(reward)
    assert sample.reward_parts == {"right": float(right), "cosine": pytest.approx(reward)}
