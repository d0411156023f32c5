"""Core attention without Transformer Engine: causal attention inside each sequence of a pack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule

from mcore_rl.engine.megatron.packing import PackedSequences, zigzag_rows

# About what one more call of the attention kernel is worth, forward and backward.
_PAIRS_TIMES_WIDTH_OF_A_CALL = 1 << 20


class PackedAttention(MegatronModule):
    """Scaled dot-product attention over packed (THD) sequences, in place of TEDotProductAttention.

    Queries may share keys (GQA), and values may differ from keys in size (MLA). Neighbouring
    sequences of like length are attended to together, padded to the longest of them where that
    costs less than another call; there is never a mask over a whole pack, and without context
    parallelism there is none at all. Padding comes after the tokens of a sequence, where a causal
    query never looks.

    Under context parallelism the query stays where it is, in its two chunks of every sequence (see
    packing.py), and keys and values are gathered: each chunk attends to the chunks up to itself.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        """Raises ValueError for what Transformer Engine can and this cannot do."""
        super().__init__(config=config)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        for name, value, supported in (
            ("attention_type", attention_type, "self"),
            ("attention_dropout", dropout, 0),
            ("softmax_type", config.softmax_type, "vanilla"),
            ("window_size", config.window_size, None),
        ):
            if value != supported:
                raise ValueError(
                    f"attention without Transformer Engine: {name}={value}; only {supported}"
                )
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
        """Attention of each token to those before it in its sequence.

        Args:
            query: [tokens, heads, dim]
            key: [tokens, groups, dim]
            value: [tokens, groups, value dim]
            attention_mask: not looked at; the sequences say all.
            packed_seq_params: starts of the sequences over all CP ranks, with padding.

        Returns:
            [tokens, heads * value dim]

        Raises:
            ValueError: the sequences are not packed, or another mask than a causal one is wanted.
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
            return self._attend_pack(query, key, value, lengths)
        return self._attend_chunks(query, key, value, lengths, self.cp_group)

    def _attend_pack(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: list[int]
    ) -> torch.Tensor:
        runs = _runs(lengths, query.shape[1] * query.shape[2])
        sizes = [sum(run) for run in runs]
        parts = zip(*(x.split(sizes) for x in (query, key, value)), runs, strict=True)
        outputs = [
            _unpadded(self._attend(_padded(q, run), _padded(k, run), _padded(v, run)), run)
            for q, k, v, run in parts
        ]
        return torch.cat(outputs).flatten(1)

    def _attend_chunks(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        lengths: list[int],
        group: Any,
    ) -> torch.Tensor:
        """The same, for this CP rank's two chunks of each sequence."""
        cp, rank = group.size(), group.rank()
        gathered = np.concatenate([zigzag_rows(lengths, cp, other) for other in range(cp)])
        in_order = torch.as_tensor(np.argsort(gathered)).to(query.device)
        both = _GatherRows.apply(torch.cat([key, value], dim=-1), in_order, group)
        runs = _runs(lengths, query.shape[1] * query.shape[2])
        sizes = [sum(run) for run in runs]
        queries = query.split([size // cp for size in sizes])
        outputs = []
        for q, kv, run in zip(queries, both.split(sizes), runs, strict=True):
            chunks = [length // (2 * cp) for length in run]
            held = [chunk for chunk in chunks for _ in range(2)]
            q = _padded(q, held).unflatten(0, (-1, 2))
            kv = _padded(kv, [chunk for chunk in chunks for _ in range(2 * cp)])
            kv = kv.unflatten(0, (-1, 2 * cp))
            attended = []
            for half, index in enumerate((rank, 2 * cp - 1 - rank)):
                k, v = kv[:, : index + 1].flatten(1, 2).split([key.shape[-1], value.shape[-1]], -1)
                mask = _chunk_mask(chunks, index, query.device)
                attended.append(self._attend(q[:, half], k, v, mask))
            stacked = torch.stack(attended, dim=1).flatten(0, 1)
            outputs.append(_unpadded(stacked, held))
        return torch.cat(outputs).flatten(1)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[sequences, length, heads, dim] each; causal where there is no mask."""
        # The flash kernel wants queries, keys and values of one size; without it torch holds
        # [length, length] weights for the backward pass.
        value_dim, widest = value.shape[-1], max(key.shape[-1], value.shape[-1])
        q, k, v = (
            (F.pad(x, (0, widest - x.shape[-1])) if x.shape[-1] < widest else x).transpose(1, 2)
            for x in (query, key, value)
        )
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        return out.transpose(1, 2)[..., :value_dim]


def _runs(lengths: Sequence[int], width: int) -> list[list[int]]:
    """Neighbouring sequences to be attended to together, as lists of their lengths.

    One joins the run before it where the padding costs less than a call of its own; `width` is
    the size of all heads of a token.
    """
    runs: list[list[int]] = []
    longest = 0
    for length in lengths:
        run, longer = runs[-1] if runs else [], max(longest, length)
        added = (len(run) + 1) * longer**2 - len(run) * longest**2 - length**2
        if run and added * width <= _PAIRS_TIMES_WIDTH_OF_A_CALL:
            run.append(length)
            longest = longer
        else:
            runs.append([length])
            longest = length
    return runs


def _padded(x: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """[pieces, longest, ...] from pieces of these lengths, concatenated along dim 0."""
    longest = max(lengths)
    if len(x) != len(lengths) * longest:
        spread = x.new_zeros(len(lengths) * longest, *x.shape[1:])
        x = spread.index_copy(0, _rows_in_padded(lengths, x.device), x)
    return x.unflatten(0, (-1, longest))


def _unpadded(x: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """The pieces, concatenated again, from [pieces, longest, ...]."""
    flat = x.flatten(0, 1)
    if len(flat) == sum(lengths):
        return flat
    found: torch.Tensor = _DistinctRows.apply(flat, _rows_in_padded(lengths, x.device))
    return found


def _rows_in_padded(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    is_filled = np.arange(max(lengths)) < np.asarray(lengths)[:, None]
    return torch.as_tensor(np.flatnonzero(is_filled)).to(device)


def _chunk_mask(chunks: Sequence[int], index: int, device: torch.device) -> torch.Tensor:
    """What chunk `index` of each sequence may look at: [sequences, 1, longest, keys].

    True for the tokens of the chunks before it and, in the chunk itself, for those up to the query.
    `chunks` are the lengths of a chunk in each sequence, every one of them padded to the longest.
    Where they are all the same, so is the mask, and it is made for one sequence.
    """
    position = torch.arange(max(chunks), device=device)
    sizes = torch.as_tensor(chunks if len(set(chunks)) > 1 else chunks[:1], device=device)
    before = (position < sizes[:, None])[:, None].expand(-1, len(position), -1)
    own = (position <= position[:, None]).expand(len(sizes), -1, -1)
    return torch.cat([before.repeat(1, 1, index), own], dim=-1)[:, None]


class _DistinctRows(torch.autograd.Function):
    """index_select of rows that are all different; its backward pass need not add them up."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows)
        ctx.num_rows = len(x)
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (rows,) = ctx.saved_tensors
        return grad.new_zeros(ctx.num_rows, *grad.shape[1:]).index_copy_(0, rows, grad), None


class _GatherRows(torch.autograd.Function):
    """Rows of all ranks of a group, in another order; gradients are summed over the group."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, order: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.save_for_backward(order)
        ctx.group = group
        gathered = x.new_empty(group.size() * len(x), *x.shape[1:])
        dist.all_gather_into_tensor(gathered, x.contiguous(), group=group)
        return gathered.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (order,) = ctx.saved_tensors
        # NCCL refuses what is not contiguous, and empty_like keeps the strides of a permuted tensor
        # (torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, check_gpu_single_tensor).
        by_rank = grad.new_empty(grad.shape).index_copy_(0, order, grad)
        mine = grad.new_empty(len(grad) // ctx.group.size(), *grad.shape[1:])
        dist.reduce_scatter_tensor(mine, by_rank, group=ctx.group)
        return mine, None, None
