"""Micro-batches: samples of a batch, concatenated (THD), and the part of them on a rank.

A response token is scored with the hidden state of the token before it, so a micro-batch has, for
each response token, the row of that hidden state.

Context parallelism splits a pack in one of two ways. "zigzag": each sequence in 2 * cp chunks of
equal length, of which CP rank r has the chunks r and 2 * cp - 1 - r, so that under a causal mask
every rank has as many query-key pairs as the others. Megatron's rotary embedding
(models/common/embeddings/rope_utils.py:140) and Transformer Engine expect this split.
"contiguous": the pack in cp equal parts, whatever sequences they cut, as Ulysses has them
(arXiv:2309.14509, section 3).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from mcore_rl.data.batch import Batch
from mcore_rl.engine.steps import select_response_columns
from mcore_rl.parallel.balance import (
    Parts,
    SequenceCost,
    count_parts_within,
    partition_within,
)

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PackSplit:
    """The split of a pack's tokens over TP and CP ranks, and the CP rank of this process."""

    tp: int = 1  # sequence parallelism: equal shares of the CP rank's tokens
    cp: int = 1
    cp_rank: int = 0
    kind: Literal["zigzag", "contiguous"] = "zigzag"
    rank_multiple: int = 1  # the multiple that the tokens of a rank are padded to

    @property
    def sequence_multiple(self) -> int:
        """The multiple that sequences are padded to."""
        return 2 * self.cp if self.cp > 1 and self.kind == "zigzag" else 1

    @property
    def pack_multiple(self) -> int:
        """The multiple that packs are padded to."""
        return math.lcm(self.sequence_multiple, self.cp * self.tp * self.rank_multiple)

    def get_rows(self, lengths: Sequence[int]) -> Rows:
        """Return the rows of a pack on this CP rank, for sequences of these (padded) lengths."""
        if self.kind == "zigzag":
            return get_zigzag_rows(lengths, self.cp, self.cp_rank)
        share = sum(lengths) // self.cp
        return np.arange(self.cp_rank * share, (self.cp_rank + 1) * share)

    def pad_length(self, length: int) -> int:
        """Return the tokens of a sequence with its padding, over all CP ranks."""
        return length + -length % self.sequence_multiple

    def compute_budget(self, max_tokens: int) -> int:
        """Return the tokens that a pack may have over all CP ranks, for `max_tokens` on each.

        It is a multiple of pack_multiple, so that padding never exceeds it.
        """
        multiple = self.pack_multiple
        return max(multiple, max_tokens * self.cp // multiple * multiple)


@dataclass(frozen=True, slots=True)
class MtpTargets:
    """Response tokens that a depth of multi-token prediction predicts on this rank."""

    hidden_rows: torch.Tensor  # [predicted tokens] row of the state that predicts each
    targets: torch.Tensor  # [predicted tokens]
    loss_weights: torch.Tensor  # [predicted tokens]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A pack of samples, and the response tokens of it that this CP rank scores.

    A response token is scored on the CP rank that has the hidden state before it.
    """

    rows: list[int]  # rows of the batch, in the order of the pack
    input_ids: torch.Tensor  # [1, tokens]
    position_ids: torch.Tensor  # [1, tokens]
    # Sequences over all CP ranks, with padding: [sequences + 1] int32 the first token of each and
    # the end; lengths on the host, for which the device would make it wait.
    starts: torch.Tensor
    lengths: tuple[int, ...]
    num_tokens: int  # on this CP rank, without padding
    # [tokens] Index among the batch's tokens (prompt and response, rows concatenated); -1: padding.
    token_indices: torch.Tensor
    num_response_tokens: int  # of all CP ranks
    response_indices: torch.Tensor  # [scored tokens] index among the response tokens of `rows`
    hidden_rows: torch.Tensor  # [scored tokens] row of the hidden state that scores each
    targets: torch.Tensor  # [scored tokens]
    columns: dict[str, torch.Tensor]  # other response columns, each [scored tokens]
    sequence_ids: torch.Tensor  # [scored tokens] index into `rows`
    mtp_targets: tuple[MtpTargets, ...]  # by depth of multi-token prediction
    # Further arguments of the model, and others in place of those above (engine/fsdp/vision.py).
    model_inputs: Mapping[str, torch.Tensor] = field(default_factory=dict)


def build_micro_batches(
    batch: Batch,
    max_tokens: int,
    split: PackSplit,
    cost: SequenceCost,
    device: torch.device,
    *,
    group: dist.ProcessGroup,
    multiple_of: int = 1,
    equal_sizes: bool = False,
    num_mtp_layers: int = 0,
) -> list[MicroBatch]:
    """Pack this rank's samples into micro-batches of equal cost.

    All data-parallel ranks get the same number of micro-batches. Collective over them.

    Args:
        max_tokens: Limit of tokens per rank, including padding. A sample above it gets its own
            micro-batch.
        group: The data-parallel ranks.
        multiple_of: Make the number of micro-batches a multiple of this.
        equal_sizes: Pad the micro-batches that ranks run at the same time to the same size.
        num_mtp_layers: Depths of multi-token prediction to build targets for.
    """
    lengths = batch.num_tokens.tolist()
    loads = [split.pad_length(length) for length in lengths]
    budget = split.compute_budget(max_tokens)
    num = torch.tensor(count_parts_within(loads, budget), device=device)
    dist.all_reduce(num, op=dist.ReduceOp.MAX, group=group)
    num_parts = -(-int(num) // multiple_of) * multiple_of
    costs = [cost.estimate(length) for length in lengths]
    parts = partition_within(loads, costs, budget, num_parts)
    sizes = torch.tensor(compute_pack_sizes(batch, parts, split), device=device)
    if equal_sizes:
        dist.all_reduce(sizes, op=dist.ReduceOp.MAX, group=group)
    return pack_samples(batch, parts, split, device, sizes.tolist(), num_mtp_layers)


def pack_samples(
    batch: Batch,
    parts: Parts,
    split: PackSplit,
    device: torch.device,
    sizes: Sequence[int] | None = None,
    num_mtp_layers: int = 0,
) -> list[MicroBatch]:
    """Build one micro-batch per part, from the rows of the batch that the part lists.

    A part without rows becomes a pack of padding, so that all ranks run the same number.

    Args:
        sizes: Tokens to pad each pack to, over all CP ranks; at least compute_pack_sizes.
        num_mtp_layers: Depths of multi-token prediction to build targets for.

    Raises:
        ValueError: A prompt is empty, so that nothing precedes its response; or a column does not
            run along the response tokens.
    """
    sizes = sizes or compute_pack_sizes(batch, parts, split)
    return [
        _build_micro_batch(batch, rows, split, size, device, num_mtp_layers)
        for rows, size in zip(parts, sizes, strict=True)
    ]


def compute_pack_sizes(batch: Batch, parts: Parts, split: PackSplit) -> list[int]:
    """Return the tokens of each pack over all CP ranks, with the padding of its own samples."""
    lengths = batch.num_tokens
    loads = [sum(split.pad_length(int(lengths[row])) for row in rows) for rows in parts]
    multiple = split.pack_multiple
    # At least one multiple: a part without rows is a pack of padding.
    return [max(-(-load // multiple), 1) * multiple for load in loads]


def get_zigzag_rows(lengths: Sequence[int], cp: int, cp_rank: int) -> Rows:
    """Return the rows of a pack on a CP rank, for sequences of these (padded) lengths.

    >>> get_zigzag_rows([4, 8], cp=2, cp_rank=0).tolist()
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


def _build_micro_batch(
    batch: Batch,
    rows: list[int],
    split: PackSplit,
    size: int,
    device: torch.device,
    num_mtp_layers: int,
) -> MicroBatch:
    # The longest first: neighbours of equal length are attended to in one call (attention.py).
    rows = sorted(rows, key=lambda row: (-batch.num_tokens[row], row))
    prompts = [batch.jagged("prompt_ids")[row] for row in rows]
    responses = [batch.jagged("response_ids")[row] for row in rows]
    if not all(len(prompt) for prompt in prompts):
        raise ValueError("a sample has an empty prompt: nothing scores its first response token")
    # Padding comes after the tokens of a sequence, where a causal model never looks. The last
    # sequence is padded further, to the size of the pack.
    padded = [split.pad_length(len(p) + len(r)) for p, r in zip(prompts, responses, strict=True)]
    padded = padded or [0]  # without rows all of the pack is padding
    padded[-1] += size - sum(padded)
    starts = np.cumsum([0, *padded])
    ids = np.zeros(starts[-1], dtype=np.int64)
    token_indices = np.full(starts[-1], -1, dtype=np.int64)
    firsts = (np.cumsum(batch.num_tokens) - batch.num_tokens)[rows]
    states = []
    for start, first, prompt, response in zip(
        starts[: len(rows)], firsts, prompts, responses, strict=True
    ):
        scored, end = start + len(prompt), start + len(prompt) + len(response)
        ids[start:scored], ids[scored:end] = prompt, response
        token_indices[start:end] = first + np.arange(end - start)
        # The state of a token scores the next one: from the last of the prompt to the last but one.
        states.append(np.arange(scored - 1, end - 1))
    rank_rows = split.get_rows(padded)
    local_rows = np.full(starts[-1], -1, dtype=np.int64)  # by row of the pack; -1: not on this rank
    local_rows[rank_rows] = np.arange(len(rank_rows))
    all_states = _concatenate(states, np.int64)
    hidden_rows = local_rows[all_states]
    scored_here = np.flatnonzero(hidden_rows >= 0)
    targets = _concatenate(responses, np.int64)
    columns = {n: c.take(rows).values for n, c in select_response_columns(batch).items()}
    sequence_ids = np.repeat(np.arange(len(rows)), [len(r) for r in responses])
    sequence_starts = starts[sequence_ids]

    def to_tensor(array: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.as_tensor(array).to(device)

    def build_mtp_targets(depth: int) -> MtpTargets:
        earlier = all_states - depth
        earlier_rows = np.where(earlier >= sequence_starts, local_rows[earlier], -1)
        predicted = np.flatnonzero(earlier_rows >= 0)
        return MtpTargets(
            hidden_rows=to_tensor(earlier_rows[predicted]),
            targets=to_tensor(targets[predicted]),
            loss_weights=to_tensor(columns["loss_weights"][predicted]),
        )

    return MicroBatch(
        rows=rows,
        input_ids=to_tensor(ids[rank_rows])[None],
        position_ids=to_tensor(np.concatenate([np.arange(n) for n in padded])[rank_rows])[None],
        starts=to_tensor(starts.astype(np.int32)),
        lengths=tuple(padded),
        num_tokens=int((token_indices[rank_rows] >= 0).sum()),
        token_indices=to_tensor(token_indices[rank_rows]),
        num_response_tokens=len(hidden_rows),
        response_indices=to_tensor(scored_here),
        hidden_rows=to_tensor(hidden_rows[scored_here]),
        targets=to_tensor(targets[scored_here]),
        columns={name: to_tensor(column[scored_here]) for name, column in columns.items()},
        sequence_ids=to_tensor(sequence_ids[scored_here]),
        mtp_targets=tuple(build_mtp_targets(depth) for depth in range(1, num_mtp_layers + 1)),
    )


def _concatenate(arrays: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.empty(0, dtype=dtype)
