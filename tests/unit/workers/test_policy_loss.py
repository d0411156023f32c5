"""The loss of an update is the sum of its parts, each by its coefficient."""

from __future__ import annotations

import pytest
import torch

from mcore_rl.config.schema import AlgorithmConfig
from mcore_rl.workers.policy_loss import PolicyLoss, supervised_loss

LOG_PROBS = torch.tensor([-1.0, -2.0, -0.5])
SCORES = {"log_probs": LOG_PROBS, "entropy": torch.tensor([0.3, 0.6, 0.1])}
COLUMNS = {
    "log_probs": LOG_PROBS.clone(),  # on-policy: ratios are 1
    "advantages": torch.tensor([1.0, -1.0, 2.0]),
    "reference_log_probs": LOG_PROBS - 0.5,
}


def test_on_policy_it_is_minus_the_advantage():
    loss, metrics = PolicyLoss(AlgorithmConfig())(SCORES, COLUMNS)
    torch.testing.assert_close(loss, -COLUMNS["advantages"])
    assert "entropy" not in metrics and "reference_kl" not in metrics


def test_the_entropy_is_taken_off_and_the_kl_added():
    config = AlgorithmConfig(entropy_coef=0.5, kl_coef=2.0)
    loss, metrics = PolicyLoss(config)(SCORES, COLUMNS)
    kl = 2.718281828459045**-0.5 - 1 + 0.5  # k3 at a log-ratio of -0.5
    wanted = -COLUMNS["advantages"] + 2.0 * kl - 0.5 * SCORES["entropy"]
    torch.testing.assert_close(loss, wanted)
    assert metrics["reference_kl"][0].item() == pytest.approx(kl, rel=1e-6)
    assert torch.equal(metrics["entropy"], SCORES["entropy"])


def test_supervised_loss_is_the_negative_log_likelihood():
    loss, _ = supervised_loss(SCORES, COLUMNS)
    torch.testing.assert_close(loss, -LOG_PROBS)
