"""Rules and config of value models."""

from __future__ import annotations

import pytest

import mcore_rl.models  # noqa: F401
from mcore_rl.config.errors import ConfigError
from mcore_rl.models.base import get_family
from mcore_rl.models.heads import build_value_config, has_value_head, map_value_weights
from mcore_rl.reshard.rules import check_cover, list_logical_tensors

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "vocab_size": 131, "hidden_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 96, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu",
    "tie_word_embeddings": True,
}  # fmt: skip
ONE_LABEL = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
VALUE = QWEN3 | ONE_LABEL | {"architectures": ["Qwen3ForTokenClassification"]}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("start", [QWEN3, VALUE])
def test_a_value_model_has_the_decoder_and_a_head_of_one_row(start, tied):
    config = build_value_config(start | {"tie_word_embeddings": tied})
    language = get_family(QWEN3).weights(QWEN3, 132)
    shapes = {t.name: t.shape for t in list_logical_tensors(map_value_weights(config, 132))}
    decoder = {t.name for t in list_logical_tensors(language)} - {"lm_head.weight"}
    assert shapes.keys() == decoder | {"score.weight", "score.bias"}
    assert shapes["score.weight"] == (1, 64)
    assert shapes["score.bias"] == (1,)
    check_cover(map_value_weights(config, 132), 2)


def test_a_head_without_a_bias_has_none():
    weights = map_value_weights(
        build_value_config(VALUE | {"token_classification_bias": False}), 132
    )
    assert "score.bias" not in {t.name for t in list_logical_tensors(weights)}


def test_the_config_of_a_value_model_is_its_own_again():
    config = build_value_config(QWEN3)
    assert has_value_head(config)
    assert not has_value_head(QWEN3)
    assert build_value_config(config) == config
    assert config["architectures"] == ["Qwen3ForTokenClassification"]
    assert config["tie_word_embeddings"] is False


@pytest.mark.parametrize("name", ["num_nextn_predict_layers", "num_mtp_layers"])
def test_a_value_model_has_no_layers_for_multi_token_prediction(name):
    assert build_value_config(QWEN3 | {name: 1})[name] == 0
    assert name not in build_value_config(QWEN3)


@pytest.mark.parametrize(
    ("labels", "count"), [({}, 2), ({"id2label": {"0": "a", "1": "b", "2": "c"}}, 3)]
)
def test_a_classifier_of_more_labels_is_refused(labels, count):
    config = QWEN3 | labels | {"architectures": ["Qwen3ForTokenClassification"]}
    with pytest.raises(ConfigError, match=rf"Qwen3For.* has {count} labels .* allowed.*: 1"):
        build_value_config(config)
