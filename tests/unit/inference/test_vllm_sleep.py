"""The KV cache of a worker that wakes is zero; vLLM's own pause has a fixed wait."""

import inspect
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import AsyncMPClient

from mcore_rl.inference.vllm.patches.sleep import clear_woken_cache


@pytest.mark.parametrize(
    ("tags", "is_cleared"), [(None, True), (["kv_cache"], True), (["weights"], False)]
)
def test_pages_that_wake_are_zero(tags, is_cleared):
    pages = torch.ones(4, 8)
    caches = [pages[:2], [pages[2:], torch.ones(3)]]
    worker = SimpleNamespace(model_runner=SimpleNamespace(kv_caches=caches))

    def wake_up(worker, tags=None):
        pages.fill_(torch.nan)  # as memory that another process has used

    clear_woken_cache(wake_up)(worker, tags)
    assert bool((pages == 0).all()) is is_cleared
    assert bool((caches[1][1] == 0).all()) is is_cleared


def test_the_pause_of_vllm_is_one_call_of_its_core_and_a_fixed_wait():
    """Otherwise the server's own pause (server.py, _pause_scheduler) has lost its reason."""
    source = inspect.getsource(AsyncLLM.pause_generation)
    assert "self.engine_core.pause_scheduler_async(mode=mode, clear_cache=clear_cache)" in source
    assert "await asyncio.sleep(0.02)" in source and "not required for correctness" in source
    assert {"mode", "clear_cache"} <= {
        *inspect.signature(AsyncMPClient.pause_scheduler_async).parameters
    }
