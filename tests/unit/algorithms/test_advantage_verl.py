"""Every advantage that verl has, against verl's on 1,000 random cases, padded into its tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from verl.trainer.ppo import core_algos

from mcore_rl.algorithms.advantages import compute_advantages
from mcore_rl.data.batch import Batch, Jagged
from tests.nightly import nightly
from tests.unit.algorithms import advantage_oracles as oracles

Tensors = dict[str, Any]


def padded(column: Jagged) -> torch.Tensor:
    """[samples, longest]"""
    rows = [torch.from_numpy(row.astype(np.float64)) for row in column]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def convert_for_verl(batch: Batch) -> Tensors:
    rewards = batch.array("rewards")
    last = [np.flatnonzero(row)[-1:] for row in batch.jagged("response_mask")]
    at_last = [np.zeros(n) for n in batch.jagged("response_ids").lengths]
    for row, place, reward in zip(at_last, last, rewards, strict=True):
        row[place] = reward
    given = (
        batch.jagged("token_rewards") if "token_rewards" in batch else Jagged.pack(at_last, "f8")
    )
    mask = padded(batch.jagged("response_mask"))
    return {
        "token_level_rewards": padded(given) * mask,
        "response_mask": mask,
        "index": batch.array("group_ids"),
        "values": padded(batch.jagged("values")),
        "reward_baselines": torch.from_numpy(batch.array("baseline_rewards")).double(),
        "old_log_probs": padded(batch.jagged("log_probs")),
        "sum_pi_squared": padded(batch.jagged("sum_pi_squared")),
    }


@functools.cache
def fair_cases() -> list[tuple[Batch, Tensors]]:
    """Return cases where verl does the same: no group of one, no response without a step.

    Each sample occurs twice, the second time with other rewards.
    """
    values = []
    for seed in range(1000):
        case = oracles.random_case(seed, nonnegative=False)
        rng = np.random.default_rng(seed)
        item, two = (oracles.build_batch(case) for _ in range(2))
        changed = {"rewards": rng.normal(size=len(two)).astype(np.float32)}
        if case.process:
            tokens = two.jagged("token_rewards")
            changed = {"token_rewards": tokens.with_values(rng.normal(size=len(tokens.values)))}
        both = Batch.concat([item, two.with_columns(**changed)])
        chosen = [row.any() for row in both.jagged("response_mask")]
        if sum(chosen) >= 4:
            batch = both.take(np.flatnonzero(chosen).tolist())
            values.append((batch, convert_for_verl(batch)))
    return values


def choose_all_tokens(batch: Batch) -> Batch:
    """Choose every token: verl has another function for responses with tools."""
    mask = batch.jagged("response_mask")
    return batch.with_columns(response_mask=mask.with_values(np.ones_like(mask.values)))


def gdpo_of_verl(tensors: Tensors, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    mask = tensors["response_mask"]
    keys = ["reward/accuracy", "reward/format"]
    attention = torch.ones(len(mask), mask.shape[1] + 1, dtype=torch.int64)
    return core_algos.compute_gdpo_outcome_advantage(
        tensors["token_level_rewards"],
        mask,
        tensors["index"],
        config={"gdpo_reward_keys": keys, "gdpo_reward_weights": [1.0, 0.5]},
        non_tensor_batch={key: batch.array(key) for key in keys},
        batch={"prompts": torch.ones(len(mask), 1), "attention_mask": attention},
    )


def wrap_verl(name: str, inputs: str, **given: Any) -> Callable[[Tensors, Batch], Any]:
    function = core_algos.get_adv_estimator_fn(name)
    names = ["token_level_rewards", "response_mask", *inputs.split()]

    def call(tensors: Tensors, batch: Batch) -> Any:
        copies = {name: tensors[name] for name in names}
        return function(**copies | {"token_level_rewards": tensors["token_level_rewards"].clone()},
                        **given)  # fmt: skip

    return call


def wrap_verl_by_small_ids(name: str) -> Callable[[Tensors, Batch], Any]:
    """Wrap a function that allocates memory by the largest id."""

    def call(tensors: Tensors, batch: Batch) -> Any:
        ids = np.unique(tensors["index"], return_inverse=True)[1]
        return wrap_verl(name, "index")(tensors | {"index": ids}, batch)

    return call


def gpg_of_verl(tensors: Tensors, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute GPG with the alpha of the paper instead of `m = torch.count_nonzero(scores)`."""
    result = wrap_verl("gpg", "index")(tensors, batch)
    scores = tensors["token_level_rewards"].sum(1).tolist()
    groups: dict[int, set[float]] = {}
    for group, score in zip(tensors["index"].tolist(), scores, strict=True):
        groups.setdefault(group, set()).add(score)
    taught = sum(len(groups[group]) > 1 for group in tensors["index"].tolist())
    scale = max(np.count_nonzero(scores), 1) / max(taught, 1)
    return result[0] * scale, result[1] * scale


