"""Memory of a server's worker: the CUDA graphs that vLLM captures."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mcore_rl.config.schema import RolloutConfig, SpeculativeConfig
from mcore_rl.planner.servers import (
    ATTENTION_WORKSPACE_BYTES,
    GRAPH_BYTES,
    count_graph_bytes,
    count_workspace_bytes,
    list_graph_sizes,
)
from tests.published_runs import read_model


def list_vllm_sizes(settings: RolloutConfig) -> list[int]:
    """Return the sizes that the installed vLLM chooses on a GPU."""
    from vllm.config import CompilationConfig, VllmConfig
    from vllm.config.compilation import CUDAGraphMode

    passed = settings.engine
    compilation = CompilationConfig(**passed.get("compilation_config", {}))
    if compilation.cudagraph_mode is None:
        compilation.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    scheduler = SimpleNamespace(
        max_num_seqs=settings.max_num_seqs or 1024,
        max_num_batched_tokens=settings.max_num_batched_tokens or 8192,
    )
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(enforce_eager=passed.get("enforce_eager", False)),
        compilation_config=compilation,
        scheduler_config=scheduler,
        uniform_decode_query_len=1 + settings.speculative.num_tokens,
        speculative_config=None,
        performance_mode=passed.get("performance_mode", "balanced"),
    )
    VllmConfig._set_cudagraph_sizes(config)
    return list(compilation.cudagraph_capture_sizes)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_seqs": 1},
        {"max_num_seqs": 20},
        {"max_num_seqs": 100},
        {"max_num_seqs": 200},
        {"max_num_seqs": 1024, "max_num_batched_tokens": 300},
        {"max_num_seqs": 64, "max_num_batched_tokens": 100},
        {"max_num_seqs": 64, "speculative": SpeculativeConfig(num_tokens=2)},
        {"max_num_seqs": 300, "speculative": SpeculativeConfig(num_tokens=1)},
        {"engine": {"compilation_config": {"cudagraph_capture_sizes": [8, 1, 64]}}},
        {"engine": {"compilation_config": {"max_cudagraph_capture_size": 100}}},
        {"engine": {"compilation_config": {"cudagraph_mode": "NONE"}}},
        {"engine": {"enforce_eager": True}},
        {"engine": {"performance_mode": "interactivity"}},
    ],
    ids=str,
)
def test_graph_sizes_are_those_of_the_installed_vllm(settings: dict[str, Any]) -> None:
    rollout = RolloutConfig(**settings)
    assert list_graph_sizes(rollout) == list_vllm_sizes(rollout)


def test_graphs_take_bytes_for_each_size_and_layer() -> None:
    model = read_model({"model": "Qwen3-8B"})
    assert count_graph_bytes(RolloutConfig(), model) == 51 * 36 * GRAPH_BYTES
    small = RolloutConfig(max_num_seqs=8)  # 1, 2, 4, 8, 16
    assert count_graph_bytes(small, model) == 5 * 36 * GRAPH_BYTES
    assert count_graph_bytes(RolloutConfig(engine={"optimization_level": 0}), model) == 0


@pytest.mark.parametrize(
    ("name", "settings", "num_bytes"),
    [
        # Logits of 1,024 sequences twice in float32, or a pass of 8,192 tokens through a layer:
        # four hidden states, and gate, up and product on half of the columns.
        ("Qwen3-8B", {"tp": 2}, 1024 * 151936 * 2 * 4),
        ("Qwen3-8B", {"tp": 2, "max_num_seqs": 64}, 8192 * (4 * 4096 + 3 * 12288 / 2) * 2),
        # A token goes to 8 experts, of half of their columns each.
        (
            "Qwen3-30B-A3B",
            {"tp": 2, "max_num_seqs": 64},
            8192 * (4 * 2048 + 8 * (2 * 2048 + 3 * 768 / 2)) * 2,
        ),
        # Or to a quarter of its experts, 1.5 times as often, from both replicas.
        (
            "Qwen3-30B-A3B",
            {"tp": 2, "dp": 2, "ep": True, "max_num_seqs": 64},
            8192 * (4 * 2048 + 8 * 1.5 / 4 * 2 * (2 * 2048 + 3 * 768)) * 2,
        ),
    ],
)
def test_workspace_is_a_layer_or_logits(
    name: str, settings: dict[str, Any], num_bytes: float
) -> None:
    model = read_model({"model": name})
    actual = count_workspace_bytes(RolloutConfig(**settings), model, 2, 1.5)
    assert actual == int(num_bytes) + ATTENTION_WORKSPACE_BYTES
