"""Core attention of the CPU lane: causal attention inside each sequence of a pack."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule


class PackedAttention(MegatronModule):
    """Scaled dot-product attention over packed (THD) sequences, with grouped queries.

    Sequences are gathered into padded batches of similar length, so that the cost is that of the
    sequences (at most four times the ideal for the shortest of a group) and no mask over a whole
    pack is ever made. Padding stands behind the tokens, where a causal query never looks.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale or (k_channels or config.kv_channels) ** -0.5

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> torch.Tensor:
        """[tokens, heads, dim] query, [tokens, groups, dim] key, value -> [tokens, heads * dim]."""
        if packed_seq_params is None or packed_seq_params.qkv_format != "thd":
            raise ValueError("PackedAttention needs packed (THD) sequences")
        starts = packed_seq_params.cu_seqlens_q.long()
        outputs, order = [], []
        for rows, valid in _length_groups(starts):
            attended = self._attend(query[rows], key[rows], value[rows])
            outputs.append(attended[valid])
            order.append(rows[valid])
        if len(outputs) == 1:  # one group holds its sequences in their order
            return outputs[0].flatten(1)
        inverse = torch.argsort(torch.cat(order))
        return torch.cat(outputs)[inverse].flatten(1)

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """[sequences, length, heads, dim] in and out."""
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        repeats = q.shape[1] // k.shape[1]
        if repeats > 1:
            k, v = (x.repeat_interleave(repeats, dim=1) for x in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return out.transpose(1, 2)


def _length_groups(starts: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Token rows [sequences, longest] and which are real, for sequences within a factor of two."""
    lengths = starts.diff()
    magnitude = torch.log2(lengths.clamp(min=1).double()).floor().long()
    groups = []
    for size in magnitude.unique().tolist():
        members = (magnitude == size).nonzero().squeeze(1)
        position = torch.arange(int(lengths[members].max()), device=starts.device)
        valid = position < lengths[members, None]
        rows = torch.where(valid, starts[members, None] + position, starts[members, None])
        groups.append((rows, valid))
    return groups
