"""Causal attention inside each sequence of a pack, by torch's scaled dot-product attention.

Neighbouring sequences of equal length run in one call. Unequal ones would have to be padded, and on
a CPU the copies of queries, keys, values and outputs cost more than further calls.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

_QUERIES_PER_BLOCK = 256  # of attention with a softcap or sinks, whose weights are in memory

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
        lengths: Tokens of each sequence; sequences follow each other.
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
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    first: int = 0,
) -> torch.Tensor:
    """Attend causally, with [sequences, length, heads, dim] each.

    Args:
        window: Keys that a query sees, itself included. None: all before it.
        softcap: Bound of the logits, by tanh.
        sinks: [heads] a logit beside those of the keys, of no value.
        first: Position of the first query among the keys.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if window is not None and window >= key.shape[1]:
        window = None
    if softcap is not None or sinks is not None:
        options = {"scale": scale, "softcap": softcap, "sinks": sinks}
        return _attend_blocks(query, key, value, window, first, **options)
    mask = None
    if window is not None or query.shape[1] != key.shape[1]:
        mask = _build_mask(query, key, window, first)
    # The flash kernel needs queries, keys and values of the same size; without it torch saves
    # [length, length] weights for the backward pass. Its default scale is that of the padded size.
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


def _build_mask(
    query: torch.Tensor, key: torch.Tensor, window: int | None, first: int
) -> torch.Tensor:
    """Return [queries, keys], True for the keys that each query sees."""
    positions = torch.arange(key.shape[1], device=query.device)
    age = positions[first : first + query.shape[1], None] - positions
    return age >= 0 if window is None else (age >= 0) & (age < window)


def _attend_blocks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    window: int | None,
    first: int,
    **options: Any,
) -> torch.Tensor:
    """Attend one block of queries after the other, with the weights of one block in memory.

    The backward pass computes the weights again.
    """
    outputs = []
    for block in query.split(_QUERIES_PER_BLOCK, dim=1):
        end = first + block.shape[1]
        start = 0 if window is None else max(0, first - window + 1)
        inputs = block, key[:, start:end], value[:, start:end]
        options |= {"window": window, "first": first - start}
        if query.shape[1] > _QUERIES_PER_BLOCK and torch.is_grad_enabled():
            attended = checkpoint(_attend_plainly, *inputs, use_reentrant=False, **options)
        else:
            attended = _attend_plainly(*inputs, **options)
        outputs.append(attended)
        first = end
    return torch.cat(outputs, dim=1)


def _attend_plainly(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    first: int,
) -> torch.Tensor:
    """Attend with all [queries, keys] weights in memory."""
    length, copies = key.shape[1], query.shape[2] // key.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    k, v = (x.repeat_interleave(copies, 1) for x in (k, v))
    logits = q @ k.transpose(2, 3) * scale
    logits = torch.tanh(logits / softcap) * softcap if softcap else logits
    logits = logits.masked_fill(~_build_mask(query, key, window, first), float("-inf"))
    if sinks is not None:
        logits = torch.cat([logits, sinks.view(1, -1, 1, 1).expand(*logits.shape[:3], 1)], -1)
    wide = torch.promote_types(logits.dtype, torch.float32)
    # A sink takes its share of the sum and has no value, so its column is dropped.
    weights = logits.softmax(-1, dtype=wide)[..., :length].to(v.dtype)
    return (weights @ v).transpose(1, 2)
