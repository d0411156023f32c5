"""Multi-token prediction: its loss is that of transformers, at every layout; log-probs stay."""

from __future__ import annotations

import mtp_jobs
import pytest
import ranks
import tiny_families
import tiny_models
import torch
from safetensors.torch import load_file

from mcore_rl.config.schema import Layout
from tests.nightly import all_but

# The models have three layers.
LAYOUTS = {
    "one": Layout(),
    "tp2": Layout(tp=2),
    "dp2": Layout(dp=2),
    "cp2": Layout(cp=2),
    "tp2 ep2": Layout(tp=2, ep=2),
    "tp2 etp2": Layout(tp=2, etp=2),
    "pp2": Layout(pp=2, first_stage_layers=1),
    "pp2 vpp2": Layout(pp=2, vpp=2, first_stage_layers=0),
    "tp2 pp2 ep2": Layout(tp=2, pp=2, ep=2, last_stage_layers=1),
    "cp2 dp2 ep2": Layout(cp=2, dp=2, ep=2),
}
MODELS = deepseek, glm = ("deepseek_v3", "glm4_moe")


class Runs:
    def __init__(self, folder):
        self.batch = tiny_models.make_batch()
        self.paths = {model: tiny_families.save_with_mtp(model, folder) for model in MODELS}
        jobs = {1: {}, 2: {}, 4: {}}
        for model, path in self.paths.items():
            for name, layout in LAYOUTS.items():
                case = ranks.job(mtp_jobs.train, path, layout, self.batch, mtp_jobs.COEF)
                jobs[layout.world_size][f"{model}/{name}"] = case
            off = ranks.job(mtp_jobs.train, path, Layout(), self.batch, 0.0)
            again = (mtp_jobs.train, path, Layout(), self.batch, mtp_jobs.COEF, "selective")
            jobs[1] |= {f"{model}/off": off, f"{model}/selective": ranks.job(*again)}
        self.results = ranks.Results(jobs)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return Runs(tmp_path_factory.mktemp("mtp"))


@pytest.mark.parametrize("model", MODELS)
def test_the_loss_and_the_gradient_norm_equal_transformers(runs, model):
    mtp_loss, grad_norm = mtp_jobs.reference_step(runs.paths[model], runs.batch)
    step = runs.results[f"{model}/one"][0]["steps"][0]
    assert step["mtp_loss"] == pytest.approx(mtp_loss, rel=1e-5)
    assert step["grad_norm"] == pytest.approx(grad_norm, rel=1e-4)


@pytest.mark.parametrize(
    ("model", "name"),
    all_but(
        [(deepseek, "tp2"), (deepseek, "cp2"), (deepseek, "pp2"), (deepseek, "tp2 pp2 ep2"),
         (deepseek, "selective"), (glm, "tp2 ep2"), (glm, "pp2 vpp2")],
        [(model, name) for model in MODELS for name in [*list(LAYOUTS)[1:], "selective"]],
    ),
)  # fmt: skip
def test_two_steps_equal_one_rank(runs, model, name):
    one = runs.results[f"{model}/one"][0]
    by_rank = runs.results[f"{model}/{name}"]
    assert any("mtp_loss" in result["steps"][0] for result in by_rank)
    for result in by_rank:
        for step, wanted in zip(result["steps"], one["steps"], strict=True):
            assert step["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-4)
            if "loss" in step:
                assert step["loss"] == pytest.approx(wanted["loss"], rel=1e-6, abs=1e-6)
                assert step["mtp_loss"] == pytest.approx(wanted["mtp_loss"], rel=1e-6)
    for key, tensor in one["trained"].items():
        torch.testing.assert_close(by_rank[0]["trained"][key], tensor, rtol=0, atol=2e-4, msg=key)


@pytest.mark.parametrize("model", MODELS)
def test_log_probs_are_those_of_a_model_without_it_bit_for_bit(runs, model):
    with_it, without = (runs.results[f"{model}/{name}"][0] for name in ("one", "off"))
    assert with_it["log_probs"] == without["log_probs"]
    assert "mtp_loss" not in without["steps"][0]


@pytest.mark.parametrize(
    ("model", "name"),
    all_but(
        [(deepseek, "one"), (deepseek, "tp2 pp2 ep2"), (deepseek, "off"), (glm, "one")],
        [(model, name) for model in MODELS for name in ("one", "tp2 pp2 ep2", "off")],
    ),
)
def test_the_export_has_the_prediction_layers_bit_for_bit(runs, model, name):
    original = load_file(runs.paths[model] / "model.safetensors")
    first, *others = runs.results[f"{model}/{name}"]
    assert first["exported"].keys() == original.keys()
    for key, tensor in original.items():
        assert torch.equal(first["exported"][key], tensor), key
    assert all(result["exported"] == {} for result in others)


@pytest.mark.parametrize("model", MODELS)
def test_the_prediction_layer_is_trained_when_its_loss_is_on_and_else_kept(runs, model):
    on, off = (runs.results[f"{model}/{name}"][0] for name in ("one", "off"))
    key = "model.layers.3.eh_proj.weight"
    assert (on["trained"][key] - on["exported"][key]).abs().max() > 5e-4
    assert torch.equal(off["trained"][key], off["exported"][key])
    copied = on["trained"]["model.layers.3.embed_tokens.weight"]
    assert torch.equal(copied, on["trained"]["model.embed_tokens.weight"])
