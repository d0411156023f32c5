"""Megatron's process groups for a layout."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import Layout
from mcore_rl.parallel.store import join_world


def initialize_groups(layout: Layout, backend: str, seed: int, timeout_s: float = 1800.0) -> None:
    """Join the default group, unless it exists, and create Megatron's groups.

    A second call with another layout over the same ranks replaces the groups; engines built on the
    earlier ones can no longer run.

    Args:
        timeout_s: Timeout of all groups.

    Raises:
        ConfigError: The world has another size than the layout, or this process is no rank.
        RuntimeError: Other ranks did not join in time.
    """
    if not dist.is_initialized():
        join_world(backend, timeout_s)
    if dist.get_world_size() != layout.world_size:
        raise ConfigError(
            f"layout {layout} needs {layout.world_size} ranks; {dist.get_world_size()} were started"
        )
    if not _has_groups(layout):
        leave_groups()
        _create_groups(layout, timeout_s)
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


@contextmanager
def use_single_rank_groups() -> Iterator[None]:
    """Make this process the only rank of a world inside the context, without launcher or network.

    Raises:
        RuntimeError: The process belongs to a world already.
    """
    if dist.is_initialized():
        raise RuntimeError("this process is already a rank and cannot form a separate world")
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        initialize_groups(Layout(), "gloo", seed=0)
        yield
    finally:
        leave_groups()
        dist.destroy_process_group()


def leave_groups() -> None:
    """Destroy Megatron's groups: each gloo group has threads that wait until it ends."""
    gc.collect()  # engines of the earlier layout refer to its groups in cycles
    for group in parallel_state._global_process_group_list or ():
        if group is not None:  # None is the default group
            dist.destroy_process_group(group)
    parallel_state.destroy_model_parallel()


def _create_groups(layout: Layout, timeout_s: float) -> None:
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        distributed_timeout_minutes=timeout_s / 60,
    )
    # parallel_state.py:1465 sets no timeout for this group.
    group = parallel_state._EXPERT_DATA_PARALLEL_GROUP_GLOO
    backend = group._get_backend(torch.device("cpu"))
    backend._set_default_timeout(timedelta(seconds=timeout_s))


def _has_groups(layout: Layout) -> bool:
    """Return whether Megatron has the groups of this layout."""
    if not parallel_state.model_parallel_is_initialized():
        return False
    sizes = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_context_parallel_world_size(),
        parallel_state.get_expert_model_parallel_world_size(),
        parallel_state.get_expert_tensor_parallel_world_size(),
        parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
    )
    return sizes == (layout.tp, layout.pp, layout.cp, layout.ep, layout.etp, layout.vpp)
