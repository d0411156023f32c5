"""A program: a vLLM server with expert-parallel workers, told to go through what follows.

    python parallel_server.py DP TP METHOD OLD NEW FOLDER

It has DP data-parallel ranks of TP workers. METHOD is "fork" or, as on GPUs, "spawn": how
its processes are started. With "nodes" half of the workers are on a node of their own, as far as
vLLM can tell: that of a second program.

It writes what it gives as lines of JSON: first its scores under the weights of checkpoint OLD, with
a trace as FOLDER/trace.safetensors if DP is 1; then those of NEW as a folder; then as shards of two
training ranks, twice by each transport, the second time after a sleep. Responses run across each of
these. After that it waits to be killed.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Coroutine
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from mcore_rl.config.schema import RolloutConfig
from mcore_rl.inference.protocol import SamplingParams, ServerMemory
from mcore_rl.inference.vllm.processes import ServerNodes
from mcore_rl.inference.vllm.server import VLLMServer
from mcore_rl.parallel.rendezvous import RendezvousEndpoint, RendezvousServer
from mcore_rl.weight_sync.spec import TransferSpec

TOKENS = list(range(20, 80))
NUM_TRACED, NUM_DECODED = 40, 12
KV_CACHE_BYTES = 32 << 20


async def main(
    dp: int, tp: int, old: Path, new: Path, folder: Path, node: int | None = None
) -> None:
    config = RolloutConfig(dp=dp, tp=tp, ep=True, max_num_seqs=8, kv_cache_bytes=KV_CACHE_BYTES)
    nodes = None
    if node is not None:
        config.nodes_per_server = 2
        cores = sorted(os.sched_getaffinity(0))
        config.cores = str(cores[node % len(cores)])
        nodes = ServerNodes(2, node, 2, timeout_s=60)
    server = VLLMServer(str(old), "float32", 256, config, seed=0, can_sleep=True, nodes=nodes)
    if node == 1:
        await server.start()
        return await until_orphaned()
    await server.start()
    report(await scores(server, folder))
    loading = server.load_checkpoint(str(new), 1, in_flight=True, recompute_cache=True)
    report({"across": await across(server, loading), "completion": await completion(server)})
    await load_by_each_transport(server, new, folder)
    await asyncio.sleep(600)


async def until_orphaned() -> None:
    first_node = os.getppid()
    while os.getppid() == first_node:
        await asyncio.sleep(0.1)


def report(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


async def scores(server: VLLMServer, folder: Path) -> dict[str, Any]:
    """Return scores of a cached prompt, of tokens sampled with two seeds, and of a trace."""
    await server.submit(TOKENS, SamplingParams(max_tokens=1))
    scored, *decoded = await asyncio.gather(
        server.score(TOKENS), *(server.decode(TOKENS, NUM_DECODED, seed) for seed in (0, 1, 0))
    )
    if server.spec.settings.dp == 1:
        traced = await server.trace(TOKENS[:NUM_TRACED])
        save_file(traced, folder / "trace.safetensors")
    return {"scored": asdict(scored), "decoded": [asdict(completion) for completion in decoded]}


async def completion(server: VLLMServer) -> dict[str, Any]:
    (result,) = await server.submit(TOKENS, SamplingParams(max_tokens=24, seed=3))
    return asdict(result)


async def across(server: VLLMServer, change: Coroutine[Any, Any, None]) -> list[dict[str, Any]]:
    """Return responses that run while something is done to the server."""
    running = asyncio.create_task(
        server.submit(TOKENS, SamplingParams(n=4, max_tokens=190, seed=3))
    )
    await server.submit(TOKENS[:5], SamplingParams(max_tokens=5, seed=4))  # so the others run
    await change
    return [asdict(completion) for completion in await running]


async def load_by_each_transport(server: VLLMServer, checkpoint: Path, folder: Path) -> None:
    command = [sys.executable, Path(__file__).with_name("shard_trainer.py")]
    shape = map(str, (server.spec.settings.dp, server.spec.settings.tp))
    arguments = ["2", *shape, checkpoint, folder, *"2345"]
    ranks = [subprocess.Popen([*command, str(rank), *arguments]) for rank in range(2)]
    for transport, (first, second) in (("process_group", (2, 3)), ("nixl", (4, 5))):
        meeting = folder / f"{transport}.json"
        while not meeting.exists():
            await asyncio.sleep(0.05)
        endpoint, fields = json.loads(meeting.read_text())
        spec = TransferSpec.parse(fields)
        await server.connect_weights(RendezvousEndpoint(**endpoint), spec, 0)
        in_flight = await across(server, server.update(first, in_flight=True))
        memory = [await server.memory()]

        async def sleep(version: int, memory: list[ServerMemory]) -> None:
            await server.sleep(keep=True)
            memory.append(await server.memory())
            await server.wake("weights")
            await server.update(version)
            await server.wake("kv_cache")
            memory.append(await server.memory())

        slept = await across(server, sleep(second, memory))
        report(
            {
                "completion": await completion(server),
                "across": in_flight + slept,
                "memory": [asdict(usage) for usage in memory],
            }
        )
    assert [rank.wait(60) for rank in ranks] == [0, 0]


if __name__ == "__main__":
    dp, tp, method, *paths = sys.argv[1:]
    node = None
    if method == "nodes":
        rendezvous, node = RendezvousServer("127.0.0.1"), 0
        os.environ |= rendezvous.endpoint.to_environment()
        subprocess.Popen([sys.executable, sys.argv[0], dp, tp, "second node", *paths])
    elif method == "second node":
        node = 1
    elif method == "spawn":
        from mcore_rl.inference.vllm import worker as vllm_worker

        vllm_worker.START_METHOD["cpu"] = method
    asyncio.run(main(int(dp), int(tp), *map(Path, paths), node=node))
