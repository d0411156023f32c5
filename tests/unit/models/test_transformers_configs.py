"""config.json as transformers saves it: models of backend=fsdp, or one clear refusal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.rules import TRANSFORMERS
from mcore_rl.models.base import (
    estimate_cost,
    get_family,
    get_model_sizes,
    read_config,
    scope_family,
)
from mcore_rl.models.heads import map_model_weights
from tests.nightly import all_but

# Infinite numbers, sizes by layer, sizes under other names, a window of 0.
READ = (
    "bamba", "falcon_h1", "granitemoehybrid", "nemotron_h", "gemma4_text", "gpt2", "dbrx", "bloom",
    "gptj", "mpt", "gpt_neo", "minimax", "qwen2_moe", "longcat_flash",
)  # fmt: skip
REFUSED = (
    "mamba2", "falcon_mamba", "gemma3n_text", "rwkv", "prophetnet", "gemma4", "blt",
    "gemma4_assistant", "gemma4_unified_assistant",
)  # fmt: skip
UNBUILT = ("musicgen", "musicgen_melody")  # transformers does not build them from nothing


def save_config(kind: str, folder: Path, **fields: Any) -> Any:
    """Save the config of a model type as save_pretrained does; return it."""
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
    config = CONFIG_MAPPING[kind](**fields)
    config.architectures = [architecture if isinstance(architecture, str) else architecture[0]]
    config.save_pretrained(folder)
    return config


@pytest.mark.parametrize("kind", READ)
def test_sizes_of_a_saved_config_are_those_of_transformers(kind, tmp_path):
    saved = save_config(kind, tmp_path)
    with scope_family(TRANSFORMERS):
        config = read_config(tmp_path)
        fields, cost = get_family(config).config_map(config), estimate_cost(config)
    for name in ("hidden_size", "num_attention_heads"):
        assert fields[name] == config[name] == getattr(saved, name)
    assert fields["num_layers"] == config["num_hidden_layers"] == saved.num_hidden_layers
    assert config["vocab_size"] == saved.vocab_size and cost is not None


@pytest.mark.parametrize(
    "kind",
    all_but(
        REFUSED,
        [kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if kind not in (*READ, *UNBUILT)],
    ),
)
def test_a_saved_config_is_read_or_refused_with_one_message(kind, tmp_path):
    save_config(kind, tmp_path)
    message = ""
    with scope_family(TRANSFORMERS):
        try:
            config = read_config(tmp_path)
            estimate_cost(config)
            get_model_sizes(config)
        except ConfigError as error:
            message = str(error)
    assert message.startswith("config.json") if kind in REFUSED else "__float__" not in message


# Fields of these that are None by default, or that transformers reads and does not write.
INCOMPLETE = ("ministral", "dots1", "lfm2_moe", "nemotron", "dbrx", "hunyuan_v1_dense")


@pytest.mark.parametrize(
    "kind",
    all_but(
        ("ministral", "nemotron", "qwen2"),
        [kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if kind not in (*REFUSED, *UNBUILT)],
    ),
)
def test_tensors_of_a_saved_config_are_listed_or_refused_with_one_message(kind, tmp_path):
    save_config(kind, tmp_path)
    message = ""
    with scope_family(TRANSFORMERS):
        try:
            config = read_config(tmp_path)
            map_model_weights(config, config["vocab_size"])
        except ConfigError as error:
            message = str(error)
    if kind in INCOMPLETE:
        assert "does not build it with these fields" in message
    else:
        assert message == "" or "; allowed: " in message


def test_a_field_that_transformers_refuses_is_named(tmp_path):
    save_config("gpt2", tmp_path)
    text = (tmp_path / "config.json").read_text().replace('"n_embd": 768', '"n_embd": "wide"')
    (tmp_path / "config.json").write_text(text)
    with (
        scope_family(TRANSFORMERS),
        pytest.raises(ConfigError, match=r"refuses a field of model_type='gpt2': .*n_embd"),
    ):
        read_config(tmp_path)


def test_numbers_without_json_s_own_form_reach_the_model_as_they_were(tmp_path):
    saved = save_config("bamba", tmp_path, time_step_limit=(0.0, float("inf")))
    assert "__float__" in (tmp_path / "config.json").read_text()
    with scope_family(TRANSFORMERS):
        assert read_config(tmp_path)["time_step_limit"] == list(saved.time_step_limit)
    assert transformers.AutoConfig.from_pretrained(tmp_path).time_step_limit[1] == float("inf")
