"""Adapters in the Megatron engine against transformers, plain autograd, and one rank."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lora_jobs
import pytest
import ranks
import tiny_models
import torch
import transformers
from lora_jobs import SCALE, Adapted, join_factors
from safetensors.torch import load_file, save_file

from mcore_rl.checkpoint.peft import initialize_factor
from mcore_rl.config.schema import Layout
from mcore_rl.engine.worker import ModelWorker
from tests.nightly import all_but

LAYOUTS = {
    "qwen3": {
        "one": Layout(),
        "tp2": Layout(tp=2),
        "dp2": Layout(dp=2),
        "cp2": Layout(cp=2),
        "pp2": Layout(pp=2),
        "pp2vpp2": Layout(pp=2, vpp=2),
    },
    "qwen3_moe": {
        "one": Layout(),
        "ep2": Layout(dp=2, ep=2),
        "tp2ep2": Layout(tp=2, ep=2),
        "tp2etp2": Layout(tp=2, etp=2),
        "dp2etp2": Layout(dp=2, etp=2),
        "pp2": Layout(pp=2),
    },
    "deepseek_v3": {"one": Layout(), "tp2ep2": Layout(tp=2, ep=2)},
    "qwen3_next": {"one": Layout(), "tp2ep2": Layout(tp=2, ep=2)},
}
# Delta nets have no adapters, and Megatron multiplies by a frozen weight with another function
# (tensor_parallel/layers.py, linear_with_frozen_weight), which rounds otherwise.
ROUNDING = {"qwen3_next": 3e-6}
CASES = [(model, name) for model, layouts in LAYOUTS.items() for name in layouts]
PARALLEL = [(model, name) for model, name in CASES if name != "one"]
MORE = (("qwen3", "dp2"), ("qwen3", "pp2"), ("qwen3_moe", "dp2etp2"), ("qwen3_moe", "pp2"))
DAILY_CASES = all_but([case for case in CASES if case not in MORE], CASES)
DAILY_PARALLEL = all_but([case for case in PARALLEL if case not in MORE], PARALLEL)
VARIANTS = {  # settings that change nothing: the job, its model and its layout
    "full recompute": (lora_jobs.full_recompute, "qwen3_moe", "one"),
    "full recompute pp2": (lora_jobs.full_recompute, "qwen3_moe", "pp2"),
    "selective recompute": (lora_jobs.selective_recompute, "qwen3_moe", "one"),
    "sharded overlap dp2": (lora_jobs.overlapped, "qwen3", "dp2"),
    "sharded overlap ep2": (lora_jobs.overlapped, "qwen3_moe", "ep2"),
}


@dataclass
class Runs:
    batch: Any
    results: dict[str, list[dict[str, Any]]]
    checkpoints: dict[str, Path]

    def get_reference(self, model: str) -> dict[str, Any]:
        return self.results[f"{model}/one"][0]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("lora")
    batch = tiny_models.make_batch()
    paths = {model: folder / model for model in LAYOUTS}
    for model, path in paths.items():
        lora_jobs.build(model).save_pretrained(path)
    jobs: dict[int, dict[str, ranks.Job]] = {1: {}, 2: {}}

    def add(name: str, function: Any, model: str, layout: Layout, *more: Any) -> None:
        jobs[layout.world_size][name] = ranks.make_job(function, paths[model], layout, *more)

    for model, name in CASES:
        add(f"{model}/{name}", lora_jobs.parity, model, LAYOUTS[model][name], batch)
    for name, (function, model, layout) in VARIANTS.items():
        add(name, function, model, LAYOUTS[model][layout], batch)
    moe, written = LAYOUTS["qwen3_moe"], {d: folder / d for d in ("float32", "bfloat16")}
    for name in ("one", "ep2"):
        add(f"experts only/{name}", lora_jobs.experts_only, "qwen3_moe", moe[name], batch)
    alone = Layout(pp=2, first_stage_layers=0)
    add("embedding alone", lora_jobs.steps, "qwen3", alone, batch)
    resume, resumed = lora_jobs.resume, lora_jobs.resumed
    add("resume embedding alone", resume, "qwen3", alone, batch, folder / "alone", "float32")
    for dtype, name in (("float32", "tp2etp2"), ("bfloat16", "tp2ep2")):
        add(f"resume {dtype}", resume, "qwen3_moe", moe[name], batch, written[dtype], dtype)
    add("resumed", resumed, "qwen3_moe", moe["one"], batch, written["float32"], "float32")
    replicated, sharded = written["float32"], folder / "sharded"
    again = moe["one"], batch, sharded, "float32"
    add("sharded", resumed, "qwen3_moe", moe["ep2"], batch, replicated, "float32", sharded)
    add("resumed sharded", resumed, "qwen3_moe", *again)
    add("refusals", lora_jobs.refusals, "qwen3_moe", moe["one"], written["float32"])
    add("formed", lora_jobs.formed_weights, "qwen3_moe", moe["one"], batch)
    needs = dict.fromkeys(("resumed", "refusals", "sharded"), "resume float32")
    needs["resumed sharded"] = "sharded"
    return Runs(batch, ranks.Results(jobs, needs), paths)


def merged_by_hand(
    checkpoint: Mapping[str, torch.Tensor], factors: list[dict[str, Any]]
) -> dict[str, torch.Tensor]:
    """The checkpoint with W + scale * B @ A in place of each W, in float64."""
    products = {
        f["tensor"]: SCALE * f["B"].double() @ f["A"].double() for f in join_factors(factors)
    }
    return {n: t.double() + products.get(n, 0.0) for n, t in checkpoint.items()}


@pytest.mark.parametrize(("model", "layout"), DAILY_CASES)
def test_fresh_adapters_change_no_bit(runs, model, layout):
    original = load_file(runs.checkpoints[model] / "model.safetensors")
    for result in runs.results[f"{model}/{layout}"]:
        assert (result["fresh"] is None) == (result["plain"] is None)
        for actual, plain in zip(result["fresh"] or [], result["plain"] or [], strict=True):
            torch.testing.assert_close(actual, plain, rtol=0, atol=ROUNDING.get(model, 0))
    exported = runs.results[f"{model}/{layout}"][0]["fresh_export"]
    assert exported.keys() == original.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in original.items())


@pytest.mark.parametrize(("model", "layout"), DAILY_CASES)
def test_a_trained_model_without_its_adapters_is_the_one_it_began_with(runs, model, layout):
    """Bit for bit: it is its own reference. Asked again, it has them."""
    for result in runs.results[f"{model}/{layout}"]:
        actual, plain = result["without_adapters"] or [], result["plain"] or []
        assert len(actual) == len(plain)
        for scores, expected in zip(actual, plain, strict=True):
            torch.testing.assert_close(scores, expected, rtol=0, atol=ROUNDING.get(model, 0))
        trained = result["with_adapters"] or []
        assert not any(torch.allclose(a, b) for a, b in zip(trained, plain, strict=True))


@pytest.mark.parametrize("model", LAYOUTS)
def test_export_and_log_probs_are_those_of_weights_merged_by_hand(runs, model, tmp_path):
    result, path = runs.get_reference(model), runs.checkpoints[model]
    checkpoint = load_file(path / "model.safetensors")
    expected = merged_by_hand(checkpoint, result["factors"])
    for name, tensor in expected.items():
        torch.testing.assert_close(result["exported"][name].double(), tensor, rtol=0, atol=1e-6)
    changed = {
        n for n, tensor in checkpoint.items() if not torch.equal(result["exported"][n], tensor)
    }
    assert changed == {f["tensor"] for f in result["factors"]}
    shutil.copy(path / "config.json", tmp_path)
    tensors = {name: tensor.float() for name, tensor in expected.items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).float().eval()
    _, log_probs, _ = tiny_models.reference_scores(merged, runs.batch)
    reference = torch.from_numpy(log_probs)
    torch.testing.assert_close(
        torch.cat(result["log_probs"]).double(), reference, rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("model", LAYOUTS)
def test_the_first_step_equals_autograd_through_transformers(runs, model):
    checkpoint = load_file(runs.checkpoints[model] / "model.safetensors")
    reference = Adapted(lora_jobs.build(model), checkpoint, runs.get_reference(model)["factors"])
    loss, grad_norm = tiny_models.reference_step(reference, runs.batch)
    step = runs.get_reference(model)["steps"][0]
    assert step["loss"] == pytest.approx(loss, rel=1e-5)
    assert step["grad_norm"] == pytest.approx(grad_norm, rel=1e-4)


def check_steps(actual: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    for step, other in zip(actual, expected, strict=True):
        if "loss" in step:  # on the last pipeline stage
            assert step["loss"] == pytest.approx(other["loss"], rel=1e-6)
        assert step["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)


def check_weights(actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize(("model", "layout"), DAILY_PARALLEL)
def test_scores_and_two_steps_equal_one_rank(runs, model, layout):
    reference, results = runs.get_reference(model), runs.results[f"{model}/{layout}"]
    for result in results:
        rows = result["rows"] if result["log_probs"] is not None else []
        for row, actual in zip(rows, result["log_probs"] or [], strict=True):
            torch.testing.assert_close(actual, reference["log_probs"][row], rtol=0, atol=1e-5)
        check_steps(result["steps"], reference["steps"])
    assert any("loss" in step for result in results for step in result["steps"])
    check_weights(results[0]["exported"], reference["exported"])
    check_weights(results[0]["trained"], reference["trained"])


@pytest.mark.parametrize(("model", "layout"), DAILY_PARALLEL)
@pytest.mark.parametrize("when", ["factors", "trained_factors"])
def test_every_rank_holds_its_part_of_the_factors_of_one_rank(runs, model, layout, when):
    """Also the copies of a factor, which only reduced gradients keep alike."""
    full_factors = {f["tensor"]: f for f in join_factors(runs.get_reference(model)[when])}
    seen = set()
    for result in runs.results[f"{model}/{layout}"]:
        for actual in result[when]:
            row, column = actual["first_row"], actual["first_input"]
            expected = full_factors[actual["tensor"]]
            a = expected["A"][:, column : column + actual["A"].shape[1]]
            b = expected["B"][row : row + len(actual["B"])]
            torch.testing.assert_close(actual["A"], a, rtol=0, atol=1e-5)
            torch.testing.assert_close(actual["B"], b, rtol=0, atol=1e-5)
            seen.add(actual["tensor"])
    assert seen == full_factors.keys()


@pytest.mark.parametrize("model", LAYOUTS)
def test_factors_start_from_the_seed_of_the_run(runs, model):
    seed = ranks.build_engine_spec(Path(), Layout()).seed
    for factors in runs.get_reference(model)["factors"]:
        expected = initialize_factor(factors["A_of"], seed, *factors["A"].shape)
        assert torch.equal(factors["A"], expected), factors["A_of"]


@pytest.mark.parametrize("model", LAYOUTS)
def test_the_steps_do_train_factors(runs, model):
    """Guards the tests above: two steps at this rate move factors far beyond their tolerance.

    Those of experts that no token went to do not move.
    """
    result, idle = runs.get_reference(model), []
    for before, after in zip(result["factors"], result["trained_factors"], strict=True):
        moves = [(after[factor] - before[factor]).abs().max() for factor in "AB"]
        if min(moves) < 5e-4:
            idle.append(before["tensor"])
    assert all(".mlp.experts." in tensor for tensor in idle)
    assert len(idle) < 0.2 * len(result["factors"])


@pytest.mark.parametrize(("model", "layout"), DAILY_CASES)
def test_only_factors_are_trained(runs, model, layout):
    for result in runs.results[f"{model}/{layout}"]:
        assert result["frozen_is_equal"]
        assert result["state_numel"] == result["factor_numel"] > 0


@pytest.mark.parametrize(
    "name",
    all_but(("full recompute", "selective recompute", "sharded overlap ep2"), VARIANTS),
)
def test_settings_that_change_nothing(runs, name):
    reference = runs.get_reference(VARIANTS[name][1])
    for result in runs.results[name]:
        check_steps(result["steps"], reference["steps"])
    check_weights(runs.results[name][0]["trained"], reference["trained"])


def test_experts_alone_can_have_adapters(runs):
    reference = runs.results["experts only/one"][0]
    for result in runs.results["experts only/ep2"]:
        check_steps(result["steps"], reference["steps"])
    check_weights(runs.results["experts only/ep2"][0]["trained"], reference["trained"])


def test_a_pipeline_stage_may_have_nothing_to_train(runs):
    reference = runs.get_reference("qwen3")
    for result in runs.results["embedding alone"]:
        check_steps(result["steps"], reference["steps"])
    check_weights(runs.results["embedding alone"][0]["trained"], reference["trained"])


@pytest.mark.parametrize("name", ["float32", "bfloat16", "embedding alone"])
def test_two_steps_after_a_resume_equal_those_without_a_stop(runs, name):
    """Also if rank 0, which writes the count of Adam's steps, has nothing to train."""
    for result in runs.results[f"resume {name}"]:
        assert result["resumed"]["steps"] == result["steps"][2:]
        for name, tensor in result["trained"].items():
            assert torch.equal(result["resumed"]["trained"][name], tensor), name


