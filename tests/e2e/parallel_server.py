"""A program: a vLLM server with two expert-parallel workers, told to go through what follows.

    python parallel_server.py OLD NEW FOLDER [METHOD]

METHOD is "fork" or, as on the GPU lane, "spawn": how its processes are started.

It writes what it gives as lines of JSON: first its scores under the weights of checkpoint OLD, with
a trace as FOLDER/trace.safetensors; then those of NEW as a stream; then as shards of two training
ranks, twice by each transport. After that it waits to be killed.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from mcore_rl.config.schema import RolloutConfig
from mcore_rl.rollout.protocol import SamplingParams
from mcore_rl.rollout.vllm_server import VLLMServer
from mcore_rl.weight_sync.checkpoint_engine import RoutePlan
from mcore_rl.weight_sync.disaggregated import endpoint_of
from mcore_rl.weight_sync.stream import StreamSender

TOKENS = list(range(20, 80))
NUM_TRACED, NUM_DECODED = 40, 12


async def main(old: Path, new: Path, folder: Path) -> None:
    config = RolloutConfig(tp=2, ep=True, max_num_seqs=8, kv_cache_bytes=32 << 20)
    server = VLLMServer(str(old), "float32", 256, config, seed=0)
    await server.start()
    tell(await scores(server, folder))
    with StreamSender("127.0.0.1", 2, 20.0) as sender:
        weights = load_file(new / "model.safetensors").items()
        sent = asyncio.to_thread(sender.send, weights, 1)
        await asyncio.gather(sent, server.update_weights(sender.endpoint, 1))
    tell(await completion(server))
    await by_each_transport(server, new, folder)
    await asyncio.sleep(600)


def tell(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


async def scores(server: VLLMServer, folder: Path) -> dict[str, Any]:
    """Of a prompt that is cached, of a trace's companions, and of tokens sampled with two seeds."""
    await server.generate(TOKENS, SamplingParams(max_tokens=1))
    traced, scored, *decoded = await asyncio.gather(
        server.trace(TOKENS[:NUM_TRACED]),
        server.score(TOKENS),
        *(server.decode(TOKENS, NUM_DECODED, seed) for seed in (0, 1, 0)),
    )
    save_file(traced, folder / "trace.safetensors")
    return {"scored": asdict(scored), "decoded": [asdict(found) for found in decoded]}


async def completion(server: VLLMServer) -> dict[str, Any]:
    (found,) = await server.generate(TOKENS, SamplingParams(max_tokens=24, seed=3))
    return asdict(found)


async def by_each_transport(server: VLLMServer, checkpoint: Path, folder: Path) -> None:
    trainer = Path(__file__).with_name("shard_trainer.py")
    ranks = [
        subprocess.Popen([sys.executable, trainer, str(rank), "2", checkpoint, folder, *"234567"])
        for rank in range(2)
    ]
    for transport, versions in (("process_group", (2, 3)), ("nixl", (4, 5)), ("disk", (6, 7))):
        meeting = folder / f"{transport}.json"
        while not meeting.exists():
            await asyncio.sleep(0.05)
        endpoint, fields = json.loads(meeting.read_text())
        plan = RoutePlan.from_dict(fields)
        await server.join_checkpoint_engine(endpoint_of(plan, endpoint), plan, 0)
        for version in versions:
            await server.receive_checkpoint(version)
        tell(await completion(server))
    assert [rank.wait(60) for rank in ranks] == [0, 0]


if __name__ == "__main__":
    if sys.argv[4:]:
        from mcore_rl.rollout import vllm_worker

        vllm_worker.START_METHOD["cpu"] = sys.argv[4]
    asyncio.run(main(*map(Path, sys.argv[1:4])))
