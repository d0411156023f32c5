"""Columns along tokens in Ray's object store: stored where they are made, fetched where read.

An object is a dict of Jagged columns of consecutive samples. numpy arrays lie in it as they are, so
that a reader on the same node views them without a copy. It is gone when no RemoteBatch refers to
it, and lost when the process dies that has stored it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayError

from mcore_rl.controller.remote_batch import (
    NOWHERE,
    PROMPT_TOKENS,
    RESPONSE_TOKENS,
    Places,
    RemoteBatch,
    RemoteColumn,
    Rows,
)
from mcore_rl.data.batch import FILLED, Batch, Column, Jagged

OBJECT_BYTES = 4 << 20  # of an object, but for a sample that is larger
Objects = Sequence[Mapping[str, Jagged]]


class LostColumnsError(RuntimeError):
    """Columns were in a process that has died."""


def store(batch: Batch, known: Collection[str] = ()) -> RemoteBatch:
    """The columns of a batch that are not `known` by another, by reference.

    Columns along tokens go to the object store of this node, those of one value a sample are in
    what comes back, with prompt_tokens and response_tokens where there are prompts and responses.
    """
    new = {name: column for name, column in batch.columns.items() if name not in known}
    own: dict[str, Column] = {n: c for n, c in new.items() if not isinstance(c, Jagged)}
    for ids, name in (("prompt_ids", PROMPT_TOKENS), ("response_ids", RESPONSE_TOKENS)):
        if ids in new:
            own[name] = batch.lengths(ids)
    tokens = {name: column for name, column in new.items() if isinstance(column, Jagged)}
    remote = {}
    if tokens:
        places = _stored(tokens, len(batch))
        remote = {n: RemoteColumn(places, n, c.values[:0].copy()) for n, c in tokens.items()}
    return RemoteBatch(Batch(own), remote)


def _stored(columns: Mapping[str, Jagged], num_rows: int) -> Places:
    references: list[Any] = []
    objects, rows = np.zeros(num_rows, np.int32), np.zeros(num_rows, np.int32)
    for start, end in _slices(columns, num_rows):
        objects[start:end], rows[start:end] = len(references), np.arange(end - start)
        references.append(ray.put(_rows_of(columns, start, end)))
    return Places(tuple(references), objects, rows)


def _slices(columns: Mapping[str, Jagged], num_rows: int) -> Iterator[tuple[int, int]]:
    """Of consecutive rows that make an object together."""
    num_bytes = np.zeros(num_rows, np.int64)
    for column in columns.values():
        entry = column.values.itemsize * int(np.prod(column.values.shape[1:], dtype=np.int64))
        num_bytes += column.lengths * entry
    ends = np.cumsum(num_bytes)
    start = 0
    while start < num_rows:
        before = ends[start - 1] if start else 0
        end = max(int(np.searchsorted(ends, before + OBJECT_BYTES, "right")), start + 1)
        yield start, end
        start = end


def _rows_of(columns: Mapping[str, Jagged], start: int, end: int) -> dict[str, Jagged]:
    offsets: dict[int, Any] = {}  # columns with the same lengths share their offsets
    found = {}
    for name, column in columns.items():
        key = id(column.offsets)
        if key not in offsets:
            offsets[key] = column.offsets[start : end + 1] - column.offsets[start]
        values = column.values[column.offsets[start] : column.offsets[end]]
        found[name] = Jagged(np.ascontiguousarray(values), offsets[key])
    return found


def fetch(batch: RemoteBatch, timeout_s: float | None = None) -> Batch:
    """The batch with all its columns here.

    Rows that follow each other in one object are views of it, and read-only.

    Raises:
        LostColumnsError: a process that has stored some has died.
        TimeoutError: an object has not arrived in `timeout_s`.
    """
    places = {id(column.places): column.places for column in batch.remote.values()}
    references = dict.fromkeys(ref for one in places.values() for ref in one.references)
    objects = dict(zip(references, _objects(list(references), timeout_s), strict=True))
    columns: dict[str, Column] = {}
    for name, column in batch.remote.items():
        own = [objects[reference] for reference in column.places.references]
        columns[name] = _gathered(column, own, batch, name)
    return Batch({**columns, **batch.own.columns})


def _objects(references: list[Any], timeout_s: float | None) -> Objects:
    try:
        found: Objects = ray.get(references, timeout=timeout_s)
    except GetTimeoutError as error:
        raise TimeoutError(
            f"columns of {len(references)} objects have not arrived in {timeout_s:g} s"
        ) from error
    except RayError as error:
        raise LostColumnsError(
            f"columns are lost: the process that had stored them has died ({type(error).__name__})"
        ) from error
    return found


def _gathered(column: RemoteColumn, objects: Objects, batch: RemoteBatch, name: str) -> Jagged:
    places, parts = column.places, []
    for number, first, last in _runs(places.objects, places.rows):
        if number == NOWHERE:
            lengths = batch.lengths("response_ids")[first:last]
            offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
            parts.append(Jagged(np.full(offsets[-1], FILLED[name]), offsets))
            continue
        source, row = objects[number][column.stored_name], int(places.rows[first])
        end = row + last - first
        if row == 0 and end == len(source):
            parts.append(source)
            continue
        offsets = source.offsets[row : end + 1]
        values = source.values[offsets[0] : offsets[-1]]
        parts.append(Jagged(values, offsets - offsets[0]))
    if not parts:
        return Jagged(column.empty, np.zeros(1, np.int64))
    return parts[0] if len(parts) == 1 else Jagged.concat(parts)


def _runs(objects: Rows, rows: Rows) -> Iterator[tuple[int, int, int]]:
    """(object, first, end) of rows that follow each other in one object."""
    if not len(rows):
        return
    is_cut = (np.diff(objects) != 0) | ((np.diff(rows) != 1) & (objects[1:] != NOWHERE))
    bounds = [0, *(np.flatnonzero(is_cut) + 1).tolist(), len(rows)]
    for first, end in pairwise(bounds):
        yield int(objects[first]), first, end
