"""Patches of vLLM's caches: none outlives the weights that filled it, or exceeds its GPU.

Those of prefixes and pixels run in the engine's process. Upstream lines are those of vLLM 0.32.

What an update, an update in flight and a sleep do (tests/e2e/test_server_caches.py):
prefixes (keys and values, states of linear attention, drafts): emptied; in flight running requests
    keep their blocks, which no other reads; after a sleep requests that go on compute theirs again.
recorded experts: emptied; in flight those of running requests stay; emptied.
encoder cache (embeddings by picture): emptied each time.
processor cache (pixels by picture): stays; stays; emptied. Those of a running request stay.
adapters: the last version is dropped; refused; stay.
values derived from weights (absorbed, packed, float8): computed again; computed again; freed.
A cancelled request leaves full blocks, and all caches but its own pixels.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.v1.core.sched import output
from vllm.v1.engine.core import EngineCore

from mcore_rl.inference.kv_cache import GPU_SHARE

FORGET_PREFIXES = "forget_prefixes"  # method of the engine
FITS_CACHE = "MCORE_RL_FITS_CACHE"  # variable of processes whose cache has its default size


@functools.cache
def patch_caches() -> None:
    """Keep pixels of running requests, and give the engine `forget_prefixes`."""
    output.strip_covered_mm_data = _keep_pixels
    setattr(EngineCore, FORGET_PREFIXES, _forget_prefixes)


def _keep_pixels(
    mm_features: list[MultiModalFeatureSpec], num_computed_tokens: int, uses_mrope: bool = False
) -> list[MultiModalFeatureSpec]:
    """Return the images of a request with their pixels, in place of strip_covered_mm_data.

    vLLM drops those of images whose tokens are in the prefix cache (multimodal/utils.py:213). A
    request that is preempted, or sleeps, computes its prompt again; if the embeddings have been
    evicted meanwhile, the worker fails and the engine dies.
    """
    return mm_features


def _forget_prefixes(engine: Any) -> None:
    """Empty the prefix cache beside paused requests, which keep their blocks for themselves.

    vLLM's reset_prefix_cache (v1/core/block_pool.py:827) refuses that while requests have blocks.
    Requests in the queue, and those on their way to the engine, then compute their prompts with the
    new weights. So does a request without a token yet, whose prompt is computed in part: all of its
    tokens will have the new version.
    """
    scheduler = engine.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    pool.evict_blocks({block.block_id for block in pool.blocks})
    for request in [request for request in scheduler.running if not request.num_output_tokens]:
        scheduler.running.remove(request)
        scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
        # It may be resumed in the next step: see Scheduler.reset_prefix_cache.
        scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
    for request in scheduler.running:
        # Blocks that it fills from now on depend on older ones: nobody else has its salt.
        request.cache_salt = request.request_id
        request.block_hashes.clear()
        request.update_block_hashes()


@functools.cache
def fit_caches() -> None:
    """Bound the size of the KV cache on a GPU by what is free beside weights and work."""
    from vllm.v1.worker.gpu_worker import Worker

    Worker.determine_available_memory = bound_cache(Worker.determine_available_memory)


def bound_cache(choose_bytes: Callable[[Any], int]) -> Callable[[Any], int]:
    """Extend a worker's `determine_available_memory`, which takes the size that it is given.

    It comes after a pass of the largest batch (v1/worker/gpu_worker.py:653), whose memory torch
    still has. CUDA graphs come after it, from the margin.
    """

    @functools.wraps(choose_bytes)
    def determine_available_memory(worker: Any) -> int:
        size = choose_bytes(worker)
        free, total = torch.cuda.mem_get_info()
        return min(size, max(0, free - total + int(GPU_SHARE * total)))

    return determine_available_memory
