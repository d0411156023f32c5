"""Families by import path: used for their architecture alone, and refused by the setting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import MistralConfig

from mcore_rl.cli.compose import compose_config
from mcore_rl.cli.convert import main as convert
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import (
    EngineConfig,
    Layout,
    ModelConfig,
    RLConfig,
    WeightSyncConfig,
)
from mcore_rl.engine.base import EngineSpec, create_engine
from mcore_rl.models.base import (
    get_family,
    get_user_family,
    get_vllm_weights,
    scope_family,
    use_family,
)
from mcore_rl.planner.dry_run import dry_run
from mcore_rl.reshard.layout import GenerationLayout
from mcore_rl.testing.family import save_random_checkpoint
from mcore_rl.weight_sync.spec import TransferSpec, read_served_config

FAMILY = f"{Path(__file__).parents[3] / 'examples/my_family.py'}:FAMILY"
FILE = f"""
from dataclasses import replace
from mcore_rl.config.import_path import load_object

MISTRAL = load_object("model.family", {FAMILY!r})
QWEN3 = replace(MISTRAL, name="mine", architecture="Qwen3ForCausalLM")
UNSERVED = replace(MISTRAL, vllm_weights=None)
NUMBER = 3
"""


@pytest.fixture(autouse=True)
def no_family():
    yield
    use_family("")


@pytest.fixture
def path(tmp_path):
    (tmp_path / "families.py").write_text(FILE)
    return str(tmp_path / "families.py")


def build_config(architecture: str = "MistralForCausalLM", **changes: Any) -> dict[str, Any]:
    return {
        "architectures": [architecture], "vocab_size": 64, "hidden_size": 16,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
        "intermediate_size": 32, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "hidden_act": "silu",
        "max_position_embeddings": 64, **changes,
    }  # fmt: skip


def test_a_family_is_used_for_its_architecture_until_another_is():
    use_family("")
    with pytest.raises(ConfigError, match=r"or model.family with a family of your own"):
        get_family(build_config())
    use_family(FAMILY)
    assert (get_family(build_config()).name, get_user_family()) == ("mistral", FAMILY)
    assert get_family(build_config("LlamaForCausalLM")).name == "llama"
    # A value model is the same family with another head.
    assert get_family(build_config("MistralForTokenClassification")).name == "mistral"
    use_family("")
    with pytest.raises(ConfigError, match="is not supported"):
        get_family(build_config())


def test_families_of_a_scope_are_those_of_before_when_it_ends(path):
    use_family(FAMILY)
    with pytest.raises(ConfigError), scope_family():
        assert get_user_family() == ""
        use_family("transformers")
        with scope_family(f"{path}:QWEN3"):
            assert get_family(build_config("Qwen3ForCausalLM")).name == "mine"
        assert get_user_family() == "transformers"
        use_family(f"{path}:NOTHING")
    assert (get_family(build_config()).name, get_user_family()) == ("mistral", FAMILY)


def test_a_family_may_take_the_place_of_one_of_this_package(path):
    use_family(f"{path}:QWEN3")
    assert get_family(build_config("Qwen3ForCausalLM")).name == "mine"
    use_family("")
    assert get_family(build_config("Qwen3ForCausalLM")).name == "qwen3"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("NUMBER", r"model.family='.*:NUMBER' is no mcore_rl.models.base.Family; allowed: one; ''"),
        ("FAMILY", r"model.family='.*:FAMILY': '.*families.py' has no 'FAMILY'; it has: .*MISTRAL"),
    ],
)
def test_an_import_path_that_is_no_family_is_refused_by_its_setting(path, name, message):
    with pytest.raises(ConfigError, match=message):
        use_family(f"{path}:{name}")


def test_an_engine_uses_the_family_of_its_settings(path):
    model = ModelConfig(family=f"{path}:QWEN3")
    create_engine("language_model", EngineSpec(model, EngineConfig(), seed=0))
    assert get_user_family() == f"{path}:QWEN3"
    create_engine("language_model", EngineSpec(ModelConfig(), EngineConfig(), seed=0))
    assert get_user_family() == ""


def test_a_conversion_takes_a_family_and_refuses_one_with_a_bridge(path, tmp_path):
    options = ["--model", str(tmp_path), "--output", str(tmp_path / "out")]
    with pytest.raises(ConfigError, match=r"--family='.*:NUMBER' is no mcore_rl.models.base.Fam"):
        convert(["hf-to-mcore", *options, "--family", f"{path}:NUMBER"])
    with pytest.raises(ConfigError, match="--family with --bridge=megatron-bridge, which does not"):
        convert(["hf-to-mcore", *options, "--family", FAMILY, "--bridge", "megatron-bridge"])


def test_a_family_refuses_what_it_cannot_express():
    use_family(FAMILY)
    family = get_family(build_config())
    assert family.config_map(build_config(sliding_window=None))["num_layers"] == 2
    with pytest.raises(ConfigError, match="sliding_window=4096 is not supported; allowed: null"):
        family.config_map(build_config(sliding_window=4096))


@pytest.fixture
def model(tmp_path):
    import json

    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(build_config()))
    return str(tmp_path / "model")


def plan(*overrides: str) -> None:
    dry_run(compose_config(RLConfig, ["weight_sync.method=colocated", *overrides]))


def test_a_server_uses_the_family_that_the_trainer_names(tmp_path):
    config = MistralConfig(**build_config(architectures=None), sliding_window=None)
    save_random_checkpoint(config, tmp_path)
    fields = TransferSpec(
        Layout(), 0, GenerationLayout(), "float32", WeightSyncConfig(), family=FAMILY
    ).to_dict()
    hf_config = read_served_config(TransferSpec.parse(fields), tmp_path)
    assert get_family(hf_config).name == "mistral"


def test_a_family_without_rules_of_vllm_is_served_by_what_its_loader_lists(path, model, capsys):
    use_family(f"{path}:UNSERVED")
    with pytest.raises(ConfigError, match="the family 'mistral' has no vllm_weights, the rules"):
        get_vllm_weights(build_config())
    small = (
        f"model.path={model}", "data.max_prompt_tokens=16", "rollout.max_response_tokens=16",
        "rollout.kv_cache_bytes=1048576",
    )  # fmt: skip
    plan(*small, f"model.family={path}:UNSERVED")
    plan(*small, f"model.family={FAMILY}")
    assert capsys.readouterr().out.count("rollout: 1 rank, tp=1") == 2
    with pytest.raises(ConfigError, match=r"\['MistralForCausalLM'\] is not supported"):
        plan(*small)
