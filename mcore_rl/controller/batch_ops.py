"""Functions of whole batches, run where the columns along tokens are and not in the driver.

Advantages, correction and weights of losses are over all samples of a step or of a mini-batch. They
run on rank 0 of the actor, which fetches the columns and stores those that a function adds. The
driver gets what else the function returns: numbers and sentences.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar, cast

import numpy as np
import ray

from mcore_rl.controller.dispatch import Group
from mcore_rl.controller.object_columns import LostColumnsError, fetch, lost_rows, store
from mcore_rl.controller.pending import WorkerError
from mcore_rl.controller.remote_batch import PROMPT_TOKENS, RESPONSE_TOKENS, RemoteBatch
from mcore_rl.data.batch import NO_VERSION, Array, Batch, Column, Jagged, Samples
from mcore_rl.data.routed_experts import list_expert_columns

B = TypeVar("B", bound=Samples)


def with_near(
    group: Group,
    function: Callable[..., tuple[Batch, Any]],
    batch: B,
    *args: object,
    reads: Collection[str] | None = None,
) -> tuple[B, Any]:
    """`function(batch, *args)`: the batch with columns added or replaced, and a value.

    `reads` are the columns that it may need, where they are known. A batch that is here is worked
    on here.
    """
    if isinstance(batch, Batch):
        return cast(tuple[B, Any], function(batch, *args))
    found, value = group.apply(function, _read(batch, reads), *args)
    return batch.union(found), value


def near(
    group: Group,
    function: Callable[..., Any],
    batch: Samples,
    *args: object,
    reads: Collection[str] | None = None,
) -> Any:
    """`function(batch, *args)`, which is no batch; `reads` as for with_near."""
    if isinstance(batch, Batch):
        return function(batch, *args)
    return group.apply(function, _read(batch, reads), *args)


def _read(batch: B, reads: Collection[str] | None) -> B:
    if reads is None:  # all but large ones
        return batch.drop_columns("prompt_ids", "fields", *list_expert_columns(batch))
    return batch.select(*(name for name in batch.names if name in reads))


def along_tokens(batch: B) -> B:
    """Without columns that no engine reads: data rows and, elsewhere, one value a sample."""
    batch = batch.drop_columns("fields")
    return batch if isinstance(batch, Batch) else batch.drop_columns(*per_sample(batch).names)


def per_sample(batch: Samples) -> Batch:
    """The columns of one value a sample, with those that a RemoteBatch has of its tokens."""
    if isinstance(batch, RemoteBatch):
        return batch.own
    assert isinstance(batch, Batch)
    own: dict[str, Column] = {n: c for n, c in batch.columns.items() if not isinstance(c, Jagged)}
    for ids, name in (("prompt_ids", PROMPT_TOKENS), ("response_ids", RESPONSE_TOKENS)):
        if ids in batch:
            own[name] = batch.lengths(ids)
    if "weight_versions" in batch and "response_mask" in batch:
        pairs = zip(batch.jagged("weight_versions"), batch.jagged("response_mask"), strict=True)
        found = [row[mask != 0] for row, mask in pairs]
        own["oldest_versions"] = np.array([r.min() if len(r) else NO_VERSION for r in found])
        own["newest_versions"] = np.array([r.max() if len(r) else NO_VERSION for r in found])
    return Batch(own)


def for_metrics(batch: B) -> B:
    """With what `per_sample` reads; what a RemoteBatch has of tokens in the object store may go."""
    return cast(B, batch.let_go()) if isinstance(batch, RemoteBatch) else batch


def kept(function: Callable[..., Batch], batch: B, *args: object) -> B:
    """The rows that a choice by the columns of one value a sample leaves, in its order."""
    numbered = per_sample(batch).with_columns(row_numbers=np.arange(len(batch)))
    rows: Array = function(numbered, *args).array("row_numbers")
    return batch.take(rows.tolist())


def joined(batches: Sequence[B]) -> B:
    """Raises ValueError for none."""
    if not batches:
        raise ValueError("no batches to join")
    found: B = type(batches[0]).concat(batches)
    return found


def lost_groups(batches: Sequence[Samples]) -> list[int]:
    """The ids of groups that have lost columns with a node that died (`lost_rows`), in order.

    A batch that is here has lost none.
    """
    remote = [batch for batch in batches if isinstance(batch, RemoteBatch) and batch.remote]
    if not remote:
        return []
    pairs = zip(remote, lost_rows(remote), strict=True)
    return sorted({int(group) for b, rows in pairs for group in b.array("group_ids")[rows]})


def without_groups(batch: B, group_ids: Collection[int]) -> B:
    is_left = ~np.isin(batch.array("group_ids"), list(group_ids))
    return batch.take(np.flatnonzero(is_left).tolist())


def here(batch: Samples, what: str, call_s: float) -> Batch:
    """With all columns in this process; `what` they are is for the error.

    Raises:
        WorkerError: they have not come in `call_s`, which is timeouts.call_s, or are lost.
    """
    if not isinstance(batch, RemoteBatch):
        return cast(Batch, batch)
    try:
        return fetch(batch, call_s)
    except TimeoutError as error:
        raise WorkerError(f"{what}: {error} (timeouts.call_s)") from error
    except LostColumnsError as error:
        raise WorkerError(f"{what}: {error}") from error


def to_arrays(batch: Samples, what: str, call_s: float) -> dict[str, dict[str, Array]]:
    """As Batch.to_arrays: all that a checkpoint keeps of it is fetched for that, as by `here`."""
    return here(batch, what, call_s).to_arrays()


def from_arrays(arrays: Mapping[str, Mapping[str, Array]]) -> Samples:
    """What to_arrays was made of; by reference in a job, whose columns this process then stores."""
    batch = Batch.load_arrays(arrays)
    return (
        store(batch.drop_columns(PROMPT_TOKENS, RESPONSE_TOKENS)) if ray.is_initialized() else batch
    )