@pytest.mark.parametrize("name", ["resumed", "sharded", "resumed sharded"])
def test_another_layout_and_optimizer_resume_alike(runs, name):
    """A sharded optimizer goes on from a replicated one, and the other way round."""
    without_stop = runs.results["resume float32"][0]
    for result in runs.results[name]:
        check_steps(result["steps"], without_stop["steps"][2:])
    check_weights(runs.results[name][0]["trained"], without_stop["trained"])


def test_other_adapters_and_unknown_targets_are_refused(runs):
    of_checkpoint, of_targets = runs.results["refusals"][0]["messages"]
    assert "'alpha': 8.0" in of_checkpoint and "'alpha': 16.0" in of_checkpoint
    assert of_targets == (
        "lora.targets names q_proj, which this model does not have; allowed: linear_fc1, "
        "linear_fc2, linear_proj, linear_qkv"
    )


def test_an_export_is_what_forward_ran_on_bit_for_bit_in_bfloat16(runs):
    [result] = runs.results["formed"]
    assert result["used"].keys() == result["exported"].keys() and result["used"]
    for name, weight in result["used"].items():
        assert weight.dtype is torch.bfloat16
        assert torch.equal(result["exported"][name], weight), name


@ranks.spawn_on_ranks()
def left(model: Path, output: Path, layout: Layout) -> ranks.Result:
    """Leave what a run does: an export by the worker, with factors from noise."""
    spec = replace(lora_jobs.lora_spec(model, layout), total_steps=0)
    worker = ModelWorker(spec, None)
    worker.initialize()
    lora_jobs.set_factors(worker._engine)
    assert worker.export(str(output), 0) == ""
    return {}


