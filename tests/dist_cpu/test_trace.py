"""A trace of the engine is that of transformers, module by module, at every kind of layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ranks
import tiny_families
import tiny_models
import torch

from mcore_rl.config.schema import EngineConfig, Layout, ModelConfig
from mcore_rl.engine.base import EngineSpec
from mcore_rl.jobs.parity import engines
from mcore_rl.jobs.parity.run import THRESHOLDS, compare_traces, list_module_names

LAYOUTS = {
    "tp2": Layout(tp=2),
    "pp2": Layout(pp=2, first_stage_layers=1),
    "vpp2": Layout(pp=2, vpp=2, first_stage_layers=0),
    "cp2": Layout(cp=2),
    "dp2": Layout(dp=2),
    "tp2cp2": Layout(tp=2, cp=2),
    "tp2pp2": Layout(tp=2, pp=2, last_stage_layers=1),
    "dp2ep2": Layout(dp=2, ep=2),
    "tp2ep2": Layout(tp=2, ep=2),
    "tp2etp2dp2ep2": Layout(tp=2, dp=2, ep=2, etp=2),
}
CASES = {
    "qwen3": ("tp2", "vpp2", "tp2pp2", "dp2"),  # tied embeddings, norms inside of linears
    "glm4_moe": ("pp2", "cp2", "dp2ep2", "tp2cp2", "tp2etp2dp2ep2"),  # a dense layer, biases
    "deepseek_v3": ("tp2ep2", "tp2cp2"),  # norms of their own, scaled routing weights
    "gpt_oss": ("tp2ep2", "pp2"),  # a bias after attention
}
SEQUENCES = [
    torch.randint(0, tiny_models.VOCAB, (length,), generator=torch.manual_seed(length)).tolist()
    for length in (2, 13, 38)
]
Traces = list[dict[str, torch.Tensor]]


def spec(path: Path, layout: Layout) -> EngineSpec:
    model = ModelConfig(path=str(path), dtype="float32")
    return EngineSpec(model, EngineConfig(layout=layout), seed=0)


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By "family/layout" what the engine gave, by family what transformers gave."""
    jobs: dict[int, dict[str, Any]] = {2: {}, 4: {}}
    traces: dict[str, Any] = {}
    for name, layouts in CASES.items():
        config = tiny_families.cases()[name].config
        if name != "gpt_oss":  # what transformers has in norms of latents, whatever the config
            config.rms_norm_eps = 1e-6
        model = tiny_models.build_from(config)
        path = tiny_families.save(model, tmp_path_factory.mktemp("models") / name)
        traces[name] = engines.trace_with_hf(str(path), "float32", SEQUENCES)
        for key in layouts:
            case = ranks.make_job(
                engines.trace_with_megatron, spec(path, LAYOUTS[key]), "", SEQUENCES
            )
            jobs[LAYOUTS[key].world_size][f"{name}/{key}"] = case
    for world, cases in jobs.items():
        traces |= {n: engines.merge_traces(by) for n, by in ranks.spawn(world, cases).items()}
    return traces


@pytest.mark.parametrize("case", [f"{name}/{key}" for name, keys in CASES.items() for key in keys])
def test_every_module_gives_what_transformers_gives(traces, case):
    reference: Traces = traces[case.partition("/")[0]]
    for actual, expected, ids in zip(traces[case], reference, SEQUENCES, strict=True):
        assert set(actual) == set(expected)
        assert set(actual) <= set(list_module_names(3))
        assert all(len(value) == len(ids) for value in actual.values())
        gaps = compare_traces(actual, expected, num_layers=3)
        assert max(gaps.values()) < THRESHOLDS["float32"] / 10, gaps


def test_a_trace_has_every_module_of_a_layer(traces):
    last = {name for name in traces["glm4_moe/pp2"][0] if name.startswith("model.layers.2.")}
    assert last == {name for name in list_module_names(3) if name.startswith("model.layers.2.")}
    assert traces["qwen3/tp2"][0]["lm_head"].shape == (2, tiny_models.VOCAB)  # no padding
    weights = traces["deepseek_v3/tp2ep2"][2]["model.layers.1.mlp.gate"]
    assert ((weights > 0).sum(-1) == 4).all()
    torch.testing.assert_close(weights.sum(-1), torch.full((38,), 2.5))
