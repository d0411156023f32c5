"""A trainer of one rank for a server: what the rules say that it holds, out of a checkpoint."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import reshard_jobs
import torch
import torch.distributed as dist

from mcore_rl.checkpoint.hf import CheckpointReader
from mcore_rl.config.schema import Layout, WeightSyncConfig
from mcore_rl.inference.protocol import Completion, SamplingParams
from mcore_rl.inference.vllm.server import VLLMServer
from mcore_rl.parallel.rendezvous import RendezvousServer
from mcore_rl.reshard.executor import LocalWeights
from mcore_rl.reshard.layout import GenerationLayout
from mcore_rl.weight_sync.spec import TransferSpec
from mcore_rl.weight_sync.transport import WeightTransport, WeightUpdate, connect

SAMPLED = SamplingParams(n=3, max_tokens=20, seed=5)
GREEDY = SamplingParams(temperature=0.0, max_tokens=20)


class Trainer:
    """The only training rank, of two checkpoints of one model."""

    def __init__(
        self, paths: list[Path], dtype: str = "float32", quantization: str | None = None
    ) -> None:
        self.paths = paths
        readers = [CheckpointReader(path) for path in paths]
        self.config = readers[0].read_config()
        training, _ = reshard_jobs.sides(self.config, Layout(), GenerationLayout())
        held = [reshard_jobs.filled(training, 0, reader.read) for reader in readers]
        # Its own padding of the vocabulary is not to reach anybody: it is NaN.
        self.dtype, self.quantization = dtype, quantization
        self.weights = [
            LocalWeights(
                {n: t.to(getattr(torch, dtype)) if t.dim() > 1 else t for n, t in tensors.items()}
            )
            for tensors in held
        ]
        self.rendezvous = RendezvousServer("127.0.0.1")

    def spec(self, verify: str = "full", tp: int = 1, **settings: Any) -> TransferSpec:
        given = {"bucket_bytes": 32 << 10, "verify": verify, "timeout_s": 10.0, **settings}
        sync = WeightSyncConfig(**given)
        return TransferSpec(
            Layout(), 0, GenerationLayout(tp=tp), self.dtype, sync, quantization=self.quantization
        )

    async def connect(self, server: VLLMServer, verify: str = "full") -> WeightTransport:
        """Connect both sides through shared memory."""
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self.rendezvous = RendezvousServer("127.0.0.1")  # each meeting has one of its own
        spec, endpoint = self.spec(verify), self.rendezvous.endpoint
        device = torch.device("cpu")
        joining = asyncio.to_thread(connect, spec, endpoint, self.config, 0, device)
        transport, _ = await asyncio.gather(joining, server.connect_weights(endpoint, spec, 0))
        return transport


async def take_all(server: VLLMServer, trainer: Trainer, number: int) -> None:
    """Checkpoint `number` as a folder."""
    await server.load_checkpoint(str(trainer.paths[number]), server.weight_version + 1)


async def take_shards(
    server: VLLMServer, trainer: Trainer, number: int, transport: WeightTransport
) -> list[BaseException | None]:
    """Return the outcome of the sender and of the server."""
    version = server.weight_version + 1
    sending = asyncio.to_thread(transport.send, trainer.weights[number], WeightUpdate(version))
    return await asyncio.gather(sending, server.update(version), return_exceptions=True)


async def answers(server: VLLMServer) -> list[Completion]:
    prompts = [[1, *range(5, 5 + length)] for length in (3, 17, 40)]
    return [
        replace(completion, weight_versions=[])
        for how in (SAMPLED, GREEDY)
        for prompt in prompts
        for completion in await server.submit(prompt, how)  # a batch of others rounds otherwise
    ]


async def both_ways(server: VLLMServer, trainer: Trainer) -> dict[str, Any]:
    """Return answers on checkpoint 1 after a full export and after shards, the latter twice."""
    results: dict[str, Any] = {}
    await take_all(server, trainer, 0)
    results["first"] = await answers(server)
    await take_all(server, trainer, 1)
    results["export"] = await answers(server)
    transport = await trainer.connect(server)
    for number, name in ((0, "first again"), (1, "shards")):
        assert await take_shards(server, trainer, number, transport) == [None, None]
        results[name] = await answers(server)
    return results


def assert_equal(completions: list[Completion], expected: list[Completion]) -> None:
    """Token for token. Log-probs to rounding: on equal weights vLLM's MLA gives two last bits."""
    assert [c.token_ids for c in completions] == [c.token_ids for c in expected]
    for completion, other in zip(completions, expected, strict=True):
        assert completion.log_probs == pytest.approx(other.log_probs, abs=2e-6)


def assert_both_ways_agree(results: dict[str, Any]) -> None:
    assert_equal(results["shards"], results["export"])
    assert_equal(results["first again"], results["first"])
    assert [c.token_ids for c in results["first"]] != [c.token_ids for c in results["export"]]
