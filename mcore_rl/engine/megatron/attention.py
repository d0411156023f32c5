"""Causal attention inside each sequence of a pack, without Transformer Engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule

from mcore_rl.engine.megatron.packing import PackedSequences, get_zigzag_rows

# Cost of one more call of the attention kernel, forward and backward, in query-key pairs * width.
_CALL_COST = 1 << 20


class PackedAttention(MegatronModule):
    """Scaled dot-product attention over packed (THD) sequences, in place of TEDotProductAttention.

    Queries may share keys (GQA), and values may differ from keys in size (MLA). Neighbouring
    sequences of similar length run in one call, padded to the longest of them, if that costs less
    than another call. There is never a mask over a full pack, and none at all without context
    parallelism. Padding comes after the tokens of a sequence, so a causal query never sees it.

    With context parallelism queries stay on their rank, in two chunks of every sequence (see
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
        """Raise ValueError for features that only Transformer Engine has."""
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
            return self._attend_pack(query, key, value, lengths)
        return self._attend_chunks(query, key, value, lengths, self.cp_group)

    def _attend_pack(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: list[int]
    ) -> torch.Tensor:
        """Attend inside each sequence of a pack that is whole on this rank."""
        runs = _group_sequences(lengths, query.shape[1] * query.shape[2])
        sizes = [sum(run) for run in runs]
        parts = zip(*(x.split(sizes) for x in (query, key, value)), runs, strict=True)
        outputs = [
            _unpad(self._attend(_pad(q, run), _pad(k, run), _pad(v, run)), run)
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
        """Attend from this CP rank's two chunks of each sequence."""
        cp, rank = group.size(), group.rank()
        gathered = np.concatenate([get_zigzag_rows(lengths, cp, cp_rank) for cp_rank in range(cp)])
        order = torch.as_tensor(np.argsort(gathered)).to(query.device)
        keys_values = _GatherRows.apply(torch.cat([key, value], dim=-1), order, group)
        runs = _group_sequences(lengths, query.shape[1] * query.shape[2])
        sizes = [sum(run) for run in runs]
        queries = query.split([size // cp for size in sizes])
        outputs = []
        for q, kv, run in zip(queries, keys_values.split(sizes), runs, strict=True):
            chunks = [length // (2 * cp) for length in run]
            query_chunks = [chunk for chunk in chunks for _ in range(2)]
            q = _pad(q, query_chunks).unflatten(0, (-1, 2))
            kv = _pad(kv, [chunk for chunk in chunks for _ in range(2 * cp)])
            kv = kv.unflatten(0, (-1, 2 * cp))
            attended = []
            for half, index in enumerate((rank, 2 * cp - 1 - rank)):
                k, v = kv[:, : index + 1].flatten(1, 2).split([key.shape[-1], value.shape[-1]], -1)
                mask = _build_chunk_mask(chunks, index, query.device)
                attended.append(self._attend(q[:, half], k, v, mask))
            stacked = torch.stack(attended, dim=1).flatten(0, 1)
            outputs.append(_unpad(stacked, query_chunks))
        return torch.cat(outputs).flatten(1)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend, with [sequences, length, heads, dim] each; causal without a mask."""
        # The flash kernel needs queries, keys and values of the same size; without it torch saves
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


def _group_sequences(lengths: Sequence[int], width: int) -> list[list[int]]:
    """Group neighbouring sequences into calls; return the lengths of each call.

    A sequence joins the previous call if its padding costs less than another call.

    Args:
        width: Size of all heads of a token.
    """
    runs: list[list[int]] = []
    longest = 0
    for length in lengths:
        run, new_longest = runs[-1] if runs else [], max(longest, length)
        padding = (len(run) + 1) * new_longest**2 - len(run) * longest**2 - length**2
        if run and padding * width <= _CALL_COST:
            run.append(length)
            longest = new_longest
        else:
            runs.append([length])
            longest = length
    return runs


def _pad(x: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """Return [pieces, longest, ...] from pieces of these lengths, concatenated along dim 0."""
    longest = max(lengths)
    if len(x) != len(lengths) * longest:
        zeros = x.new_zeros(len(lengths) * longest, *x.shape[1:])
        x = zeros.index_copy(0, _get_filled_rows(lengths, x.device), x)
    return x.unflatten(0, (-1, longest))


def _unpad(x: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """Return the pieces of [pieces, longest, ...], concatenated along dim 0."""
    flat = x.flatten(0, 1)
    if len(flat) == sum(lengths):
        return flat
    pieces: torch.Tensor = _SelectDistinctRows.apply(flat, _get_filled_rows(lengths, x.device))
    return pieces


def _get_filled_rows(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return the rows of flat [pieces * longest] that are no padding."""
    is_filled = np.arange(max(lengths)) < np.asarray(lengths)[:, None]
    return torch.as_tensor(np.flatnonzero(is_filled)).to(device)


def _build_chunk_mask(chunks: Sequence[int], index: int, device: torch.device) -> torch.Tensor:
    """Return the mask of chunk `index` of each sequence: [sequences, 1, longest, keys].

    True for the tokens of the chunks before it and, in the chunk itself, for those up to the query.

    Args:
        chunks: Length of a chunk in each sequence; chunks are padded to the longest. If all are
            equal, the mask has a single sequence.
    """
    position = torch.arange(max(chunks), device=device)
    sizes = torch.as_tensor(chunks if len(set(chunks)) > 1 else chunks[:1], device=device)
    before = (position < sizes[:, None])[:, None].expand(-1, len(position), -1)
    causal = (position <= position[:, None]).expand(len(sizes), -1, -1)
    return torch.cat([before.repeat(1, 1, index), causal], dim=-1)[:, None]


class _SelectDistinctRows(torch.autograd.Function):
    """index_select of distinct rows; its backward pass need not accumulate."""

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
    """Gather the rows of all ranks of a group, reordered; gradients are summed over the group."""

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
        # NCCL needs contiguous tensors, and empty_like has the strides of a permuted tensor
        # (torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, check_gpu_single_tensor).
        by_rank = grad.new_empty(grad.shape).index_copy_(0, order, grad)
        rank_grad = grad.new_empty(len(grad) // ctx.group.size(), *grad.shape[1:])
        dist.reduce_scatter_tensor(rank_grad, by_rank, group=ctx.group)
        return rank_grad, None, None
