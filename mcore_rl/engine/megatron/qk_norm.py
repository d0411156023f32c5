"""Norms of queries and keys over all heads of a token, which tensor parallelism splits."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.parallel_state import get_tensor_model_parallel_group
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)

from mcore_rl.engine.megatron.layers import RMSNorm

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig


class AllHeadsNorm(RMSNorm):
    """An RMS norm with one mean square per token, over the heads of all tensor-parallel ranks.

    Every rank has the full weight and scales its heads with their part of it. So the gradient of a
    rank is zero outside that part, and the sum over ranks, which Megatron takes of each parameter
    named q_layernorm or k_layernorm (distributed/finalize_model_grads.py:453), is the gradient.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float, *, heads_field: str
    ) -> None:
        """Build the norm of a layer.

        Args:
            hidden_size: Size of one head, as Megatron's attention passes it.
            heads_field: Field of the config with the number of heads, of all ranks.
        """
        super().__init__(config, getattr(config, heads_field) * hidden_size, eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize [tokens, 1, heads of this rank, dim], in float32 as transformers and vLLM."""
        group = get_tensor_model_parallel_group()
        weight = self.weight.view(group.size(), *x.shape[-2:])[group.rank()]
        values = x.float()
        squares = values.square().sum((-2, -1), keepdim=True)
        # Summed over ranks, in the backward pass as well: each rank's heads depend on all heads.
        squares = reduce_from_tensor_model_parallel_region(squares, group)
        squares = copy_to_tensor_model_parallel_region(squares, group)
        normalized = values * torch.rsqrt(squares / self.weight.numel() + self.eps)
        return (normalized * weight).to(x.dtype)


def use_all_heads_norms(layer_spec: Any) -> Any:
    """Set AllHeadsNorm for queries and keys in the layers of a chunk's spec."""
    for layer in layer_spec.layer_specs:
        modules = layer.submodules.self_attention.submodules
        modules.q_layernorm = partial(AllHeadsNorm, heads_field="num_attention_heads")
        modules.k_layernorm = partial(AllHeadsNorm, heads_field="num_query_groups")
    return layer_spec
