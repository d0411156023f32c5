"""Distillation against plain loops in float64, and its gradients."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from mcore_rl.algorithms.aggregation import compute_loss_weights
from mcore_rl.algorithms.distillation import (
    compute_distillation_metrics,
    compute_sampled_kl,
    compute_top_tokens_kl,
)
from mcore_rl.config.schema import AlgorithmConfig, DistillationConfig
from mcore_rl.data.batch import Batch, Jagged
from mcore_rl.trainers.training_batch import add_advantages, add_loss_weights

KINDS = ("reverse_kl", "forward_kl")


def log_probs(rng: np.random.Generator, vocab: int) -> np.ndarray:
    logits = rng.normal(0, 2, vocab)
    return logits - np.log(np.exp(logits).sum())


def kl_by_loops(policy: list[float], teacher: list[float], kind: str) -> float:
    p, q = ([math.exp(x) for x in side] for side in (policy, teacher))
    p.append(1 - sum(p))
    q.append(1 - sum(q))
    if kind == "forward_kl":
        p, q = q, p
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_the_kl_over_likely_tokens_equals_its_definition(kind):
    rng = np.random.default_rng(0)
    for _ in range(1000):
        vocab = int(rng.integers(3, 12))
        policy, teacher = log_probs(rng, vocab), log_probs(rng, vocab)
        top = np.argsort(-teacher)[: rng.integers(1, vocab)]
        sides = torch.from_numpy(policy[top]), torch.from_numpy(teacher[top])
        result = compute_top_tokens_kl(*sides, kind).item()
        expected = kl_by_loops(policy[top].tolist(), teacher[top].tolist(), kind)
        assert result == pytest.approx(expected, rel=1e-9, abs=1e-12)
        p, q = (policy, teacher) if kind == "reverse_kl" else (teacher, policy)
        assert -1e-12 <= result <= (np.exp(p) * (p - q)).sum() + 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_over_all_tokens_it_is_the_whole_kl_with_its_gradient(kind):
    rng = np.random.default_rng(1)
    logits = torch.from_numpy(rng.normal(0, 2, (4, 9))).requires_grad_()
    teacher = torch.from_numpy(rng.normal(0, 2, (4, 9))).log_softmax(-1)
    result = compute_top_tokens_kl(logits.log_softmax(-1), teacher, kind)
    policy = logits.log_softmax(-1)
    sides = (teacher, policy) if kind == "reverse_kl" else (policy, teacher)
    expected = torch.nn.functional.kl_div(*sides, reduction="none", log_target=True).sum(-1)
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-9)
    grads = [torch.autograd.grad(loss.sum(), logits)[0] for loss in (result, expected)]
    torch.testing.assert_close(*grads, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck(kind):
    rng = np.random.default_rng(2)
    logits = torch.from_numpy(rng.normal(0, 1, (3, 7))).requires_grad_()
    teacher = torch.from_numpy(rng.normal(0, 1, (3, 7))).log_softmax(-1)[:, :4]
    assert torch.autograd.gradcheck(
        lambda x: compute_top_tokens_kl(x.log_softmax(-1)[:, :4], teacher, kind), logits
    )


def batch_of(rng: np.random.Generator, num_teachers: int) -> Batch:
    lengths = rng.integers(1, 6, rng.integers(2, 6))
    ids = Jagged.pack([rng.integers(0, 9, n) for n in lengths], np.int64)
    total = len(ids.values)

    def column(*shape: int) -> Jagged:
        return ids.with_values(rng.normal(-2, 1, (total, *shape)).astype(np.float32))

    mask = rng.integers(0, 2, total).astype(np.int8)
    mask[0] = 1
    return Batch(
        {
            "response_ids": ids,
            "response_mask": ids.with_values(mask),
            "log_probs": column(),
            "teacher_log_probs": column(num_teachers),
            "teacher_shares": column(num_teachers),
            "rewards": rng.normal(size=len(lengths)).astype(np.float32),
            "group_ids": np.zeros(len(lengths), np.int64),
        }
    )


def test_the_sampled_kl_is_taken_off_the_advantage():
    rng = np.random.default_rng(3)
    for case in range(1000):
        batch = batch_of(rng, 1 + case % 3)
        result = compute_sampled_kl(batch)
        expected = []
        for t, chosen in enumerate(batch.jagged("response_mask").values):
            policy = float(batch.jagged("log_probs").values[t])
            teachers = batch.jagged("teacher_log_probs").values[t].tolist()
            shares = batch.jagged("teacher_shares").values[t].tolist()
            parts = [w * (policy - other) for w, other in zip(shares, teachers, strict=True)]
            expected.append(sum(parts) if chosen else 0.0)
        np.testing.assert_allclose(result.values, expected, rtol=1e-4, atol=1e-5)
        alone = AlgorithmConfig(distillation=DistillationConfig("sampled_kl", coef=0.5))
        mixed = AlgorithmConfig(
            distillation=DistillationConfig("sampled_kl", coef=0.5, use_reward=True)
        )
        plain = add_advantages(batch, AlgorithmConfig()).jagged("advantages").values
        for config, base in ((alone, 0), (mixed, plain)):
            advantages = add_advantages(batch, config).jagged("advantages").values
            np.testing.assert_allclose(
                advantages, base - 0.5 * np.array(expected), rtol=1e-4, atol=1e-5
            )
        chosen = batch.jagged("response_mask").values != 0
        mean = compute_distillation_metrics(batch)["distillation/sampled_kl"]
        assert mean == pytest.approx(np.array(expected)[chosen].mean(), rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("use_reward", [False, True])
def test_weights_of_a_distillation_loss_alone_and_beside_rewards(use_reward):
    batch = batch_of(np.random.default_rng(4), 1)
    config = AlgorithmConfig(
        distillation=DistillationConfig("reverse_kl", coef=0.5, use_reward=use_reward)
    )
    result, _ = add_loss_weights(batch, config)
    weights = compute_loss_weights(batch.jagged("response_mask"), "token_mean").values
    np.testing.assert_array_equal(result.jagged("loss_weights").values, weights * use_reward)
    np.testing.assert_array_equal(result.jagged("distillation_weights").values, weights * 0.5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_rest_has_a_probability_of_a_millionth_at_least(kind):
    # One side has all of its probability on the token, where the KL would have no bound.
    sure, half = torch.zeros(1), torch.tensor([0.5]).log()
    sides = (half, sure) if kind == "reverse_kl" else (sure, half)
    expected = 0.5 * math.log(0.5) + 0.5 * (math.log(0.5) - math.log(1e-6))
    assert compute_top_tokens_kl(*sides, kind).item() == pytest.approx(expected, rel=1e-5)
