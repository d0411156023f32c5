"""Attention and rotary embedding inside each sequence of a pack, without Transformer Engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.models.common.embeddings.rope_utils import _rotate_half
from megatron.core.parallel_state import get_tensor_model_parallel_group
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import (
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)

from mcore_rl.engine.attention import attend, attend_pack, split_runs
from mcore_rl.engine.megatron.packing import PackedSequences
from mcore_rl.engine.packing import get_zigzag_rows


class PackedAttention(MegatronModule):
    """Scaled dot-product attention over packed (THD) sequences, in place of TEDotProductAttention.

    Queries may share keys (GQA), values may differ from keys in size (MLA), layers may have a
    sliding window, and heads a learned offset of their softmax (`softmax_offset`, an attention
    sink). There is never a mask over a full pack.

    With context parallelism queries stay on their rank, in two chunks of every sequence (see
    packing.py), and keys and values are gathered: each chunk attends to the chunks up to itself.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        """Raise ValueError for features that only Transformer Engine has."""
        super().__init__(config=config)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        for name, value, supported in (
            ("attention_type", attention_type, "self"),
            ("attention_dropout", dropout, 0),
        ):
            if value != supported:
                raise ValueError(
                    f"attention without Transformer Engine: {name}={value}; only {supported}"
                )
        if config.softmax_type not in ("vanilla", "learnable"):
            raise ValueError(
                f"attention without Transformer Engine: softmax_type={config.softmax_type}; only "
                "vanilla, learnable"
            )
        self.window = None
        if is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer_number
        ):
            before, after = config.window_size
            if before < 0 or after != 0:
                raise ValueError(
                    f"attention without Transformer Engine: window_size={config.window_size}; only "
                    "(n, 0)"
                )
            self.window = before + 1  # Megatron counts the tokens before a query, without itself
        self.softmax_offset = None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            offset = torch.empty(heads, dtype=config.params_dtype)
            self.softmax_offset = torch.nn.Parameter(config.init_method(offset))
        self.mask_type = attn_mask_type
        self.scale = softmax_scale
        if softmax_scale is None:
            self.scale = (k_channels or config.kv_channels) ** -0.5
        self.cp_group = None if pg_collection is None else pg_collection.cp

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """Return the attention of each token to itself and the tokens before it in its sequence.

        Args:
            query: [tokens, heads, dim]
            key: [tokens, groups, dim]
            value: [tokens, groups, value dim]
            attention_mask: Ignored: sequences define the mask.
            packed_seq_params: Starts of the sequences over all CP ranks, with padding.

        Returns:
            [tokens, heads * value dim]

        Raises:
            ValueError: The sequences are not packed, or the mask is not causal.
        """
        if packed_seq_params is None or packed_seq_params.qkv_format != "thd":
            raise ValueError("PackedAttention needs packed (THD) sequences")
        mask_type = attn_mask_type or self.mask_type
        if mask_type not in (AttnMaskType.causal, AttnMaskType.padding_causal):
            raise ValueError(
                f"attention without Transformer Engine: mask {mask_type.name}; only causal"
            )
        if attention_bias is not None:
            raise ValueError("attention without Transformer Engine takes no bias")
        if isinstance(packed_seq_params, PackedSequences):
            lengths = list(packed_seq_params.lengths)
        else:
            lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
        if self.cp_group is None or self.cp_group.size() == 1:
            return attend_pack(query, key, value, lengths, self._attend).flatten(1)
        return self._attend_chunks(query, key, value, lengths, self.cp_group)

    def _attend(self, *inputs: torch.Tensor, first: int = 0) -> torch.Tensor:
        return attend(
            *inputs, scale=self.scale, window=self.window, sinks=self.softmax_offset, first=first
        )

    def _attend_chunks(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        lengths: list[int],
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        """Attend from this CP rank's two chunks of each sequence."""
        cp, rank = group.size(), group.rank()
        gathered = np.concatenate([get_zigzag_rows(lengths, cp, cp_rank) for cp_rank in range(cp)])
        order = torch.as_tensor(np.argsort(gathered)).to(query.device)
        # Keys and values differ in their last dim at most (MLA), so one gather is for both.
        keys_values = _gather_rows(torch.cat([key, value], dim=-1), order, group)
        queries = split_runs(query, [length // cp for length in lengths])
        outputs = []
        for q, kv in zip(queries, split_runs(keys_values, lengths), strict=True):
            q, kv = q.unflatten(1, (2, -1)), kv.unflatten(1, (2 * cp, -1))
            chunk, attended = q.shape[2], []
            # Chunk r and its mirror image: on each rank the two have as many tokens before them.
            for half, index in enumerate((rank, 2 * cp - 1 - rank)):
                k, v = kv[:, : index + 1].flatten(1, 2).split([key.shape[-1], value.shape[-1]], -1)
                attended.append(self._attend(q[:, half], k, v, first=index * chunk))
            outputs.append(torch.stack(attended, dim=1).flatten(0, 2))
        return torch.cat(outputs).flatten(1)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> ShardedStateDict:
        """Return shards with the keys of TEDotProductAttention (transformer_engine.py:2083)."""
        offset = self.softmax_offset
        state: ShardedStateDict = make_sharded_tensors_for_checkpoint(
            {} if offset is None else {"softmax_offset": offset},
            prefix,
            {"softmax_offset": 0},  # split by tensor parallelism along dim 0, the heads
            sharded_offsets,
            tp_group=get_tensor_model_parallel_group(),
            dp_cp_group=metadata["dp_cp_group"],
        )
        return state


def use_packed_attention(layer_spec: Any) -> Any:
    """Set PackedAttention in the layers of a chunk's spec, on a GPU as well.

    Transformer Engine has no kernel for a learned offset of the softmax in packed sequences
    (pytorch/attention/dot_product_attention/utils.py, "Filter: Softmax type").
    """
    for layer in layer_spec.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = PackedAttention
    return layer_spec


def rotate_pack(
    x: torch.Tensor,
    starts: torch.Tensor,
    angles: torch.Tensor,
    rotary_interleaved: bool = False,
    mla_rotary_interleaved: bool = False,
    mscale: float = 1.0,
    *,
    cp_group: dist.ProcessGroup,
) -> torch.Tensor:
    """Apply the rotary embedding; every sequence begins at position 0.

    In place of Megatron's _apply_rotary_pos_emb_thd, to the bit, with no work per sequence: that
    one slices the angles of each sequence in Python and takes cosines of every token.

    Args:
        x: [tokens, heads, dim]
        starts: [sequences + 1] first token of each sequence and the end, over all CP ranks.
        angles: [longest sequence, 1, 1, rotated dims]
    """
    positions = _compute_positions(starts, len(x), cp_group.size(), cp_group.rank())
    cos, sin = (
        (function(angles) * mscale).to(x.dtype).index_select(0, positions)
        for function in (torch.cos, torch.sin)
    )
    rotated, rest = x.unsqueeze(1).tensor_split([angles.shape[-1]], dim=-1)
    if mla_rotary_interleaved:
        rotated = torch.cat((rotated[..., 0::2], rotated[..., 1::2]), dim=-1)
    rotated = rotated * cos + _rotate_half(rotated, rotary_interleaved) * sin
    return (torch.cat((rotated, rest), dim=-1) if rest.shape[-1] else rotated).squeeze(1)


def _compute_positions(
    starts: torch.Tensor, num_tokens: int, cp: int, cp_rank: int
) -> torch.Tensor:
    """Return the position of each token of this CP rank in its sequence (get_zigzag_rows)."""
    lengths, firsts = starts.diff() // cp, starts[:-1] // cp
    first, chunk = (
        values.repeat_interleave(lengths, output_size=num_tokens)
        for values in (firsts, lengths // 2)
    )
    row = torch.arange(num_tokens, device=starts.device) - first
    if cp == 1:
        return row
    return torch.where(row < chunk, row + cp_rank * chunk, row + (2 * cp - 2 - cp_rank) * chunk)


class _GatherRows(torch.autograd.Function):
    """Gather the rows of all ranks of a group, reordered; gradients are summed over the group."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, order: torch.Tensor, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.save_for_backward(order)
        ctx.group = group
        gathered = x.new_empty(group.size() * len(x), *x.shape[1:])
        dist.all_gather_into_tensor(gathered, x.contiguous(), group=group)
        return gathered.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (order,) = ctx.saved_tensors
        # NCCL needs contiguous tensors, and empty_like has the strides of a permuted tensor
        # (torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, check_gpu_single_tensor).
        by_rank = grad.new_empty(grad.shape).index_copy_(0, order, grad)
        rank_grad = grad.new_empty(len(grad) // ctx.group.size(), *grad.shape[1:])
        dist.reduce_scatter_tensor(rank_grad, by_rank, group=ctx.group)
        return rank_grad, None, None


_gather_rows: Callable[[torch.Tensor, torch.Tensor, dist.ProcessGroup], torch.Tensor] = (
    _GatherRows.apply
)
