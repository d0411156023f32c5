"""A vLLM server on DeepSeek-V3 as it is published: float8 blocks, a prediction layer.

Run as a program, `python test_float8_server.py FOLDER`, it prints the scores of a server with two
workers, which a process that has joined other ranks cannot start.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import transformers

sys.path.insert(0, str(Path(__file__).parents[1] / "dist_cpu"))
sys.path.insert(0, str(Path(__file__).parent))

import shards
import tiny_families
import tiny_models
import torch_reference

from mcore_rl.config.errors import StateError
from mcore_rl.config.schema import RolloutConfig
from mcore_rl.inference.protocol import TokenScores
from mcore_rl.inference.vllm.server import VLLMServer
from mcore_rl.weight_sync import shared_memory
from tests.e2e import reference
from tests.e2e.hosting import hosting, run_module

pytestmark = pytest.mark.server

TOKENS = [1, *range(5, 60)]


def server_of(folder: Path, tp: int, **settings: bool) -> VLLMServer:
    rollout = RolloutConfig(tp=tp, ep=tp > 1, max_num_seqs=8, kv_cache_bytes=32 << 20)
    return VLLMServer(str(folder), "float32", 256, rollout, seed=0, **settings)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[Path]:
    """Make folders: published, the same in plain float32, other weights in plain float32."""
    config = tiny_families.served_config("deepseek_v3")
    both = tiny_families.save_published_deepseek(tmp_path_factory.mktemp("first"), config)
    config, folder = tiny_families.served_config("deepseek_v3"), tmp_path_factory.mktemp("other")
    other = tiny_families.save_served(tiny_models.build_from(config, seed=1), folder)
    return [*both, other]


def check(scores: TokenScores, folder: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).float().eval()
    reference.check(scores, model, TOKENS[:1])


def test_a_server_starts_with_the_dequantised_weights_and_takes_shards_and_folders(folders):
    published, plain, other = folders
    assert "quantization_config" in json.loads((published / "config.json").read_text())
    server = server_of(published, tp=1)
    with hosting(), asyncio.Runner() as runner:
        run = runner.run
        run(server.start())
        try:
            check(run(server.score(TOKENS)), plain)
            trainer = shards.Trainer([published, other])
            transport = run(trainer.connect(server))
            for number, folder in ((1, other), (0, plain)):
                assert run(shards.take_shards(server, trainer, number, transport)) == [None, None]
                check(run(server.score(TOKENS)), folder)
            for folder in (plain, published):
                run(server.load_checkpoint(str(folder), server.weight_version + 1))
                check(run(server.score(TOKENS)), plain)
        finally:
            run(server.close())


def test_a_server_without_weights_serves_when_it_has_received_all(folders, monkeypatch):
    """It sleeps before; its model has a parameter whose elements vLLM does not count."""
    published, plain, other = folders
    describe = shared_memory._describe_slice

    def describe_bias_as_short(piece: Any, memory: Any) -> list[Any]:
        entry: list[Any] = describe(piece, memory)
        if entry[0].endswith("e_score_correction_bias"):
            entry[2] = [1]
        return entry

    server = server_of(published, tp=1, can_sleep=True)
    trainer = shards.Trainer([plain, other])
    with hosting(), asyncio.Runner() as runner:
        run = runner.run
        run(server.start(reads_weights=False))
        try:
            with pytest.raises(StateError, match="cannot generate: it has yet to get weights"):
                run(server.score(TOKENS))
            run(server.sleep())
            run(server.wake("weights"))
            with monkeypatch.context() as patch:
                patch.setattr(shared_memory, "_describe_slice", describe_bias_as_short)
                transport = run(trainer.connect(server, verify="off"))
                _, outcome = run(shards.take_shards(server, trainer, 1, transport))
            assert re.search(r"did not get all.*\.e_score_correction_bias'", str(outcome))
            with pytest.raises(StateError, match="it has no weights since it slept"):
                run(server.wake("kv_cache"))
            transport = run(trainer.connect(server))
            assert run(shards.take_shards(server, trainer, 1, transport)) == [None, None]
            run(server.wake("kv_cache"))
            check(run(server.score(TOKENS)), other)
            assert run(shards.take_shards(server, trainer, 0, transport)) == [None, None]
            check(run(server.score(TOKENS)), plain)
        finally:
            run(server.close())


@pytest.mark.nightly
@pytest.mark.parametrize(
    "family",
    [
        "qwen2", "qwen3", "llama", "mixtral", "qwen3_moe", "deepseek_v3", "glm4_moe", "gpt_oss",
        "minimax_m2",
    ],
)  # fmt: skip
def test_a_server_without_weights_serves_what_the_trainer_sent_in_each_family(tmp_path, family):
    config = tiny_families.served_config(family)
    folder = tiny_families.save_served(tiny_models.build_from(config), tmp_path)
    server, trainer = server_of(folder, tp=1), shards.Trainer([folder])
    with hosting(), asyncio.Runner() as runner:
        run = runner.run
        run(server.start(reads_weights=False))
        try:
            transport = run(trainer.connect(server))
            assert run(shards.take_shards(server, trainer, 0, transport)) == [None, None]
            check(run(server.score(TOKENS)), folder)
        finally:
            run(server.close())


def test_a_server_of_experts_in_mxfp4_has_the_dequantised_weights(tmp_path):
    """It starts with them, and takes folders of both forms."""
    config = tiny_families.served_config("gpt_oss")
    published, plain = tiny_families.save_published_gpt_oss(tmp_path, config)
    server = server_of(published, tp=1)
    with hosting(), asyncio.Runner() as runner:
        run = runner.run
        run(server.start())
        try:
            check(run(server.score(TOKENS)), plain)
            # Modules of gpt-oss have other names in vLLM.
            reference.check_trace(
                run(server.trace(TOKENS)), torch_reference.load(plain).float().eval(), TOKENS
            )
            for folder in (plain, published):
                run(server.load_checkpoint(str(folder), server.weight_version + 1))
                check(run(server.score(TOKENS)), plain)
        finally:
            run(server.close())


@pytest.mark.nightly
def test_a_server_of_kimi_k2_5_has_the_dequantised_experts_of_int4(tmp_path):
    """It starts with them, without its tower, and takes folders of both forms."""
    config = tiny_families.served_config("kimi_k2")
    published, plain = tiny_families.save_published_kimi(tmp_path, config)
    model = torch_reference.load(plain)
    server = server_of(published, tp=1)
    with hosting(), asyncio.Runner() as runner:
        run = runner.run
        run(server.start())
        try:
            reference.check(run(server.score(TOKENS)), model, TOKENS[:1])
            for folder in (plain, published):
                run(server.load_checkpoint(str(folder), server.weight_version + 1))
                reference.check(run(server.score(TOKENS)), model, TOKENS[:1])
        finally:
            run(server.close())


@pytest.mark.nightly
def test_two_workers_with_half_of_the_experts_each_have_the_dequantised_weights(folders):
    output = run_module(__name__, folders[0])
    check(TokenScores(**json.loads(output.splitlines()[-1])), folders[1])


async def print_scores(folder: Path) -> None:
    server = server_of(folder, tp=2)
    await server.start()
    print(json.dumps(asdict(await server.score(TOKENS))))
    await server.close()


if __name__ == "__main__":
    asyncio.run(print_scores(Path(sys.argv[1])))
