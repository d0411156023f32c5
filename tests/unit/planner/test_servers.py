"""Memory of a server's worker: the CUDA graphs that vLLM captures."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mcore_rl.config.schema import RolloutConfig, SpeculativeConfig
from mcore_rl.planner.servers import GRAPH_BYTES, count_graph_bytes, list_graph_sizes
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
