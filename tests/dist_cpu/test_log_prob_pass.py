"""Optimizer steps whose log-probs are those of their own forward pass, on ranks.

Beside each, the same steps after a pass of infer_batch; and steps that a gap stops.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import ranks
import tiny_families
import tiny_models
import torch

from mcore_rl.config.schema import AlgorithmConfig, Layout
from mcore_rl.data.batch import Batch
from mcore_rl.engine.megatron.engine import MegatronEngine
from mcore_rl.trainers.policy_loss import PolicyLoss
from tests.nightly import nightly

NUM_STEPS, TEMPERATURE = 6, 1.5
LAYOUTS = {
    "one": Layout(),
    "tp2": Layout(tp=2),
    "dp2": Layout(dp=2),
    "pp2": Layout(pp=2),
    "cp2": Layout(cp=2),
}
CASES = [
    *(nightly(("qwen3", name, "ppo_clip")) for name in ("tp2", "dp2")),
    *(("qwen3_moe", name, "ppo_clip") for name in LAYOUTS),
]
LOSSES = {
    "ppo_clip": AlgorithmConfig(kl_coef=0.1),
    "with entropy": AlgorithmConfig(kl_coef=0.1, entropy_coef=0.1),
    "decoupled_ppo": AlgorithmConfig(loss="decoupled_ppo", loss_settings={"weight_cap": 2.0}),
    "topr": AlgorithmConfig(loss="topr"),  # of ratios of whole sequences
}
WIDE = {"max_logprob_gap": math.inf, "mean_logprob_gap": math.inf}


def batch_of(step: int, loss: str) -> Batch:
    """With log-probs of servers, and without those of the trainer."""
    made, rng = (
        tiny_models.make_batch(seed=step).drop_columns("log_probs"),
        np.random.default_rng(step),
    )
    mask, weights = made.jagged("response_mask"), made.jagged("loss_weights")
    served = rng.normal(-5, 0.1, len(mask.values)).astype(np.float32)
    made = made.with_columns(
        rollout_log_probs=mask.with_values(served),
        # Less than the mask, as of a batch with samples of older policies.
        gap_mask=mask.with_values((mask.values * (rng.random(len(served)) < 0.8)).astype(np.int8)),
    )
    if LOSSES[loss].entropy_coef:
        made = made.with_columns(entropy_weights=weights.with_values(0.1 * weights.values))
    return made if LOSSES[loss].kl_coef else made.drop_columns("kl_weights")


@ranks.spawn_on_ranks()
def trained(path: Path, layout: Layout, loss: str, with_pass: bool) -> ranks.Result:
    """The weights after all steps; scores, gaps and metrics of each."""
    engine, function = (
        ranks.start_engine(ranks.build_engine_spec(path, layout)),
        PolicyLoss(LOSSES[loss]),
    )
    steps, scores, gaps = [], [], []
    for step in range(NUM_STEPS):
        batch = batch_of(step, loss)
        rows = ranks.list_rows(engine, batch)
        share = batch.take(rows)
        if with_pass:
            scored = engine.infer_batch(share, temperature=TEMPERATURE)
            given = share if scored is None else scored.drop_columns("entropy")
            steps.append(engine.train_batch(given, function, temperature=TEMPERATURE))
        else:
            done = engine.train_batch_with_scores(
                share, function, temperature=TEMPERATURE, bounds=WIDE
            )
            steps.append(done.metrics)
            gaps.append(done.gaps)
            scored = done.scores
        if scored is not None:
            columns = {n: scored.jagged(n) for n in ("log_probs", "entropy")}
            tensors = {n: torch.from_numpy(c.values.copy()) for n, c in columns.items()}
            chosen = torch.from_numpy(share.jagged("gap_mask").values.copy()) != 0
            served = torch.from_numpy(share.jagged("rollout_log_probs").values.copy())
            apart = (tensors["log_probs"] - served).abs()[chosen]
            scores.append(tensors | {"gaps": apart})
    exported = dict(engine.get_per_tensor_param())
    return {"exported": exported, "steps": steps, "scores": scores, "gaps": gaps}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    made = {name: tiny_models.save(name, folder) for name in ("qwen3", "qwen3_moe")}
    deepseek = tiny_models.build_from(tiny_families.cases()["deepseek_v3"].config)
    return made | {"deepseek": tiny_families.save(deepseek, folder / "deepseek")}


@pytest.mark.parametrize(
    ("model", "layout", "loss"),
    [*CASES, *(("qwen3", "one", loss) for loss in LOSSES)],
)
def test_weights_and_metrics_are_those_of_steps_with_a_pass_of_log_probs(
    paths, model, layout, loss
):
    shape = LAYOUTS[layout]
    runs = [trained(paths[model], shape, loss, with_pass) for with_pass in (True, False)]
    with_pass, without = (run[0]["exported"] for run in runs)
    assert with_pass.keys() == without.keys()
    for name, tensor in with_pass.items():
        torch.testing.assert_close(without[name], tensor, rtol=0, atol=1e-6, msg=name)
    for reference, result in zip(*runs, strict=True):
        for expected, actual in zip(reference["steps"], result["steps"], strict=True):
            assert actual == pytest.approx(expected, rel=1e-4, abs=1e-5)
        for expected, actual in zip(reference["scores"], result["scores"], strict=True):
            torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
    for step in range(NUM_STEPS):
        gaps = [rank["gaps"][step] for rank in runs[1]]
        assert gaps == [gaps[0]] * len(gaps)
        # Of the ranks with a share of their own, for others have the same.
        apart = torch.cat([rank["scores"][step]["gaps"] for rank in runs[0] if rank["scores"]])
        expected = {"max_logprob_gap": apart.max().item(), "mean_logprob_gap": apart.mean().item()}
        assert gaps[0] == pytest.approx(expected, abs=1e-5)


PLANTED = {"large": 9.0, "no number": math.nan, "infinite": math.inf}


@ranks.spawn_on_ranks()
def stopped(path: Path, layout: Layout, planted: str) -> ranks.Result:
    """Two steps, with an attempt between them, which a gap on one data-parallel rank stops."""
    engine = ranks.start_engine_with(path, layout, {"moe.bias_update_rate": 0.01})
    bounds = {"max_logprob_gap": 6.0, "mean_logprob_gap": 6.0}
    function = PolicyLoss(LOSSES["ppo_clip"])
    dp_rank = engine.mesh.get_coordinate(engine.world_rank).dp_rank
    gaps, exported, metrics = [], [], []
    for step, wrong in enumerate(("", planted, "") if planted else ("", "")):
        share = _share(engine, batch_of(min(step, 1), "ppo_clip"))
        served = share.jagged("rollout_log_probs")
        if wrong and dp_rank == layout.dp - 1:
            values = served.values.copy()
            values[share.jagged("gap_mask").values != 0] += np.float32(PLANTED[wrong])
            share = share.with_columns(rollout_log_probs=served.with_values(values))
        done = engine.train_batch_with_scores(share, function, bounds=bounds)
        gaps.append(done.gaps)
        metrics.append(done.metrics)
        exported.append({n: t.clone() for n, t in engine.get_per_tensor_param()})
    return {"gaps": gaps, "metrics": metrics, "exported": exported}


def _share(engine: MegatronEngine, batch: Batch) -> Batch:
    return batch.take(ranks.list_rows(engine, batch))


STOPS = [
    ("qwen3", "one", "large"),
    ("qwen3", "dp2", "large"),
    ("qwen3", "tp2", "no number"),
    ("qwen3_moe", "dp2", "no number"),
    ("deepseek", "dp2", "infinite"),  # with selection biases, which a backward pass changes
    ("qwen3_moe", "pp2", "large"),
]


@pytest.mark.parametrize(("model", "layout", "planted"), STOPS)
def test_a_gap_stops_every_rank_before_the_optimizer_and_leaves_nothing(
    paths, model, layout, planted
):
    runs = [stopped(paths[model], LAYOUTS[layout], planted) for planted in (planted, "")]
    for with_stop, without in zip(*runs, strict=True):
        first, after_stop, last = with_stop["exported"]
        _same(first, after_stop)
        _same(last, without["exported"][1])  # weights, optimizer state and learning rate
        assert with_stop["metrics"][1] == {} and with_stop["gaps"][1] != with_stop["gaps"][0]
        assert [with_stop["metrics"][i] for i in (0, 2)] == without["metrics"]
    biggest = runs[0][0]["gaps"][1]["max_logprob_gap"]
    assert math.isnan(biggest) if planted == "no number" else biggest > 6


def _same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


@ranks.spawn_on_ranks()
def without_a_token(path: Path, layout: Layout) -> ranks.Result:
    engine = ranks.start_engine(ranks.build_engine_spec(path, layout))
    share = _share(engine, batch_of(0, "ppo_clip"))
    mask = share.jagged("gap_mask")
    share = share.with_columns(gap_mask=mask.with_values(np.zeros_like(mask.values)))
    nothing = dict.fromkeys(WIDE, 0.0)
    done = engine.train_batch_with_scores(share, PolicyLoss(LOSSES["ppo_clip"]), bounds=nothing)
    return {"gaps": done.gaps, "metrics": done.metrics}


def test_where_no_token_is_compared_there_is_no_gap_to_stop_at(paths):
    for rank in without_a_token(paths["qwen3"], LAYOUTS["dp2"]):
        assert rank["gaps"] == {} and rank["metrics"]["grad_norm"] > 0
