"""The KV cache of a worker that wakes is zero; vLLM's own pause has a fixed wait."""

import inspect
from types import SimpleNamespace

import psutil
import pytest
import torch
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import AsyncMPClient

from mcore_rl.inference.vllm.patches.caches import bound_cache
from mcore_rl.inference.vllm.patches.sleep import clear_woken_cache


@pytest.mark.parametrize(
    ("tags", "is_cleared"), [(None, True), (["kv_cache"], True), (["weights"], False)]
)
def test_pages_that_wake_are_zero(tags, is_cleared):
    pages = torch.ones(4, 5000)  # whole pages of memory, and parts of some at both ends
    caches = [pages[:2], [pages[2:], torch.ones(3)]]
    worker = SimpleNamespace(model_runner=SimpleNamespace(kv_caches=caches))

    def wake_up(worker, tags=None):
        pages.fill_(torch.nan)  # as memory that another process has used

    clear_woken_cache(wake_up)(worker, tags)
    assert bool((pages == 0).all()) is is_cleared
    assert bool((caches[1][1] == 0).all()) is is_cleared


def test_pages_that_wake_take_no_memory_until_they_are_used():
    cache = torch.ones(64 << 20, dtype=torch.uint8)
    worker = SimpleNamespace(model_runner=SimpleNamespace(kv_caches=[cache]))
    before = psutil.Process().memory_info().rss
    clear_woken_cache(lambda worker, tags=None: None)(worker)
    assert before - psutil.Process().memory_info().rss > 60 << 20
    assert not cache.any()


@pytest.mark.parametrize(("free", "size"), [(60, 40), (30, 20), (5, 0)])
def test_a_cache_of_the_default_size_leaves_a_tenth_of_a_gpu(monkeypatch, free, size):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 100))
    assert bound_cache(lambda worker: 40)(None) == size


def test_the_pause_of_vllm_is_one_call_of_its_core_and_a_fixed_wait():
    """Otherwise the server's own pause (server.py, _pause_scheduler) has lost its reason."""
    source = inspect.getsource(AsyncLLM.pause_generation)
    assert "self.engine_core.pause_scheduler_async(mode=mode, clear_cache=clear_cache)" in source
    assert "await asyncio.sleep(0.02)" in source and "not required for correctness" in source
    assert {"mode", "clear_cache"} <= {
        *inspect.signature(AsyncMPClient.pause_scheduler_async).parameters
    }
