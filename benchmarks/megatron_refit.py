"""Megatron's own resharding between two layouts on the same ranks, as a baseline for benchmarks.

The weights of both models are meaningless. Their process groups exist at the same time.
"""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from megatron.core.resharding import refit

from mcore_rl.config.schema import EngineConfig, Layout
from mcore_rl.engine.megatron import device, model
from mcore_rl.engine.megatron.weights import get_local_tensors
from mcore_rl.models.base import HFConfig, get_family, pad_vocab_size
from mcore_rl.parallel.groups import initialize_groups
from mcore_rl.parallel.mesh import Mesh, split_into_chunks


class MegatronRefit:
    """Two models of one config, one chunk per rank, and the transfer from the first to the second.

    Create it once per process, after device.install, on all ranks of the default group.
    """

    def __init__(
        self, config: HFConfig, source: Layout, target: Layout, dtype: torch.dtype, rank: int
    ) -> None:
        self.source = _build_model(config, source, dtype, rank)
        # Megatron forgets the first model's groups, but they stay alive: the transfer uses them.
        parallel_state.destroy_model_parallel()
        self.target = _build_model(config, target, dtype, rank)

    def run(self) -> None:
        """Transfer the weights. Megatron plans in the first call and caches the plan."""
        refit.swap_model_weights(self.source, self.target, "gloo")

    def get_parameters(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Return the parameters of source and target by their names in reshard plans."""
        source, target = (
            {f"0:{name}": tensor.data for name, tensor in get_local_tensors(chunk).items()}
            for chunk in (self.source, self.target)
        )
        return source, target


def _build_model(
    config: HFConfig, layout: Layout, dtype: torch.dtype, rank: int
) -> model.PolicyModel:
    initialize_groups(layout, device.get_collective_backend(), seed=0)
    [chunk] = model.build_chunks(
        get_family(config),
        config,
        EngineConfig(layout=layout),
        dtype,
        split_into_chunks(layout, config["num_hidden_layers"]),
        Mesh(layout).get_coordinate(rank).pp_rank,
        pad_vocab_size(config, layout.tp),
    )
    for name, parameter in chunk.named_parameters():
        if ".linear_fc1.weight" in name:
            # Each shard is [gate; up], as Megatron's own MLP sets (transformer/mlp.py); without it
            # the planner splits as if all gates came before all ups.
            parameter.partition_stride = 2
    return chunk
