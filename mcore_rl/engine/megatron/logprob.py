"""Log-probs and entropy of chosen tokens from hidden states, over a vocabulary split by TP.

The head projection is part of the operation: logits exist for one chunk of tokens at a time and are
made again in the backward pass, so that memory does not grow with tokens times vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist


class TokenScores(NamedTuple):
    log_probs: torch.Tensor  # [tokens] float32, nats
    entropy: torch.Tensor  # [tokens] float32, nats; zeros unless asked for


class VocabShard(NamedTuple):
    """The rows of the head that this rank holds, and the group that holds the others."""

    start: int  # first vocabulary id of the shard
    vocab_size: int  # ids of the whole vocabulary, without padding
    group: Any  # tensor-parallel process group


def token_scores(
    hidden: torch.Tensor,
    head: torch.Tensor,
    targets: torch.Tensor,
    shard: VocabShard,
    *,
    temperature: float = 1.0,
    chunk_tokens: int = 1024,
    with_entropy: bool = False,
) -> TokenScores:
    """log softmax(hidden @ head.T / temperature) at the targets, and its entropy.

    Args:
        hidden: [tokens, hidden]; the same on every rank of the group. Its gradient is this rank's
            part of the sum over the vocabulary; the caller reduces it over the group.
        head: [rows of this shard, hidden]; rows beyond the vocabulary are padding and are ignored.
        targets: [tokens] vocabulary ids.
    """
    log_probs, entropy = _TokenScores.apply(
        hidden, head, targets, shard, temperature, chunk_tokens, with_entropy
    )
    return TokenScores(log_probs, entropy)


def _logits(hidden: torch.Tensor, head: torch.Tensor, temperature: float) -> torch.Tensor:
    """[chunk, shard] in float32 (float64 stays), scaled by temperature."""
    logits = hidden @ head.t()
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return logits if temperature == 1.0 else logits / temperature


class _TokenScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        head: torch.Tensor,
        targets: torch.Tensor,
        shard: VocabShard,
        temperature: float,
        chunk_tokens: int,
        with_entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = max(0, min(head.shape[0], shard.vocab_size - shard.start))
        local = targets - shard.start
        mine = (local >= 0) & (local < rows)
        local = local.clamp(0, max(rows - 1, 0))
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        log_z, log_probs, entropy = (hidden.new_zeros(len(targets), dtype=dtype) for _ in range(3))
        for part in _chunks(len(targets), chunk_tokens):
            logits = _logits(hidden[part], head[:rows], temperature)
            top = logits.amax(-1) if rows else log_z.new_full((len(logits),), -torch.inf)
            _reduce(top, shard.group, dist.ReduceOp.MAX)
            chosen = (
                logits.gather(1, local[part, None]).squeeze(1) if rows else torch.zeros_like(top)
            )
            sums = [chosen.masked_fill(~mine[part], 0.0)]
            exp = (logits - top[:, None]).exp_()
            sums.append(exp.sum(-1))
            if with_entropy:
                sums.append((exp * logits).sum(-1))
            totals = torch.stack(sums)
            _reduce(totals, shard.group, dist.ReduceOp.SUM)
            log_z[part] = top + totals[1].log()
            log_probs[part] = totals[0] - log_z[part]
            if with_entropy:
                entropy[part] = log_z[part] - totals[2] / totals[1]
        ctx.save_for_backward(hidden, head, local, mine, log_z, entropy)
        ctx.settings = (rows, temperature, chunk_tokens, with_entropy)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, grad_log_probs: torch.Tensor, grad_entropy: torch.Tensor) -> Any:
        """d log p_t / d z_j = [j = t] - p_j;  d H / d z_j = -p_j (log p_j + H);  z = logits / T."""
        hidden, head, local, mine, log_z, entropy = ctx.saved_tensors
        rows, temperature, chunk_tokens, with_entropy = ctx.settings
        grad_hidden = torch.empty_like(hidden)
        grad_head = torch.zeros_like(head)
        for part in _chunks(len(local), chunk_tokens):
            log_p = _logits(hidden[part], head[:rows], temperature).sub_(log_z[part, None])
            p = log_p.exp()
            grad = p * -grad_log_probs[part, None]
            if with_entropy:
                grad -= grad_entropy[part, None] * p * (log_p + entropy[part, None])
            if rows:
                chosen = (grad_log_probs[part] * mine[part]).unsqueeze(1)
                grad.scatter_add_(1, local[part, None], chosen)
            grad = (grad / temperature).to(hidden.dtype)
            grad_hidden[part] = grad @ head[:rows]
            grad_head[:rows].addmm_(grad.t(), hidden[part])
        return grad_hidden, grad_head, None, None, None, None, None


def _chunks(total: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


def _reduce(tensor: torch.Tensor, group: Any, op: Any) -> None:
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(tensor, op=op, group=group)
