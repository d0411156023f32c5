"""Meta models: rules are held against Megatron's model, and a process is left as it was."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.dist_checkpointing.mapping import ShardedTensor

import mcore_rl.models  # noqa: F401
from mcore_rl.checkpoint.storage_location import StorageLocation
from mcore_rl.config.errors import ConfigError
from mcore_rl.engine.megatron import device
from mcore_rl.engine.megatron.conversion import (
    MetaModel,
    build_meta_model,
    get_storage_location,
    switch_layer_stacking,
)
from mcore_rl.models import base
from mcore_rl.reshard.rules import LogicalTensor, Replicated

_SHAPE: dict[str, Any] = {
    "vocab_size": 131, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 24, "intermediate_size": 96, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "hidden_act": "silu", "max_position_embeddings": 256,
}  # fmt: skip
DENSE = {**_SHAPE, "architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True}
MOE = {
    **_SHAPE, "architectures": ["Glm4MoeForCausalLM"], "n_routed_experts": 4, "n_shared_experts": 1,
    "num_experts_per_tok": 2, "moe_intermediate_size": 40, "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5, "attention_bias": True, "use_qk_norm": True,
    "num_nextn_predict_layers": 1,
}  # fmt: skip
FC1 = "decoder.layers.1.mlp.experts.linear_fc1.weight2"


def test_experts_are_stacked_and_layers_are_apart():
    dense, moe = build_meta_model(DENSE, 132), build_meta_model(MOE, 131)
    name = "decoder.layers.1.mlp.linear_fc2.weight"
    assert dense.parameters[name] == StorageLocation(name, (64, 96), ())
    assert dense.parameters["embedding.word_embeddings.weight"].shape == (132, 64)
    assert not any(key.startswith("output_layer") for key in dense.parameters)
    key = "decoder.layers.1.mlp.experts.experts.linear_fc1.weight"
    assert moe.parameters[FC1] == StorageLocation(key, (4, 80, 64), (2,))
    assert "decoder.layers.1.mlp.router.expert_bias" in moe.parameters
    assert "mtp.layers.0.mtp_model_layer.mlp.experts.linear_fc1.weight3" in moe.parameters
    assert "mtp.layers.0.eh_proj._extra_state/shard_0_1" in moe.objects


def test_value_models_and_tied_models_with_prediction_layers_have_meta_models():
    value = build_meta_model({**DENSE, "architectures": ["Qwen3ForTokenClassification"],
                       "id2label": {"0": "LABEL_0"}}, 131)  # fmt: skip
    assert value.parameters["output_layer.weight"].shape == (1, 64)
    assert value.parameters["output_layer.bias"].shape == (1,)
    tied = build_meta_model({**MOE, "tie_word_embeddings": True}, 131).parameters
    assert build_meta_model(MOE, 131).parameters.keys() - tied.keys() == {"output_layer.weight"}


def test_a_process_is_left_as_it_was():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    build_meta_model(DENSE, 131)
    assert torch.equal(torch.get_rng_state(), before)
    assert not dist.is_initialized()
    assert torch.empty(2, device="cuda").device == torch.device("cpu")  # not meta any more


def test_a_rank_is_refused(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match="this process is already a rank"):
        build_meta_model(DENSE, 131)


def test_after_a_failure_the_next_meta_model_is_made(monkeypatch):
    with monkeypatch.context() as patch:
        change_rules(patch, lambda weights: weights[1:])
        with pytest.raises(RuntimeError):
            build_meta_model(MOE, 131)
    assert not dist.is_initialized()
    assert build_meta_model(MOE, 131).parameters


def change_rules(monkeypatch, change):
    family = base.get_family(MOE)
    faulty = replace(family, weights=lambda *args: tuple(change(list(family.weights(*args)))))
    monkeypatch.setitem(base._FAMILIES, family.architecture, faulty)


def without(weights):
    return [w for w in weights if w.get_local_name() != FC1]


def doubled(weights):
    return [*weights, weights[0]._replace(rule=Replicated(LogicalTensor("other", (131, 64))))]


def misshapen(weights):
    def shape(weight):
        if not weight.name.endswith("router.weight"):
            return weight
        [gate] = weight.rule.tensors
        return weight._replace(rule=Replicated(LogicalTensor(gate.name, (4, 63))))

    return [shape(w) for w in weights]


def with_one_more(weights):
    tensor = LogicalTensor("model.layers.1.extra.weight", (64,))
    return [*weights, weights[-1]._replace(name="decoder.extra.weight", rule=Replicated(tensor))]


def reading_one_tensor_twice(weights):
    norms = [w for w in weights if w.name.endswith("q_layernorm.weight")]
    return [w._replace(rule=norms[0].rule) if w is norms[1] else w for w in weights]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without, rf"{FC1}: no rule names this parameter of the model$"),
        (doubled, r"embedding\.word_embeddings\.weight: two rules name this parameter"),
        (
            misshapen,
            r"decoder\.layers\.1\.mlp\.router\.weight: the model has shape \(4, 64\), its rule "
            r"says \(4, 63\)",
        ),
        (with_one_more, r"decoder\.extra\.weight: a rule names this parameter, which the model"),
        (
            reading_one_tensor_twice,
            r"model\.layers\.0\.self_attn\.q_norm\.weight is named by two parameters",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_fault_in_the_rules_is_named(monkeypatch, change, message):
    change_rules(monkeypatch, change)
    with pytest.raises((RuntimeError, ValueError), match=message):
        build_meta_model(MOE, 131)


@given(
    apart=st.builds(
        lambda layer, rest, shape, index: StorageLocation(
            f"decoder.layers.{layer}.{rest}", (*range(9, 9 + len(index)), *shape), tuple(index)
        ),
        st.integers(0, 5),
        st.sampled_from(["mlp.router.weight", "mlp.experts.experts.linear_fc1.weight"]),
        st.lists(st.integers(1, 9), min_size=1, max_size=2),
        st.lists(st.integers(0, 8), max_size=1),
    )
)
def test_both_forms_lead_to_each_other(apart):
    stacked = switch_layer_stacking(apart, 6)
    assert stacked.shape == (6, *apart.shape)
    assert stacked.index[1:] == apart.index
    assert switch_layer_stacking(stacked, 6) == apart


def test_a_parameter_outside_the_layers_has_one_form():
    model = MetaModel({"x": StorageLocation("mtp.layers.0.enorm.weight", (4,), ())}, {}, 6)
    assert switch_layer_stacking(model.parameters["x"], 6) is None
    with pytest.raises(ConfigError, match=r"the checkpoint has no mtp\.layers\.0\.enorm\.weight"):
        model.locate_parameters(["mtp.layers.enorm.weight"])


def shard(offset: int, count: int) -> ShardedTensor:
    data = torch.empty(4, 3, device="meta")
    return ShardedTensor.from_rank_offsets("w", data, (0, offset, count), replica_id=0)


def test_a_shard_that_is_not_the_whole_parameter_is_refused():
    assert get_storage_location("w", shard(0, 1)) == StorageLocation("w", (4, 3), ())
    with pytest.raises(RuntimeError, match=r"w: 4 rows of w, whose shape is \(8, 3\)"):
        get_storage_location("w", shard(0, 2))
    with pytest.raises(RuntimeError, match="does not follow on row 0 of w"):
        get_storage_location("w", shard(1, 2))


def test_the_process_stays_on_the_cpu_where_there_is_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert build_meta_model(DENSE, 131).parameters
    assert device.get_device_type() == "cpu"
    assert device.get_collective_backend() == "gloo"
