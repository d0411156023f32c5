"""Rollout correction against loops over tokens in float64, and the settings that are refused."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mcore_rl.algorithms.correction import RULES as RULES_BY_NAME
from mcore_rl.algorithms.correction import apply_correction, check_rules, compute_mismatch
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import CorrectionConfig
from mcore_rl.data.batch import Batch, Jagged
from tests.unit.algorithms.correction_cases import RULES, random_batch, random_bound

NOT_NORMALISED = ("token_binary_kl", "negative_sequence_k1")


def sequences(batch: Batch) -> list[list[tuple[float, float, float]]]:
    """Return (trainer, server, advantage) of the chosen tokens of each sequence."""
    names = ("log_probs", "rollout_log_probs", "advantages")
    values = []
    for row, mask in enumerate(batch.jagged("response_mask")):
        columns = [batch.jagged(name)[row] for name in names]
        values.append([tuple(float(c[t]) for c in columns) for t in range(len(mask)) if mask[t]])
    return values


def exp(log: float) -> float:
    return math.exp(max(-20.0, min(20.0, log)))


def weights_by_loops(batch: Batch, config: CorrectionConfig) -> tuple[list[float], list[bool]]:
    """Return the weight of each chosen token, and whether it was beyond a bound."""
    weights, beyond, starts = [], [], []
    for tokens in sequences(batch):
        logs = [trainer - server for trainer, server, _ in tokens]
        starts += [len(weights)] if tokens else []
        for log in logs:
            ratio = {
                "off": 1.0,
                "token": exp(log),
                "sequence": exp(sum(logs)),
                "geometric": exp(sum(logs) / len(logs)),
            }[config.level]
            high = ratio > config.weight_max and config.level != "off"
            low = ratio < config.weight_min and config.method == "mask" and config.level != "off"
            beyond.append(high or low)
            cut = config.weight_max if config.method == "truncate" else 0.0
            weights.append(cut if high or low else ratio)
    if config.normalize and config.level != "off" and any(weights):
        each = weights if config.level == "token" else [weights[start] for start in starts]
        mean = sum(each) / len(each)
        weights = [weight / mean for weight in weights]
    return weights, beyond


def estimate(kind: str, trainer: float, server: float) -> float:
    log = max(-20.0, min(20.0, trainer - server))
    return {"k1": log, "k2": log * log / 2, "k3": math.exp(log) - 1 - log}[kind]


def binary_kl(p: float, q: float) -> float:
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def accept_by_loops(batch: Batch, rule: str, bound: float | list[float]) -> list[bool]:
    result = []
    for tokens in sequences(batch):
        if rule == "veto":
            fine = all(
                bound[0] <= exp(trainer - server) <= bound[1] for trainer, server, _ in tokens
            )
            result += [fine] * len(tokens)
        elif rule == "token_binary_kl":
            for trainer, server, _ in tokens:
                p, q = (min(max(math.exp(x), 1e-6), 1 - 1e-6) for x in (trainer, server))
                result.append(binary_kl(p, q) <= bound and binary_kl(q, p) <= bound)
        elif rule == "negative_sequence_k1":
            drift = sum(server - trainer for trainer, server, _ in tokens) / max(len(tokens), 1)
            result += [not (advantage < 0 and drift > bound) for _, _, advantage in tokens]
        else:
            level, _, kind = rule.rpartition("_")
            values = [estimate(kind, trainer, server) for trainer, server, _ in tokens]
            if level != "token" and values:
                over = {"sum": sum, "mean": lambda v: sum(v) / len(v), "max": max}
                values = [over[level.removeprefix("sequence_")](values)] * len(values)
            low, high = (-math.inf, bound) if kind != "k1" else [math.log(b) for b in bound]
            result += [low <= value <= high for value in values]
    return result


def chosen(batch: Batch, column: str) -> list[float]:
    return batch.jagged(column).values[batch.jagged("response_mask").values != 0].tolist()


def random_settings(rng: np.random.Generator) -> CorrectionConfig:
    rules = rng.permutation(RULES)[: rng.integers(0, 4)].tolist()
    return CorrectionConfig(
        level=str(rng.choice(["off", "token", "sequence", "geometric"])),
        method=str(rng.choice(["truncate", "mask"])),
        weight_min=float(rng.choice([0.0, 0.5])),
        weight_max=float(rng.choice([1.0, 2.0, 5.0])),
        normalize=bool(rng.random() < 0.3),
        reject={rule: random_bound(rng, rule) for rule in rules},
    )


def test_every_rule_has_a_case():
    assert set(RULES) == set(RULES_BY_NAME)


def test_weights_masks_and_metrics_equal_loops_over_tokens():
    used = 0
    for seed in range(1000):
        rng = np.random.default_rng(seed)
        batch, config = random_batch(rng), random_settings(rng)
        corrected, metrics = apply_correction(batch, config)
        num = sum(chosen(batch, "response_mask"))
        if (config.level == "off" and not config.reject) or not num:
            assert corrected is batch and metrics == {}
            continue
        weights, beyond = weights_by_loops(batch, config)
        selected = [True] * len(weights)
        for rule, bound in config.reject.items():
            passes = accept_by_loops(batch, rule, bound)
            assert metrics[f"correction/{rule}"] == pytest.approx(1 - sum(passes) / num)
            if rule in NOT_NORMALISED:
                weights = [w if fine else 0.0 for w, fine in zip(weights, passes, strict=True)]
            else:
                selected = [item and other for item, other in zip(selected, passes, strict=True)]
        assert chosen(corrected, "policy_mask") == selected, seed
        assert chosen(corrected, "correction_weights") == pytest.approx(weights, rel=1e-6), seed
        unchosen = batch.jagged("response_mask").values == 0
        for column in ("policy_mask", "correction_weights"):
            assert not corrected.jagged(column).values[unchosen].any()
            assert corrected.jagged(column).values.dtype == np.float32
        trained = sum(k and w != 0 for k, w in zip(selected, weights, strict=True))
        assert metrics["correction/rejected_tokens"] == pytest.approx(1 - trained / num)
        if config.level != "off":
            assert metrics["correction/clipped"] == pytest.approx(sum(beyond) / num)
        used += 0 < trained < num
    assert used > 150


def test_the_mismatch_equals_loops_over_tokens():
    for seed in range(1000):
        batch = random_batch(np.random.default_rng(seed))
        tokens = sequences(batch)
        logs = [trainer - server for row in tokens for trainer, server, _ in row]
        if not logs:
            assert compute_mismatch(batch) == {}
            continue
        metrics = {
            n.removeprefix("mismatch/"): value for n, value in compute_mismatch(batch).items()
        }
        assert metrics["kl"] == pytest.approx(-sum(logs) / len(logs))
        k3 = [exp(log) - 1 - max(-20.0, min(20.0, log)) for log in logs]
        assert metrics["k3_kl"] == pytest.approx(sum(k3) / len(k3), rel=1e-6, abs=1e-12)
        for percent in (1, 50, 99):
            place = (len(logs) - 1) * percent / 100
            low, high = sorted(logs)[math.floor(place)], sorted(logs)[math.ceil(place)]
            expected = low + (high - low) * (place - math.floor(place))
            assert metrics[f"log_ratio_p{percent:02}"] == pytest.approx(expected, abs=1e-12)
        full = [exp(sum(trainer - server for trainer, server, _ in row)) for row in tokens if row]
        for name, ratios in {"": [exp(log) for log in logs], "_sequences": full}.items():
            share = sum(ratios) ** 2 / (len(ratios) * sum(r * r for r in ratios))
            assert metrics[f"effective_sample_size{name}"] == pytest.approx(share)


def test_samples_in_another_order_have_the_same_weights():
    for seed in range(100):
        rng = np.random.default_rng(seed)
        batch, config = random_batch(rng), random_settings(rng)
        order = rng.permutation(len(batch)).tolist()
        item, metrics = apply_correction(batch, config)
        other, same = apply_correction(batch.take(order), config)
        assert metrics == pytest.approx(same)
        for column in item.columns.keys() - batch.columns.keys():
            np.testing.assert_allclose(
                other.jagged(column).values, item.jagged(column).take(order).values, rtol=1e-6
            )


def build_from_ratios(rows: list[list[float]]) -> Batch:
    """Build a batch in which the server gives each token a probability of a tenth."""
    column = Jagged.pack(rows, np.float32)
    server = np.full(len(column.values), math.log(0.1), np.float32)
    return Batch(
        {
            "log_probs": column.with_values((server + np.log(column.values)).astype(np.float32)),
            "rollout_log_probs": column.with_values(server),
            "response_mask": column.with_values(np.ones(len(server), np.int8)),
        }
    )


@pytest.mark.parametrize(
    ("settings", "weights", "mask"),
    [
        ({"level": "token", "weight_max": 2.0}, [0.5, 2.0, 1.0], [1, 1, 1]),
        ({"level": "sequence", "weight_max": 2.0}, [2.0, 2.0, 1.0], [1, 1, 1]),
        ({"level": "geometric", "weight_max": 2.0}, [2.0**0.5] * 2 + [1.0], [1, 1, 1]),
        (
            {"level": "token", "method": "mask", "weight_min": 0.6, "weight_max": 5.0},
            [0.0, 4.0, 1.0],
            [1, 1, 1],
        ),
        ({"reject": {"sequence_mean_k1": [0.9, 1.1]}}, [1.0, 1.0, 1.0], [0, 0, 1]),
        ({"reject": {"veto": [0.4, 3.0]}}, [1.0, 1.0, 1.0], [0, 0, 1]),
    ],
)
def test_a_case_worked_by_hand(settings, weights, mask):
    # A sequence of the ratios 1/2 and 4, of product 2, and one of the ratio 1.
    corrected, _ = apply_correction(
        build_from_ratios([[0.5, 4.0], [1.0]]), CorrectionConfig(**settings)
    )
    assert corrected.jagged("correction_weights").values.tolist() == pytest.approx(
        weights, rel=1e-6
    )
    assert corrected.jagged("policy_mask").values.tolist() == mask


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reject": {"token_k4": 1}}, r"reject.token_k4 is no rule; allowed: token_k1, "),
        ({"reject": {"sequence_max_k1": [0.5, 2]}}, r"sequence_max_k1 is no rule"),
        ({"reject": {"token_k1": 2.0}}, r"reject.token_k1=2.0; allowed: two ratios"),
        ({"reject": {"token_k1": [2.0, 0.5]}}, r"token_k1=\[2.0, 0.5\]; allowed: two ratios"),
        ({"reject": {"veto": [0.0, 2.0]}}, r"reject.veto=\[0.0, 2.0\]; allowed: two ratios"),
        ({"reject": {"token_k3": [0.1, 2.0]}}, r"token_k3=\[0.1, 2.0\]; allowed: a number above 0"),
        ({"reject": {"token_k3": "0.1"}}, r"token_k3='0.1'; allowed: a number above 0"),
        ({"reject": {"token_k3": math.nan}}, r"token_k3=nan; allowed: a number above 0"),
    ],
)
def test_rules_and_bounds_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        check_rules(CorrectionConfig(**settings))


def test_a_ratio_that_equals_a_bound_is_within_it():
    column = Jagged.pack([[-1.0, -1.0]], np.float64)
    names = ("log_probs", "rollout_log_probs", "advantages")
    batch = Batch(dict.fromkeys(names, column) | {"response_mask": column})
    for bounds in ({"weight_min": 1.0}, {"weight_max": 1.0}):
        config = CorrectionConfig(level="token", method="mask", **bounds)
        corrected, metrics = apply_correction(batch, config)
        assert corrected.jagged("correction_weights").values.tolist() == [1, 1]
        assert metrics["correction/clipped"] == 0