@pytest.mark.parametrize(
    ("name", "layout"),
    [("qwen3", Layout(tp=2)), ("qwen3_moe", Layout(tp=2, ep=2)), ("qwen3_moe", Layout(pp=2))],
    ids=str,
)
def test_a_run_leaves_its_adapter_in_the_format_of_peft_beside_the_merged_weights(
    name, layout, tmp_path
):
    """The base model with them by PEFT's arithmetic is what is merged; A is that of one rank."""
    model = tmp_path / name
    lora_jobs.build(name).save_pretrained(model)
    left(model, tmp_path / "out", layout)
    folder = tmp_path / "out" / "adapter"
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 8.0)
    factors = load_file(folder / "adapter_model.safetensors")
    base, merged = (load_file(path / "model.safetensors") for path in (model, tmp_path / "out"))
    changed = 0
    for key, weight in base.items():
        module = f"base_model.model.{key.removesuffix('.weight')}"
        expected = weight.double()
        if (a := factors.get(f"{module}.lora_A.weight")) is not None:
            expected = expected + 2.0 * factors[f"{module}.lora_B.weight"].double() @ a.double()
            changed += 1
        torch.testing.assert_close(merged[key].double(), expected, rtol=0, atol=1e-6)
    assert 2 * changed == len(factors) > 0
