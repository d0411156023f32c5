"""Causal attention inside each sequence of a pack, by torch's scaled dot-product attention.

Neighbouring sequences of similar length run in one call, padded to the longest of them, if that
costs less than another call. Padding comes after the tokens of a sequence, so a causal query never
sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

# From queries, keys and values, [sequences, length, heads, dim] each, to outputs.
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
# Cost of one more call of the attention kernel, forward and backward, in query-key pairs * width.
_CALL_COST = 1 << 20


def attend_pack(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: Sequence[int],
    attend: Attend,
) -> torch.Tensor:
    """Return the attention of each token to itself and the tokens before it in its sequence.

    Args:
        query: [tokens, heads, dim]
        key: [tokens, groups, dim]
        value: [tokens, groups, value dim]
        lengths: Of the sequences, one after the other.
        attend: Causal attention of whole sequences.

    Returns:
        [tokens, heads, value dim]
    """
    runs = group_sequences(lengths, query.shape[1] * query.shape[2])
    sizes = [sum(run) for run in runs]
    parts = zip(*(x.split(sizes) for x in (query, key, value)), runs, strict=True)
    outputs = [
        unpad_pieces(attend(pad_pieces(q, run), pad_pieces(k, run), pad_pieces(v, run)), run)
        for q, k, v, run in parts
    ]
    return torch.cat(outputs)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float | None = None,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend, with [sequences, length, heads, dim] each; causal without a mask."""
    # The flash kernel needs queries, keys and values of the same size; without it torch saves
    # [length, length] weights for the backward pass. Its default scale is that of the padded size.
    scale = query.shape[-1] ** -0.5 if scale is None else scale
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
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out.transpose(1, 2)[..., :value_dim]


def group_sequences(lengths: Sequence[int], width: int) -> list[list[int]]:
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


def pad_pieces(x: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """Return [pieces, longest, ...] from pieces of these lengths, concatenated along dim 0."""
    longest = max(lengths)
    if len(x) != len(lengths) * longest:
        zeros = x.new_zeros(len(lengths) * longest, *x.shape[1:])
        x = zeros.index_copy(0, _get_filled_rows(lengths, x.device), x)
    return x.unflatten(0, (-1, longest))


def unpad_pieces(x: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
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
