"""Activations of layers of torch's modules, and of plans with them, counted by hand."""

from __future__ import annotations

import pytest

from mcore_rl.config.schema import Layout
from mcore_rl.models.base import get_family
from mcore_rl.planner.activations import count_layer_bytes
from mcore_rl.planner.memory import Conditions, plan_memory
from tests.unit.planner import test_memory


def count(name: str, layout: Layout, modules: str, layer: int | None = None) -> dict[str, float]:
    model = test_memory.read_model(name)
    fields = get_family(model).config_map(model)
    index = fields["num_layers"] - 1 if layer is None else layer
    return count_layer_bytes(fields, index, layout, 2, modules)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("cp", [1, 2, 8])
def test_torch_stores_keys_and_values_of_all_context_parallel_ranks(cp: int, tp: int) -> None:
    """Llama-3.1-70B: 64 heads and 8 key heads of 128, without norms of heads."""
    query, key, angles = 64 * 128, 8 * 128, 4 * 128 * 2
    projected = query + 3 * key if cp == 1 else 2 * cp * key
    parts = count("Llama-3.1-70B", Layout(tp=tp, cp=cp), "torch")
    assert parts["heads"] == ((projected + 2 * query) * 2 + 64 * 4) / tp + angles
    assert parts["norms"] == parts["mlp_norm"] == (2 * 8192 * 2 + 4) / tp
    assert parts["mlp"] == 5 * 28672 * 2 / tp and parts["input"] == 8192 * 2 / tp


def test_each_rank_has_a_key_head_where_tp_is_larger_than_their_number() -> None:
    """Each of 16 ranks has four of 64 heads, and one of 8 key heads."""
    parts = count("Llama-3.1-70B", Layout(tp=16), "te")
    assert parts["heads"] == 2 * (2 * (4 * 128 + 128) + 128)


def test_torch_stores_latents_three_times_and_values_as_wide_as_keys() -> None:
    """DeepSeek-V3: 128 heads of 192 and 128 dims, latents of 1536 and 512, 64 rotary dims."""
    parts = count("DeepSeek-V3", Layout(), "torch")
    latents, query = 3 * 1536 + 3 * 512 + 64, 128 * 192
    assert parts["heads"] == (latents + 4 * query) * 2 + 128 * 4 + 4 * 64 * 2
    assert parts["result"] == (128 * 128 + 7168) * 2
    # Scores and their map of 256 experts, 13 bytes each and of 8 choices; a sigmoid's beside.
    assert parts["router"] == 256 * 13 + 8 * 24 + 8 + 256 * 4 + 8 * 4
    assert parts["experts"] == parts["moe_act"] == 8 * 3 * 2048 * 2


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("cp", [2, 8])
def test_torch_stores_keys_and_padded_values_of_all_ranks_of_latent_attention(
    cp: int, tp: int
) -> None:
    """DeepSeek-V3: values of 128 dims are gathered as wide as keys, 192, in each of 128 heads."""
    latents, size = 3 * 1536 + 3 * 512 + 64, 128 * 192
    parts = count("DeepSeek-V3", Layout(tp=tp, cp=cp), "torch")
    # Keys and values of cp ranks; queries and the result, of the rank's tokens.
    stored = (latents + cp * 2 * size + 2 * size) * 2 + 128 * 4
    assert parts["heads"] == stored / tp + 4 * 64 * 2
    assert parts["result"] == (128 * 128 + 7168) * 2 / tp


def test_a_delta_net_stores_projections_gates_and_a_state_each_64_tokens() -> None:
    """Qwen3-Next: 16 key heads and 32 value heads of 128 dims, hidden size 2048."""
    keys, values = 16 * 128, 32 * 128
    stored = (3 * (2 * keys + values) + 3 * values) * 2
    state = 32 * 128 * 128 * 4 / 64
    parts = count("Qwen3-Next-80B-A3B", Layout(tp=2), "te", layer=0)
    assert parts["heads"] == (stored + state) / 2
    assert parts["result"] == (values + 2 * 2048) * 2 / 2


def test_expert_tensor_parallelism_gathers_the_tokens_of_its_ranks() -> None:
    """Qwen3-30B-A3B: hidden size 2048, 8 experts of a token; their columns are split again."""
    alone, shared = (count("Qwen3-30B-A3B", Layout(tp=4, etp=etp), "te") for etp in (1, 4))
    assert alone["dispatch"] == 8 * 2048 * 2 / 4 and shared["dispatch"] == 8 * 2048 * 2
    assert alone["experts"] == shared["experts"] == 8 * 2 * 768 * 2 / 4


@pytest.mark.parametrize("cp", [1, 2])
def test_an_engine_with_torch_modules_stores_on_a_gpu_what_it_stores_on_a_cpu(cp: int) -> None:
    config = test_memory.build_config(Layout(cp=cp, dp=2))
    model = test_memory.read_model("Qwen3-8B")

    def count_activations(device_type: str) -> int:
        plan = plan_memory(config, model, Conditions(device_type))
        return test_memory.get_moments(plan)["actor: update"].kinds["activations"]

    fused = count_activations("cuda")
    config.actor.modules = "torch"
    assert count_activations("cuda") == count_activations("cpu") != fused
