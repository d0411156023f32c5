"""Megatron's process groups for a layout."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import Layout


def initialize_groups(layout: Layout, backend: str, seed: int, timeout_s: float = 1800.0) -> None:
    """Join the default group (from RANK, WORLD_SIZE, MASTER_*) and make Megatron's groups.

    Calling it again with another layout over the same ranks replaces the groups.

    Raises:
        ConfigError: the launched world is not the layout's.
    """
    if not dist.is_initialized():
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    if dist.get_world_size() != layout.world_size:
        raise ConfigError(
            f"layout {layout} needs {layout.world_size} ranks; {dist.get_world_size()} were started"
        )
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
