"""A trainer of one rank for a server: what the rules say that it holds, out of a checkpoint."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import reshard_jobs
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from mcore_rl.checkpoint.hf import CheckpointReader
from mcore_rl.config.schema import Layout, WeightSyncConfig
from mcore_rl.reshard.executor import LocalWeights
from mcore_rl.reshard.layout import GenerationLayout
from mcore_rl.rollout.protocol import Completion, SamplingParams
from mcore_rl.rollout.vllm_server import VLLMServer
from mcore_rl.weight_sync.announced import check_announced
from mcore_rl.weight_sync.shards import Places, ShardRoute, generation_side, plan_colocated
from mcore_rl.weight_sync.stream import StreamSender

ONE = GenerationLayout()
SAMPLED = SamplingParams(n=3, max_tokens=20, seed=5)
GREEDY = SamplingParams(temperature=0.0, max_tokens=20)


class Trainer:
    """The only training rank, of two checkpoints of one model."""

    def __init__(self, paths: list[Path]) -> None:
        self.config = json.loads((paths[0] / "config.json").read_text())
        self.training, _ = reshard_jobs.sides(self.config, Layout(), ONE)
        readers = [CheckpointReader(path) for path in paths]
        held = [reshard_jobs.filled(self.training, 0, reader.read) for reader in readers]
        # Its own padding of the vocabulary is not to reach anybody: it is NaN.
        self.weights = [LocalWeights(found) for found in held]
        self.tensors = [load_file(path / "model.safetensors") for path in paths]

    def route(self, verify: str = "full") -> ShardRoute:
        _, generation = generation_side(self.config, ONE)
        plan = plan_colocated(self.training, generation, Places(("here",), ("here",), 1), 4)
        settings = WeightSyncConfig(bucket_bytes=32 << 10, verify=verify, timeout_s=10)
        group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=10))
        return ShardRoute(plan, group, torch.device("cpu"), torch.float32, settings)


async def take_all(server: VLLMServer, trainer: Trainer, number: int) -> None:
    """A full export of checkpoint `number`."""
    version = server.weight_version + 1
    with StreamSender("127.0.0.1", num_receivers=1, timeout_s=10) as sender:
        sending = asyncio.to_thread(sender.send, trainer.tensors[number].items(), version)
        await asyncio.gather(sending, server.update_weights(sender.endpoint, version))


async def take_shards(
    server: VLLMServer, trainer: Trainer, number: int, route: ShardRoute
) -> list[BaseException | None]:
    """The outcome of the sender and of the server."""
    version = server.weight_version + 1
    sending = asyncio.to_thread(route.send, trainer.weights[number], version)
    receiving = server.receive_shards([route.endpoint], version)
    return await asyncio.gather(sending, receiving, return_exceptions=True)


async def answers(server: VLLMServer) -> list[Completion]:
    prompts = [[1, *range(5, 5 + length)] for length in (3, 17, 40)]
    return [
        replace(completion, weight_versions=[])
        for how in (SAMPLED, GREEDY)
        for prompt in prompts
        for completion in await server.generate(prompt, how)  # a batch of others rounds otherwise
    ]


async def both_ways(server: VLLMServer, trainer: Trainer) -> dict[str, Any]:
    """Answers on checkpoint 1 after a full export and after shards, the latter twice in turn."""
    found: dict[str, Any] = {"announced": await server.weight_layout()}
    await take_all(server, trainer, 0)
    found["first"] = await answers(server)
    await take_all(server, trainer, 1)
    found["export"] = await answers(server)
    route = trainer.route()
    for number, name in ((0, "first again"), (1, "shards")):
        assert await take_shards(server, trainer, number, route) == [None, None]
        found[name] = await answers(server)
    return found


def assert_equal(found: list[Completion], wanted: list[Completion]) -> None:
    """Token for token. Log-probs to rounding: on equal weights vLLM's MLA gives two last bits."""
    assert [c.token_ids for c in found] == [c.token_ids for c in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert one.log_probs == pytest.approx(other.log_probs, abs=2e-6)


def assert_both_ways_agree(found: dict[str, Any], trainer: Trainer) -> None:
    assert_equal(found["shards"], found["export"])
    assert_equal(found["first again"], found["first"])
    assert [c.token_ids for c in found["first"]] != [c.token_ids for c in found["export"]]
    ranks, (_, weights) = generation_side(trainer.config, ONE)
    check_announced(found["announced"], ranks, weights, "float32")
