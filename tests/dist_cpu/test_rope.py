"""Scaled rotary embeddings beyond the original context, packed and split over ranks.

Each sequence scores as transformers scores it alone, in both engines.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ranks
import tiny_families
import tiny_models
import torch
import transformers

from mcore_rl.config.schema import EngineConfig, Layout, ModelConfig
from mcore_rl.engine.base import EngineSpec
from mcore_rl.jobs.parity import engines

SEQUENCES = [  # the original contexts of the models are 16 tokens, but for linear scaling
    torch.randint(0, tiny_models.VOCAB, (length,), generator=torch.manual_seed(length)).tolist()
    for length in (3, 200, 40)
]
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
CP2, PP2 = Layout(cp=2), Layout(pp=2, first_stage_layers=1)
CASES: dict[str, tuple[str, str, Layout]] = {
    "linear/cp2": ("llama_linear", "megatron", CP2),
    "llama3/pp2": ("llama_scaled", "megatron", PP2),
    "yarn/cp2": ("qwen3_yarn", "megatron", CP2),
    "yarn/pp2": ("qwen3_yarn", "megatron", PP2),
    "partial yarn/cp2": ("glm4_moe_yarn", "megatron", CP2),
    "latent yarn/cp2": ("kimi_k2", "megatron", CP2),
    "dynamic/cp2": ("llama_dynamic", "megatron", CP2),
    "fsdp linear": ("llama_linear", "fsdp", Layout(dp=2)),
    "fsdp llama3": ("llama_scaled", "fsdp", Layout(dp=2)),
    "fsdp yarn": ("qwen3_yarn", "fsdp", CP2),
    "fsdp dynamic": ("llama_dynamic", "fsdp", Layout(dp=2)),
}


def build(name: str, folder: Path) -> Path:
    if name == "llama_dynamic":  # scaling acts beyond 256 positions, where a job has no sequences
        config = tiny_families.cases()["llama"].config
        config.rope_parameters, config.max_position_embeddings = DYNAMIC, 256
        config = transformers.LlamaConfig(**config.to_dict())
    else:
        config = tiny_families.cases()[name].config
    return tiny_families.save(tiny_models.build_from(config), folder / name)


@pytest.fixture(scope="module")
def scores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By case the log-probs of an engine on two ranks, by model those of transformers."""
    folder, scores = tmp_path_factory.mktemp("models"), dict[str, Any]()
    jobs = {}
    for key, (name, backend, layout) in CASES.items():
        path = folder / name if name in scores else build(name, folder)
        scores[name] = engines.score_with_hf(str(path), "float32", SEQUENCES)["log_probs"]
        spec = EngineSpec(
            ModelConfig(path=str(path), dtype="float32"),
            EngineConfig(layout=layout, backend=backend),
            seed=0,
            num_top_log_probs=1,
        )
        jobs[key] = ranks.make_job(engines.score_with_megatron, spec, "", SEQUENCES)
    results = ranks.spawn(2, jobs)
    return scores | {key: engines.merge_scores(results[key]).log_probs for key in CASES}


@pytest.mark.parametrize("case", CASES)
def test_long_and_short_sequences_of_a_pack_score_as_in_transformers(scores, case):
    for actual, expected in zip(scores[case], scores[CASES[case][0]], strict=True):
        torch.testing.assert_close(torch.tensor(actual), torch.tensor(expected), rtol=0, atol=1e-5)


@pytest.mark.parametrize("scaled", ["llama_linear", "llama_scaled"])
def test_scaling_acts_on_these_sequences(scores, scaled):
    plain = scores["llama_dynamic"]  # the same weights
    gap = max(
        (torch.tensor(scaled_score) - torch.tensor(plain_score)).abs().max()
        for scaled_score, plain_score in zip(scores[scaled], plain, strict=True)
    )
    assert gap > 0.1
