"""The KV cache of a worker that wakes is zero."""

from types import SimpleNamespace

import pytest
import torch

from mcore_rl.inference.vllm.worker import clear_woken_cache


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
