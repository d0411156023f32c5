"""Causal attention inside each sequence of a pack, by torch's scaled dot-product attention.

Neighbouring sequences of equal length run in one call. Unequal ones would have to be padded, and on
a CPU the copies of queries, keys, values and outputs cost more than further calls.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

# From queries, keys and values, [sequences, length, heads, dim] each, to outputs.
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


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
    runs = [split_runs(x, lengths) for x in (query, key, value)]
    return torch.cat([attend(q, k, v).flatten(0, 1) for q, k, v in zip(*runs, strict=True)])


def split_runs(x: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
    """Split [tokens, ...] into runs of equal length, [sequences, length, ...] each."""
    runs = [(length, len(list(run))) for length, run in itertools.groupby(lengths)]
    parts = x.split([length * count for length, count in runs])
    return [
        part.unflatten(0, (count, length))
        for part, (length, count) in zip(parts, runs, strict=True)
    ]


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
