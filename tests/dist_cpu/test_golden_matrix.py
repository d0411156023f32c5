"""Every axis alone, in pairs and together equals one rank: log-probs, losses, gradient norms."""

from __future__ import annotations

import json

import golden_matrix
import pytest

from tests.nightly import all_but

NAMES = [(m, n) for m in golden_matrix.MODELS for n in golden_matrix.cases_of(m)]
# Each axis alone and each way of running, with one model; three axes and more.
KEPT = {
    "dense": (
        "full recompute", "tp2", "pp2 head", "pp2 vpp2 embedding head", "cp2", "dp2",
        "dp2 sharded overlap", "tp2 pp2", "pp2 cp2", "tp2 dp2 sharded overlap full",
    ),
    "moe": ("tp2 ep2", "dp2 ep2", "tp2 etp2", "cp2 ep2", "dp2 ep2 allgather"),
    "deepseek": (
        "selective recompute", "tp2", "pp2 first1", "pp2 last1", "pp2 vpp2 full", "cp2 selective",
        "dp2 etp2", "dp2 ep2 sharded", "tp2 ep2", "cp2 etp2", "tp4", "cp4", "pp4 embedding head",
        "dp4 ep2 etp2", "tp2 cp2 ep4", "tp2 pp2 vpp2 ep2", "tp2 dp2 ep2 sharded",
        "cp2 dp2 ep2",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return golden_matrix.run(tmp_path_factory.mktemp("golden"))


@pytest.fixture(scope="module")
def golden():
    return json.loads(golden_matrix.GOLDEN.read_text())


def log_probs(by_rank):
    """By row of the batch; ranks that score the same row must agree, and no row may be missing."""
    found = {}
    for result in by_rank:
        for row, values in result.get("log_probs", {}).items():
            assert found.setdefault(row, values) == pytest.approx(values, abs=1e-6)
    return [found[row] for row in sorted(found)]


@pytest.mark.parametrize("depth", golden_matrix.DEPTHS)
@pytest.mark.parametrize("model", golden_matrix.MODELS)
def test_one_rank_gives_the_golden_values(results, golden, model, depth):
    [one], values = results[f"{model}/{depth}"], golden[f"{model}/{depth}"]
    for found, wanted in zip(log_probs([one]), values["log_probs"], strict=True):
        assert found == pytest.approx(wanted, abs=1e-5)
    for place, step in enumerate(one["steps"]):
        assert step["loss"] == pytest.approx(values["loss"][place], abs=1e-6)
        assert step["grad_norm"] == pytest.approx(values["grad_norm"][place], rel=1e-4)


@pytest.mark.parametrize(
    ("model", "name"), all_but([(model, name) for model in KEPT for name in KEPT[model]], NAMES)
)
def test_a_layout_equals_one_rank(results, model, name):
    [one] = results[f"{model}/{golden_matrix.CASES[name].num_layers}"]
    by_rank = results[f"{model}/{name}"]
    for found, wanted in zip(log_probs(by_rank), log_probs([one]), strict=True):
        assert found == pytest.approx(wanted, abs=1e-5)
    assert any("loss" in result["steps"][0] for result in by_rank)
    for result in by_rank:
        for step, wanted in zip(result["steps"], one["steps"], strict=True):
            if "loss" in step:
                assert step["loss"] == pytest.approx(wanted["loss"], rel=1e-6)
            assert step["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-4)


def test_the_steps_move_the_loss(golden):
    """Guards the tests above: the second step starts from other weights."""
    for values in golden.values():
        first, second = values["loss"]
        assert abs(first - second) > 1e-3
