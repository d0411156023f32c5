"""The gated delta rule over packed sequences in plain torch, in place of flash-linear-attention.

Megatron's GatedDeltaNet (megatron/core/ssm/gated_delta_net) packs with the kernels of fla alone.
These functions have their signatures and run anywhere, so that the module itself is the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F

_CHUNK = 64  # tokens, as in fla and transformers


def l2norm(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """Divide the last dimension by its length, in float32: fla.modules.l2norm."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    cu_seqlens: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Convolve each channel over the last tokens of its sequence: fla.modules.convolution.

    Args:
        x: [1, tokens, channels]
        weight: [channels, width]; the last column is that of the token itself.
        cu_seqlens: Starts of the sequences, and the end.
    """
    num_tokens, width = x.shape[1], weight.shape[1]
    starts = _read_starts(cu_seqlens, num_tokens)
    lengths = starts.diff()
    positions = torch.arange(num_tokens, device=x.device) - starts[:-1].repeat_interleave(
        lengths, output_size=num_tokens
    )
    out = x * weight[:, -1]
    for distance in range(1, min(width, num_tokens)):
        earlier = F.pad(x[:, :-distance], (0, 0, distance, 0))
        is_inside = (positions >= distance)[:, None]
        out = out + earlier * is_inside * weight[:, width - 1 - distance]
    if bias is not None:
        out = out + bias
    return (F.silu(out) if activation in ("silu", "swish") else out), None


def _read_starts(cu_seqlens: torch.Tensor | None, num_tokens: int) -> torch.Tensor:
    return torch.tensor([0, num_tokens]) if cu_seqlens is None else cu_seqlens.long()


@dataclass(frozen=True)
class _Chunks:
    """The chunks of all sequences of a pack: each sequence is padded to full chunks."""

    starts: torch.Tensor  # of the sequences, and the end

    @cached_property
    def counts(self) -> torch.Tensor:
        """Return the chunks of each sequence."""
        return -(-self.starts.diff() // _CHUNK)

    @cached_property
    def firsts(self) -> torch.Tensor:
        """Return the first chunk of each sequence."""
        return F.pad(self.counts.cumsum(0), (1, 0))[:-1]

    @cached_property
    def rows(self) -> torch.Tensor:
        """Return the row of each token in the rows of all chunks."""
        lengths = self.starts.diff()
        num_tokens = int(self.starts[-1])
        shift = (self.firsts * _CHUNK - self.starts[:-1]).repeat_interleave(
            lengths, output_size=num_tokens
        )
        return torch.arange(num_tokens, device=self.starts.device) + shift

    def split(self, x: torch.Tensor) -> torch.Tensor:
        """Split [1, tokens, heads, ...] into [chunks, heads, 64, ...] float32, padded by zeros."""
        num_rows = int(self.counts.sum()) * _CHUNK
        padded = x.new_zeros((num_rows, *x.shape[2:]), dtype=torch.float32)
        padded = padded.index_copy(0, self.rows, x[0].float())
        chunks: torch.Tensor = padded.unflatten(0, (-1, _CHUNK))
        return chunks.transpose(1, 2)

    def join(self, x: torch.Tensor) -> torch.Tensor:
        """Join [chunks, heads, 64, dim] to [1, tokens, heads, dim]."""
        return x.transpose(1, 2).flatten(0, 1).index_select(0, self.rows)[None]


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    cu_seqlens: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Run the gated delta rule over each sequence: fla.ops.gated_delta_rule.

    Gated Delta Networks, arXiv:2412.06464, section 3.3. The state S of a head decays by exp(g), is
    corrected by beta * (v - S^T k), and is read by q. Tokens of a chunk are computed together, and
    the sequences in step, from chunk to chunk.

    Args:
        q: [1, tokens, heads, key dim], as k.
        v: [1, tokens, heads, value dim]
        g: Logarithm of the decay [1, tokens, heads].
        beta: [1, tokens, heads]
        cu_seqlens: Starts of the sequences, and the end.

    Returns:
        [1, tokens, heads, value dim] and no final state.
    """
    chunks = _Chunks(_read_starts(cu_seqlens, q.shape[1]).to(q.device))
    dtype, scale = q.dtype, q.shape[-1] ** -0.5
    q, k, v, g, beta = (chunks.split(x) for x in (q, k, v, g, beta))
    q, g, beta = q * scale, g.cumsum(-1), beta.unsqueeze(-1)
    decay = (g.unsqueeze(-1) - g.unsqueeze(-2)).tril().exp().tril()  # of row i since row j
    keys = k.transpose(-1, -2)
    # Corrections depend on those of earlier tokens of the chunk: a unit triangular system.
    system = (k * beta) @ keys * decay
    right = torch.cat([v * beta, k * beta * g.exp().unsqueeze(-1)], dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    values, old_keys = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    scores = q @ keys * decay
    queries = q * g.exp().unsqueeze(-1)
    end = g[..., -1:]
    written_keys = (k * (end - g).exp().unsqueeze(-1)).transpose(-1, -2)
    end_decay = end.exp().unsqueeze(-1)

    order = chunks.counts.argsort(descending=True, stable=True)
    counts, firsts = chunks.counts[order].tolist(), chunks.firsts[order]
    state = v.new_zeros(len(counts), v.shape[1], k.shape[-1], v.shape[-1])
    outputs, numbers = [], []
    for step in range(counts[0]):
        active = sum(count > step for count in counts)  # a prefix: the longest come first
        state, number = state[:active], firsts[:active] + step
        new = values[number] - old_keys[number] @ state
        outputs.append(queries[number] @ state + scores[number] @ new)
        state = state * end_decay[number] + written_keys[number] @ new
        numbers.append(number)
    place = torch.cat(numbers).argsort()
    return chunks.join(torch.cat(outputs)[place]).to(dtype), None
