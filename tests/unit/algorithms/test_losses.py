import math

import numpy as np
import pytest
import torch

from mcore_rl.algorithms.inputs import LossInputs
from mcore_rl.algorithms.losses import (
    ValueClipSettings,
    negative_log_likelihood,
    ppo_clip,
    value_clip,
)
from mcore_rl.config.schema import PPOClipSettings

CLIP = PPOClipSettings(clip_ratio_low=0.2, clip_ratio_high=0.3)


def inputs(scores: dict[str, torch.Tensor], **columns: torch.Tensor) -> LossInputs:
    """Build the inputs of a single sequence."""
    [name] = scores
    ids = torch.zeros(len(scores[name]), dtype=torch.int64)
    return LossInputs(scores=scores, columns=columns, sequence_ids=ids, num_sequences=1)


def policy(new: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor) -> LossInputs:
    return inputs({"log_probs": new}, log_probs=old, advantages=advantages)


def value(values: torch.Tensor, old: torch.Tensor, returns: torch.Tensor) -> LossInputs:
    return inputs({"values": values}, values=old, returns=returns)


def loss_at(ratio: float, advantage: float) -> tuple[float, bool, float]:
    """(loss, clipped, gradient) of one token whose probability has changed by `ratio`."""
    old = torch.tensor([-1.5], dtype=torch.float64)
    new = (old + math.log(ratio)).requires_grad_()
    loss, metrics = ppo_clip(policy(new, old, torch.tensor([advantage], dtype=torch.float64)), CLIP)
    loss.sum().backward()
    return loss.item(), bool(metrics["clipped"]), new.grad.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (1.0, 2.0, -2.0, False),  # on policy
        (1.25, 2.0, -2.5, False),  # inside the wider upper bound
        (1.5, 2.0, -2.6, True),  # rewarded, and already 1.3 times as likely
        (0.5, 2.0, -1.0, False),  # rewarded, yet less likely: free to come back
        (0.9, -2.0, 1.8, False),
        (0.5, -2.0, 1.6, True),  # punished, and already at 0.8
        (1.5, -2.0, 3.0, False),  # punished, yet more likely: no bound
    ],
)
def test_ppo_clip_matches_cases_worked_by_hand(ratio, advantage, loss, clipped):
    got_loss, got_clipped, gradient = loss_at(ratio, advantage)
    assert got_loss == pytest.approx(loss)
    assert got_clipped is clipped
    # d(-ratio * A) / d log_prob = -ratio * A, and nothing where the clip holds.
    assert gradient == pytest.approx(0.0 if clipped else -ratio * advantage)


def test_ppo_clip_equals_a_plain_torch_reference():
    torch.manual_seed(0)
    old, advantages = torch.randn(500) - 2, torch.randn(500)
    new = (old + 0.4 * torch.randn(500)).requires_grad_()
    loss, metrics = ppo_clip(policy(new, old, advantages), PPOClipSettings())
    (gradient,) = torch.autograd.grad(loss.mean(), new)

    ratio = torch.exp(new - old)
    reference = torch.max(-advantages * ratio, -advantages * torch.clamp(ratio, 0.8, 1.2))
    torch.testing.assert_close(loss, reference)
    torch.testing.assert_close(gradient, torch.autograd.grad(reference.mean(), new)[0])
    torch.testing.assert_close(metrics["ratio"], torch.exp(new - old).detach())
    assert torch.equal(metrics["clipped"], (gradient == 0))


def test_a_policy_that_ran_away_gives_finite_losses_and_gradients():
    old = torch.zeros(4)
    new = torch.tensor([200.0, 200.0, -200.0, -200.0], requires_grad=True)
    loss, metrics = ppo_clip(policy(new, old, torch.tensor([1.0, -1.0, 1.0, -1.0])), CLIP)
    loss.sum().backward()
    assert loss.isfinite().all()
    assert new.grad.isfinite().all()
    assert metrics["approx_kl"].isfinite().all()


def test_metrics_carry_no_gradient_and_one_entry_a_token():
    new = torch.zeros(3, requires_grad=True)
    _, metrics = ppo_clip(policy(new, torch.zeros(3), torch.ones(3)), CLIP)
    for values in metrics.values():
        assert values.shape == (3,)
        assert not values.requires_grad


def test_the_negative_log_likelihood_of_two_tokens():
    loss, metrics = negative_log_likelihood(inputs({"log_probs": torch.tensor([-0.5, -2.0])}))
    assert loss.tolist() == [0.5, 2.0]
    assert metrics == {}


@pytest.mark.parametrize(
    ("moved_to", "target", "loss", "clipped", "gradient"),
    [  # the old value is 1, the clip 0.5; gradient is V - R, and none where the clip holds
        (1.0, 3.0, 2.0, False, -2.0),  # has not moved
        (1.25, 3.0, 1.53125, False, -1.75),  # inside the clip
        (2.0, 3.0, 1.125, True, 0.0),  # moved 1.0 towards the return: held at 1.5
        (0.0, 3.0, 4.5, False, -3.0),  # moved away: the clipped 0.5 is nearer, so it does not hold
        (0.0, -1.0, 1.125, True, 0.0),  # towards it, downwards: held at 0.5
        (2.0, 1.25, 0.28125, False, 0.75),  # past the return: 1.5 is nearer, free to come back
    ],
)
def test_value_clip_matches_cases_worked_by_hand(moved_to, target, loss, clipped, gradient):
    values = torch.tensor([moved_to], requires_grad=True)
    given = value(values, torch.tensor([1.0]), torch.tensor([target]))
    losses, metrics = value_clip(given, ValueClipSettings(clip_range=0.5))
    losses.sum().backward()
    assert losses.item() == loss
    assert bool(metrics["value_clipped"]) is clipped
    assert metrics["value_error"].item() == (moved_to - target) ** 2
    assert values.grad.item() == pytest.approx(gradient)


def test_value_clip_is_the_larger_of_two_squares_at_each_token():
    rng = np.random.default_rng(0)
    values, old, target = rng.normal(size=(3, 1000))
    given = [torch.from_numpy(column.copy()) for column in (values, old, target)]
    loss, metrics = value_clip(value(given[0].requires_grad_(), *given[1:]), ValueClipSettings(0.5))
    (gradient,) = torch.autograd.grad(loss.sum(), given[0])
    for t in range(1000):
        bounded = min(max(values[t], old[t] - 0.5), old[t] + 0.5)
        squares = (values[t] - target[t]) ** 2, (bounded - target[t]) ** 2
        assert loss[t].item() == pytest.approx(max(squares) / 2)
        is_clipped = squares[1] > squares[0]
        assert bool(metrics["value_clipped"][t]) == is_clipped
        assert gradient[t].item() == pytest.approx(0 if is_clipped else values[t] - target[t])
    few = [column[:50].detach() for column in given]
    assert torch.autograd.gradcheck(
        lambda new: value_clip(value(new, *few[1:]), ValueClipSettings(0.5))[0],
        few[0].requires_grad_(),
    )


def test_value_clip_without_a_bound_is_half_the_squared_error():
    torch.manual_seed(0)
    values, old, target = torch.randn(3, 50)
    loss, metrics = value_clip(value(values, old, target), ValueClipSettings(math.inf))
    torch.testing.assert_close(loss, (values - target) ** 2 / 2)
    assert not metrics["value_clipped"].any()
