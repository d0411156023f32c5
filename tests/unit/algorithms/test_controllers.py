"""Coefficients that follow a target, rewards of tokens and the tokens of highest entropy."""

from __future__ import annotations

import json

import numpy as np
import pytest

from mcore_rl.algorithms.advantages import add_token_rewards
from mcore_rl.algorithms.aggregation import select_top_entropy
from mcore_rl.algorithms.controllers import Coefficients, measure
from mcore_rl.algorithms.inputs import AdvantageInputs
from mcore_rl.algorithms.kl import compute_reference_kl
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import AlgorithmConfig
from mcore_rl.data.batch import Batch, Jagged


def update(coefficients: Coefficients, batch: Batch):
    return coefficients.update(measure(batch, coefficients.config), len(batch))


def random_batch(seed: int) -> Batch:
    """Up to 5 responses of up to 6 tokens; the last one may be empty, or have no chosen token."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 7, rng.integers(1, 6))
    mask = Jagged.pack([rng.random(n) < 0.7 for n in lengths], np.int8)
    num = len(mask.values)
    columns = {
        name: mask.with_values(rng.normal(-2, 1, num).astype(np.float32))
        for name in ("log_probs", "reference_log_probs", "process_rewards")
    }
    columns["entropy"] = mask.with_values(rng.integers(0, 6, num).astype(np.float32) / 4)
    columns |= {"response_ids": mask.with_values(np.arange(num)), "response_mask": mask}
    return Batch({**columns, "rewards": rng.normal(size=len(mask)).astype(np.float32)})


def kl_by_loops(batch: Batch) -> float:
    """k1: the mean of the means of responses with a chosen token."""
    means = []
    for row, mask in enumerate(batch.jagged("response_mask")):
        policy, reference = (batch.jagged(n)[row] for n in ("log_probs", "reference_log_probs"))
        result = [float(policy[t]) - float(reference[t]) for t in range(len(mask)) if mask[t]]
        means += [sum(result) / len(result)] if result else []
    return sum(means) / len(means) if means else 0.0


def test_the_kl_coefficient_follows_its_target():
    config = AlgorithmConfig(
        kl_coef=0.3, kl_target=0.1, kl_horizon=60, kl_estimator="k1", kl_placement="loss"
    )
    coefficients, expected = Coefficients(config), 0.3
    for seed in range(1000):
        batch = random_batch(seed)
        kl = kl_by_loops(batch)
        used, metrics = update(coefficients, batch)
        assert used.kl_coef == metrics["algorithm/kl_coef"] == pytest.approx(expected, rel=1e-4)
        assert metrics["algorithm/reference_kl"] == pytest.approx(kl, abs=1e-6)
        error = kl / 0.1 - 1
        error = 0.2 if error > 0.2 else -0.2 if error < -0.2 else error
        expected = expected * (1 + error * len(batch) / 60)


def test_the_entropy_coefficient_follows_its_target():
    config = AlgorithmConfig(
        entropy_target=0.6003, entropy_coef=0.01, entropy_coef_step=0.004, entropy_coef_max=0.02
    )
    coefficients, expected, seen = Coefficients(config), 0.01, set()
    for seed in range(1000):
        batch = random_batch(seed)
        mask = batch.jagged("response_mask").values
        result = [float(e) for e, m in zip(batch.jagged("entropy").values, mask, strict=True) if m]
        entropy = sum(result) / len(result) if result else 0.0
        used, metrics = update(coefficients, batch)
        assert metrics["algorithm/entropy"] == pytest.approx(entropy)
        assert used.entropy_coef == pytest.approx(expected if entropy <= 0.6003 else 0.0)
        if entropy < 0.6003:
            expected = min(expected + 0.004, 0.02)
        elif entropy > 0.6003:
            expected = max(expected - 0.004, 0.0)
        seen.add(round(expected, 6))
    assert {0.0, 0.02} < seen


def test_a_run_that_goes_on_has_the_coefficients_it_had():
    config = AlgorithmConfig(
        kl_coef=0.3, kl_target=0.1, kl_horizon=60, entropy_target=0.6, kl_estimator="k1"
    )
    item = Coefficients(config)
    for seed in range(5):
        update(item, random_batch(seed))
    other = Coefficients(config)
    other.load_state_dict(json.loads(json.dumps(item.state_dict())))
    assert update(item, random_batch(9)) == update(other, random_batch(9))
    assert update(item, random_batch(9)) != update(Coefficients(config), random_batch(9))


def test_coefficients_without_a_target_are_those_of_the_settings_now():
    before = Coefficients(AlgorithmConfig(kl_coef=0.3, entropy_coef=0.2))
    config = AlgorithmConfig(kl_coef=0.7, entropy_coef=0.1)
    after = Coefficients(config)
    after.load_state_dict(before.state_dict())
    assert update(after, random_batch(0)) == (config, {})


@pytest.mark.parametrize(("has_process", "coef"), [(True, 0.25), (False, 0.25), (True, 0.0)])
def test_rewards_of_tokens_equal_loops(has_process, coef):
    algorithm = AlgorithmConfig(kl_coef=coef, kl_placement="reward", kl_estimator="k2")
    for seed in range(1000):
        batch = random_batch(seed)
        if not has_process:
            batch = batch.select(*batch.columns.keys() - {"process_rewards"})
        result = add_token_rewards(batch, algorithm)
        assert result.array("rewards") is batch.array("rewards")
        for row, mask in enumerate(batch.jagged("response_mask")):
            policy, reference = (batch.jagged(n)[row] for n in ("log_probs", "reference_log_probs"))
            expected = [0.0] * len(mask)
            left = float(batch.array("rewards")[row])  # by process rewards, for the last token
            for t in range(len(mask)):
                if mask[t]:
                    kl = (float(policy[t]) - float(reference[t])) ** 2 / 2
                    process = float(batch.jagged("process_rewards")[row][t]) if has_process else 0.0
                    left -= process
                    is_last = not any(mask[t + 1 :])
                    expected[t] = process - coef * kl + (left if is_last else 0.0)
            assert result.jagged("token_rewards")[row].tolist() == pytest.approx(expected, abs=1e-6)
            score = sum(expected) if any(mask) else batch.array("rewards")[row]
            assert AdvantageInputs(result).scores[row] == pytest.approx(score, abs=1e-5)


def test_rewards_of_responses_stay_where_nothing_is_of_tokens():
    batch = random_batch(0)
    batch = batch.select(*batch.columns.keys() - {"process_rewards"})
    assert add_token_rewards(batch, AlgorithmConfig(kl_coef=0.1)) is batch


def test_an_estimator_of_another_form_is_refused(tmp_path):
    (tmp_path / "own.py").write_text("def total(log_probs, reference_log_probs):\n    return 1.0\n")
    algorithm = AlgorithmConfig(kl_coef=0.1, kl_estimator=f"{tmp_path}/own.py:total")
    with pytest.raises(ConfigError, match=r"own.py:total' returned float; allowed: a tensor of \["):
        compute_reference_kl(random_batch(0), algorithm)


def test_the_tokens_of_highest_entropy_equal_a_sort():
    # Ties of the last one are in; there is at least one.
    for seed in range(1000):
        batch = random_batch(seed)
        share = float(np.random.default_rng(seed).choice([0.01, 0.2, 0.5, 0.99]))
        mask, entropy = batch.jagged("response_mask"), batch.jagged("entropy")
        result = select_top_entropy(entropy, mask, share).values.tolist()
        chosen = sorted(
            (float(e) for e, m in zip(entropy.values, mask.values, strict=True) if m), reverse=True
        )
        lowest = chosen[max(round(share * len(chosen)), 1) - 1] if chosen else 0.0
        pairs = zip(entropy.values, mask.values, strict=True)
        assert result == [bool(m) and float(e) >= lowest for e, m in pairs]


def test_the_bonus_counts_at_the_target_itself_and_stays_as_it_is():
    config = AlgorithmConfig(entropy_target=0.5, entropy_coef=0.01, entropy_coef_step=0.004)
    coefficients = Coefficients(config)
    for _ in range(2):
        assert coefficients.update({"entropy": 0.5}, 4)[0].entropy_coef == 0.01


def test_the_share_of_tokens_of_highest_entropy_is_the_nearest():
    # Of three tokens 0.5 are two, as Python rounds 1.5, and 0.4 is one.
    entropy = Jagged.pack([[0.1, 0.3, 0.2]], np.float32)
    mask = entropy.with_values(np.ones(3, np.int8))
    for share, selected in ((0.5, [0, 1, 1]), (0.4, [0, 1, 0]), (0.01, [0, 1, 0])):
        assert select_top_entropy(entropy, mask, share).values.tolist() == selected


def test_tokens_that_the_policy_did_not_choose_have_no_kl():
    batch = random_batch(3)
    mask = batch.jagged("response_mask").values
    kl = compute_reference_kl(batch, AlgorithmConfig(kl_estimator="abs")).values
    assert 0 in mask and ((kl != 0) == (mask != 0)).all()
