"""Flops and parameters of the planner against torch's counter, published sizes and rates."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from mcore_rl.planner.flops import count_work
from tests.published_runs import read_model

_COMMON = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
_TINY = {
    "dense": {
        **_COMMON,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_key_value_heads": 2,
        "head_dim": 32,
        "attention_bias": False,
    },
    "moe": {
        **_COMMON,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "mlp_only_layers": [0],
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
    },
    "mla": {
        **_COMMON,
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 8,
        "v_head_dim": 24,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 48,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 0,
    },
}


@pytest.mark.parametrize("name", _TINY)
def test_forward_flops_are_those_that_torch_counts(name: str) -> None:
    config, length = _TINY[name], 96
    hf = AutoConfig.for_model(**config)
    hf._attn_implementation, hf._experts_implementation = "eager", "eager"
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(hf).eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(input_ids=torch.arange(length)[None])
    expected = counter.get_total_flops()
    work = count_work(config)
    actual = work.count_forward_flops(length, length, causal=False)
    assert actual == pytest.approx(expected, rel=0.01)
    # Selection biases of routers are buffers to transformers.
    buffers = 2 * 8 if name == "mla" else 0
    assert work.parameters == sum(p.numel() for p in model.parameters()) + buffers


# Elements that the hub counts (test_published.py), without prediction layers.
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Llama-3.1-70B", 70_553_706_496),
        ("Qwen3-8B", 8_190_735_360),
        ("Qwen3-30B-A3B", 30_532_122_624),
        ("Qwen3-235B-A22B", 235_093_634_560),
    ],
)
def test_parameters_are_those_of_the_published_files(name: str, expected: int) -> None:
    assert count_work(read_model({"model": name})).parameters == expected


# Model TFLOP/s over tokens/s, as Megatron-Bridge publishes both (tests/published_runs.yaml).
@pytest.mark.parametrize(
    ("name", "sequence", "expected"),
    [
        ("Llama-3.1-70B", 8192, 728e12 / 1621),
        ("Llama-3.1-405B", 8192, 784e12 / 311),
        ("Qwen3-30B-A3B", 4096, 118e12 / 5113),
        ("Qwen3-235B-A22B", 4096, 242e12 / 1633),
        ("DeepSeek-V3", 4096, 1003e12 / 4018),
        ("gpt-oss-120b", 4096, 934e12 / 28672),
    ],
)
def test_training_flops_of_a_token_are_those_that_nvidia_reports(
    name: str, sequence: int, expected: float
) -> None:
    work = count_work(read_model({"model": name}))
    assert work.count_training_flops(1, sequence) == pytest.approx(expected, rel=0.01)


def test_a_window_limits_the_keys_of_a_query() -> None:
    layer = count_work(read_model({"model": "gpt-oss-120b"})).layers[0]
    assert layer.window == 128
    expected = sum(min(i, 128) for i in range(1, 1001)) / 1000
    assert layer.count_keys(1000) == pytest.approx(expected)
    assert layer.count_keys(100) == sum(range(1, 101)) / 100
