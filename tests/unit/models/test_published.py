"""Published models at full size: their rules are complete, and Megatron's models have them."""

from __future__ import annotations

import json
import math
import time
from fractions import Fraction
from typing import Any

import pytest

import mcore_rl.models  # noqa: F401
from mcore_rl.checkpoint.fp8 import get_scale_shape, is_block_quantized
from mcore_rl.checkpoint.quantization import check_quantization_config
from mcore_rl.engine.megatron.conversion import build_meta_model
from mcore_rl.jobs.remote_paths import find_published
from mcore_rl.models.base import (
    count_kv_elements_per_token,
    drop_mtp_layers,
    get_family,
    pad_vocab_size,
)
from mcore_rl.models.rope import count_positions
from mcore_rl.reshard.rules import LogicalTensor, check_cover, list_logical_tensors
from tests.nightly import all_but, nightly

# Elements of all tensors of the published files, as the hub counts them in their headers (with the
# prediction layers, which repeat embedding and head).
TENSOR_ELEMENTS = {
    "DeepSeek-R1": 684_489_845_504,
    "DeepSeek-V3": 684_489_845_504,
    "DeepSeek-V3.1": 684_489_845_504,
    "DeepSeek-V3.2": 685_355_329_792,
    "GLM-4.5": 358_337_791_296,
    "GLM-4.7": 358_337_791_296,
    "GLM-4.7-Flash": 31_221_488_576,
    "Kimi-K2-Instruct": 1_026_408_232_448,
    "Kimi-K2.5": 1_026_408_232_448,  # the language model, dequantised
    "Llama-2-7b-hf": 6_738_415_616,
    "Llama-3.1-405B": 405_853_388_800,
    "Llama-3.1-70B": 70_553_706_496,
    "MiniMax-M2": 228_703_644_928 - 13_880_064,  # scales of its float8 blocks
    "Mixtral-8x22B-v0.1": 140_620_634_112,
    "Qwen3-235B-A22B": 235_093_634_560,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen3-8B": 8_190_735_360,
    "gpt-oss-120b": 116_829_156_672,  # dequantised
    "gpt-oss-20b": 20_914_757_184,
    "Qwen3-Next-80B-A3B": 81_324_862_720,
    "Qwen3.5-35B-A3B": 35_951_822_704 - 446_571_248,  # without the tower, by transformers
    "Qwen3.5-397B-A17B": 403_397_928_944 - 456_010_480,
}
# Those with fewer tensors than others have; the others take seconds each and are nightly.
SMALL = all_but(
    (
        "GLM-4.7-Flash",
        "Llama-2-7b-hf",
        "Llama-3.1-405B",
        "Mixtral-8x22B-v0.1",
        "Qwen3-30B-A3B",
        "gpt-oss-20b",
    ),
    TENSOR_ELEMENTS,
)
# Under `nightly`: sizes and fine-tunings of families that others here have.
TENSOR_ELEMENTS_CASES = [
    nightly(name)
    if name in ("DeepSeek-R1", "DeepSeek-V3.1", "GLM-4.7", "Qwen3.5-397B-A17B")
    else name
    for name in TENSOR_ELEMENTS
]
DEEPSEEK_V3_2_WITH_SCALES = 685_396_921_376  # of blocks
# Of the hub's count of DeepSeek-V3: float8 weights; bfloat16; float32 biases and scales of blocks.
DEEPSEEK_F8, DEEPSEEK_BF16, DEEPSEEK_F32 = 680_571_043_840, 3_918_786_560, 41_555_600


# Of Kimi-K2.5's files: all tensors, those of the language model, and elements of the frozen ones.
KIMI_STORED, KIMI_TENSORS, KIMI_FROZEN = 170_738_182_128, 208_550 - 335, 471_143_920


def published(name: str) -> dict[str, Any]:
    """Read config.json with the fields of a nested language model beside its own."""
    config = json.loads((find_published(name) / "config.json").read_text())
    return {**config.get("text_config", {}), **config}


def config_of(name: str) -> dict[str, Any]:
    config = published(name)
    config.pop("quantization_config", None)
    return {**config.get("text_config", {}), **config}


def tensors_of(config: dict[str, Any]) -> list[LogicalTensor]:
    return list(list_logical_tensors(get_family(config).weights(config, config["vocab_size"])))


def count_elements(tensors: list[LogicalTensor]) -> int:
    return sum(math.prod(tensor.shape) for tensor in tensors)


