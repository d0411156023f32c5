"""Weights reach servers of families without rules here as transformers has them."""

from __future__ import annotations

import asyncio
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers

from mcore_rl.checkpoint.hf import CheckpointReader
from mcore_rl.config.schema import Layout, RolloutConfig, WeightSyncConfig
from mcore_rl.inference.vllm.server import VLLMServer
from mcore_rl.models.base import use_family
from mcore_rl.parallel.rendezvous import RendezvousServer
from mcore_rl.reshard.executor import LocalWeights
from mcore_rl.reshard.layout import GenerationLayout
from mcore_rl.reshard.rules import Shard
from mcore_rl.weight_sync.spec import TransferSpec, build_training_side
from mcore_rl.weight_sync.transport import WeightUpdate, connect
from tests import tiny_vision
from tests.e2e.test_adapters import SHAPE, compute_gap
from tests.nightly import all_but

sys.path.insert(0, str(Path(__file__).parents[1] / "dist_cpu"))
import tiny_models

pytestmark = pytest.mark.server
FAMILIES: dict[str, dict[str, Any]] = {
    "phi3": {},
    "olmo2": {},
    "olmo3": {"sliding_window": 16},
    "glm4": {},
    "granite": {},
    # With a window that nothing leaves: vLLM's has a token more than that of transformers.
    "cohere2": {"sliding_window": 512, "logit_scale": 0.3, "tie_word_embeddings": True},
    "gemma3_text": {
        "sliding_window": 16, "query_pre_attn_scalar": 32, "tie_word_embeddings": True,
    },
}  # fmt: skip
CASES = [(name, tp) for name in (*FAMILIES, *tiny_vision.KINDS) for tp in (1, 2)]

SELECTED = [("phi3", 1)]  # test_image_jobs.py has a model with images


def read_rows(spec: TransferSpec, reader: CheckpointReader) -> LocalWeights:
    """Read all weights as a single FSDP2 rank has them."""
    sizes = spec.training, 0, spec.shard_format
    _, rules = build_training_side(reader.read_config(), *sizes)
    weights = {}
    for weight in rules:
        weights[weight.name] = torch.empty(weight.rule.get_local_shape(Shard(0, 1)))
        for block in weight.rule.get_blocks(Shard(0, 1)):
            weights[weight.name][block.local_slices] = reader.read(block, torch.float32)
    return LocalWeights(weights)


async def check_push(first: Path, second: Path, models: list[Any], tp: int) -> None:
    """Push the second checkpoint to a server of the first, which it has loaded by itself."""
    config = RolloutConfig(kv_cache_bytes=64 << 20, max_num_seqs=8, tp=tp)
    server = VLLMServer(str(first), "float32", 256, config, 0, timeout_s=120.0)
    await server.start()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rendezvous = RendezvousServer("127.0.0.1")
    try:
        assert await compute_gap(server, models[0]) < 1e-5
        method = "colocated" if tp == 1 else "disaggregated"
        settings = WeightSyncConfig(
            method=method, bucket_bytes=32 << 10, verify="full", timeout_s=30.0
        )
        spec = TransferSpec(
            Layout(), 0, GenerationLayout(tp=tp), "float32", settings, shard_format="rows",
            family="transformers", worker_lists=await server.list_parameters(),
        )  # fmt: skip
        assert len(spec.worker_lists) == tp
        reader, endpoint = CheckpointReader(second), rendezvous.endpoint
        device, hf_config = torch.device("cpu"), reader.read_config()
        joining = asyncio.to_thread(connect, spec, endpoint, hf_config, 0, device)
        transport, _ = await asyncio.gather(joining, server.connect_weights(endpoint, spec, 0))
        weights = read_rows(spec, reader)
        sending = asyncio.to_thread(transport.send, weights, WeightUpdate(1))
        await asyncio.gather(sending, server.update(1))
        assert await compute_gap(server, models[1]) < 1e-5
    finally:
        await server.close()
        rendezvous.close()


def check_family(name: str, tp: int, folder: Path) -> None:
    paths, models = [folder / "first", folder / "second"], []
    for seed, path in enumerate(paths):
        if name in tiny_vision.KINDS:
            models.append(tiny_vision.save(path, name, seed))
        else:
            config = transformers.AutoConfig.for_model(name, **(SHAPE | FAMILIES[name]))
            models.append(tiny_models.build_from(config, seed))
            models[-1].save_pretrained(path)
    use_family("transformers")
    asyncio.run(check_push(*paths, models, tp))


@pytest.mark.parametrize(("name", "tp"), all_but(SELECTED, CASES))
def test_a_pushed_model_has_the_log_probs_of_transformers(name, tp, tmp_path):
    # A server of several workers forks them, which a process with threads of gloo cannot.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor:
        executor.submit(check_family, name, tp, tmp_path).result(timeout=200)
