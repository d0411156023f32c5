"""Megatron's own resharding between two layouts on the same ranks: what ours is measured against.

Neither model has meaningful weights. Their process groups exist at the same time.
"""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from megatron.core.resharding import refit

from mcore_rl.config.schema import EngineConfig, Layout
from mcore_rl.engine.megatron import device, model
from mcore_rl.engine.megatron.weights import local_tensors
from mcore_rl.models.base import HFConfig, get_family, pad_vocab_size
from mcore_rl.parallel.groups import initialize_groups
from mcore_rl.parallel.mesh import Mesh, split_into_chunks


class MegatronRefit:
    """Two models of one config, one chunk per rank, and the transfer from the first to the second.

    To be made once a process, after device.install, by all ranks of the default group together.
    """

    def __init__(
        self, config: HFConfig, source: Layout, target: Layout, dtype: torch.dtype, rank: int
    ) -> None:
        self.source = _model(config, source, dtype, rank)
        # Forgotten, not ended: the first model's groups say who has what.
        parallel_state.destroy_model_parallel()
        self.target = _model(config, target, dtype, rank)

    def run(self) -> None:
        """Megatron plans in the first run and keeps the plan."""
        refit.swap_model_weights(self.source, self.target, "gloo")

    def parameters(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Of the source and of the target, as plans name them."""
        source, target = (
            {f"0:{name}": tensor.data for name, tensor in local_tensors(chunk).items()}
            for chunk in (self.source, self.target)
        )
        return source, target


def _model(config: HFConfig, layout: Layout, dtype: torch.dtype, rank: int) -> model.PolicyModel:
    initialize_groups(layout, device.collective_backend(), seed=0)
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
            # [gate; up] of each shard. Megatron's own MLP says so (transformer/mlp.py); without it
            # the planner would cut as if all gates came before all ups.
            parameter.partition_stride = 2  # type: ignore[attr-defined]
    return chunk
