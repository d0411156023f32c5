"""Megatron's process groups, in a world of one rank."""

from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from mcore_rl.config.schema import Layout
from mcore_rl.engine.megatron import device
from mcore_rl.parallel.groups import initialize_groups, leave_groups


@pytest.fixture
def world_of_one() -> Iterator[None]:
    device.install(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    leave_groups()
    dist.destroy_process_group()


@pytest.mark.job
def test_all_groups_have_the_given_timeout(world_of_one):
    initialize_groups(Layout(), "gloo", seed=0, timeout_s=1234.5)
    groups = [group for group in parallel_state._global_process_group_list if group is not None]
    backends = [group._get_backend(torch.device("cpu")) for group in groups]
    assert len(backends) > 5
    assert {backend.options._timeout for backend in backends} == {timedelta(seconds=1234.5)}
