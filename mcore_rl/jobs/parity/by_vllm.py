"""vLLM's side: a server of its own, one request at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import torch

from mcore_rl.config.schema import RolloutConfig
from mcore_rl.models.base import HFConfig, kv_elements_per_token
from mcore_rl.rollout.protocol import TokenScores
from mcore_rl.rollout.vllm_server import VLLMServer

_SEED = 0
_LEAST_CACHE_BYTES = 64 << 20
_BLOCK_TOKENS = 128  # on a CPU (vllm/platforms/cpu.py:293)


@dataclass(frozen=True, slots=True)
class ServerSpec:
    model_path: str
    dtype: str
    max_model_tokens: int  # of a sequence, and one more, which vLLM generates after a prefill
    tp: int
    kv_cache_bytes: int
    timeout_s: float | None = None  # of waits inside vLLM


def score(spec: ServerSpec, prompts: list[list[int]], num_tokens: int) -> dict[str, Any]:
    """Starts a server for `scored`."""

    async def run() -> dict[str, Any]:
        async with _server(spec) as server:
            return await scored(server, prompts, num_tokens)

    return asyncio.run(run())


async def scored(server: VLLMServer, prompts: list[list[int]], num_tokens: int) -> dict[str, Any]:
    """Continues each prompt by `num_tokens` sampled ones, and scores what comes out of that.

    "sequences": prompts with their continuations. "decode": fields of Scores, of the continuations
    as they were sampled. "prefill": the same of all tokens but the first, from one pass over them.
    """
    decoded = [
        await server.decode(ids, num_tokens, seed=_SEED + row) for row, ids in enumerate(prompts)
    ]
    sequences = [ids + more.token_ids for ids, more in zip(prompts, decoded, strict=True)]
    prefilled = [await server.score(ids) for ids in sequences]
    return {"sequences": sequences, "decode": _fields(decoded), "prefill": _fields(prefilled)}


def trace(spec: ServerSpec, sequences: list[list[int]]) -> list[dict[str, torch.Tensor]]:
    """Of each sequence what the modules put out, float32 [tokens, dim] by name."""

    async def run() -> list[dict[str, torch.Tensor]]:
        async with _server(spec, eager=True) as server:
            return [await server.trace(ids) for ids in sequences]

    return asyncio.run(run())


def kv_cache_bytes(config: HFConfig, num_tokens: int) -> int:
    """An upper bound on what the cache of four sequences takes, at four bytes an element."""
    num_tokens += _BLOCK_TOKENS  # vLLM rounds up to whole blocks
    return max(_LEAST_CACHE_BYTES, 4 * num_tokens * 4 * kv_elements_per_token(config))


@asynccontextmanager
async def _server(spec: ServerSpec, *, eager: bool = False) -> AsyncIterator[VLLMServer]:
    config = RolloutConfig(tp=spec.tp, max_num_seqs=4, kv_cache_bytes=spec.kv_cache_bytes)
    server = VLLMServer(
        spec.model_path,
        spec.dtype,
        spec.max_model_tokens,
        config,
        _SEED,
        timeout_s=spec.timeout_s,
        eager=eager,
    )
    try:
        await server.start()
        yield server
    finally:
        await server.close()


def _fields(scores: list[TokenScores]) -> dict[str, list[list[Any]]]:
    return {
        "log_probs": [entry.log_probs for entry in scores],
        "top_ids": [entry.top_ids for entry in scores],
    }