def count_by_formula(config: dict[str, Any]) -> int:
    """Count parameters by the formulas of the models' papers, without prediction layers."""
    c = config
    hidden, layers, heads = c["hidden_size"], c["num_hidden_layers"], c["num_attention_heads"]
    if "kv_lora_rank" in c:
        head, rotary, value = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
        query, latent = c["q_lora_rank"], c["kv_lora_rank"]
        attention = query or hidden  # what the query projection reads
        attention *= heads * (head + rotary)
        attention += hidden * query + query if query else 0
        attention += hidden * (latent + rotary) + latent + latent * heads * (head + value)
        attention += heads * value * hidden
        if "index_topk" in c:
            index_heads, index_dim = c["index_n_heads"], c["index_head_dim"]
            attention += index_heads * (index_dim * query + hidden) + index_dim * (hidden + 2)
    else:
        dim = c.get("head_dim") or hidden // heads
        rows = (heads + 2 * c["num_key_value_heads"]) * dim
        attention = rows * hidden + heads * dim * hidden
        attention += rows if c.get("attention_bias") else 0
        has_norms = c["architectures"][0].startswith("Qwen3") or c.get("use_qk_norm")
        normed = heads + c["num_key_value_heads"] if c.get("qk_norm_type") == "per_layer" else 2
        attention += normed * dim if has_norms else 0
    attention += heads + hidden if "swiglu_limit" in c else 0  # sinks, a bias
    experts = c.get("n_routed_experts") or c.get("num_experts") or c.get("num_local_experts") or 0
    dense = c.get("first_k_dense_replace", 0) if experts else layers
    ffn = c.get("moe_intermediate_size") or c["intermediate_size"]
    moe = (experts + c.get("n_shared_experts", 0)) * 3 * hidden * ffn + experts * hidden
    moe += experts if "n_routed_experts" in c or "use_routing_bias" in c else 0  # selection bias
    if "swiglu_limit" in c:  # biases of experts and router
        moe += experts * (2 * ffn + hidden + 1)
    if shared := c.get("shared_expert_intermediate_size"):
        moe += 3 * hidden * shared + hidden  # with a gate
    if interval := c.get("full_attention_interval"):  # with output gates, and delta nets between
        full = layers // interval
        attention += heads * dim * hidden
        keys = c["linear_num_key_heads"] * c["linear_key_head_dim"]
        value_heads, value = c["linear_num_value_heads"], c["linear_value_head_dim"]
        values = value_heads * value
        linear = hidden * (2 * keys + 2 * values + 2 * value_heads) + values * hidden
        linear += c["linear_conv_kernel_dim"] * (2 * keys + values) + 2 * value_heads + value
        attention = Fraction(full * attention + (layers - full) * linear, layers)
    total = layers * (attention + 2 * hidden)
    total += dense * 3 * hidden * c["intermediate_size"] if dense else 0
    return int(total) + (layers - dense) * moe + 2 * c["vocab_size"] * hidden + hidden


@pytest.mark.parametrize("name", TENSOR_ELEMENTS_CASES)
def test_the_tensors_have_the_published_number_of_count_elements(name):
    config = config_of(name)
    assert count_elements(tensors_of(config)) == TENSOR_ELEMENTS[name]
    assert count_elements(tensors_of(drop_mtp_layers(config))) == count_by_formula(config)


def test_the_prediction_layer_of_deepseek_is_a_layer_with_what_stands_around_it():
    config = config_of("DeepSeek-V3")
    one_more = {**config, "num_hidden_layers": 62}
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    around = 2 * hidden * hidden + 3 * hidden + 2 * vocab * hidden
    assert count_by_formula(one_more) + around == TENSOR_ELEMENTS["DeepSeek-V3"]
    assert count_by_formula(config) == 671_026_419_200


def test_kimi_k2_has_the_published_rotary_embedding_and_cache():
    config = config_of("Kimi-K2-Instruct")
    fields = get_family(config).config_map(config)
    assert (fields["rotary_base"], fields["rotary_scaling_factor"]) == (50000.0, 32.0)
    assert (fields["beta_fast"], fields["beta_slow"]) == (1.0, 1.0)
    assert count_kv_elements_per_token(config) == 61 * 576
    assert count_positions(config) == 131072


def test_the_prediction_layer_of_qwen3_next_shares_embedding_and_head():
    config = config_of("Qwen3-Next-80B-A3B")
    attention = {**config, "num_hidden_layers": 1, "full_attention_interval": 1}
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    layer = count_by_formula(attention) - 2 * vocab * hidden - hidden
    around = 2 * hidden * hidden + 3 * hidden
    assert count_by_formula(config) + layer + around == TENSOR_ELEMENTS["Qwen3-Next-80B-A3B"]
    assert count_by_formula(config) == 79_674_391_296


