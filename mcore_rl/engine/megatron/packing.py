"""Micro-batches: samples of a batch, concatenated (THD), and their share on a rank.

A response token is scored by the hidden state of the token before it, so a micro-batch has, for
each response token, the row of that hidden state.

Context parallelism splits each sequence into 2 * cp chunks of equal length. CP rank r has the
chunks r and 2 * cp - 1 - r, so that under a causal mask every rank has as many query-key pairs as
the others. That is what Megatron's rotary embedding (models/common/embeddings/rope_utils.py:115)
and Transformer Engine expect of packed sequences.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams

from mcore_rl.data.batch import Batch
from mcore_rl.engine.steps import select_response_columns
from mcore_rl.parallel.balance import Parts

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PackSplit:
    """How the tokens of a pack are split over ranks, and which part is this rank's."""

    tp: int = 1  # sequence parallelism: equal shares of what the CP rank has
    cp: int = 1
    cp_rank: int = 0

    @classmethod
    def of_this_rank(cls) -> PackSplit:
        return cls(
            tp=parallel_state.get_tensor_model_parallel_world_size(),
            cp=parallel_state.get_context_parallel_world_size(),
            cp_rank=parallel_state.get_context_parallel_rank(),
        )

    @property
    def sequence_multiple(self) -> int:
        """What the padded length of each sequence is a multiple of."""
        return 2 * self.cp if self.cp > 1 else 1

    @property
    def pack_multiple(self) -> int:
        """What the padded length of a pack is a multiple of."""
        return math.lcm(self.sequence_multiple, self.cp * self.tp)

    def padded(self, length: int) -> int:
        """Tokens that a sequence takes in a pack, over all CP ranks."""
        return length + -length % self.sequence_multiple

    def budget(self, max_tokens: int) -> int:
        """Tokens of a pack over all CP ranks when one rank may have `max_tokens`.

        A whole number of pack multiples, so that a pack within it stays within it when padded.
        """
        multiple = self.pack_multiple
        return max(multiple, max_tokens * self.cp // multiple * multiple)


@dataclass(frozen=True, slots=True)
class Ahead:
    """Response tokens that are predicted from further before them: of multi-token prediction."""

    hidden_rows: torch.Tensor  # [predicted here] row of the state that predicts each
    targets: torch.Tensor  # [predicted here]
    loss_weights: torch.Tensor  # [predicted here]


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's parameters of a pack, with the lengths on the host as well.

    Read back from the device they would make the host wait in every layer.
    """

    lengths: tuple[int, ...] = ()  # with padding, over all CP ranks


@dataclass(frozen=True, slots=True)
class MicroBatch:
    rows: list[int]  # rows of the batch, in the order of the pack
    input_ids: torch.Tensor  # [1, tokens]
    position_ids: torch.Tensor  # [1, tokens]
    packed: PackedSeqParams  # of all context-parallel ranks
    num_tokens: int  # of samples, on this context-parallel rank, without padding
    # [tokens] Index in the batch's tokens (prompt and response, rows concatenated), -1: padding.
    tokens: torch.Tensor
    # Response tokens are scored on the context-parallel rank that has the state before them.
    num_response_tokens: int  # of all context-parallel ranks
    places: torch.Tensor  # [scored here] which of the response tokens, in the order of `rows`
    hidden_rows: torch.Tensor  # [scored here] row of the hidden state that scores each
    targets: torch.Tensor  # [scored here]
    columns: dict[str, torch.Tensor]  # other response columns, each [scored here]
    sequence_ids: torch.Tensor  # [scored here] which of `rows` each is of
    ahead: tuple[Ahead, ...]  # by depth of multi-token prediction


def pack(
    batch: Batch,
    parts: Parts,
    split: PackSplit,
    device: torch.device,
    sizes: Sequence[int] | None = None,
    num_ahead: int = 0,
) -> list[MicroBatch]:
    """One micro-batch a part, from the rows of the batch that the part lists.

    A part without rows becomes a pack of padding only, so that every rank can run as many as the
    others. `sizes` are tokens of each pack, over all CP ranks, to pad it to; at least pack_sizes.
    `num_ahead` is the number of depths of multi-token prediction.

    Raises:
        ValueError: a prompt is empty, so that nothing precedes its response; or a column does not
            run along the response tokens.
    """
    sizes = sizes or pack_sizes(batch, parts, split)
    return [
        _pack(batch, rows, split, size, device, num_ahead)
        for rows, size in zip(parts, sizes, strict=True)
    ]


def pack_sizes(batch: Batch, parts: Parts, split: PackSplit) -> list[int]:
    """Tokens of each pack over all CP ranks, with the padding that it needs by itself."""
    lengths = batch.num_tokens
    loads = [sum(split.padded(int(lengths[row])) for row in rows) for rows in parts]
    multiple = split.pack_multiple
    return [max(-(-load // multiple), 1) * multiple for load in loads]


def zigzag_rows(lengths: Sequence[int], cp: int, cp_rank: int) -> Rows:
    """Rows of a pack that a CP rank has, for sequences of these (padded) lengths.

    >>> zigzag_rows([4, 8], cp=2, cp_rank=0).tolist()
    [0, 3, 4, 5, 10, 11]
    """
    if cp == 1:
        return np.arange(sum(lengths))
    rows, start = [], 0
    for length in lengths:
        chunk = length // (2 * cp)
        firsts = [start + index * chunk for index in (cp_rank, 2 * cp - 1 - cp_rank)]
        rows += [np.arange(first, first + chunk) for first in firsts]
        start += length
    return np.concatenate(rows)


def _pack(
    batch: Batch, rows: list[int], split: PackSplit, size: int, device: torch.device, num_ahead: int
) -> MicroBatch:
    # The longest first: neighbours of like length are attended to together (attention.py).
    rows = sorted(rows, key=lambda row: (-batch.num_tokens[row], row))
    prompts = [batch.jagged("prompt_ids")[row] for row in rows]
    responses = [batch.jagged("response_ids")[row] for row in rows]
    if not all(len(prompt) for prompt in prompts):
        raise ValueError("a sample has an empty prompt: nothing scores its first response token")
    lengths = [len(p) + len(r) for p, r in zip(prompts, responses, strict=True)]
    padded = _padded_lengths(lengths, split, size)
    starts = np.cumsum([0, *padded])
    ids = np.zeros(starts[-1], dtype=np.int64)
    tokens = np.full(starts[-1], -1, dtype=np.int64)
    firsts = (np.cumsum(batch.num_tokens) - batch.num_tokens)[rows]
    states = []
    for start, first, prompt, response in zip(
        starts[: len(rows)], firsts, prompts, responses, strict=True
    ):
        scored, end = start + len(prompt), start + len(prompt) + len(response)
        ids[start:scored], ids[scored:end] = prompt, response
        tokens[start:end] = first + np.arange(end - start)
        states.append(np.arange(scored - 1, end - 1))
    mine = zigzag_rows(padded, split.cp, split.cp_rank)
    local = np.full(starts[-1], -1, dtype=np.int64)
    local[mine] = np.arange(len(mine))
    all_states = _concatenate(states, np.int64)
    hidden_rows = local[all_states]
    places = np.flatnonzero(hidden_rows >= 0)
    targets = _concatenate(responses, np.int64)
    columns = {n: c.take(rows).values for n, c in select_response_columns(batch).items()}
    sequence_ids = np.repeat(np.arange(len(rows)), [len(r) for r in responses])
    sequence_starts = starts[sequence_ids]

    def tensor(array: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.as_tensor(array).to(device)

    def ahead(depth: int) -> Ahead:
        found = np.where(all_states - depth >= sequence_starts, local[all_states - depth], -1)
        here = np.flatnonzero(found >= 0)
        weights = columns["loss_weights"][here]
        return Ahead(tensor(found[here]), tensor(targets[here]), tensor(weights))

    return MicroBatch(
        rows=rows,
        input_ids=tensor(ids[mine])[None],
        position_ids=tensor(np.concatenate([np.arange(n) for n in padded])[mine])[None],
        packed=_packed_seq_params(starts, max(padded), split, device),
        num_tokens=int((tokens[mine] >= 0).sum()),
        tokens=tensor(tokens[mine]),
        num_response_tokens=len(hidden_rows),
        places=tensor(places),
        hidden_rows=tensor(hidden_rows[places]),
        targets=tensor(targets[places]),
        columns={name: tensor(column[places]) for name, column in columns.items()},
        sequence_ids=tensor(sequence_ids[places]),
        ahead=tuple(ahead(depth) for depth in range(1, num_ahead + 1)),
    )


def _padded_lengths(lengths: Sequence[int], split: PackSplit, size: int) -> list[int]:
    """Each sequence padded to its multiple, and the last one on to the size of the pack.

    Padding comes after the tokens of a sequence, where a causal model never looks.
    """
    padded = [split.padded(length) for length in lengths] or [0]
    padded[-1] += size - sum(padded)
    return padded


def _packed_seq_params(
    starts: Rows, longest: int, split: PackSplit, device: torch.device
) -> PackedSeqParams:
    """Starts and lengths with padding, over all CP ranks: Megatron and TE divide them by cp.

    Padding counts as tokens. Transformer Engine wants the padded starts named as such under CP;
    equal to the others they say that nothing is between sequences, which its flash kernel needs.
    """
    cu_seqlens = torch.as_tensor(starts.astype(np.int32)).to(device)
    padded = cu_seqlens if split.cp > 1 else None
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        lengths=tuple(np.diff(starts).tolist()),
    )


def _concatenate(arrays: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.empty(0, dtype=dtype)