PASSK, CONFIG = {"norm_adv_by_std_in_grpo": False}, {"norm_adv_by_std_in_grpo": True}
ENERGY = "index old_log_probs sum_pi_squared"
COMPARED: dict[str, tuple[str, Mapping[str, object], Callable[[Tensors, Batch], Any]]] = {
    "gae": (
        "gae",
        {"gamma": 0.9, "lam": 0.8},
        wrap_verl("gae", "values", gamma=0.9, lam=0.8),
    ),
    "grpo": ("grpo", {}, wrap_verl("grpo", "index")),
    "grpo_vectorized": ("grpo", {}, wrap_verl_by_small_ids("grpo_vectorized")),
    "dr_grpo": (
        "grpo",
        {"normalize_by_std": False},
        wrap_verl("grpo", "index", norm_adv_by_std_in_grpo=False),
    ),
    "grpo_passk": ("grpo_passk", {}, wrap_verl("grpo_passk", "index", config=CONFIG)),
    "grpo_passk without std": (
        "grpo_passk",
        {"normalize_by_std": False},
        wrap_verl("grpo_passk", "index", config=PASSK),
    ),
    "rloo": ("rloo", {}, wrap_verl("rloo", "index")),
    "rloo_vectorized": ("rloo", {}, wrap_verl("rloo_vectorized", "index")),
    "reinforce_plus_plus": (
        "reinforce_plus_plus",
        {"gamma": 0.9},
        wrap_verl("reinforce_plus_plus", "", config=core_algos.AlgoConfig(gamma=0.9)),
    ),
    "reinforce_plus_plus_baseline": (
        "reinforce_plus_plus_baseline",
        {},
        wrap_verl("reinforce_plus_plus_baseline", "index"),
    ),
    "remax": ("remax", {}, wrap_verl("remax", "reward_baselines")),
    "opo": ("opo", {}, wrap_verl("opo", "index")),
    "gpg": ("gpg", {}, gpg_of_verl),
    "gdpo": ("gdpo", {"parts": "accuracy,format=0.5"}, gdpo_of_verl),
    "optimal_token_baseline": (
        "optimal_token_baseline",
        {},
        wrap_verl("optimal_token_baseline", ENERGY),
    ),
    "tir_optimal_token_baseline": (
        "optimal_token_baseline",
        {},
        wrap_verl("tir_optimal_token_baseline", ENERGY),
    ),
}


@pytest.mark.parametrize("part", [slice(0, None, 8), nightly(slice(0, None))], ids=str)
@pytest.mark.parametrize("name", COMPARED)
def test_it_equals_verl(name, part):
    advantage, settings, verl = COMPARED[name]
    assert len(fair_cases()) > 800
    for batch, tensors in fair_cases()[part]:
        if name == "optimal_token_baseline":
            batch = choose_all_tokens(batch)
            tensors = convert_for_verl(batch)
        columns = compute_advantages(batch, advantage, settings)
        chosen = tensors["response_mask"] != 0
        advantages, returns = verl(tensors, batch)
        pairs = [(columns["advantages"], advantages)]
        if "returns" in columns:
            pairs.append((columns["returns"], returns))
        for values, expected in pairs:
            torch.testing.assert_close(
                padded(values)[chosen], expected[chosen].double(), rtol=1e-4, atol=1e-4
            )


@pytest.mark.parametrize("name", ["optimal_token_baseline", "tir_optimal_token_baseline"])
def test_the_advantage_of_a_group_of_one_is_its_return_as_in_verl(name):
    # Of the optimal token baseline: advantages that take a group's mean are 0 there.
    advantage, settings, verl = COMPARED[name]
    for batch, _ in fair_cases()[:50]:
        groups = np.arange(len(batch), dtype=np.int64)
        batch = choose_all_tokens(batch).with_columns(group_ids=groups)
        tensors = convert_for_verl(batch)
        result = padded(compute_advantages(batch, advantage, settings)["advantages"])
        advantages, returns = verl(tensors, batch)
        torch.testing.assert_close(advantages, returns)
        torch.testing.assert_close(result, returns.double(), rtol=1e-4, atol=1e-4)
        assert result.any()
