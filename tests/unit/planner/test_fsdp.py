"""Activations of the FSDP2 engine, tensor by tensor."""

from __future__ import annotations

import pytest

from mcore_rl.config.schema import FSDPConfig, Layout, RecomputeConfig
from mcore_rl.planner.memory import Conditions, plan_memory
from tests.unit.planner import test_memory

TOKENS = 4096
# Of Qwen3-8B in bfloat16, for a token. A norm: states in float32, normalised states, the result,
# and a factor. Heads: three tensors as wide as queries, two as keys, maxima; their norms.
NORM = 4096 * (4 + 2 * 2) + 4
HEADS = (3 * 4096 + 2 * 1024) * 2 + 32 * 4 + (4096 + 1024) * (2 * 2 + 4) + (32 + 8) * 4
STORED = 2 * NORM + HEADS + 4 * 12288 * 2
# Of Qwen3-30B-A3B: logits of 128 experts, and 8 choices; tokens, results and columns of experts.
MOE_NORM = 2048 * (4 + 2 * 2) + 4
MOE_HEADS = (3 * 4096 + 2 * 512) * 2 + 32 * 4 + (4096 + 512) * (2 * 2 + 4) + (32 + 4) * 4
ROUTER = 128 * 4 + 8 * (4 * 8 + 2 * 4) + 4
MOE_STORED = 2 * MOE_NORM + MOE_HEADS + ROUTER + 8 * (2 * 2048 + 4 * 768) * 2


def count_activations(name: str, moment: str, granularity: str = "none") -> int:
    config = test_memory.build_config(
        Layout(dp=8), backend="fsdp", recompute=RecomputeConfig(granularity)
    )
    plan = plan_memory(config, test_memory.read_model(name), Conditions("cpu"))
    return test_memory.get_moments(plan)[moment].kinds["activations"]


@pytest.mark.parametrize(
    ("name", "stored", "hidden"),
    [("Qwen3-8B", STORED, 4096), ("Qwen3-30B-A3B", MOE_STORED, 2048)],
)
def test_log_probs_have_a_layer_and_its_input(name: str, stored: int, hidden: int) -> None:
    assert count_activations(name, "actor: log-probs") == (stored + 2 * hidden) * TOKENS


def test_an_update_has_all_layers_and_gradients_in_the_mlp_of_the_last() -> None:
    # Gate, up and product have gradients, and the input; the product's own tensor is free.
    working = STORED - 12288 * 2 + (3 * 12288 + 4096) * 2
    angles = 2 * 2 * 128  # cosines and sines
    expected = (35 * STORED + working + angles) * TOKENS
    assert count_activations("Qwen3-8B", "actor: update") == expected


def test_full_recompute_has_inputs_of_layers_and_one_layer() -> None:
    """The fullest moment is the layer before the last, where gradients are reduced in float32."""
    working = STORED - 12288 * 2 + (3 * 12288 + 4096) * 2 + 4096 * 2
    expected = (34 * 4096 * 2 + working + 2 * 2 * 128) * TOKENS
    assert count_activations("Qwen3-8B", "actor: update", "full") == expected


def test_replicas_of_a_sharded_engine_have_all_rows_each() -> None:
    """Eight ranks in two replicas share rows by four: twice what eight share."""
    sharded, replicated = (
        plan_memory(
            test_memory.build_config(Layout(dp=8), backend="fsdp", fsdp=FSDPConfig(num_replicas=n)),
            test_memory.read_model("Qwen3-8B"),
            Conditions("cpu"),
        ).roles[0].stages[0]
        for n in (1, 2)
    )  # fmt: skip
    assert replicated.parameters == pytest.approx(2 * sharded.parameters, rel=1e-6)
    assert sharded.parameters == pytest.approx(8_190_735_360 / 8, rel=1e-6)
    assert (
        sharded.weight_bytes
        == sharded.gradient_bytes
        == sharded.optimizer_bytes // 2
        == 4 * sharded.parameters
    )