def test_moonlight_has_the_parameters_that_its_report_counts_without_the_embeddings():
    """arXiv 2502.16982: 15.29 B. (Its files also hold rotary frequencies, no weights.)"""
    config = config_of("Moonlight-16B-A3B")
    without = count_by_formula(config) - 2 * config["vocab_size"] * config["hidden_size"]
    assert count_elements(tensors_of(config)) == count_by_formula(config)
    assert round(without / 1e9, 2) == 15.29


@pytest.mark.parametrize("name", ["DeepSeek-V3", "DeepSeek-R1", "DeepSeek-V3.1"])
def test_deepseek_in_float8_blocks_has_the_published_number_of_elements_of_each_dtype(name):
    tensors = tensors_of(config_of(name))
    quantised = [t for t in tensors if "_proj" in t.name and "eh_proj" not in t.name]
    biases = [t for t in tensors if t.name.endswith("e_score_correction_bias")]
    scales = sum(math.prod(math.ceil(size / 128) for size in t.shape) for t in quantised)
    assert count_elements(quantised) == DEEPSEEK_F8
    assert count_elements(biases) + scales == DEEPSEEK_F32
    assert (
        count_elements(tensors) - count_elements(quantised) - count_elements(biases)
        == DEEPSEEK_BF16
    )


def test_the_files_of_minimax_m2_have_a_scale_for_each_block_and_no_prediction_layer():
    tensors = tensors_of(config_of("MiniMax-M2"))
    quantised = [t for t in tensors if is_block_quantized(t.name, t.shape)]
    scales = sum(math.prod(math.ceil(size / 128) for size in t.shape) for t in quantised)
    assert count_elements(tensors) + scales == 228_703_644_928


def test_the_files_of_kimi_k2_5_have_experts_in_int4_of_the_published_sizes():
    tensors = tensors_of(config_of("Kimi-K2.5"))
    assert all(tensor.name.startswith("language_model.") for tensor in tensors)
    packed = [t for t in tensors if ".experts." in t.name]
    values = count_elements(packed)
    stored = count_elements(tensors) - values + values // 8 + values // 32 + 2 * len(packed)
    assert len(tensors) + 2 * len(packed) == KIMI_TENSORS
    assert stored + KIMI_FROZEN == KIMI_STORED


def test_deepseek_v3_2_in_float8_blocks_has_the_published_number_of_elements():
    tensors = tensors_of(config_of("DeepSeek-V3.2"))
    shapes = [t.shape for t in tensors if is_block_quantized(t.name, t.shape)]
    scales = sum(math.prod(get_scale_shape(shape)) for shape in shapes)
    assert count_elements(tensors) + scales == DEEPSEEK_V3_2_WITH_SCALES


@pytest.mark.parametrize(
    "name", [name for name in TENSOR_ELEMENTS if "quantization_config" in published(name)]
)
def test_published_quantised_weights_are_read(name):
    check_quantization_config(published(name)["quantization_config"])


def test_the_cache_of_a_token_has_the_published_size():
    """Compare with table 1 of "Insights into DeepSeek-V3" (arXiv 2505.09343), in bfloat16."""
    deepseek, llama = config_of("DeepSeek-V3"), config_of("Llama-3.1-405B")
    assert 2 * count_kv_elements_per_token(deepseek) == 70_272
    assert 2 * count_kv_elements_per_token(llama) == 516_096
    assert 2 * count_kv_elements_per_token(deepseek, tp=16) == 70_272  # every worker has the latent
    assert 2 * count_kv_elements_per_token(llama, tp=16) == 516_096 // 8  # and one head of eight


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("count", [1, 2])  # some have two groups of queries
def test_shards_cover_each_tensor_exactly_once(name, count):
    config = config_of(name)
    check_cover(get_family(config).weights(config, pad_vocab_size(config, count)), count)


@pytest.mark.job
@pytest.mark.parametrize("name", SMALL)
def test_megatron_has_each_parameter_once_and_nothing_else_in_seconds(name):
    """Check that a checkpoint has each once; build_meta_model() compares rules and model."""
    config = config_of(name)
    weights = get_family(config).weights(config, config["vocab_size"])
    start_s = time.process_time()
    parameters = build_meta_model(config, config["vocab_size"]).parameters
    assert time.process_time() - start_s < 30  # at most 6 on the machine that this was written on
    held = [w for w in weights if not w.replica]
    assert parameters.keys() == {w.get_local_name() for w in held}
    places = {(location.key, location.index) for location in parameters.values()}
    assert len(places) == len(held)
    sizes = {location.key: math.prod(location.shape) for location in parameters.values()}
    once = count_elements([tensor for w in held for tensor in w.rule.tensors])
    assert sum(sizes.values()) == once
