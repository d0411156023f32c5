import math

import pytest
import torch

from mcore_rl.algorithms.inputs import LossInputs
from mcore_rl.algorithms.kl import KL_ESTIMATORS
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import AlgorithmConfig, CorrectionConfig
from mcore_rl.trainers.policy_loss import PolicyLoss


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


def compute_by_formula(name: str, policy: float, reference: float) -> float:
    log_r = reference - policy
    k3 = math.exp(max(-20.0, min(20.0, log_r))) - 1 - max(-20.0, min(20.0, log_r))
    values = {"k1": -log_r, "k2": log_r**2 / 2, "k3": k3, "low_variance": min(k3, 10.0)}
    return (values | {"abs": abs(log_r)})[name.removesuffix("+")]


@pytest.mark.parametrize("name", sorted(KL_ESTIMATORS.names))
def test_an_estimator_and_its_gradient_equal_its_formula(name):
    # Those with a + have the gradient of k2; gradcheck has the others.
    torch.manual_seed(1)
    policy, reference = 4 * torch.randn(2, 1000, dtype=torch.float64)
    policy.requires_grad_()
    result = KL_ESTIMATORS[name](policy, reference)
    pairs = zip(policy.tolist(), reference.tolist(), strict=True)
    expected = torch.tensor(
        [compute_by_formula(name, *pair) for pair in pairs], dtype=torch.float64
    )
    torch.testing.assert_close(result, expected)
    if name.endswith("+"):
        torch.testing.assert_close(
            torch.autograd.grad(result.sum(), policy)[0], (policy - reference).detach()
        )
    else:
        few = [x[:50].detach().requires_grad_() for x in (policy, reference)]
        assert torch.autograd.gradcheck(KL_ESTIMATORS[name], few)


def test_k3_with_the_ratio_has_the_gradient_of_the_kl_whatever_policy_generated(two_policies):
    """Over all tokens, each as often as the server's policy has it."""
    logits, reference = two_policies
    server = (logits + 0.5 * torch.randn(32, dtype=torch.float64)).log_softmax(0)
    logits.requires_grad_()
    policy = logits.log_softmax(0)
    inputs = LossInputs(
        scores={"log_probs": policy},
        columns={"reference_log_probs": reference, "rollout_log_probs": server},
        sequence_ids=torch.arange(32),
        num_sequences=32,
    )
    config = AlgorithmConfig(kl_coef=1.0, correction=CorrectionConfig(unbiased_kl=True))
    kl = PolicyLoss(config)._compute_reference_kl(inputs)
    exact = (policy.exp() * (policy - reference)).sum()
    expected = (server.exp() * kl).sum()
    torch.testing.assert_close(expected, exact)
    gradients = [
        torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (expected, exact)
    ]
    torch.testing.assert_close(*gradients)
