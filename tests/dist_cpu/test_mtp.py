"""Multi-token prediction: its loss is that of transformers, at every layout; log-probs stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ranks
import tiny_families
import tiny_models
import torch
import torch_reference

from mcore_rl.checkpoint.hf import CheckpointReader
from mcore_rl.config.schema import Layout
from mcore_rl.data.batch import Batch
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
MODELS = deepseek, glm, lite, qwen, qwen3_5, sparse = (
    "deepseek_v3", "glm4_moe", "glm4_moe_lite", "qwen3_next", "qwen3_5_moe", "deepseek_v32"
)  # fmt: skip
SCALED = "glm4_moe_yarn"  # its prediction layer has the frequencies of the others
PROJECTION = dict.fromkeys((qwen, qwen3_5), "mtp.fc.weight")  # the others: as DeepSeek-V3


COEF = 0.3


@ranks.spawn_on_ranks()
def train(
    path: Path, layout: Layout, batch: Batch, coef: float, granularity: str = "none"
) -> ranks.Result:
    """Log-probs, the export, and two optimizer steps with the loss of the prediction layer."""
    spec = ranks.build_engine_spec(path, layout)
    spec.engine.mtp_loss_coef = coef
    spec.engine.recompute.granularity = granularity
    engine = ranks.start_engine(spec)
    rows = ranks.list_rows(engine, batch)
    share = batch.take(rows)
    scored = engine.infer_batch(share)
    result: ranks.Result = {"exported": dict(engine.get_per_tensor_param())}
    if scored is not None:
        columns = scored.jagged("log_probs")
        result["log_probs"] = {row: columns[place].tolist() for place, row in enumerate(rows)}
    result["steps"] = [engine.train_batch(share, ranks.LOSS) for _ in range(2)]
    result["trained"] = dict(engine.get_per_tensor_param())
    return result


def reference_step(path: Path, batch: Batch) -> tuple[float, float]:
    """Loss of the prediction layer and gradient norm of the step, by autograd of transformers."""
    predictor = tiny_families.with_prediction_layer(path).float()
    main = predictor_main(predictor, path)
    mtp_loss = torch.zeros((), dtype=torch.float64)
    for row in range(len(batch)):
        prompt, response = (batch.jagged(name)[row] for name in ("prompt_ids", "response_ids"))
        ids = torch.from_numpy(np.concatenate([prompt, response]))[None]
        weights = torch.from_numpy(batch.jagged("loss_weights")[row].copy()).double()
        log_probs = _predicted(main, predictor, ids)  # of tokens 2, 3, ...
        first = max(len(prompt), 2)  # the first response token that has a prediction
        mtp_loss = mtp_loss - (log_probs[first - 2 :] * weights[first - len(prompt) :]).sum()
    (COEF * mtp_loss).backward()
    tiny_models.reference_step(main, batch)  # adds the gradients of the policy's loss
    tensors = {id(p): p for model in (main, predictor) for p in model.parameters()}
    squares = sum(
        float(p.grad.double().square().sum())
        for p in tensors.values()
        if p.requires_grad and p.grad is not None
    )
    return mtp_loss.item(), squares**0.5


def predictor_main(predictor: Any, path: Path) -> Any:
    """The main model that shares embedding and head with the predictor."""
    main = torch_reference.load(path).float()
    predictor.tie_with_main_model(main)
    return main


def _predicted(main: Any, predictor: Any, ids: torch.Tensor) -> torch.Tensor:
    """[length - 2] log-probs of tokens 2 and on, each by the state two places before it."""
    if ids.shape[1] < 3:
        return torch.zeros(0, dtype=torch.float64)
    states = main.get_decoder()(ids)[0]
    embedded = predictor.embed_tokens(ids[:, 1:])
    [layer], length = predictor.layers, embedded.shape[1]
    positions = torch.arange(length)[None]
    mask = torch.full((1, 1, length, length), float("-inf")).triu(1)
    out = layer(
        embedded,
        states[:, :-1],
        position_embeddings=predictor.rotary_emb(embedded, position_ids=positions),
        attention_mask=mask,
        position_ids=positions,
        past_key_values=None,
    )
    scores = predictor.shared_head(out)[0, :-1].double().log_softmax(-1)
    return scores.gather(1, ids[0, 2:, None])[:, 0]


class Runs:
    def __init__(self, folder: Path) -> None:
        self.batch = tiny_models.make_batch()
        self.paths = {
            model: tiny_families.save_with_mtp(model, folder) for model in (*MODELS, SCALED)
        }

    def train(self, model: str, name: str) -> list[ranks.Result]:
        """At a layout; on one rank "off" has no such loss, and "selective" recomputes."""
        coef = 0.0 if name == "off" else COEF
        granularity = name if name == "selective" else "none"
        layout = LAYOUTS.get(name, Layout())
        return train(self.paths[model], layout, self.batch, coef, granularity)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return Runs(tmp_path_factory.mktemp("mtp"))


@pytest.mark.parametrize("model", [*MODELS, SCALED])
def test_the_loss_and_the_gradient_norm_equal_transformers(runs, model):
    mtp_loss, grad_norm = reference_step(runs.paths[model], runs.batch)
    step = runs.train(model, "one")[0]["steps"][0]
    assert step["mtp_loss"] == pytest.approx(mtp_loss, rel=1e-5)
    assert step["grad_norm"] == pytest.approx(grad_norm, rel=1e-4)


@pytest.mark.parametrize(
    ("model", "name"),
    all_but(
        [(deepseek, "tp2"), (deepseek, "cp2"), (deepseek, "pp2"), (deepseek, "tp2 pp2 ep2"),
         (deepseek, "selective"), (glm, "tp2 ep2"), (glm, "pp2 vpp2"), (qwen, "tp2 etp2"),
         (qwen, "cp2"), (qwen, "pp2"), (qwen, "tp2 pp2 ep2"), (sparse, "tp2 pp2 ep2")],
        [(model, name) for model in MODELS for name in [*list(LAYOUTS)[1:], "selective"]],
    ),
)  # fmt: skip
def test_two_steps_equal_one_rank(runs, model, name):
    reference = runs.train(model, "one")[0]
    by_rank = runs.train(model, name)
    assert any("mtp_loss" in result["steps"][0] for result in by_rank)
    for result in by_rank:
        for step, expected in zip(result["steps"], reference["steps"], strict=True):
            assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
            if "loss" in step:
                assert step["loss"] == pytest.approx(expected["loss"], rel=1e-6, abs=1e-6)
                assert step["mtp_loss"] == pytest.approx(expected["mtp_loss"], rel=1e-6)
    for key, tensor in reference["trained"].items():
        torch.testing.assert_close(by_rank[0]["trained"][key], tensor, rtol=0, atol=2e-4, msg=key)


@pytest.mark.parametrize("model", MODELS)
def test_log_probs_are_those_of_a_model_without_it_bit_for_bit(runs, model):
    with_it, without = (runs.train(model, name)[0] for name in ("one", "off"))
    assert with_it["log_probs"] == without["log_probs"]
    assert "mtp_loss" not in without["steps"][0]


@pytest.mark.parametrize(
    ("model", "name"),
    all_but(
        [(deepseek, "one"), (deepseek, "tp2 pp2 ep2"), (deepseek, "off"), (glm, "one"),
         (qwen, "one"), (qwen, "tp2 pp2 ep2"), (qwen, "off"), (qwen3_5, "tp2 pp2 ep2")],
        [(model, name) for model in MODELS for name in ("one", "tp2 pp2 ep2", "off")],
    ),
)  # fmt: skip
def test_the_export_has_the_prediction_layers_bit_for_bit(runs, model, name):
    reader = CheckpointReader(runs.paths[model])  # experts that are stacked apart, no tower
    original = {n: reader.read_tensor(n) for n in reader.get_shapes() if n not in reader.frozen}
    first, *other_ranks = runs.train(model, name)
    assert first["exported"].keys() == original.keys()
    for key, tensor in original.items():
        assert torch.equal(first["exported"][key], tensor), key
    assert all(result["exported"] == {} for result in other_ranks)


@pytest.mark.parametrize("model", MODELS)
def test_the_prediction_layer_is_trained_when_its_loss_is_on_and_else_unchanged(runs, model):
    on, off = (runs.train(model, name)[0] for name in ("one", "off"))
    key = PROJECTION.get(model, "model.layers.3.eh_proj.weight")
    assert (on["trained"][key] - on["exported"][key]).abs().max() > 5e-4
    assert torch.equal(off["trained"][key], off["exported"][key])
    copied = on["trained"].get("model.layers.3.embed_tokens.weight")
    assert (copied is None) == (model in PROJECTION)
    assert copied is None or torch.equal(copied, on["trained"]["model.embed_tokens.weight"])
