"""Flops and parameters of the planner against torch's counter, published sizes and rates."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from mcore_rl.config.schema import LoRAConfig
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


RANK, LENGTH = 4, 96


class Adapted(nn.Module):
    """A frozen linear layer with an adapter."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Linear(base.in_features, RANK, bias=False)
        self.b = nn.Linear(RANK, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(x))


def build_model(config: dict[str, object]) -> nn.Module:
    hf = AutoConfig.for_model(**config)
    hf._attn_implementation, hf._experts_implementation = "eager", "eager"
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(hf)


def count_training(model: nn.Module) -> int:
    """Count the flops of forward and backward pass, gradients of the embeddings included."""
    embeddings = torch.randn(1, LENGTH, 64, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        model(inputs_embeds=embeddings).logits.float().sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("name", _TINY)
def test_training_flops_are_those_that_torch_counts(name: str) -> None:
    expected = count_training(build_model(_TINY[name]))
    actual = count_work(_TINY[name]).count_training_flops(LENGTH, LENGTH, causal=False)
    assert actual == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("dense", {"o_proj": "linear_proj", "down_proj": "linear_fc2"}),
        ("moe", {"o_proj": "linear_proj"}),
    ],
)
def test_frozen_layers_have_no_weight_gradients_and_adapters_do(
    name: str, targets: dict[str, str]
) -> None:
    model = build_model(_TINY[name]).requires_grad_(False)
    for path, module in list(model.named_modules()):
        parent, _, child = path.rpartition(".")
        if child in targets:
            setattr(model.get_submodule(parent), child, Adapted(module))
    lora = LoRAConfig(RANK, targets=[*targets.values()])
    work = count_work(_TINY[name])
    actual = work.count_training_flops(LENGTH, LENGTH, lora, causal=False)
    assert actual == pytest.approx(count_training(model), rel=0.01)
    assert actual < 0.8 * work.count_training_flops(LENGTH, LENGTH, causal=False)


def test_a_prediction_layer_is_a_layer_a_projection_and_the_output_layer() -> None:
    config = {**_TINY["mla"], "num_nextn_predict_layers": 1}
    work = count_work(config)
    longer = build_model({**config, "num_hidden_layers": 4})
    projection, head = nn.Linear(128, 64, bias=False), longer.lm_head
    states = torch.randn(1, LENGTH, 64)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        longer(input_ids=torch.arange(LENGTH)[None])
        head(projection(torch.cat([states, states], -1)))
    actual = work.count_forward_flops(LENGTH, LENGTH, causal=False, has_mtp=True)
    assert actual == pytest.approx(counter.get_total_flops(), rel=0.01)
    without = count_work(_TINY["mla"]).count_forward_flops(LENGTH, LENGTH, causal=False)
    assert work.count_forward_flops(LENGTH, LENGTH, causal=False) == without


def test_the_prediction_layer_of_deepseek_v3_has_the_published_parameters() -> None:
    """README_WEIGHTS.md of DeepSeek-V3: 11.5 B, without the shared embedding and output layer."""
    [layer] = count_work(read_model({"model": "DeepSeek-V3"})).mtp_layers
    assert layer.parameters == pytest.approx(11.5e9, rel=0.01)


@pytest.mark.parametrize("name", _TINY)
def test_forward_flops_are_those_that_torch_counts(name: str) -> None:
    config, length = _TINY[name], LENGTH
    model = build_model(config).eval()
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


def test_sizes_of_attention_and_experts_of_published_layers() -> None:
    dense, *_, sparse = count_work(read_model({"model": "DeepSeek-V3"})).layers
    # 128 heads with keys of 128 and 64 dims, and values of 128.
    query, value = 128 * 192, 128 * 128
    assert sparse.pair_flops == 2 * (query + value)
    assert sparse.decode_pair_flops == 2 * 128 * (2 * 512 + 64)
    assert (sparse.heads_elements, sparse.key_value_elements) == (2 * query + value, query + value)
    assert (dense.act_elements, sparse.act_elements) == (3 * 18432, 3 * 2048 * (8 + 1))
    assert (sparse.num_experts, sparse.topk) == (256, 8)
    assert (sparse.num_groups, sparse.group_topk) == (8, 4)
    assert sparse.expert_parameters == 256 * 3 * 7168 * 2048
    layer = count_work(read_model({"model": "Qwen3-8B"})).layers[0]
    assert (layer.heads_elements, layer.key_value_elements) == (48 * 128, 16 * 128)


def test_linear_attention_has_four_products_with_its_state() -> None:
    """Qwen3-Next: 16 key heads, 32 value heads of 128 dims; each fourth layer compares pairs."""
    work = count_work(read_model({"model": "Qwen3-Next-80B-A3B"}))
    linear, pairs = work.layers[0], work.layers[3]
    assert linear.state_flops == 4 * 2 * 32 * 128 * 128 and linear.pair_flops == 0
    assert (linear.heads_elements, linear.key_value_elements) == ((16 + 16 + 32) * 128, 0)
    assert pairs.state_flops == 0 and pairs.pair_flops == 2 * 2 * 16 * 256


def test_a_value_model_has_one_output_and_no_prediction_layers() -> None:
    work = count_work(read_model({"model": "DeepSeek-V3"}))
    value = work.with_value_head()
    assert value.parameters == work.parameters - (129280 - 1) * 7168
    assert value.mtp_layers == () and work.mtp_layers
