"""Every model family against transformers and mbridge, on one rank and in a parallel layout.

The tests run over `tiny_families.cases()`; none is about one family alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ranks
import tiny_families
import tiny_models
import torch
import torch_reference
import transformers
from safetensors.torch import load_file
from transformers.core_model_loading import revert_weight_conversion

import mcore_rl.models  # noqa: F401  (fills the family registry)
from mcore_rl.checkpoint.hf import CheckpointReader
from mcore_rl.config.schema import Layout
from mcore_rl.data.batch import Batch
from mcore_rl.engine.megatron import device
from mcore_rl.engine.megatron.engine import MegatronEngine
from mcore_rl.models.base import get_family, read_config
from mcore_rl.reshard.rules import list_logical_tensors
from tests.nightly import all_but, nightly

CASES = tiny_families.cases()
NAMES = list(CASES)
EACH = all_but([name for name in NAMES if name != "qwen3_5"], NAMES)
PLACES = ("one rank", "parallel")
# mbridge does not know them
UNBRIDGED = (
    "deepseek_v32", "glm_moe_dsa", "gpt_oss", "kimi_k25", "minimax_m2", "qwen3_5", "qwen3_5_moe",
    "qwen3_next",
)  # fmt: skip
BRIDGED = [name for name in NAMES if name not in UNBRIDGED]
WITH_BIAS = [
    *[name for name, case in CASES.items() if hasattr(case.config, "n_routed_experts")],
    "minimax_m2",
]
WITH_MTP = [name for name, case in CASES.items() if hasattr(case.config, "num_mtp_layers")]
# Gradients of each tensor, and three steps, against plain torch on transformers.
STEPPED = all_but(("qwen3_next", "gpt_oss", "minimax_m2"), NAMES)
RESUMED = [
    *all_but(("deepseek_v3", "glm4_moe", "qwen3_next"), [*WITH_MTP, "qwen3_next"]), "gpt_oss"
]  # fmt: skip


@ranks.spawn_on_ranks()
def parity(path: Path, layout: Layout, batch: Batch) -> ranks.Result:
    """Scores, export and training steps, and what only an engine that has just loaded can tell."""
    loaded = ranks.start_engine(replace(ranks.build_engine_spec(path, layout), total_steps=0))
    fresh = {"mbridge": convert_by_mbridge(loaded, path), "rotary": rotary(loaded.chunks[0])}
    return ranks.run_parity(path, layout, batch) | fresh


@ranks.spawn_on_ranks()
def three_steps(path: Path, layout: Layout, batch: Batch) -> ranks.Result:
    """Gradients of the first step, each by its name, and three steps."""
    engine = ranks.start_engine_with(path, layout, {"optimizer.eps": torch_reference.EPSILON})
    share = batch.take(ranks.list_rows(engine, batch))
    engine.optimizer_zero_grad()
    engine.forward_backward_batch(share, ranks.LOSS, forward_only=False)
    actual: ranks.Result = {"gradients": ranks.read_gradients(engine)}
    steps = [engine.train_batch(share, ranks.LOSS) for _ in range(3)]
    return actual | {"steps": steps, "trained": dict(engine.get_per_tensor_param())}


def convert_by_mbridge(engine: MegatronEngine, path: Path) -> dict[str, list[torch.Tensor]]:
    """For each parameter of this rank: [ours, mbridge's from the same checkpoint].

    mbridge converts and splits with its own code. Nothing for a family that it does not know.
    """
    from mbridge.core.parallel_states import ParallelStates

    from mcore_rl.engine.megatron.weights import get_local_tensors

    [model] = engine.chunks
    hf_config = transformers.AutoConfig.from_pretrained(path)
    if hf_config.model_type.removesuffix("_text") in UNBRIDGED:
        return {}
    if getattr(hf_config, "head_dim", None) is None:
        hf_config.head_dim = hf_config.hidden_size // hf_config.num_attention_heads
    bridge = mbridge_for(hf_config.model_type, hf_config, model.config)
    bridge.mpu = ParallelStates.get_parallel_state()
    bridge.vocab_size = hf_config.vocab_size
    bridge.make_vocab_size_divisible_by = engine.layout.tp
    bridge.padded_vocab_size = -(-hf_config.vocab_size // engine.layout.tp) * engine.layout.tp
    checkpoint = load_file(path / "model.safetensors")
    names = bridge._weight_name_mapping_mcore_local_to_global(model)
    actual = {}
    for local, tensor in get_local_tensors(model).items():
        sources = bridge._weight_name_mapping_mcore_to_hf(names[local])
        full_tensor = bridge._weight_to_mcore_format(local, [checkpoint[name] for name in sources])
        expert = ".mlp.experts.linear_fc" in local
        size = bridge.mpu.etp_size if expert else bridge.mpu.tp_size
        rank = bridge.mpu.etp_rank if expert else bridge.mpu.tp_rank
        expected = bridge._weight_split_across_tp(local, full_tensor, tensor, size)[rank]
        actual[local] = [tensor.detach().clone(), expected.clone()]
    return actual


def mbridge_for(model_type: str, hf_config: Any, config: Any) -> Any:
    """mbridge's converter, without its constructor.

    That builds a Megatron config from attributes that the configs of transformers 5 no longer have.
    """
    from mbridge.core.bridge import _MODEL_REGISTRY

    kind: Any = _MODEL_REGISTRY[model_type.replace("glm4_moe_lite", "deepseek_v3")]
    bridge = kind.__new__(kind)
    bridge._DIRECT_MAPPING = dict(kind._DIRECT_MAPPING)  # a tied head would stay in the class
    bridge.hf_config, bridge.config, bridge.dtype = hf_config, config, torch.float32
    bridge._adjust_mapping_for_shared_weights()
    return bridge


@ranks.spawn_on_ranks(1)
def names_by_mbridge(path: Path) -> ranks.Result:
    """Each parameter of a model with a prediction layer: [our, mbridge's] checkpoint tensors.

    With 61 layers, the only number for which mbridge knows a prediction layer of DeepSeek-V3.
    """
    device.install(1)
    config = {**read_config(path), "num_hidden_layers": 61, "num_nextn_predict_layers": 1}
    mcore = SimpleNamespace(num_layers=61, mtp_num_layers=1)
    bridge = mbridge_for(config["model_type"], SimpleNamespace(), mcore)
    weights = get_family(config).weights(config, config["vocab_size"])
    return {
        weight.get_local_name(): [
            [tensor.name for tensor in weight.rule.tensors],
            bridge._weight_name_mapping_mcore_to_hf(
                weight.get_local_name().replace("mtp_model_layer", "transformer_layer")  # of 0.16
            ),
        ]
        for weight in weights
        if not weight.replica
    }


@ranks.spawn_on_ranks()
def bfloat16(path: Path, layout: Layout) -> ranks.Result:
    """Export a model in bfloat16."""
    spec = replace(ranks.build_engine_spec(path, layout, "bfloat16"), total_steps=0)
    return dict(ranks.start_engine(spec).get_per_tensor_param())


def rotary(model: Any) -> dict[str, Any]:
    """Angles a position by rotary frequency, and the factor on cosine and sine."""
    attention = model.decoder.layers[-1].self_attention  # a hybrid model's first has no angles
    factor = attention._yarn_concentration_factor
    embedding = getattr(model, "rotary_pos_emb", None)
    if embedding is None:  # latent attention has one in each layer
        embedding = attention.rotary_pos_emb
    angles = embedding.get_emb(2)
    if isinstance(angles, tuple):
        angles, factor = angles
    return {"angles": angles[1, 0, 0].chunk(2)[0].clone(), "factor": float(factor)}


@dataclass(frozen=True)
class Runs:
    batch: Batch
    models: dict[str, Any]
    checkpoints: dict[str, Path]

    def parity(self, name: str, place: str) -> list[ranks.Result]:
        layout = CASES[name].layout if place == "parallel" else Layout()
        return parity(self.checkpoints[name], layout, self.batch)

    def three_steps(self, name: str, place: str) -> ranks.Result:
        layout = CASES[name].layout if place == "parallel" else Layout()
        return three_steps(self.checkpoints[name], layout, self.batch)[0]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("families")
    models = {name: tiny_models.build_from(case.config) for name, case in CASES.items()}
    checkpoints = {n: tiny_families.save(model, folder / n) for n, model in models.items()}
    return Runs(tiny_models.make_batch(num_samples=7), models, checkpoints)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", EACH)
def test_logits_equal_transformers(runs, name, place):
    reference, log_probs, _ = tiny_models.reference_scores(runs.models[name], runs.batch)
    for result in runs.parity(name, place):
        expected = torch.from_numpy(reference)
        torch.testing.assert_close(result["logits"], expected, rtol=0, atol=1e-5)
        actual = torch.cat(result["log_probs"]).double()
        torch.testing.assert_close(actual, torch.from_numpy(log_probs), rtol=0, atol=1e-5)


@pytest.mark.parametrize("layout", [Layout(), nightly(Layout(tp=2)), Layout(cp=2)], ids=str)
def test_logits_over_several_chunks_of_a_gated_delta_net_equal_transformers(runs, layout):
    """Chunks have 64 tokens. transformers itself is 1.3e-5 from float64 here."""
    batch = tiny_models.make_batch(num_samples=5, times=5)
    lengths = batch.jagged("prompt_ids").lengths + batch.jagged("response_ids").lengths
    assert lengths.max() > 128
    reference, _, _ = tiny_models.reference_scores(runs.models["qwen3_next"], batch)
    for result in ranks.run_parity(runs.checkpoints["qwen3_next"], layout, batch):
        expected = torch.from_numpy(reference)
        torch.testing.assert_close(result["logits"], expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", EACH)
def test_rotary_angles_equal_transformers(runs, name):
    """Finer than logits: at the few positions of a test, scaling moves those little."""
    rotary = runs.models[name].get_decoder().rotary_emb
    [result] = runs.parity(name, "one rank")
    actual = result["rotary"]
    torch.testing.assert_close(actual["angles"], rotary.inv_freq, rtol=1e-6, atol=0)
    assert actual["factor"] == pytest.approx(rotary.attention_scaling, rel=1e-6)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", EACH)
def test_export_gives_back_each_tensor_bit_for_bit(runs, name, place):
    """But those of a frozen tower, which the writer of a checkpoint adds."""
    original = load_file(runs.checkpoints[name] / "model.safetensors")
    for key in CheckpointReader(runs.checkpoints[name]).frozen:
        del original[key]
    exported = runs.parity(name, place)[0]["exported"]
    assert exported.keys() == original.keys()
    for key, tensor in original.items():
        assert exported[key].dtype == tensor.dtype, key
        assert torch.equal(exported[key], tensor), key


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", BRIDGED)
def test_every_parameter_equals_mbridges_conversion(runs, name, place):
    for result in runs.parity(name, place):
        assert len(result["mbridge"]) > 10
        for key, (actual, expected) in result["mbridge"].items():
            assert torch.equal(actual, expected), key


@pytest.mark.parametrize("name", EACH)
def test_two_training_steps_equal_one_rank(runs, name):
    [single] = runs.parity(name, "one rank")
    for result in runs.parity(name, "parallel"):
        for step, expected in zip(result["steps"], single["steps"], strict=True):
            assert step["loss"] == pytest.approx(expected["loss"], rel=1e-6)
            assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
    trained = runs.parity(name, "parallel")[0]["trained"]
    for key, tensor in single["trained"].items():
        torch.testing.assert_close(trained[key], tensor, rtol=0, atol=2e-4, msg=key)


@pytest.mark.parametrize("name", EACH)
def test_first_gradient_norm_equals_plain_torch_on_transformers(runs, name):
    model = runs.models[name]
    model.zero_grad()
    loss, grad_norm = tiny_models.reference_step(model, runs.batch)
    [result] = runs.parity(name, "one rank")
    assert result["steps"][0]["loss"] == pytest.approx(loss, rel=1e-5)
    assert result["steps"][0]["grad_norm"] == pytest.approx(grad_norm, rel=1e-4)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", STEPPED)
def test_gradients_of_each_tensor_equal_plain_torch_on_transformers(runs, name, place):
    model, actual = runs.models[name], runs.three_steps(name, place)["gradients"]
    model.zero_grad()
    tiny_models.reference_step(model, runs.batch)
    gradients = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    expected = revert_weight_conversion(model, gradients)
    assert expected.keys() <= actual.keys()
    for key, gradient in expected.items():
        assert (actual[key] - gradient).norm() <= 1e-4 * gradient.norm(), key


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", STEPPED)
def test_three_steps_equal_plain_torch_on_transformers(runs, name, place):
    """Policy loss, clipped gradients and AdamW."""
    path, result = runs.checkpoints[name], runs.three_steps(name, place)
    settings = ranks.build_engine_spec(path, Layout()).engine.optimizer
    norms, weights = torch_reference.train(path, runs.batch, settings, num_steps=3)
    assert [step["grad_norm"] for step in result["steps"]] == pytest.approx(norms, rel=1e-4)
    for key, tensor in result["trained"].items():
        torch.testing.assert_close(tensor, weights[key], rtol=0, atol=3e-6, msg=key)


@pytest.mark.parametrize("name", WITH_BIAS)
def test_the_selection_bias_stays_as_it_is_in_float32(runs, name):
    """Training leaves it alone, and a model in bfloat16 keeps it and nothing else in float32."""
    original = load_file(runs.checkpoints[name] / "model.safetensors")
    biases = {key for key in original if key.endswith("e_score_correction_bias")}
    assert biases
    narrow = bfloat16(runs.checkpoints[name], CASES[name].layout)[0]
    for place in PLACES:
        trained = runs.parity(name, place)[0]["trained"]
        assert all(torch.equal(trained[key], original[key]) for key in biases)
    for key, tensor in original.items():
        dtype = torch.float32 if key in biases else torch.bfloat16
        assert torch.equal(narrow[key], tensor.to(dtype)), key


@pytest.mark.parametrize("name", RESUMED)
def test_two_steps_after_a_resume_equal_those_without_a_stop(runs, name, tmp_path):
    """Linears of experts and their biases, sinks, replicated linears and the selection bias."""
    path, layout = runs.checkpoints[name], CASES[name].layout
    for result in ranks.resume(path, layout, runs.batch, tmp_path):
        for actual, expected in zip(result["resumed"], result["steps"][2:], strict=True):
            assert actual == expected
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
    weights = get_family(config).weights(config, config["vocab_size"])
    assert get_family(config).num_mtp_layers(config) == 1
    CheckpointReader(path).check(list_logical_tensors(weights))
    [replica] = [weight for weight in weights if weight.replica]
    assert (replica.name, replica.stage) == ("embedding.word_embeddings.weight", "mtp")
    read = tiny_families.with_prediction_layer(path)  # the checkpoint is in the published form
    number = config["num_hidden_layers"]
    tensor = load_file(path / "model.safetensors")[f"model.layers.{number}.eh_proj.weight"]
    assert torch.equal(read.layers[0].eh_proj.weight, tensor)


PUBLISHED = {
    "float8": tiny_families.save_published_deepseek,  # with its prediction layer
    "mxfp4": tiny_families.save_published_gpt_oss,
    "int4": tiny_families.save_published_kimi,  # inside a wrapper
}


@pytest.mark.parametrize("layout", [Layout(), nightly(CASES["deepseek_v3"].layout)], ids=str)
@pytest.mark.parametrize("form", PUBLISHED)
def test_a_published_quantised_checkpoint_is_the_model_of_the_dequantised_weights(
    form, layout, tmp_path_factory
):
    """Scores, training and an export without blocks."""
    path, plain = PUBLISHED[form](tmp_path_factory.mktemp(form))
    batch = tiny_models.make_batch(num_samples=7)
    [actual, *_], [expected, *_] = (parity(folder, layout, batch) for folder in (path, plain))
    assert actual["steps"] == expected["steps"]
    original = load_file(plain / "model.safetensors")
    for key in CheckpointReader(plain).frozen:
        del original[key]
    assert actual["exported"].keys() == original.keys()
    for key, tensor in original.items():
        assert torch.equal(actual["exported"][key], tensor), key
    for key, tensors in actual.items():
        if key in ("log_probs", "entropy"):
            assert all(map(torch.equal, tensors, expected[key])), key


@pytest.mark.parametrize("layout", [nightly(Layout()), CASES["kimi_k2"].layout], ids=str)
def test_scores_and_three_steps_of_kimi_k2_5_equal_plain_torch_on_transformers(layout, tmp_path):
    """The checkpoint has experts in int4; transformers reads its dequantised copy."""
    path, plain = tiny_families.save_published_kimi(tmp_path)
    batch = tiny_models.make_batch(num_samples=7)
    expected = torch_reference.score(torch_reference.load(plain), batch, 1.0)
    for result in parity(path, layout, batch):
        actual = torch.cat(result["log_probs"])
        torch.testing.assert_close(actual, torch.cat(expected["log_probs"]), rtol=0, atol=1e-5)
    settings = ranks.build_engine_spec(path, Layout()).engine.optimizer
    norms, weights = torch_reference.train(plain, batch, settings, num_steps=3)
    weights = {tiny_families.name_kimi_tensor(key): tensor for key, tensor in weights.items()}
    result = three_steps(path, layout, batch)[0]
    assert [step["grad_norm"] for step in result["steps"]] == pytest.approx(norms, rel=1e-4)
    for key, tensor in result["trained"].items():
        torch.testing.assert_close(tensor, weights[key], rtol=0, atol=3e-6, msg=key)


@pytest.mark.parametrize("name", [name for name in WITH_MTP if name in BRIDGED])
def test_prediction_layers_are_named_as_mbridge_names_them(runs, name):
    [names] = names_by_mbridge(runs.checkpoints[name])
    assert any(key.startswith("mtp.layers.0.mtp_model_layer.mlp.experts") for key in names)
    for key, (actual, expected) in names.items():
        assert actual == expected, key
