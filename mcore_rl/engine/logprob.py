"""Log-probs and entropy of chosen tokens from hidden states, over a vocabulary split by TP.

The head projection is part of the operation. Logits exist for one tile at a time, some tokens by
some vocabulary ids, and the softmax runs over the tiles of a token (online softmax: Milakov and
Gimelshein 2018, arXiv:1805.02867, algorithm 3). The backward pass recomputes the logits. So no
tensor of tokens x vocabulary ever exists, with or without the entropy, and the setting for entropy
checkpointing of other frameworks is not needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

# By device type: wide tiles fill the processors of a GPU, small ones fit in the caches of a CPU.
DEFAULT_CHUNK_BYTES = {"cuda": 512 << 20, "cpu": 32 << 20}
_BYTES_PER_LOGIT = 8  # a logit and its probability, both float32
_MIN_TILE_IDS = 256  # tokens are divided only if a tile of all of them would be narrower
# Rows of logits must start at multiples of 16 bytes, or cuBLAS uses its "align1" kernels, without
# the wide loads of tensor cores, 10 times slower. Its tiles have 256 columns.
_TILE_MULTIPLES = (256, 8)


class LogProbs(NamedTuple):
    log_probs: torch.Tensor  # shape of the targets; float32, nats
    entropy: torch.Tensor  # [tokens] float32, nats; zeros without with_entropy
    # [tokens] float32: the sum over the ids of p^2; zeros without with_squares. No gradient.
    sum_pi_squared: torch.Tensor
    # The k most likely ids of each token, most likely first; any of equal ones. No gradient.
    top_log_probs: torch.Tensor  # [tokens, k] float32, nats
    top_ids: torch.Tensor  # [tokens, k] int64


class VocabShard(NamedTuple):
    """The rows of the head on this rank, and the group over which the head is split."""

    start: int  # first vocabulary id of the shard
    vocab_size: int  # ids of the full vocabulary, without padding
    group: dist.ProcessGroup | None  # of tensor-parallel ranks; None if the vocabulary is not split


class Tile(NamedTuple):
    """The maximum tokens and vocabulary ids whose logits are in memory at the same time."""

    tokens: int
    ids: int


def choose_tile(chunk_bytes: int, num_tokens: int, hidden_size: int) -> Tile:
    """Choose the tile whose logits and probabilities together take up to chunk_bytes.

    It has all tokens if possible and few ids, so that a slice of the head is read once for all
    tokens. That slice in float32 stays within half of chunk_bytes. The number of ids is a multiple
    of 256, or of 8 if it is smaller than 256.

    >>> choose_tile(32 << 20, 4096, 2048)
    Tile(tokens=4096, ids=1024)
    """
    budget = chunk_bytes // _BYTES_PER_LOGIT
    tokens = max(1, min(num_tokens, budget // _MIN_TILE_IDS))
    ids = max(1, budget // max(tokens, hidden_size))
    multiple = next((multiple for multiple in _TILE_MULTIPLES if multiple <= ids), 1)
    return Tile(tokens, ids - ids % multiple)


def compute_log_probs(
    hidden: torch.Tensor,
    head: torch.Tensor,
    targets: torch.Tensor,
    shard: VocabShard,
    *,
    temperature: float = 1.0,
    chunk_bytes: int = 0,
    with_entropy: bool = False,
    with_squares: bool = False,
    num_top: int = 0,
) -> LogProbs:
    """Compute log softmax(hidden @ head.T / temperature) at the targets, and its entropy.

    Logits, sums and gradients are accumulated in float32 (or float64), for any dtype of hidden and
    head. In addition to the results and the gradients of hidden and head it needs chunk_bytes of
    memory, and in bfloat16 the gradient of hidden and a slice of the head's in float32.

    Args:
        hidden: [tokens, hidden]; the same on every rank of the group. Its gradient is this rank's
            part of the sum over the vocabulary; the caller reduces it over the group.
        head: [rows of this shard, hidden]; rows beyond the vocabulary are padding and are ignored.
        targets: [tokens] vocabulary ids, or [tokens, n] for several per token.
        chunk_bytes: Limit on logits and probabilities in memory at a time, see choose_tile; 0 is
            the default of the device.
        with_squares: Also compute sum_pi_squared.
        num_top: Number of largest log-probs to return.

    Raises:
        ValueError: num_top is below 0 or above the size of the vocabulary.
    """
    if not 0 <= num_top <= shard.vocab_size:
        raise ValueError(f"num_top={num_top}; allowed: 0 to the {shard.vocab_size} token ids")
    tile = choose_tile(chunk_bytes or DEFAULT_CHUNK_BYTES[hidden.device.type], *hidden.shape)
    columns = targets[:, None] if targets.dim() == 1 else targets
    log_probs, *statistics = _compute_in_tiles(
        hidden, head, columns, shard, temperature, tile, with_entropy, with_squares, num_top
    )
    return LogProbs(log_probs.view(targets.shape), *statistics)


class _Sums(NamedTuple):
    """Running sums over the vocabulary, [tokens]: p is exp(logit - top)."""

    top: torch.Tensor  # largest logit so far
    total: torch.Tensor  # sum of p
    moment: torch.Tensor  # sum of p * (logit - top), if with_entropy
    squares: torch.Tensor  # sum of p^2, if with_squares
    chosen: torch.Tensor  # [tokens, n] logits of the targets, 0 if another rank has them

    @classmethod
    def create(cls, targets: torch.Tensor, dtype: torch.dtype, device: torch.device) -> _Sums:
        # A finite floor below any logit: on a shard of padding, infinity minus itself is NaN.
        floor = torch.finfo(dtype).min / 4
        top = torch.full((len(targets),), floor, dtype=dtype, device=device)
        chosen = torch.zeros(targets.shape, dtype=dtype, device=device)
        total, moment, squares = (torch.zeros_like(top) for _ in range(3))
        return cls(top, total, moment, squares, chosen)

    def normalize(self, logits: torch.Tensor) -> torch.Tensor:
        """Return log softmax of logits [tokens, ...], relative to `top`: large ones cancel."""
        shape = (-1, *[1] * (logits.dim() - 1))
        return (logits - self.top.view(shape)) - self.total.log().view(shape)

    def compute_entropy(self) -> torch.Tensor:
        """Return -E[log softmax], relative to `top`."""
        return self.total.log() - self.moment / self.total

    def add(
        self, part: slice, logits: torch.Tensor, *, with_entropy: bool, with_squares: bool
    ) -> None:
        """Add the logits [part, ids] of a tile, overwriting them."""
        top = torch.maximum(self.top[part], logits.amax(-1))
        self._rescale(part, top)
        logits -= top[:, None]
        if with_entropy:
            p = logits.exp()
            self.moment[part] += torch.bmm(p[:, None, :], logits[:, :, None]).flatten()
        else:
            p = logits.exp_()
        if with_squares:
            self.squares[part] += torch.bmm(p[:, None, :], p[:, :, None]).flatten()
        self.total[part] += p.sum(-1)

    def _rescale(self, part: slice, top: torch.Tensor) -> None:
        """Make the sums relative to a larger `top`."""
        change = self.top[part] - top
        decay = change.exp()
        self.moment[part] = decay * (self.moment[part] + change * self.total[part])
        self.squares[part] *= decay.square()
        self.total[part] *= decay
        self.top[part] = top

    def reduce(self, group: dist.ProcessGroup | None) -> None:
        """Reduce the sums of this shard to those of the full vocabulary, in place."""
        if not _is_split(group):
            return
        top = self.top.clone()
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        self._rescale(slice(None), top)
        per_token = self.total, self.moment, self.squares
        sums = torch.cat([torch.stack(per_token, 1), self.chosen], 1)
        dist.all_reduce(sums, group=group)
        for shard_sum, full_sum in zip(per_token, sums.unbind(1), strict=False):
            shard_sum.copy_(full_sum)
        self.chosen.copy_(sums[:, len(per_token) :])


class _Top(NamedTuple):
    """The largest logits so far and their ids, each [tokens, k]."""

    logits: torch.Tensor
    ids: torch.Tensor

    @classmethod
    def create(cls, k: int, like: torch.Tensor) -> _Top:
        logits = like.new_full((len(like), k), -torch.inf)
        return cls(logits, torch.zeros_like(logits, dtype=torch.int64))

    def add(self, part: slice, logits: torch.Tensor, first_id: int) -> None:
        """Add the logits [part, ids] of a tile, whose first id is `first_id`."""
        k = self.ids.shape[1]
        tile_logits, index = logits.topk(min(k, logits.shape[1]), dim=-1)
        candidates = torch.cat([self.logits[part], tile_logits], dim=1)
        ids = torch.cat([self.ids[part], index + first_id], dim=1)
        self.logits[part], index = candidates.topk(k, dim=-1)
        self.ids[part] = ids.gather(1, index)

    def reduce(self, group: dist.ProcessGroup | None) -> None:
        """Reduce the largest of this shard to those of the full vocabulary, in place."""
        if not _is_split(group):
            return
        gathered = []
        for tensor in self:
            parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, tensor, group=group)
            gathered.append(torch.cat(parts, dim=1))
        logits, index = gathered[0].topk(self.ids.shape[1], dim=-1)
        self.logits.copy_(logits)
        self.ids.copy_(gathered[1].gather(1, index))


class _ComputeLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        head: torch.Tensor,
        targets: torch.Tensor,
        shard: VocabShard,
        temperature: float,
        tile: Tile,
        with_entropy: bool,
        with_squares: bool,
        num_top: int,
    ) -> tuple[torch.Tensor, ...]:
        local_targets = targets - shard.start
        num_rows = max(0, min(head.shape[0], shard.vocab_size - shard.start))  # without padding
        sums = _Sums.create(targets, _get_wide_dtype(hidden.dtype), hidden.device)
        top = _Top.create(num_top, like=sums.top)
        for block in _split_range(num_rows, tile.ids):
            for part in _split_range(len(targets), tile.tokens):
                logits = _compute_logits(hidden[part], head[block], temperature)
                index, is_inside = _locate_targets(local_targets[part], block)
                sums.chosen[part] += logits.gather(1, index).masked_fill_(~is_inside, 0.0)
                if num_top:
                    top.add(part, logits, shard.start + block.start)
                sums.add(part, logits, with_entropy=with_entropy, with_squares=with_squares)
        sums.reduce(shard.group)
        top.reduce(shard.group)
        entropy = sums.compute_entropy() if with_entropy else torch.zeros_like(sums.top)
        ctx.save_for_backward(hidden, head, local_targets, sums.top, sums.total, entropy)
        ctx.settings = (num_rows, temperature, tile)
        ctx.set_materialize_grads(False)  # an entropy that no loss reads has no gradient
        top_log_probs = sums.normalize(top.logits)
        squares = sums.squares / sums.total.square()
        no_gradient = squares, top_log_probs, top.ids
        ctx.mark_non_differentiable(*no_gradient, *(() if with_entropy else (entropy,)))
        return sums.normalize(sums.chosen), entropy, squares, top_log_probs, top.ids

    @staticmethod
    def backward(
        ctx: Any,
        grad_log_probs: torch.Tensor | None,
        grad_entropy: torch.Tensor | None,
        *_: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, ...]:
        """Compute the gradients of hidden and head.

        With z = logits / T: d log p_t / dz_j = [j = t] - p_j; dH / dz_j = -p_j (log p_j + H). With
        several targets per token, the sum over them. None is a gradient of zeros.
        """
        hidden, head, local_targets, top, total, entropy = ctx.saved_tensors
        num_rows, temperature, tile = ctx.settings
        needs_hidden, needs_head = ctx.needs_input_grad[:2]  # a head may be frozen
        if grad_log_probs is None:
            grad_log_probs = torch.zeros_like(local_targets, dtype=top.dtype)
        grad_log_probs = grad_log_probs / temperature
        # p is exp(z - top) / total: factors per token multiply the coefficients of exp.
        log_prob_factor, entropy_factor = grad_log_probs.sum(1) / total, None
        if grad_entropy is not None:
            entropy_factor = grad_entropy / temperature / total
            entropy = entropy - total.log()
        grad_hidden = torch.zeros_like(hidden, dtype=top.dtype) if needs_hidden else None
        grad_head = torch.zeros_like(head) if needs_head else None
        for block in _split_range(num_rows, tile.ids):
            grad_block = torch.zeros_like(head[block], dtype=top.dtype)
            for part in _split_range(len(local_targets), tile.tokens):
                grad = _compute_logits(hidden[part], head[block], temperature).sub_(top[part, None])
                if entropy_factor is not None:
                    exp = grad.exp()
                    grad.add_(entropy[part, None]).mul_(entropy_factor[part, None])
                    grad.add_(log_prob_factor[part, None]).mul_(exp).neg_()
                    del exp
                else:
                    grad.exp_().mul_(-log_prob_factor[part, None])
                index, is_inside = _locate_targets(local_targets[part], block)
                grad.scatter_add_(1, index, grad_log_probs[part] * is_inside)
                grad = grad.to(head.dtype)
                if grad_hidden is not None:
                    grad_hidden[part] += _matmul(grad, head[block])
                if grad_head is not None:
                    grad_block += _matmul(grad.t(), hidden[part])
            if grad_head is not None:
                grad_head[block] = grad_block
        if grad_hidden is not None:
            grad_hidden = grad_hidden.to(hidden.dtype)
        return grad_hidden, grad_head, *[None] * 7


_compute_in_tiles: Callable[..., tuple[torch.Tensor, ...]] = _ComputeLogProbs.apply


def _get_wide_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def _compute_logits(hidden: torch.Tensor, head: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return [tokens, ids] in float32 (or float64), divided by the temperature."""
    logits = _matmul(hidden, head.t())
    return logits if temperature == 1.0 else logits.div_(temperature)


def _matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a @ b, summed and returned in float32 (or float64).

    On the CPU torch.mm has no out_dtype and rounds its result to bfloat16: at 2048 tokens x 256 x
    8192 ids log-probs are then off by up to 8e-3 nats, with float32 factors by 4e-7. So factors are
    cast, although bfloat16 is 2 to 4 times as fast on a CPU with AVX512-bf16 (two threads).
    """
    if a.dtype == _get_wide_dtype(a.dtype):
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def _locate_targets(local_targets: torch.Tensor, block: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each target's index in the block, clamped, and whether it is inside: [tokens, n]."""
    is_inside = (local_targets >= block.start) & (local_targets < block.stop)
    index = (local_targets - block.start).clamp(0, block.stop - block.start - 1)
    return index, is_inside


def _split_range(total: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


def _is_split(group: dist.ProcessGroup | None) -> bool:
    return group is not None and dist.get_world_size(group) > 1
