"""vLLM servers in float8 blocks (rollout.quantization) have the weights of vLLM's own loader.

The reference is a server that vLLM starts from a published checkpoint: its codes, scales, names and
layout. vLLM's CPU build has no kernels for the products: float8_kernels.py.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from transformers.integrations.finegrained_fp8 import Fp8Quantize
from vllm.utils.deep_gemm import per_block_cast_to_fp8

sys.path.insert(0, str(Path(__file__).parents[1] / "dist_cpu"))
sys.path.insert(0, str(Path(__file__).parent))

import shards
import tiny_families
import tiny_models

from mcore_rl.checkpoint import fp8
from mcore_rl.config.schema import RolloutConfig
from mcore_rl.inference.protocol import TokenScores
from mcore_rl.inference.vllm import weights as vllm_weights
from mcore_rl.inference.vllm.server import VLLMServer
from tests.e2e import float8_kernels
from tests.e2e.hosting import hosting

pytestmark = pytest.mark.server

TOKENS = [1, *range(5, 60)]


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch, hosting():
        float8_kernels.use_reference_kernels(patch)
        yield


def build_server(folder: Path, **settings: Any) -> VLLMServer:
    rollout = RolloutConfig(max_num_seqs=8, kv_cache_bytes=32 << 20, quantization="fp8_block")
    return VLLMServer(str(folder), "bfloat16", 256, rollout, seed=0, **settings)


def save_published(folder: Path, seed: int) -> tuple[Path, Path]:
    """Save DeepSeek-V3 as published, and the same weights in a plain checkpoint."""
    config = tiny_families.quantizable_config("deepseek_v3")
    return tiny_families.save_published_deepseek(folder, config, seed)


def score_as_published(folder: Path) -> Any:
    """Return the scores of a server that vLLM starts itself from a checkpoint in float8 blocks."""
    with pytest.MonkeyPatch.context() as patch, asyncio.Runner() as runner:
        patch.setattr(vllm_weights, "_build_quantized_arguments", lambda *_, **__: {})
        server = build_server(folder)
        runner.run(server.start())
        try:
            return runner.run(score(server))
        finally:
            runner.run(server.close())


async def score(server: VLLMServer) -> tuple[TokenScores, TokenScores]:
    """Score a prefill, and tokens decoded with MLA's absorbed projections, which vLLM derives."""
    return await server.score(TOKENS), await server.decode(TOKENS, 8, seed=0)


def check(
    scores: tuple[TokenScores, TokenScores], expected: tuple[TokenScores, TokenScores]
) -> None:
    assert scores[0] == expected[0]
    assert scores[1].token_ids == expected[1].token_ids
    # Latent attention may differ in the last bits on equal weights.
    assert scores[1].log_probs == pytest.approx(expected[1].log_probs, abs=1e-3)


def test_a_server_in_float8_has_the_scores_of_vllms_own_on_the_published_codes(tmp_path):
    """Load checkpoints of both forms, then receive what a trainer in bfloat16 sends."""
    folders = [save_published(tmp_path / str(seed), seed) for seed in (0, 1)]
    expected = [score_as_published(published) for published, _ in folders]
    assert expected[0][1].log_probs != expected[1][1].log_probs
    trainer = shards.Trainer([plain for _, plain in folders], "bfloat16", "fp8_block")
    server = build_server(folders[1][1])
    with asyncio.Runner() as runner:
        run = runner.run
        run(server.start())
        try:
            check(run(score(server)), expected[1])
            transport = run(trainer.connect(server))
            for number in (0, 1):
                assert run(shards.take_shards(server, trainer, number, transport)) == [None, None]
                check(run(score(server)), expected[number])
            for folder in folders[0]:
                run(server.load_checkpoint(str(folder), server.weight_version + 1))
                check(run(score(server)), expected[0])
        finally:
            run(server.close())


@pytest.mark.nightly
@pytest.mark.parametrize(
    "family",
    ["qwen2", "qwen3", "llama", "mixtral", "qwen3_moe", "qwen3_next", "deepseek_v3_plain",
     "glm4_moe", "glm4_moe_lite"],
)  # fmt: skip
def test_a_server_without_weights_gets_those_of_vllms_loader_in_each_family(tmp_path, family):
    """Names, shapes and dtypes of vLLM's parameters are those of the rules, or none connects."""
    config = tiny_families.quantizable_config(family)
    folder = tiny_families.save_served(tiny_models.build_from(config).bfloat16(), tmp_path)
    loaded, waiting = build_server(folder), build_server(folder)
    trainer = shards.Trainer([folder], "bfloat16", "fp8_block")
    with asyncio.Runner() as runner:
        run = runner.run
        run(loaded.start())
        try:
            expected = run(loaded.score(TOKENS))
        finally:
            run(loaded.close())
        run(waiting.start(reads_weights=False))
        try:
            transport = run(trainer.connect(waiting))
            assert run(shards.take_shards(waiting, trainer, 0, transport)) == [None, None]
            assert run(waiting.score(TOKENS)) == expected
        finally:
            run(waiting.close())


@pytest.mark.parametrize("shape", [(128, 256), (200, 131), (1, 1), (576, 384)])
def test_codes_are_those_of_vllms_quantiser_but_for_ties(shape):
    """vLLM multiplies by the rounded reciprocal of a scale, and its least amax is 1e-4."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).mul(0.05).bfloat16()
    weight[-1, -1] = 3.0e38  # among the largest of bfloat16
    codes, scales = fp8.quantize_blocks(weight)
    expected_codes, expected_scales = per_block_cast_to_fp8(weight, [128, 128])
    assert torch.equal(scales, expected_scales)
    check_neighbours(codes, expected_codes)
    zeros = torch.zeros(shape, dtype=torch.bfloat16)
    codes, scales = fp8.quantize_blocks(zeros)
    assert not codes.float().any()
    assert torch.equal(scales, torch.ones_like(scales))


def test_codes_are_those_of_transformers_but_for_ties():
    """It rounds 448 / amax, and the reciprocal of that."""
    weight = torch.randn(256, 384, generator=torch.Generator().manual_seed(1)).bfloat16()
    config = transformers.FineGrainedFP8Config(weight_block_size=(128, 128))
    quantizer = SimpleNamespace(quantization_config=config)
    values = Fp8Quantize(quantizer).convert({"a.weight": weight})
    codes, scales = fp8.quantize_blocks(weight)
    torch.testing.assert_close(scales, values["a.weight_scale_inv"], rtol=3e-7, atol=0)
    check_neighbours(codes, values["a.weight"])


def check_neighbours(codes: torch.Tensor, expected: torch.Tensor) -> None:
    """Check that one code in a thousand at most differs, by one step."""
    steps = (codes.view(torch.uint8).short() - expected.view(torch.uint8).short()).abs()
    assert int(steps.max()) <= 1
    assert int(steps.sum()) <= codes.numel() / 1000
