"""Packing and context parallelism change how a batch is computed, never what comes out."""

from __future__ import annotations

import packing_jobs
import pytest
import ranks
import tiny_models
import torch

from mcore_rl.config.schema import Layout
from tests.nightly import all_but

MODELS = ("qwen3", "qwen3_moe")
SINGLE = {"tp1": Layout()}
PACKED = SINGLE | {"dp2": Layout(dp=2), "cp2": Layout(cp=2)}
CONTEXT = {
    "qwen3": {"cp2": Layout(cp=2), "cp4": Layout(cp=4), "tp2cp2": Layout(tp=2, cp=2)},
    "qwen3_moe": {
        "cp2": Layout(cp=2),
        "cp2ep2": Layout(cp=2, ep=2),  # experts over the context-parallel ranks
        "tp2cp2": Layout(tp=2, cp=2),
        "tp2cp2ep4": Layout(tp=2, cp=2, ep=4),
        "cp2dp2ep2": Layout(cp=2, dp=2, ep=2),
    },
}
PARITY = [(model, name) for model, layouts in CONTEXT.items() for name in layouts]
PARITY_CASES = all_but(
    [("qwen3", "cp4"), ("qwen3_moe", "cp2ep2"), ("qwen3_moe", "tp2cp2ep4")], PARITY
)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder, batch = tmp_path_factory.mktemp("models"), tiny_models.make_batch()
    jobs = {1: {}, 2: {}, 4: {}}
    for model in MODELS:
        path = tiny_models.save(model, folder)
        for name, layout in PACKED.items():
            job = ranks.job(packing_jobs.packings, path, layout, batch)
            jobs[layout.world_size][f"packings/{model}/{name}"] = job
        for name, layout in (SINGLE | CONTEXT[model]).items():
            job = ranks.job(ranks.parity, path, layout, batch)
            jobs[layout.world_size][f"parity/{model}/{name}"] = job
    for cp in (2, 4):
        jobs[cp][f"attention/{cp}"] = ranks.job(packing_jobs.attention, cp)
    return ranks.Results(jobs)


def assert_same_step(found, wanted, tolerance=1e-6):
    """float32 rounding alone leaves up to 6e-7 of the norm."""
    assert found["metrics"] == pytest.approx(wanted["metrics"], rel=1e-6)
    difference = (found["gradients"] - wanted["gradients"]).norm() / wanted["gradients"].norm()
    assert difference < tolerance


@pytest.mark.parametrize("packing", packing_jobs.PACKINGS[1:], ids=str)
@pytest.mark.parametrize("layout", PACKED)
@pytest.mark.parametrize("model", MODELS)
def test_loss_and_gradients_do_not_depend_on_the_packing(results, model, layout, packing):
    for rank in results[f"packings/{model}/{layout}"]:
        first, *_ = rank.values()
        assert_same_step(rank[str(packing)], first)


@pytest.mark.parametrize("layout", ["dp2", "cp2"])
@pytest.mark.parametrize("model", MODELS)
def test_gradients_are_those_of_one_rank(results, model, layout):
    [single] = results[f"packings/{model}/tp1"]
    for rank in results[f"packings/{model}/{layout}"]:
        for packing, wanted in single.items():
            assert_same_step(rank[packing], wanted, tolerance=2e-6)


@pytest.mark.parametrize("layout", PACKED)
@pytest.mark.parametrize("model", MODELS)
def test_the_packings_differ_and_every_rank_has_as_many_micro_batches(results, model, layout):
    """One sample in 11 tokens has more than 40: the smallest budgets leave few together."""
    by_rank = results[f"packings/{model}/{layout}"]
    counts = [[case["num_micro_batches"] for case in rank.values()] for rank in by_rank]
    assert all(other == counts[0] for other in counts)
    assert counts[0][:2] == [1, 1]
    assert counts[0][1] < counts[0][2] < counts[0][4] < counts[0][5]


@pytest.mark.parametrize(("model", "layout"), PARITY_CASES)
def test_context_parallel_scores_equal_one_rank(results, model, layout):
    [single] = results[f"parity/{model}/tp1"]
    for found in results[f"parity/{model}/{layout}"]:
        assert found["rows"]
        for name in ("log_probs", "entropy"):
            for place, row in enumerate(found["rows"]):
                torch.testing.assert_close(found[name][place], single[name][row], rtol=0, atol=1e-5)


@pytest.mark.parametrize(("model", "layout"), PARITY_CASES)
def test_two_context_parallel_steps_equal_one_rank(results, model, layout):
    [single] = results[f"parity/{model}/tp1"]
    for found in results[f"parity/{model}/{layout}"]:
        for step, wanted in zip(found["steps"], single["steps"], strict=True):
            assert step["loss"] == pytest.approx(wanted["loss"], rel=1e-6)
            assert step["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-4)
    trained = results[f"parity/{model}/{layout}"][0]["trained"]
    for name, tensor in single["trained"].items():
        torch.testing.assert_close(trained[name], tensor, rtol=0, atol=2e-4, msg=name)


@pytest.mark.parametrize("shape", packing_jobs.ATTENTION_SHAPES)
@pytest.mark.parametrize("cp", [2, 4])
def test_attention_over_ranks_equals_attention_of_one_with_its_gradients(results, cp, shape):
    for rank in results[f"attention/{cp}"]:
        for found, wanted in zip(rank[shape]["found"], rank[shape]["wanted"], strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-11)
