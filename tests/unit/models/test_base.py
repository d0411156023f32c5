"""The fields of config.json are checked before a family reads them."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

import mcore_rl.models  # noqa: F401
from mcore_rl.config.errors import ConfigError
from mcore_rl.jobs.remote_paths import PUBLISHED_CONFIGS, find_published
from mcore_rl.models.base import (
    HFConfig,
    check_fields,
    check_no_unread_field,
    get_family,
    read_config,
    register,
)
from mcore_rl.reshard.rules import Weight

PUBLISHED = sorted(PUBLISHED_CONFIGS.glob("*/*"))


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.name)
def test_published_configs_pass_and_each_field_is_read_or_without_effect(path):
    config, start_s = read_config(path), time.process_time()
    check_no_unread_field(config)
    assert time.process_time() - start_s < 0.5  # rules of all experts take seconds


def test_a_field_of_the_last_experts_alone_is_read():
    config = read_config(find_published("Qwen3-30B-A3B"))
    family = get_family(config)

    def map_weights(fields: HFConfig, padded_vocab: int) -> tuple[Weight, ...]:
        weights = family.weights(fields, padded_vocab)
        last = [weight for weight in weights if weight.expert == config["num_experts"] - 1]
        return weights if not last or fields["last_scale"] else ()

    register(replace(family, weights=map_weights))
    try:
        check_no_unread_field(config | {"num_hidden_layers": 2, "last_scale": 2.0})
        with pytest.raises(ConfigError, match=r"first_scale=2\.0 is not read"):
            check_no_unread_field(
                config | {"num_hidden_layers": 2, "last_scale": 2.0, "first_scale": 2.0}
            )
    finally:
        register(family)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers=0 is not .* allowed: an integer from 1 to"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers=1000000 is not supported; allowed: an"),
        ({"num_hidden_layers": True}, "num_hidden_layers=True is not"),
        ({"num_hidden_layers": 2.0}, r"num_hidden_layers=2\.0 is not"),
        ({"hidden_size": "64"}, "hidden_size='64' is not supported; allowed: an integer"),
        ({"rms_norm_eps": 0}, "rms_norm_eps=0 is not supported; allowed: a number from"),
        ({"rope_theta": float("nan")}, "rope_theta=nan is not"),
        ({"rope_theta": 10**400}, r"rope_theta=10+\.\.\.0+ is not"),
        ({"attention_bias": "false"}, "attention_bias='false' is not .* allowed: true or false"),
        ({"hidden_act": 1}, "hidden_act=1 is not supported; allowed: a string"),
        ({"architectures": "LlamaForCausalLM"}, "architectures='L.*' is not .* a list of strings"),
        ({"architectures": [None]}, r"architectures=\[None\] is not supported"),
        ({"mlp_only_layers": [-1]}, r"mlp_only_layers=\[-1\] is not .* a list of layer numbers"),
        ({"rope_scaling": []}, r"rope_scaling=\[\] is not supported; allowed: an object"),
        ({"rope_scaling": {"factor": "2"}}, "factor='2' is not supported; allowed: a number"),
        ({"rope_parameters": {"type": 1}}, "type=1 is not supported; allowed: a string"),
        (
            {"num_attention_heads": 6, "num_key_value_heads": 4},
            "num_attention_heads=6 is no multiple of num_key_value_heads=4",
        ),
        ({"n_routed_experts": 6, "n_group": 4}, "n_routed_experts=6 is no multiple of n_group=4"),
        ({"topk_group": 3, "n_group": 2}, "topk_group=3 exceeds n_group=2"),
        (
            {"num_experts_per_tok": 9, "num_local_experts": 8},
            "num_experts_per_tok=9 exceeds num_local_experts=8",
        ),
        (
            {"first_k_dense_replace": 4, "num_hidden_layers": 3},
            "first_k_dense_replace=4 exceeds num_hidden_layers=3",
        ),
        (
            {"num_hidden_layers": 1000, "num_experts": 100},
            "100 experts in each of 1000 layers make 100000; allowed: at most 65536",
        ),
    ],
)
def test_a_field_of_the_wrong_type_or_range_is_named(config, message):
    with pytest.raises(ConfigError, match=f"config.json: {message}"):
        check_fields(config)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"num_hidden_layers": None, "rope_scaling": None, "n_group": None},
        {"n_group": 0, "topk_group": 0, "n_routed_experts": 7},
        {"rope_theta": 10000, "rope_scaling": {"low_freq_factor": 1, "mscale": 0}},
        {"of_another_family": [[{}]]},
    ],
)
def test_absent_null_and_unknown_fields_pass(config):
    check_fields(config)


def test_a_config_is_checked_when_it_is_read(tmp_path):
    (tmp_path / "config.json").write_text('{"hidden_size": -1}')
    with pytest.raises(ConfigError, match="hidden_size=-1 is not supported"):
        read_config(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"there is no config\.json in that folder"):
        read_config(tmp_path)
