"""Every loss that is a sum over tokens, in float64: the parts of all ranks are the whole batch.

The engine's own functions split, pack, count and weigh; only the scores are given, not computed.
On the other side all tokens are in one place, and weights are those of the definitions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from functools import partial
from typing import Any

import numpy as np
import pytest
import ranks
import torch

from mcore_rl.algorithms.aggregation import AGGREGATIONS
from mcore_rl.algorithms.inputs import LOSS_WEIGHTS, LossInputs, get_loss_name, is_prepared
from mcore_rl.algorithms.kl import KL_ESTIMATORS
from mcore_rl.algorithms.losses import (
    LOSSES,
    ValueClipSettings,
    negative_log_likelihood,
    value_clip,
)
from mcore_rl.config.rules_algorithm import TOP_TOKEN_LOSSES
from mcore_rl.config.schema import AlgorithmConfig, DistillationConfig, Layout
from mcore_rl.data.batch import Batch, Jagged
from mcore_rl.engine.base import LossFunction
from mcore_rl.engine.megatron import device
from mcore_rl.parallel.balance import Parts
from mcore_rl.parallel.groups import initialize_groups
from mcore_rl.trainers.policy_loss import PolicyLoss
from mcore_rl.trainers.training_batch import add_loss_weights, add_prepared_columns

LENGTH = 7  # of sequence_sum_fixed_length
COEFS = {"kl_weights": 0.3, "entropy_weights": 0.2, "cross_entropy_weights": 0.1}
DISTILLATION_COEF, NUM_TEACHERS, TOP = 0.4, 2, 3
# Losses without settings of an algorithm, of a value model and of supervised training.
PLAIN_LOSSES: dict[str, LossFunction] = {
    "value_clip": partial(value_clip, settings=ValueClipSettings(0.2)),
    "nll": negative_log_likelihood,
}
SCORES = ("log_probs", "entropy", "values", "chosen_log_probs")
# Rows of each data-parallel rank, in its micro-batches.
SHARES = {
    "uneven": [[[4, 0, 7, 11], [], [2]], [list(range(8, 11)), [1, 3, 5, 6, 12, 13], [14, 15]]],
    "empty": [[[]], [list(range(9)), list(range(9, 16))]],
}
NUM_TOKENS = 78
LAYOUT = Layout(dp=2, cp=2)
Sums = dict[str, torch.Tensor]  # loss streams, and gradients by score


def made_batch() -> Batch:
    """One sample has no token to train on, one has one token in all, and not all are chosen."""
    rng = np.random.default_rng(5)
    lengths = rng.integers(1, 12, 16)
    lengths[3] = 1
    assert lengths.max() > 8  # guards: sequences of several chunks on each CP rank
    total, offsets = int(lengths.sum()), np.concatenate([[0], lengths.cumsum()])
    assert total == NUM_TOKENS

    def tokens(values: Any) -> Jagged:
        return Jagged(np.asarray(values), offsets)

    def add_noise(column: Jagged, spread: float) -> Jagged:
        return column.with_values(column.values + rng.normal(0, spread, total))

    def top() -> Any:
        """Log-probs of the likeliest tokens; others have the rest."""
        return np.log(rng.dirichlet(np.ones(TOP + 1), total * NUM_TEACHERS)[:, :TOP])

    chosen = tokens((rng.random(total) < 0.7).astype(np.float64))
    chosen[2][:], chosen[3][:] = 0, 1
    new, value = tokens(-rng.exponential(1.0, total)), tokens(rng.normal(size=total))
    return Batch(
        {
            "prompt_ids": Jagged.pack([[1] * n for n in rng.integers(1, 7, 16)], np.int64),
            "response_ids": tokens(np.ones(total, np.int64)),
            "response_mask": chosen,
            "log_probs": add_noise(new, 0.3),
            "rollout_log_probs": add_noise(new, 0.4),
            "reference_log_probs": add_noise(new, 0.5),
            "correction_weights": tokens(rng.choice([0, 0.5, 1.5], total)),
            "advantages": tokens(rng.normal(size=total)),
            "values": add_noise(value, 0.3),
            "returns": add_noise(value, 0.5),
            "rewards": rng.integers(0, 2, 16).astype(np.float64),
            "teacher_shares": tokens(rng.dirichlet(np.ones(NUM_TEACHERS), total)),
            "teacher_top_log_probs": tokens(top().reshape(total, NUM_TEACHERS, TOP)),
            "new/chosen_log_probs": tokens(top().reshape(total, -1)),
            "new/log_probs": new,
            "new/entropy": tokens(rng.exponential(1.0, total)),
            "new/values": value,
            "place": tokens(np.arange(total)),
        }
    )


def cases() -> dict[str, tuple[LossFunction, AlgorithmConfig]]:
    """Every loss with every aggregation; every estimate of the KL, entropy and cross entropy; and
    distillation."""
    policy = {name: {"loss": name, "loss_settings": settings(name)} for name in LOSSES.names}
    kl = {f"kl {name}": {"loss": "gspo", "kl_estimator": name} for name in KL_ESTIMATORS.names}
    distilled = {
        name: {
            "loss": "gspo",
            "distillation": DistillationConfig(name, DISTILLATION_COEF, TOP, use_reward=True),
        }
        for name in TOP_TOKEN_LOSSES
    }
    named_cases: dict[str, tuple[LossFunction, AlgorithmConfig]] = {}
    for mode in AGGREGATIONS.names:
        lengths = {"length": LENGTH} if mode == "sequence_sum_fixed_length" else {}
        aggregation = {"loss_aggregation": mode, "loss_aggregation_settings": lengths}
        for name, keys in (policy | kl | distilled).items():
            coefs = {f"{n.removesuffix('_weights')}_coef": coef for n, coef in COEFS.items()}
            config = AlgorithmConfig(**keys, **aggregation, **coefs)
            named_cases[f"{name}/{mode}"] = PolicyLoss(config), config
        plain = AlgorithmConfig(**aggregation)
        named_cases |= {f"{name}/{mode}": (loss, plain) for name, loss in PLAIN_LOSSES.items()}
    return named_cases


def settings(name: str) -> dict[str, Any]:
    """Return settings that a loss needs, and a share of tokens that selects some of these few."""
    kind = LOSSES.get_settings_class(name)
    known = fields(kind) if kind is not None else ()
    needed = {f.name: 0.3 for f in known if f.default is MISSING and f.default_factory is MISSING}
    return needed | {f.name: 0.3 for f in known if f.name == "fraction"}


def input_batch(name: str, config: AlgorithmConfig) -> Batch:
    """The mini-batch as the driver sends it."""
    batch = made_batch()
    if name.partition("/")[0] in PLAIN_LOSSES:
        return add_loss_weights(batch.drop_columns("correction_weights"), config)[0]
    batch, _ = add_loss_weights(batch, config)
    if is_prepared(LOSSES[config.loss]):
        current = {"current_log_probs": batch["new/log_probs"], "entropy": batch["new/entropy"]}
        batch = add_prepared_columns(batch.with_columns(**current), config, [3])
    return batch


def sum_all_tokens(name: str, loss: LossFunction, config: AlgorithmConfig) -> Sums:
    """The same of all tokens in one place, with weights in float64."""
    batch = input_batch(name, config)
    jagged = {n: c for n, c in batch.columns.items() if isinstance(c, Jagged) and n != "prompt_ids"}
    columns = {n: torch.from_numpy(c.values.copy()) for n, c in jagged.items()}
    rows = torch.from_numpy(np.repeat(np.arange(len(batch)), batch.jagged("place").lengths))
    scores = {n: columns[f"new/{n}"].requires_grad_() for n in SCORES}
    losses, _ = loss(
        LossInputs(scores=scores, columns=columns, sequence_ids=rows, num_sequences=len(batch))
    )
    chosen = columns["response_mask"] != 0
    if not isinstance(losses, Mapping):
        sums = {"loss": (losses * defined_weights(config.loss_aggregation, chosen, rows)).sum()}
    else:
        sums = {}
        for column, value in losses.items():
            mask = ~chosen if column == "cross_entropy_weights" else chosen
            weights = defined_weights(config.loss_aggregation, mask, rows)
            if column == LOSS_WEIGHTS:
                weights = weights * (columns["correction_weights"] != 0)
            coef = (COEFS | {"distillation_weights": DISTILLATION_COEF}).get(column, 1)
            sums[get_loss_name(column)] = (coef * weights * value).sum()
        assert len(sums) == 4 + (config.distillation.loss != "off")
        sums["loss"] = torch.stack([*sums.values()]).sum()
    sums["loss"].backward()
    gradients = {n: score.grad for n, score in scores.items() if score.grad is not None}
    return {n: value.detach() for n, value in sums.items()} | gradients


def defined_weights(mode: str, chosen: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """docs/algorithms.md, aggregation: of the mean over the tokens or over the sequences."""
    counts = torch.zeros(int(rows.max()) + 1, dtype=torch.float64)
    counts = counts.index_add(0, rows, chosen.double())
    num_sequences, sequence_counts = (counts > 0).sum(), counts[rows].clamp(min=1)
    return (
        chosen
        / {
            "token_mean": counts.sum(),
            "sequence_mean_token_mean": num_sequences * sequence_counts,
            "sequence_mean_token_sum": num_sequences,
            "sequence_sum_fixed_length": num_sequences * LENGTH,
        }[mode]
    )


@ranks.spawn_on_ranks()
def split(layout: Layout, shares: str, is_normalized_per_rank: bool = False) -> ranks.Result:
    """Return what this rank adds in each case: to the sums, and to the gradients of all tokens.

    `is_normalized_per_rank` is the fault: each data-parallel rank normalises over its own tokens.
    """
    device.install(1)
    from megatron.core import parallel_state

    initialize_groups(layout, "gloo", seed=0)
    parts = SHARES[shares][parallel_state.get_data_parallel_rank()]
    rows = sorted(row for part in parts for row in part)
    results = {}
    for name, (loss, config) in cases().items():
        share = input_batch(name, config).take(rows)
        if is_normalized_per_rank and rows:
            weights = add_loss_weights(share, config)[0].jagged(LOSS_WEIGHTS)
            share = share.with_columns(loss_weights=weights.with_values(weights.values / layout.dp))
        results[name] = _added(share, [[rows.index(row) for row in part] for part in parts], loss)
    return results


def _added(batch: Batch, parts: Parts, loss: LossFunction) -> Sums:
    """By the engine's functions, from a batch to the loss that Megatron takes the gradient of."""
    from mcore_rl.engine.megatron.packing import read_pack_split
    from mcore_rl.engine.megatron.step import compute_training_loss, get_data_group
    from mcore_rl.engine.packing import pack_samples
    from mcore_rl.engine.steps import count_tokens

    cpu = torch.device("cpu")
    micros = pack_samples(batch, parts, read_pack_split(), cpu)
    counts, sums = count_tokens(micros, cpu, get_data_group()), {}
    for micro in micros:
        scores = {n: micro.columns[f"new/{n}"].clone().requires_grad_() for n in SCORES}
        head = partial(_given, scores)
        total, _, result = compute_training_loss(head, loss, counts, None, micro, torch.zeros(1))
        total.backward()
        for name, value in result.items():
            if name == "loss" or name.endswith("_loss"):
                sums[name] = sums.get(name, 0) + value
        for name, score in scores.items():
            if score.grad is not None:
                zeros = score.new_zeros((NUM_TOKENS, *score.shape[1:]))
                gradient = sums.setdefault(name, zeros)
                gradient[micro.columns["place"]] = score.grad / counts.total
    return sums


def _given(scores: Sums, *_: object) -> Sums:
    return scores


def assert_sums_of_all_tokens(by_rank: list[ranks.Result]) -> None:
    """All cases, each sum and the gradient of each score within 1e-6."""
    for name, (loss, config) in cases().items():
        expected = sum_all_tokens(name, loss, config)
        assert any(value.norm() for value in expected.values())
        for key, value in expected.items():
            actual = sum(result[name].get(key, 0) for result in by_rank)
            assert (actual - value).norm() <= 1e-6 * value.norm(), f"{key} of {name}"


@pytest.mark.parametrize("shares", SHARES)
def test_each_loss_and_its_gradient_are_the_sum_over_ranks(shares):
    assert_sums_of_all_tokens(split(LAYOUT, shares))


def test_weights_from_the_tokens_of_a_rank_alone_are_refused():
    with pytest.raises(AssertionError, match="loss of"):
        assert_sums_of_all_tokens(split(LAYOUT, "uneven", is_normalized_per_rank=True))
