"""Means over tokens of an update, however its tokens are distributed over mini-batches."""

from __future__ import annotations

import numpy as np
import pytest

from mcore_rl.config.schema import AlgorithmConfig, CriticConfig, RLConfig
from mcore_rl.data.batch import Batch, Jagged
from mcore_rl.trainers.steps import with_each, with_loss_weights
from mcore_rl.trainers.update_metrics import StepMetrics, of_update
from mcore_rl.trainers.updates import update, update_critic

# Of the mini-batch with one trained token, and of the one with 99.
FEW = {"ratio": 0.0, "reference_kl": 0.0, "moe/aux_loss": 0.0, "loss": 0.0, "kl_loss": 0.0}
MANY = {"ratio": 1.0, "reference_kl": 1.0, "moe/aux_loss": 1.0, "loss": 1.0, "kl_loss": 1.0}
OF_STEPS = {"grad_norm": 3.0, "lr": 0.1, "moe/max_expert_load": 2.0, "num_skipped_steps": 1.0}


class Model:
    """Reports by the number of trained tokens of what it is given."""

    def update(
        self, batch: Batch, *, sizes: list[int], **_: object
    ) -> list[list[dict[str, float]]]:
        ends = np.cumsum(sizes).tolist()
        parts = [batch.take(range(e - n, e)) for n, e in zip(sizes, ends, strict=True)]
        counts = [np.count_nonzero(part.jagged("loss_weights").values) for part in parts]
        return [[{**(FEW if count == 1 else MANY), **OF_STEPS} for count in counts]]


def batch() -> Batch:
    """Two groups of one response each: 1 token and 99; prompts of 3 tokens and of 1."""
    responses = Jagged.pack([[1], [1] * 99], np.int64)
    prompts = Jagged.pack([[1, 1, 1], [1]], np.int64)
    of_tokens = responses.with_values(np.ones(100, np.float32))
    return Batch(
        {
            "group_ids": np.array([0, 1]),
            "prompt_ids": prompts,
            "response_ids": responses,
            "response_mask": responses.with_values(np.ones(100, np.int8)),
            "values": of_tokens,
            "returns": of_tokens,
        }
    )


def test_mini_batches_of_1_and_of_99_tokens_have_the_mean_of_100_tokens():
    algorithm = AlgorithmConfig(num_mini_batches=2, kl_coef=0.1)
    weighed, counts = with_each(batch(), 2, [0], with_loss_weights, algorithm)
    found = update(Model(), weighed, counts, algorithm, temperature=1.0, seed=[0])
    assert found == pytest.approx(
        {
            "actor/ratio": 0.99,
            "actor/reference_kl": 0.99,
            "actor/moe/aux_loss": 100 / 104,  # over prompts, too
            "actor/loss": 0.5,  # sums that belong to a mini-batch
            "actor/kl_loss": 0.5,
            "actor/grad_norm": 3.0,
            "actor/lr": 0.1,
            "actor/moe/max_expert_load": 2.0,
            "actor/num_skipped_steps": 2.0,
        }
    )


def test_those_of_a_critic_are_means_over_its_tokens_too():
    config = RLConfig(critic=CriticConfig())
    config.algorithm.num_mini_batches = 2
    found = update_critic(Model(), batch(), config, seed=[0])
    assert (found["critic/ratio"], found["critic/loss"]) == pytest.approx((0.99, 0.5))


def test_a_metric_is_weighted_by_the_tokens_of_its_own_loss():
    """Where it has none of its own, by those of the policy's; over the steps that have it."""
    first = StepMetrics({"entropy": 1.0, "mine": 1.0}, {"loss_weights": 1, "kl_weights": 9}, 10)
    second = StepMetrics(
        {"entropy": 2.0, "mine": 2.0, "reference_kl": 5.0},
        {"loss_weights": 3, "kl_weights": 1, "entropy_weights": 4},
        10,
    )
    found = of_update([first, second])
    wanted = {"entropy": 9 / 5, "mine": 7 / 4, "reference_kl": 5.0}
    assert found == pytest.approx(wanted)


def test_a_mean_over_no_token_is_none():
    step = StepMetrics({"ratio": 0.0, "kl_loss": 1.0}, {"loss_weights": 0, "kl_weights": 2}, 5)
    assert of_update([step]) == {"kl_loss": 1.0}
