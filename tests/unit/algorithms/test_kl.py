import math

import pytest
import torch

from mcore_rl.algorithms.kl import KL_ESTIMATORS
from mcore_rl.config.errors import ConfigError


def test_estimators_match_a_case_worked_by_hand():
    log_probs, reference = torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)])
    # r = 0.25 / 0.5 = 1 / 2
    assert KL_ESTIMATORS["k1"](log_probs, reference).item() == pytest.approx(math.log(2))
    assert KL_ESTIMATORS["k2"](log_probs, reference).item() == pytest.approx(math.log(2) ** 2 / 2)
    assert KL_ESTIMATORS["k3"](log_probs, reference).item() == pytest.approx(-0.5 + math.log(2))


@pytest.fixture
def two_policies() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    logits = torch.randn(32, dtype=torch.float64)
    nearby = logits + 0.3 * torch.randn(32, dtype=torch.float64)
    return logits, nearby.log_softmax(0)


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(name, two_policies):
    logits, reference = two_policies
    policy = logits.log_softmax(0)
    expectation = (policy.exp() * KL_ESTIMATORS[name](policy, reference)).sum()
    torch.testing.assert_close(expectation, (policy.exp() * (policy - reference)).sum())


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_gradients_on_policy_samples_are_those_the_module_states(name, two_policies):
    logits, reference = two_policies
    logits.requires_grad_()
    policy = logits.log_softmax(0)
    sampled = policy.exp().detach()  # the expectation over samples; they carry no gradient
    (gradient,) = torch.autograd.grad(
        (sampled * KL_ESTIMATORS[name](policy, reference)).sum(), logits, retain_graph=True
    )
    target = {
        "k1": 0.0 * policy.sum(),
        "k2": (policy.exp() * (policy - reference)).sum(),
        "k3": (reference.exp() * (reference - policy)).sum(),
    }[name]
    torch.testing.assert_close(gradient, torch.autograd.grad(target, logits)[0])


def test_k3_stays_finite_where_the_policies_part():
    log_probs = torch.tensor([-500.0, 0.0], requires_grad=True)
    estimate = KL_ESTIMATORS["k3"](log_probs, torch.tensor([0.0, -500.0]))
    estimate.sum().backward()
    assert estimate.isfinite().all()
    assert log_probs.grad.isfinite().all()


def test_an_unknown_estimator_names_the_setting_and_what_is_allowed():
    with pytest.raises(
        ConfigError, match=r"algorithm\.kl_estimator='k4'.*allowed: .*k1, .*k2, .*k3"
    ):
        KL_ESTIMATORS["k4"]
