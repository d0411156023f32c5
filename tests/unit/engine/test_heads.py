"""The value head: float32 whatever the dtype of the model, and found as an engine of its own."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from mcore_rl.config.schema import EngineConfig, ModelConfig
from mcore_rl.engine.base import EngineSpec
from mcore_rl.engine.megatron.engine import ValueEngine
from mcore_rl.engine.megatron.heads import ValueHead

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64,
    "tie_word_embeddings": True,
}  # fmt: skip


def value_head(dtype, *, sequence_parallel=False, has_bias=True):
    config = SimpleNamespace(
        hidden_size=64, params_dtype=dtype, sequence_parallel=sequence_parallel
    )
    torch.manual_seed(0)
    return ValueHead(config, has_bias=has_bias)


@pytest.mark.parametrize("has_bias", [True, False])
def test_values_of_a_bfloat16_model_are_summed_in_float32(has_bias):
    head = value_head(torch.bfloat16, has_bias=has_bias)
    hidden = torch.randn(5, 64, dtype=torch.bfloat16, requires_grad=True)
    values = head(hidden)
    expected = hidden.double() @ head.weight.double().squeeze(0)
    expected = expected + head.bias.double() if has_bias else expected
    assert values.dtype == torch.float32
    torch.testing.assert_close(values.double(), expected, rtol=1e-6, atol=1e-6)
    values.sum().backward()
    torch.testing.assert_close(hidden.grad, head.weight.detach().expand(5, 64))
    assert head.weight.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_every_parameter_tells_megatron_whether_tp_ranks_hold_parts_of_its_gradient(
    sequence_parallel,
):
    head = value_head(torch.float32, sequence_parallel=sequence_parallel)
    marks = [parameter.sequence_parallel for parameter in head.parameters()]
    assert marks == [sequence_parallel] * 2


def test_an_export_differs_from_a_language_model_in_head_and_architecture(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    engine = ValueEngine(EngineSpec(ModelConfig(str(tmp_path)), EngineConfig(), seed=0))
    assert engine.config_changes == {
        "architectures": ["Qwen3ForTokenClassification"],
        "tie_word_embeddings": False,
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
    }


def test_an_export_has_the_config_of_the_value_model_that_it_began_with(tmp_path):
    changes = {"architectures": ["Qwen3ForTokenClassification"], "tie_word_embeddings": False}
    labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    (tmp_path / "config.json").write_text(json.dumps(QWEN3 | changes | labels))
    engine = ValueEngine(EngineSpec(ModelConfig(str(tmp_path)), EngineConfig(), seed=0))
    assert engine.config_changes == {}
