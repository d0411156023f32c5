"""Operations of the driver on batches: selecting columns and rows, joining, fetching."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar, cast

import numpy as np
import ray

from mcore_rl.controller.object_columns import (
    LostColumnsError,
    fetch_columns,
    find_lost_rows,
    store_columns,
)
from mcore_rl.controller.pending_call import WorkerError, describe_dead_ranks
from mcore_rl.controller.remote_batch import (
    PROMPT_TOKENS,
    RESPONSE_TOKENS,
    RemoteBatch,
    RemoteColumn,
    RowLocations,
)
from mcore_rl.data.batch import IMAGES, NO_VERSION, Array, Batch, Column, Jagged, Samples
from mcore_rl.data.routed_experts import ExpertLayers, divide_experts, list_expert_columns

B = TypeVar("B", bound=Samples)


def select_small_columns(batch: B) -> B:
    """Drop columns that no computation over a whole batch reads, and that are large."""
    return batch.drop_columns("prompt_ids", "fields", *list_expert_columns(batch))


def select_token_columns(batch: B) -> B:
    """Drop columns that no engine reads: data rows and, of a RemoteBatch, one value a sample.

    Images stay.
    """
    batch = batch.drop_columns("fields")
    if isinstance(batch, Batch):
        return batch
    return batch.drop_columns(*(n for n in get_sample_columns(batch).names if n != IMAGES))


def get_sample_columns(batch: Samples) -> Batch:
    """Return the columns of one value a sample, with those that a RemoteBatch has of its tokens."""
    if isinstance(batch, RemoteBatch):
        return batch.local
    assert isinstance(batch, Batch)
    columns: dict[str, Column] = {
        n: c for n, c in batch.columns.items() if not isinstance(c, Jagged)
    }
    for ids, name in (("prompt_ids", PROMPT_TOKENS), ("response_ids", RESPONSE_TOKENS)):
        if ids in batch:
            columns[name] = batch.lengths(ids)
    if "weight_versions" in batch and "response_mask" in batch:
        pairs = zip(batch.jagged("weight_versions"), batch.jagged("response_mask"), strict=True)
        versions = [row[mask != 0] for row, mask in pairs]
        columns["oldest_versions"] = np.array([r.min() if len(r) else NO_VERSION for r in versions])
        columns["newest_versions"] = np.array([r.max() if len(r) else NO_VERSION for r in versions])
    return Batch(columns)


def release_columns(batch: B) -> B:
    """Let the object store free the columns of a RemoteBatch, except what is one value a sample."""
    return cast(B, batch.drop_references()) if isinstance(batch, RemoteBatch) else batch


def save_released(batch: Samples) -> dict[str, dict[str, Array]]:
    """Return a batch of `release_columns` as arrays that a checkpoint can hold."""
    return (batch.local if isinstance(batch, RemoteBatch) else cast(Batch, batch)).to_arrays()


def restore_released(arrays: Mapping[str, Mapping[str, Array]]) -> Samples:
    """Restore the batch of `save_released`, for `append_released`."""
    batch = Batch.load_arrays(arrays)
    return RemoteBatch(batch, {}) if ray.is_initialized() else batch


def append_released(batch: B, released: Sequence[B]) -> B:
    """Join a batch and the rows of others whose columns along tokens are not needed any more.

    Released rows of a checkpoint have only what is one value a sample.
    """
    if not isinstance(batch, RemoteBatch):
        return concat_batches([batch, *released])
    parts: list[Samples] = [batch]
    for part in cast(Sequence[RemoteBatch], released):
        missing = RowLocations.create_missing(len(part))
        columns = {
            n: RemoteColumn(missing, c.stored_name, c.empty) for n, c in batch.remote.items()
        }
        parts.append(RemoteBatch(part.local, columns, len(part)))
    return cast(B, concat_batches(parts))


def select_rows(function: Callable[..., Batch], batch: B, *args: object) -> B:
    """Return the rows that `function` selects by columns of one value a sample, in its order."""
    numbered = get_sample_columns(batch).with_columns(row_numbers=np.arange(len(batch)))
    rows: Array = function(numbered, *args).array("row_numbers")
    return batch.take(rows.tolist())


def concat_batches(batches: Sequence[B]) -> B:
    """Join the rows of batches. Raises ValueError for none."""
    if not batches:
        raise ValueError("no batches to join")
    merged: B = type(batches[0]).concat(batches)
    return merged


def find_lost_groups(batches: Sequence[Samples]) -> list[int]:
    """Return the ids of groups that have lost columns with a node that died, in order."""
    remote = [batch for batch in batches if isinstance(batch, RemoteBatch) and batch.remote]
    if not remote:
        return []
    pairs = zip(remote, find_lost_rows(remote), strict=True)
    lost = [b.array("group_ids")[rows] for b, rows in pairs if rows.any()]
    return sorted({group for ids in lost for group in ids.tolist()})


def drop_groups(batch: B, group_ids: Collection[int]) -> B:
    """Return the samples of all groups but these."""
    is_dropped = np.isin(batch.array("group_ids"), list(group_ids))
    return batch.take(np.flatnonzero(~is_dropped).tolist())


def fetch_batch(batch: Samples, what: str, call_s: float) -> Batch:
    """Return the batch with all columns in this process.

    Args:
        what: The columns in words, for the error.
        call_s: Limit of fetching them: timeouts.call_s.

    Raises:
        WorkerError: They have not arrived in `call_s`, or are lost.
    """
    if not isinstance(batch, RemoteBatch):
        return cast(Batch, batch)
    try:
        return fetch_columns(batch, call_s)
    except TimeoutError as error:
        raise WorkerError(f"{what}: {error} (timeouts.call_s)") from error
    except LostColumnsError as error:
        raise WorkerError(f"{what}: {error}{describe_dead_ranks()}") from error


def to_arrays(batch: Samples, what: str, call_s: float) -> dict[str, dict[str, Array]]:
    """Fetch a batch and return it as arrays that a checkpoint can hold (Batch.to_arrays)."""
    return fetch_batch(batch, what, call_s).to_arrays()


def restore_batch(
    arrays: Mapping[str, Mapping[str, Array]], experts: ExpertLayers | None = None
) -> Samples:
    """Restore the batch of `to_arrays`; in a Ray session, store its columns and refer to them.

    Raises:
        ConfigError: as `divide_experts`.
    """
    batch = divide_experts(Batch.load_arrays(arrays), experts)
    if not ray.is_initialized():
        return batch
    return store_columns(batch.drop_columns(PROMPT_TOKENS, RESPONSE_TOKENS))
