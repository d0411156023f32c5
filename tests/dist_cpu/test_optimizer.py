"""Optimizer, overlap, memory and checkpoints over ranks, against one rank and hand-made numbers."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import math
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import optimizer_jobs as jobs
import pytest
import ranks
import tiny_models
import torch
from safetensors.torch import load_file

from mcore_rl.config.schema import Layout
from tests.nightly import all_but

LAYOUTS = {
    "tp1": Layout(),
    "tp2": Layout(tp=2),
    "dp2": Layout(dp=2),
    "ep2": Layout(dp=2, ep=2),
    "tp2ep2": Layout(tp=2, ep=2),
    "pp2": Layout(pp=2),
    "pp2vpp2": Layout(pp=2, vpp=2),
    "pp2vpp2dp2": Layout(pp=2, vpp=2, dp=2),
    "tp2pp2ep2": Layout(tp=2, pp=2, ep=2),
    "pp2ep2": Layout(pp=2, dp=2, ep=2),
}
CLIP = 0.02
# "mixed" and "four" (layers) have a dense first layer and tied embeddings: under pp2 the first
# stage of "mixed" has no expert, and the embedding is in a bucket of its own.
# (model, settings, layouts that resume); the layout that saves is in the name.
SHARDED, BF16 = {"distributed": True}, {"dtype": "bfloat16"}
BUCKETS = SHARDED | {"overlap": True, "small_buckets": True}
CHECKPOINTS: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "moe/tp2ep2": ("moe", {}, ["tp2ep2", "dp2", "pp2"]),
    "moe/tp2ep2/bf16": ("moe", BF16, ["tp2ep2"]),
    "moe/ep2/sharded": ("moe", SHARDED, ["ep2", "dp2", "tp1", "tp2pp2ep2"]),
    "moe/dp2/sharded/bf16": ("moe", SHARDED | BF16, ["dp2", "tp2"]),
    "moe/dp2/buckets": ("moe", BUCKETS, ["dp2", "tp2"]),
    "mixed/pp2": ("mixed", {}, ["pp2", "dp2"]),
    "mixed/pp2/sharded": ("mixed", SHARDED, ["pp2", "ep2"]),
    "four/pp2vpp2/sharded": ("four", SHARDED, ["pp2vpp2", "pp2", "pp2vpp2dp2"]),
}
CLOSED = {"plain": {}, "sharded": SHARDED, "buckets": BUCKETS}
RESUMES = [(name, target) for name, case in CHECKPOINTS.items() for target in case[2]]
SAME = [(name, target) for name, target in RESUMES if name.split("/")[1] == target]
OTHER = [case for case in RESUMES if case not in SAME]
OVERLAPS = [
    ("moe", "dp2", False), ("moe", "dp2", True), ("moe", "ep2", True),
    ("four", "pp2vpp2dp2", False), ("four", "pp2vpp2dp2", True),
]  # fmt: skip
# Under `nightly`: more layouts and ways of storing.
SAME_CASES = all_but(
    [("moe/tp2ep2", "tp2ep2"), ("moe/dp2/sharded/bf16", "dp2"),
     ("four/pp2vpp2/sharded", "pp2vpp2")],
    SAME,
)  # fmt: skip
OTHER_CASES = all_but(
    [("moe/tp2ep2", "dp2"), ("moe/tp2ep2", "pp2"), ("moe/ep2/sharded", "tp2pp2ep2"),
     ("moe/dp2/sharded/bf16", "tp2"), ("mixed/pp2", "dp2"), ("four/pp2vpp2/sharded", "pp2")],
    OTHER,
)  # fmt: skip
SAVES = all_but(("moe/tp2ep2", "moe/ep2/sharded", "mixed/pp2"), CHECKPOINTS)
OVERLAP_CASES = all_but(
    [("moe", "dp2", False), ("moe", "ep2", True), ("four", "pp2vpp2dp2", True)], OVERLAPS
)


@dataclass
class Runs:
    models: dict[str, Path]
    folder: Path
    results: dict[str, list[dict[str, Any]]]  # by the name of a case, then by rank

    def __getitem__(self, case: str) -> list[dict[str, Any]]:
        return self.results[case]

    def checkpoint(self, name: str) -> Path:
        """Return the checkpoint that "save/`name`" has written."""
        assert self.results[f"save/{name}"]
        return self.folder / name.replace("/", "-")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("optimizer")
    models = {
        "moe": tiny_models.save("qwen3_moe", folder),
        "mixed": tiny_models.save("qwen3_moe_mixed", folder),
        "four": jobs.save_model(folder),
    }
    batch = tiny_models.make_batch()
    todo: dict[int, dict[str, ranks.Job]] = {1: {}, 2: {}, 4: {}}
    needs = dict.fromkeys(("inference", "other rate"), "save/moe/tp2ep2")
    needs |= dict.fromkeys(("refused/dtype", "refused/model"), "save/moe/tp2ep2")
    needs |= {"refused/layers": "save/mixed/pp2", "refused/weights": "weights"}

    def add(case: str, function: Any, model: str, layout: str, *args: Any, **settings: Any) -> None:
        shape = LAYOUTS[layout]
        todo[shape.world_size][case] = partial(function, models[model], shape, *args, **settings)

    for name, (model, settings, targets) in CHECKPOINTS.items():
        to = folder / name.replace("/", "-")
        add(f"save/{name}", jobs.save, model, name.split("/")[1], batch, to, **settings)
        for target in targets:
            add(f"{name}->{target}", jobs.resume, model, target, batch, to, **settings)
            needs[f"{name}->{target}"] = f"save/{name}"
    for model in models:
        add(f"one/{model}", jobs.save, model, "tp1", batch, folder / f"one-{model}")
    for model in ("moe", "four"):
        add(f"reads/one/{model}", jobs.steps_with_reads_between, model, "tp1", batch)
    for model, layout, sharded in OVERLAPS:
        settings = {"overlap": True, "distributed": sharded, "small_buckets": True}
        case = f"reads/{model}/{layout}/{sharded}"
        add(case, jobs.steps_with_reads_between, model, layout, batch, **settings)
    for layout in ("tp1", "tp2", "dp2", "ep2"):
        add(f"clip/{layout}", jobs.step_that_clips, "moe", layout, batch, CLIP)
    for dtype in ("float32", "bfloat16"):
        for layout in ("tp1", "dp2"):
            case = f"memory/{layout}/{dtype}"
            add(case, jobs.memory, "moe", layout, batch, dtype, distributed=layout == "dp2")
    for name, settings in CLOSED.items():
        add(f"closed/{name}", jobs.closed, "moe", "dp2", batch, **settings)
    add("nan", jobs.not_a_number, "moe", "dp2", batch)
    add("nans", jobs.not_a_number, "moe", "dp2", batch, max_skipped_steps=2, overlap=True,
        distributed=True)  # fmt: skip
    add("early", jobs.saved_before_the_first_step, "moe", "dp2", batch, folder / "early")
    todo[1]["adam"] = partial(jobs.adam, models["moe"], batch)
    source = folder / "moe-tp2ep2"
    add("inference", jobs.inference_reads, "moe", "tp1", batch, source)
    add("other rate", jobs.resume, "moe", "tp1", batch, source, lr=5e-4, beta1=0.5, schedule="wsd",
        wsd_decay_steps=1)  # fmt: skip
    weights = folder / "weights"
    todo[1]["weights"] = partial(jobs.weights_only, models["moe"], weights)
    add("refused/dtype", jobs.refused, "moe", "dp2", source, dtype="bfloat16")
    add("refused/model", jobs.refused, "mixed", "pp2", source)
    add("refused/layers", jobs.refused, "four", "dp2", folder / "mixed-pp2")
    add("refused/weights", jobs.refused, "moe", "tp1", weights)
    add("refused/missing", jobs.refused, "moe", "tp1", folder / "nowhere")
    return Runs(models, folder, ranks.Results(todo, needs))


def assert_same_steps(result, expected, loss=1e-6, grad_norm=1e-4):
    for step, reference in zip(result["steps"], expected, strict=True):
        assert step["grad_norm"] == pytest.approx(reference["grad_norm"], rel=grad_norm)
        assert step["lr"] == reference["lr"]
        if "loss" in step:  # the last pipeline stage has it
            assert step["loss"] == pytest.approx(reference["loss"], rel=loss)


def assert_same_weights(actual, expected, atol):
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=0, atol=atol, msg=name)


@pytest.mark.parametrize(("name", "layout"), SAME_CASES)
def test_a_resume_in_the_same_layout_changes_no_bit(runs, name, layout):
    saved = runs[f"save/{name}"]
    for result, expected in zip(runs[f"{name}->{layout}"], saved, strict=True):
        assert result["steps"] == expected["steps"][2:]
        for key, tensor in expected["trained"].items():
            assert torch.equal(result["trained"][key], tensor), key


@pytest.mark.parametrize("name", SAVES)
def test_a_save_leaves_no_process(runs, name):
    assert [result["stayed"] for result in runs[f"save/{name}"]] == [0] * len(runs[f"save/{name}"])


@pytest.mark.parametrize(("name", "layout"), OTHER_CASES)
def test_a_resume_in_another_layout_takes_the_same_steps(runs, name, layout):
    model, settings, _ = CHECKPOINTS[name]
    in_bf16 = "dtype" in settings
    references = runs[f"save/{name}" if in_bf16 else f"one/{model}"]
    expected = next(result for result in references if "loss" in result["steps"][0])
    bounds = {"loss": 0.02, "grad_norm": 0.02} if in_bf16 else {}
    for result in runs[f"{name}->{layout}"]:
        assert_same_steps(result, expected["steps"][2:], **bounds)
    trained = runs[f"{name}->{layout}"][0]["trained"]
    assert_same_weights(trained, references[0]["trained"], atol=4e-3 if in_bf16 else 5e-5)


def test_steps_after_a_resume_move_weights_far_beyond_the_tolerance(runs):
    result = runs["one/moe"][0]
    moved = [
        float((result["trained"][name] - tensor).abs().max())
        for name, tensor in result["saved"].items()
    ]
    assert min(moved) > 5e-4


def test_a_checkpoint_before_the_first_step_can_be_resumed_from(runs):
    for result in runs["early"]:
        assert result["resumed"] == result["steps"]


def test_settings_of_the_run_hold_after_a_resume_and_the_step_count_of_the_checkpoint(runs):
    """6 steps at 5e-4, 2 of warm-up, the last one decays to 0: steps 3 and 4 are flat."""
    [result] = runs["other rate"]
    assert [step["lr"] for step in result["steps"]] == [5e-4, 5e-4]
    reference = runs["one/moe"][0]["steps"][2:]
    assert result["steps"][0]["loss"] == pytest.approx(reference[0]["loss"], rel=1e-6)
    assert result["steps"][1]["loss"] != pytest.approx(reference[1]["loss"], rel=1e-3)


def test_an_engine_for_inference_reads_the_weights_of_a_training_checkpoint(runs):
    [result] = runs["inference"]
    saved = runs["save/moe/tp2ep2"][0]["saved"]
    assert result["weights"].keys() == saved.keys()
    assert all(torch.equal(result["weights"][name], saved[name]) for name in saved)
    assert len(result["scores"]) == 11


@pytest.mark.parametrize(
    ("case", "parts"),
    [
        ("dtype", ["model.dtype='bfloat16'", "was written with 'float32'"]),
        ("model", ["checkpoint of another model", "decoder.layers"]),
        ("layers", ["checkpoint of another model", "decoder.layers"]),
        ("weights", ["has weights but no optimizer state"]),
        ("missing", ["nowhere does not exist"]),
    ],
)
def test_what_cannot_be_loaded_is_refused_on_every_rank_and_changes_nothing(runs, case, parts):
    results = runs[f"refused/{case}"]
    assert len({result["message"] for result in results}) == 1
    for result in results:
        assert all(part in result["message"] for part in parts), result["message"]
        assert result["kept"]


def test_checkpoint_info_tells_version_layout_and_kind(runs):
    info = json.loads((runs.checkpoint("moe/ep2/sharded") / "mcore_rl.json").read_text())
    assert info["megatron_core"] == importlib.metadata.version("megatron-core")
    assert (info["layout"]["ep"], info["layout"]["tp"]) == (2, 1)
    assert (info["optimizer"], info["dtype"], info["vocab_size"]) == ("sharded", "float32", 131)


@pytest.mark.parametrize(("model", "layout", "sharded"), OVERLAP_CASES)
def test_overlap_takes_the_steps_of_one_rank_and_reads_see_finished_weights(
    runs, model, layout, sharded
):
    [reference] = runs[f"reads/one/{model}"]
    results = runs[f"reads/{model}/{layout}/{sharded}"]
    assert max(result["num_buckets"] for result in results) >= 2  # or nothing could arrive late
    scored = {}
    for result in results:
        assert_same_steps(result, reference["steps"])
        scored |= result["scored"]
        if result["head"] is not None:
            expected = reference["trained"].get(
                "lm_head.weight", reference["trained"]["model.embed_tokens.weight"]
            )
            torch.testing.assert_close(result["head"], expected, rtol=0, atol=5e-5)
    assert scored.keys() == reference["scored"].keys()
    for row, values in reference["scored"].items():
        torch.testing.assert_close(scored[row], values, rtol=0, atol=1e-5)
    for when in ("exported", "trained"):
        assert_same_weights(results[0][when], reference[when], atol=5e-5)


def test_adam_is_torch_adamw_with_decay_on_matrices_only(runs):
    """Transformer Engine and apex are absent here; beta, eps and decay are far from defaults."""
    [result] = runs["adam"]
    fused = [name for name in ("transformer_engine", "apex") if importlib.util.find_spec(name)]
    assert set(result["kinds"]) == {"FusedAdam" if fused else "AdamW"}
    for norm, expected in result["norms"]:
        assert norm == pytest.approx(expected, rel=1e-5)
        assert norm > 0.5  # so that clipping took part
    assert max(result["gaps"].values()) < 1e-6


def test_norms_and_other_tensors_of_one_dim_do_not_decay(runs):
    [result] = runs["adam"]
    decays = result["decays"]
    assert decays.keys() == result["gaps"].keys()
    for name, decay in decays.items():
        free = "norm" in name or name.endswith(".bias")
        assert decay == (0.0 if free else 0.1), name
    assert {0.0, 0.1} == set(decays.values())
    assert decays["decoder.layers.0.mlp.router.weight"] == 0.1
    assert decays["decoder.layers.1.mlp.experts.linear_fc1.weight3"] == 0.1


@pytest.mark.parametrize("layout", ["tp1", "tp2", "dp2", "ep2"])
def test_clipping_bounds_the_norm_over_all_ranks(runs, layout):
    """With beta1 = beta2 = 0 and eps = 1 an update is rate * g / (1 + |g|), nearly the gradient."""
    [reference] = runs["clip/tp1"]
    unclipped = runs["one/moe"][0]["steps"][0]["grad_norm"]
    result = runs[f"clip/{layout}"][0]
    assert result["step"]["grad_norm"] == pytest.approx(unclipped, rel=1e-4)
    assert result["step"]["lr"] == 0.5
    norm = sum(float(u.double().square().sum()) for u in result["update"].values()) ** 0.5
    assert norm == pytest.approx(0.5 * CLIP, rel=0.01)
    assert_same_weights(result["update"], reference["update"], atol=1e-7)


@pytest.mark.parametrize("name", CLOSED)
def test_nothing_is_left_of_a_closed_engine(runs, name):
    assert [result["left"] for result in runs[f"closed/{name}"]] == [[], []]


def test_gradients_that_are_not_finite_stop_the_step_and_leave_the_weights(runs):
    for result in runs["nan"]:
        assert "nan" in result["message"]
        assert result["kept"]
        assert 0 < result["following"]["grad_norm"] < 100
    assert runs["nan"][0]["following"]["loss"] == runs["nan"][1]["following"]["loss"]


def test_updates_that_may_be_skipped_are_and_leave_all_as_it_was(runs):
    plain = runs["nan"][0]["following"]
    for result in runs["nans"]:
        assert [num for num, _ in result["skipped"]] == [1.0, 1.0]
        assert all(math.isnan(norm) for _, norm in result["skipped"])
        assert "optimizer.max_skipped_steps=2 in a row" in result["message"]  # the third
        assert result["advanced"] == 1  # by the third
        assert result["kept"]
        following = result["following"]
        assert following["num_skipped_steps"] == 0.0
        assert following["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-4)


NUM_TENSORS = 2 * (7 + 8 + 8) + 3  # attention, norms, router; fc1 and fc2 of 8 experts; ends


def num_weights(runs: Runs) -> int:
    tensors = load_file(runs.models["moe"] / "model.safetensors")
    return sum(tensor.numel() for tensor in tensors.values())


@pytest.mark.parametrize(
    ("dtype", "weight_bytes", "state_bytes"),
    # Adam's two moments, and in bfloat16 a float32 copy of the weights
    [("float32", 4, 8), ("bfloat16", 2, 12)],
)
def test_the_memory_report_of_one_rank_is_exact(runs, dtype, weight_bytes, state_bytes):
    num = num_weights(runs)
    [result] = runs[f"memory/tp1/{dtype}"]
    masters = (state_bytes - 8) * num
    assert result["start"]["optimizer_state_bytes"] == masters
    counts = 4 * NUM_TENSORS  # each parameter has a float32 count of its steps
    expected = {
        "parameters_bytes": weight_bytes * num + result["start"]["buffers_bytes"],
        "gradients_bytes": 4 * num,
        "optimizer_state_bytes": state_bytes * num + counts,
    }
    expected["on_device_bytes"] = sum(expected.values())
    assert result["stepped"] == expected


@pytest.mark.parametrize(("dtype", "state_bytes"), [("float32", 8), ("bfloat16", 12)])
def test_a_distributed_optimizer_halves_the_state_of_two_ranks(runs, dtype, state_bytes):
    results = runs[f"memory/dp2/{dtype}"]
    sizes = [result["stepped"]["optimizer_state_bytes"] for result in results]
    num = num_weights(runs)
    counts = sum(sizes) - state_bytes * num
    # A parameter on the border of two shards has a count on each.
    assert 4 * NUM_TENSORS <= counts <= 4 * (NUM_TENSORS + 4)
    for size in sizes:
        assert size == pytest.approx(state_bytes * num / 2, rel=0.01)
    for result in results:
        assert result["stepped"]["gradients_bytes"] == pytest.approx(4 * num, rel=0.01)


def test_away_an_engine_has_no_gradients_and_does_not_train_until_it_is_back(runs):
    """On CPUs the rest stays in the same memory, and counts as away."""
    for layout in ("tp1", "dp2"):
        for result in runs[f"memory/{layout}/float32"]:
            stepped, away = result["stepped"], result["away"]
            assert away == stepped | {"gradients_bytes": 0, "on_device_bytes": 0}
            assert stepped["gradients_bytes"] > 0
            assert result["back"] == stepped
            assert "gradients are away" in result["refusal"]


def test_a_checkpoint_without_its_checkpoint_info_is_refused(runs, tmp_path):
    from mcore_rl.checkpoint import files
    from mcore_rl.config.errors import ConfigError

    copy = tmp_path / "copy"
    shutil.copytree(runs.checkpoint("moe/ep2/sharded"), copy)
    assert files.read_checkpoint_info(copy)["optimizer"] == "sharded"
    (copy / "mcore_rl.json").unlink()
    with pytest.raises(ConfigError, match="not a complete checkpoint"):
        files.read_checkpoint_info(copy)
