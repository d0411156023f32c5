"""Micro-batches: samples of a batch laid end to end (THD), with nothing padded but the tail.

A response token is scored by the hidden state of the token before it, so a micro-batch carries, for
each response token, the row of that hidden state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from mcore_rl.data.batch import Batch, Jagged
from mcore_rl.parallel.balance import balanced_partition


@dataclass(frozen=True, slots=True)
class MicroBatch:
    rows: list[int]  # rows of the batch, in the order of the pack
    input_ids: torch.Tensor  # [1, tokens]
    position_ids: torch.Tensor  # [1, tokens]
    packed: PackedSeqParams
    num_tokens: int  # of samples, on this context-parallel rank, without padding
    # Response tokens are scored on the context-parallel rank that has the state before them.
    num_response_tokens: int  # of all context-parallel ranks
    places: torch.Tensor  # [scored here] which of the response tokens, in the order of `rows`
    hidden_rows: torch.Tensor  # [scored here] row of the hidden state that scores each
    targets: torch.Tensor  # [scored here]
    columns: dict[str, torch.Tensor]  # other response columns, each [scored here]


def pack(
    batch: Batch, num_micro_batches: int, multiple: int, device: torch.device
) -> list[MicroBatch]:
    """Exactly `num_micro_batches` micro-batches of balanced size, padded to `multiple` tokens.

    A micro-batch without samples holds padding only, so that every rank runs as many as the others.
    """
    parts = balanced_partition(batch.num_tokens.tolist(), num_micro_batches)
    return [_pack(batch, part, multiple, device) for part in parts]


def _pack(batch: Batch, rows: list[int], multiple: int, device: torch.device) -> MicroBatch:
    prompts = [batch.jagged("prompt_ids")[row] for row in rows]
    responses = [batch.jagged("response_ids")[row] for row in rows]
    sequences = [np.concatenate(pair) for pair in zip(prompts, responses, strict=True)]
    lengths = [len(sequence) for sequence in sequences]
    num_tokens = sum(lengths)
    padding = -num_tokens % multiple if num_tokens else multiple
    if lengths:
        # The tail extends the last sequence: behind its tokens, a causal model never looks at it.
        lengths[-1] += padding
    else:
        lengths = [padding]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    ids = np.concatenate([*sequences, np.zeros(padding, dtype=np.int64)])
    positions = np.concatenate([np.arange(length) for length in lengths])
    hidden_rows = [
        start + len(prompt) - 1 + np.arange(len(response))
        for start, prompt, response in zip(starts[:-1], prompts, responses, strict=False)
    ]

    def tensor(array: np.ndarray) -> torch.Tensor:
        return torch.as_tensor(array).to(device)

    return MicroBatch(
        rows=rows,
        input_ids=tensor(ids)[None],
        position_ids=tensor(positions)[None],
        packed=_packed_seq_params(starts, max(lengths), device),
        num_tokens=num_tokens,
        num_response_tokens=sum(len(response) for response in responses),
        places=tensor(np.arange(sum(len(response) for response in responses))),
        hidden_rows=tensor(_concatenate(hidden_rows, np.int64)),
        targets=tensor(_concatenate(responses, np.int64)),
        columns={name: tensor(c) for name, c in _response_columns(batch, rows).items()},
    )


def _packed_seq_params(starts: np.ndarray, longest: int, device: torch.device) -> PackedSeqParams:
    cu_seqlens = torch.as_tensor(starts.astype(np.int32)).to(device)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def _concatenate(arrays: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.empty(0, dtype=dtype)


def _response_columns(batch: Batch, rows: list[int]) -> dict[str, np.ndarray]:
    """The jagged columns that run along the responses, ids aside."""
    found = {}
    lengths = batch.jagged("response_ids").lengths
    for name, column in batch.columns.items():
        if name in ("prompt_ids", "response_ids") or not isinstance(column, Jagged):
            continue
        if not np.array_equal(column.lengths, lengths):
            raise ValueError(f"column {name!r} does not run along the response tokens")
        found[name] = _concatenate([column[row] for row in rows], column.values.dtype.type)
    return found
