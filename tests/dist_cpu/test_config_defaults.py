"""Fields that config.json leaves out mean what they mean to transformers, or are asked for.

By the classes of transformers' configs for every field that a family reads, and by scores of its
models for the branches that no other test's config takes.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ranks
import tiny_families
import tiny_models
import torch
import transformers
from megatron.core.models.common.embeddings import yarn_rotary_pos_embedding as megatron_yarn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import EngineConfig, Layout, ModelConfig
from mcore_rl.engine.base import EngineSpec
from mcore_rl.jobs.parity import engines
from mcore_rl.models.base import get_family, get_model_sizes, read_config
from mcore_rl.models.latent import map_latent_rope_config
from tests.nightly import all_but

Fields = dict[str, Any]
NAMES = tuple(tiny_families.cases())
DAILY = (
    "qwen2", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "llama", "mixtral", "deepseek_v3",
    "glm_moe_dsa", "glm4_moe_yarn", "gpt_oss", "minimax_m2", "glm4_moe_lite",
)  # fmt: skip
_WITHOUT_MEANING = {
    "architectures", "model_type", "transformers_version",
    "num_key_value_heads",  # of latent attention, which has none: see _drop_key_value_heads
    # Models of transformers have no prediction layers, whatever their config says.
    "num_nextn_predict_layers",
}  # fmt: skip


def write_full_config(config: transformers.PretrainedConfig) -> Fields:
    """Return config.json with all fields, the defaults included."""
    fields: Fields = json.loads(config.to_json_string(use_diff=False))
    kind = type(config)
    if "vision_config" in fields:
        architecture = transformers.AutoModelForImageTextToText._model_mapping[kind].__name__
    else:
        architecture = transformers.AutoModelForCausalLM._model_mapping[kind].__name__
    return fields | {"architectures": [architecture]}


def list_paths(fields: Fields, parent: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, value in fields.items():
        if name not in _WITHOUT_MEANING or (
            name == "num_key_value_heads" and "kv_lora_rank" not in fields
        ):
            yield (*parent, name)
        if name in ("text_config", "rope_parameters") and isinstance(value, dict):
            yield from list_paths(value, (*parent, name))


def remove(fields: Fields, path: tuple[str, ...]) -> Fields:
    fields = copy.deepcopy(fields)
    inner = fields
    for name in path[:-1]:
        inner = inner[name]
    del inner[path[-1]]
    return fields


def map_fields(fields: Fields, folder: Path) -> Any:
    """Return all that this package makes of a config.json, as it reads one."""
    (folder / "config.json").write_text(json.dumps(fields))
    config = read_config(folder)
    family = get_family(config)
    weights = family.weights(config, tiny_models.VOCAB)
    assert family.vllm_weights is not None
    return (
        family.config_map(config),
        get_model_sizes(config),
        {tensor for weight in weights for tensor in weight.rule.tensors},
        {tensor for w in family.vllm_weights(config) for tensor in w.rule.tensors},
    )


@pytest.mark.parametrize("name", all_but(DAILY, NAMES))
def test_absent_field_means_transformers_default_or_is_refused(name, tmp_path):
    config = tiny_families.cases()[name].config
    full = write_full_config(config)
    map_fields(full, tmp_path)
    compared = 0
    for path in list_paths(full):
        partial = remove(full, path)
        try:
            actual = map_fields(partial, tmp_path)
        except ConfigError:
            continue
        try:
            completed = type(config).from_dict(copy.deepcopy(partial))
        except (AttributeError, KeyError, TypeError, ValueError):  # transformers needs the field
            continue
        assert actual == map_fields(write_full_config(completed), tmp_path), path
        compared += 1
    assert compared > 20


_SCALED = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "beta_fast": 24, "beta_slow": 3,
    "mscale": 1.3, "mscale_all_dim": 0.7, "original_max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    "absent",
    [(), ("beta_fast",), ("beta_slow",), ("beta_fast", "beta_slow"), ("mscale", "mscale_all_dim"),
     ("original_max_position_embeddings",)],
    ids=",".join,
)  # fmt: skip
@pytest.mark.parametrize("is_null", [False, True], ids=["absent", "null"])
def test_yarn_of_latent_attention_has_the_frequencies_and_factors_of_transformers(absent, is_null):
    rope = {name: value for name, value in _SCALED.items() if name not in absent}
    config = tiny_families.cases()["deepseek_v3"].config
    config.rope_parameters, config.max_position_embeddings = dict(rope), 64
    hf_config = {
        "rope_parameters": rope | dict.fromkeys(absent if is_null else ()),
        "max_position_embeddings": 64,
    }
    fields = map_latent_rope_config(hf_config)
    config = type(config).from_dict(config.to_dict())
    dim = config.qk_rope_head_dim
    expected, factor = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    factors = fields["rotary_scaling_factor"], fields["mscale"], fields["mscale_all_dim"]
    assert megatron_yarn._yarn_get_concentration_factor(*factors) == pytest.approx(factor, rel=1e-6)
    low, high = megatron_yarn._yarn_find_correction_range(
        fields["beta_fast"],
        fields["beta_slow"],
        dim,
        fields["rotary_base"],
        fields["original_max_position_embeddings"],
    )
    mask = 1.0 - megatron_yarn._yarn_linear_ramp_mask(low, high, dim // 2, "cpu")
    plain = 1.0 / fields["rotary_base"] ** (torch.arange(0, dim, 2) / dim)
    frequencies = plain / fields["rotary_scaling_factor"] * (1 - mask) + plain * mask
    torch.testing.assert_close(frequencies, expected, rtol=1e-6, atol=0)
    with torch.device("meta"):
        model = transformers.DeepseekV3ForCausalLM(config)
    scale = megatron_yarn._yarn_get_mscale(fields["rotary_scaling_factor"], factors[2]) ** 2
    scale /= math.sqrt(config.qk_nope_head_dim + config.qk_rope_head_dim)
    assert scale == pytest.approx(model.model.layers[0].self_attn.scaling, rel=1e-6)


# Case of tiny_families, fields that change, and fields that config.json lacks.
BRANCHES: dict[str, tuple[str, Fields, tuple[str, ...]]] = {
    "top 1 of softmax": ("qwen3_moe", {"num_experts_per_tok": 1, "norm_topk_prob": False}, ()),
    "softmax without renormalisation": ("qwen3_moe", {}, ("norm_topk_prob",)),
    "top 1 of sigmoid": (
        "deepseek_v3_plain", {"num_experts_per_tok": 1, "norm_topk_prob": False}, ()
    ),
    "top 1 of sigmoid beside grouped queries": (
        "glm4_moe", {"num_experts_per_tok": 1, "norm_topk_prob": False, "n_group": 1,
                     "topk_group": 1}, ()
    ),
    "top 1 of a hybrid": ("qwen3_next", {"num_experts_per_tok": 1, "norm_topk_prob": False}, ()),
    "hybrid renormalises": ("qwen3_next", {}, ("norm_topk_prob", "decoder_sparse_step")),
    "yarn without mscale": (
        "deepseek_v3", {}, ("rope_parameters.mscale", "rope_parameters.mscale_all_dim")
    ),
    "yarn without bounds": (
        "deepseek_v3", {}, ("rope_parameters.beta_fast", "rope_parameters.beta_slow")
    ),
    "half rotated": ("glm4_moe", {}, ("rope_parameters.partial_rotary_factor",)),
    "quarter rotated": ("qwen3_next", {}, ("rope_parameters.partial_rotary_factor",)),
    "wholly rotated": (
        "minimax_m2", {}, ("rotary_dim", "rope_parameters.partial_rotary_factor")
    ),
    "sparse second layer": ("qwen3_moe", {"decoder_sparse_step": 2}, ("mlp_only_layers",)),
    "first layers dense": ("glm4_moe", {}, ("first_k_dense_replace", "attention_bias")),
    "tied llama": ("llama", {"tie_word_embeddings": True}, ()),
    "untied by default": ("qwen2", {}, ("tie_word_embeddings", "rope_parameters.rope_theta")),
    "all groups": ("deepseek_v3", {"n_group": 4, "topk_group": 4}, ()),
}  # fmt: skip
SEQUENCES = [
    torch.randint(0, tiny_models.VOCAB, (length,), generator=torch.manual_seed(length)).tolist()
    for length in (3, 90, 20)
]


def save_branch(key: str, folder: Path) -> Path:
    """Write a checkpoint of the model that transformers makes of a config.json."""
    name, changes, absent = BRANCHES[key]
    config = tiny_families.cases()[name].config
    fields = write_full_config(config) | changes
    for path in absent:
        if (parts := tuple(path.split(".")))[-1] in (
            fields[parts[0]] if len(parts) > 1 else fields
        ):
            fields = remove(fields, parts)
    model = tiny_models.build_from(type(config).from_dict(copy.deepcopy(fields)))
    path = tiny_families.save(model, folder / key.replace(" ", "-"))
    (path / "config.json").write_text(json.dumps(fields))
    return path


@pytest.mark.parametrize(
    "key",
    all_but(
        ("top 1 of softmax", "top 1 of sigmoid", "hybrid renormalises", "yarn without mscale",
         "yarn without bounds", "half rotated", "wholly rotated", "first layers dense"),
        BRANCHES,
    ),
)  # fmt: skip
def test_branch_of_config_scores_as_in_transformers(key, tmp_path):
    path = save_branch(key, tmp_path)
    spec = EngineSpec(
        ModelConfig(path=str(path), dtype="float32"),
        EngineConfig(layout=Layout()),
        seed=0,
        num_top_log_probs=1,
    )
    job = ranks.make_job(engines.score_with_megatron, spec, "", SEQUENCES)
    scores = engines.merge_scores(ranks.spawn(1, {key: job})[key]).log_probs
    reference = engines.score_with_hf(str(path), "float32", SEQUENCES)["log_probs"]
    for actual, expected in zip(scores, reference, strict=True):
        torch.testing.assert_close(torch.tensor(actual), torch.tensor(expected), rtol=0, atol=1e-5)
