"""Every model family against transformers and mbridge, on one rank and in a parallel layout.

The tests run over `tiny_families.cases()`; none is about one family alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import family_jobs
import pytest
import ranks
import tiny_families
import tiny_models
import torch
from safetensors.torch import load_file

import mcore_rl.models  # noqa: F401  (fills the family registry)
from mcore_rl.checkpoint.hf import CheckpointReader
from mcore_rl.config.schema import Layout
from mcore_rl.data.batch import Batch
from mcore_rl.models.base import family_of, read_config
from mcore_rl.reshard.rules import logical_tensors

CASES = tiny_families.cases()
NAMES = list(CASES)
PLACES = ("one rank", "parallel")
WITH_BIAS = [name for name, case in CASES.items() if hasattr(case.config, "n_routed_experts")]
WITH_MTP = [name for name, case in CASES.items() if hasattr(case.config, "num_mtp_layers")]


@dataclass
class Runs:
    batch: Batch
    models: dict[str, Any]
    checkpoints: dict[str, Path]
    results: dict[str, list[dict[str, Any]]]  # by "name/place", a result a rank


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("families")
    batch = tiny_models.make_batch(num_samples=7)
    models = {name: tiny_models.build_from(case.config) for name, case in CASES.items()}
    checkpoints = {n: tiny_families.save(model, folder / n) for n, model in models.items()}
    jobs: dict[int, dict[str, Any]] = {1: {}, 2: {}}
    for name, case in CASES.items():
        if name in WITH_BIAS:
            job = ranks.job(family_jobs.bfloat16, checkpoints[name], case.layout)
            jobs[case.layout.world_size][f"{name}/bfloat16"] = job
        if name in WITH_MTP:
            (folder / f"{name}-resume").mkdir()
            resume = (checkpoints[name], case.layout, batch, folder / f"{name}-resume")
            jobs[case.layout.world_size][f"{name}/resume"] = ranks.job(ranks.resume, *resume)
            jobs[1][f"{name}/names"] = ranks.job(family_jobs.names_by_mbridge, checkpoints[name])
        for place, layout in zip(PLACES, (Layout(), case.layout), strict=True):
            job = ranks.job(family_jobs.parity, checkpoints[name], layout, batch)
            jobs[layout.world_size][f"{name}/{place}"] = job
    return Runs(batch, models, checkpoints, ranks.Results(jobs))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_transformers(runs, name, place):
    reference, log_probs, _ = tiny_models.reference_scores(runs.models[name], runs.batch)
    for result in runs.results[f"{name}/{place}"]:
        wanted = torch.from_numpy(reference)
        torch.testing.assert_close(result["logits"], wanted, rtol=0, atol=1e-5)
        found = torch.cat(result["log_probs"]).double()
        torch.testing.assert_close(found, torch.from_numpy(log_probs), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_rotary_angles_equal_transformers(runs, name):
    """Finer than logits: at the few positions of a test, scaling moves those little."""
    rotary = runs.models[name].model.rotary_emb
    [result] = runs.results[f"{name}/one rank"]
    found = result["rotary"]
    torch.testing.assert_close(found["angles"], rotary.inv_freq, rtol=1e-6, atol=0)
    assert found["factor"] == pytest.approx(rotary.attention_scaling, rel=1e-6)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", NAMES)
def test_export_gives_back_each_tensor_bit_for_bit(runs, name, place):
    original = load_file(runs.checkpoints[name] / "model.safetensors")
    exported = runs.results[f"{name}/{place}"][0]["exported"]
    assert exported.keys() == original.keys()
    for key, tensor in original.items():
        assert exported[key].dtype == tensor.dtype, key
        assert torch.equal(exported[key], tensor), key


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_equals_mbridges_conversion(runs, name, place):
    for result in runs.results[f"{name}/{place}"]:
        assert len(result["mbridge"]) > 10
        for key, (ours, theirs) in result["mbridge"].items():
            assert torch.equal(ours, theirs), key


@pytest.mark.parametrize("name", NAMES)
def test_two_training_steps_equal_one_rank(runs, name):
    [single] = runs.results[f"{name}/one rank"]
    for result in runs.results[f"{name}/parallel"]:
        for step, wanted in zip(result["steps"], single["steps"], strict=True):
            assert step["loss"] == pytest.approx(wanted["loss"], rel=1e-6)
            assert step["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-4)
    trained = runs.results[f"{name}/parallel"][0]["trained"]
    for key, tensor in single["trained"].items():
        torch.testing.assert_close(trained[key], tensor, rtol=0, atol=2e-4, msg=key)


@pytest.mark.parametrize("name", NAMES)
def test_first_gradient_norm_equals_plain_torch_on_transformers(runs, name):
    model = runs.models[name]
    model.zero_grad()
    loss, grad_norm = tiny_models.reference_step(model, runs.batch)
    [result] = runs.results[f"{name}/one rank"]
    assert result["steps"][0]["loss"] == pytest.approx(loss, rel=1e-5)
    assert result["steps"][0]["grad_norm"] == pytest.approx(grad_norm, rel=1e-4)


@pytest.mark.parametrize("name", WITH_BIAS)
def test_the_selection_bias_stays_as_it_is_in_float32(runs, name):
    """Training leaves it alone, and a model in bfloat16 keeps it and nothing else in float32."""
    original = load_file(runs.checkpoints[name] / "model.safetensors")
    biases = {key for key in original if key.endswith("e_score_correction_bias")}
    assert biases
    narrow = runs.results[f"{name}/bfloat16"][0]
    for place in PLACES:
        trained = runs.results[f"{name}/{place}"][0]["trained"]
        assert all(torch.equal(trained[key], original[key]) for key in biases)
    for key, tensor in original.items():
        dtype = torch.float32 if key in biases else torch.bfloat16
        assert torch.equal(narrow[key], tensor.to(dtype)), key


@pytest.mark.parametrize("name", WITH_MTP)
def test_two_steps_after_a_resume_equal_those_without_a_stop(runs, name):
    """Replicated linears, expert linears and the selection bias are in the checkpoint, too."""
    for result in runs.results[f"{name}/resume"]:
        for found, wanted in zip(result["resumed"], result["steps"][2:], strict=True):
            assert found == wanted
        for key, tensor in result["trained"].items():
            assert torch.equal(result["trained_after_resume"][key], tensor), key


@pytest.fixture(scope="module")
def with_mtp(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("mtp")
    return {name: tiny_families.save_with_mtp(name, folder) for name in WITH_MTP}


@pytest.mark.parametrize("name", WITH_MTP)
def test_rules_name_each_tensor_of_a_checkpoint_with_a_prediction_layer(with_mtp, name):
    path = with_mtp[name]
    config = read_config(path)
    weights = family_of(config).weights(config, config["vocab_size"])
    assert family_of(config).num_mtp_layers(config) == 1
    CheckpointReader(path).check(logical_tensors(weights))
    [replica] = [weight for weight in weights if weight.replica]
    assert (replica.name, replica.stage) == ("embedding.word_embeddings.weight", "mtp")
    read = tiny_families.with_prediction_layer(path)  # the checkpoint is in the published form
    number = config["num_hidden_layers"]
    tensor = load_file(path / "model.safetensors")[f"model.layers.{number}.eh_proj.weight"]
    assert torch.equal(read.layers[0].eh_proj.weight, tensor)


@pytest.mark.parametrize("name", WITH_MTP)
def test_prediction_layers_are_named_as_mbridge_names_them(runs, name):
    [names] = runs.results[f"{name}/names"]
    assert any(key.startswith("mtp.layers.0.transformer_layer.mlp.experts") for key in names)
    for key, (ours, theirs) in names.items():
        assert ours == theirs, key
