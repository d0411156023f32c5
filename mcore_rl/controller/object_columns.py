"""Columns along tokens in Ray's object store: stored where they are made, fetched where read.

An object is a dict of Jagged columns of consecutive samples. numpy arrays lie in it as they are, so
that a reader on the same node views them without a copy. It is gone when no RemoteBatch refers to
it. What a rank has stored is lost when it dies. Samples that a server makes are results of a call:
they belong to the driver, and a server may die (`pieces`).

Columns "NAME/PART" are for those who read that part (`RemoteBatch.of_part`): each has objects of
its own. All others are together.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.experimental import get_local_object_locations

from mcore_rl.controller.living_nodes import living_nodes
from mcore_rl.controller.remote_batch import (
    NOWHERE,
    PROMPT_TOKENS,
    RESPONSE_TOKENS,
    Places,
    RemoteBatch,
    RemoteColumn,
    Rows,
    is_of_part,
)
from mcore_rl.data.batch import FILL_VALUES, Array, Batch, Column, Jagged

# Of an object, but for a sample that is larger. A node that reads some rows of an object gets all
# of it; on one node nothing travels, and few objects take the least time to be made.
OBJECT_BYTES, ONE_NODE_OBJECT_BYTES = 4 << 20, 128 << 20
# Objects that a call may return of columns that are together. One that is not used takes 4 us of
# the driver and 50 bytes of the reply, one that is used 0.13 ms and 900 bytes.
NUM_PIECES, MOST_PIECES = 8, 256
# Ray sends a smaller result to the driver, in place of a reference to it (its
# max_direct_call_object_size is 100 KiB).
_LEAST_BYTES = 128 << 10
_LOST_S = 30.0  # for Ray to know of an object whose node has died
_FILLER = "."  # a column of an object that would be smaller
Object = dict[str, Jagged]
Objects = Sequence[Mapping[str, Jagged]]


class LostColumnsError(RuntimeError):
    """Columns were in a process that has died."""


def store(batch: Batch, known: Collection[str] = ()) -> RemoteBatch:
    """The columns of a batch that are not `known`, by reference.

    Columns along tokens go to the object store of this node, those of one value a sample are in
    what comes back, with prompt_tokens and response_tokens where there are prompts and responses.
    """
    found, objects = _divided(batch, known)
    return found.at([ray.put(one) for one in objects])


def num_pieces(num_bytes: int) -> int:
    """How many a call needs that may return so many bytes, for no object to be larger than others.

    At least NUM_PIECES, and at most MOST_PIECES.
    """
    return min(max(-(-num_bytes // _object_bytes()), NUM_PIECES), MOST_PIECES)


def pieces(
    batch: Batch, num_most: int, num_parts: int = 0
) -> tuple[RemoteBatch, list[Object | None]]:
    """The same as results of a call: the batch without its references, and its objects.

    These are `num_most` of columns that are together, and as many of each part. The caller gives it
    the references (`RemoteBatch.at`). Unused objects are None, others large enough to be no part of
    the reply.

    Raises:
        ValueError: there are more parts than the group of this process was started for.
    """
    found, objects = _divided(batch, (), num_most)
    if len({id(column.places) for column in found.remote.values()}) > 1 + num_parts:
        parts = [name for name in found.remote if is_of_part(name)]
        raise ValueError(
            f"new samples have the parts {parts}; allowed: {num_parts}, the num_parts of their "
            "WorkerGroup"
        )
    for one in objects:
        missing = _LEAST_BYTES - sum(column.values.nbytes for column in one.values())
        if missing > 0:
            one[_FILLER] = Jagged(np.zeros(missing, np.int8), np.array([0, missing]))
    num_objects = num_most * (1 + num_parts)
    return found, [*objects, *[None] * (num_objects - len(objects))]


def _divided(
    batch: Batch, known: Collection[str], num_most: int | None = None
) -> tuple[RemoteBatch, list[Object]]:
    """Without references: their places in the list of objects are in their stead.

    `num_most`: objects of columns that are together.
    """
    new = {name: column for name, column in batch.columns.items() if name not in known}
    own: dict[str, Column] = {n: c for n, c in new.items() if not isinstance(c, Jagged)}
    for ids, name in (("prompt_ids", PROMPT_TOKENS), ("response_ids", RESPONSE_TOKENS)):
        if ids in new:
            own[name] = batch.lengths(ids)
    together: dict[str, dict[str, Jagged]] = {}
    for name, column in new.items():
        if isinstance(column, Jagged):
            together.setdefault(name if is_of_part(name) else "", {})[name] = column
    found, remote, num = list[Object](), dict[str, RemoteColumn](), len(batch)
    for tokens in together.values():
        first = len(found)
        objects, rows = np.zeros(num, np.int32), np.zeros(num, np.int32)
        for start, end in _slices(tokens, num, num_most):
            objects[start:end], rows[start:end] = len(found) - first, np.arange(end - start)
            found.append(_rows_of(tokens, start, end))
        places = Places(tuple(range(first, len(found))), objects, rows)
        remote |= {n: RemoteColumn(places, n, c.values[:0].copy()) for n, c in tokens.items()}
    return RemoteBatch(Batch(own), remote, num), found


@functools.cache
def _object_bytes() -> int:
    return OBJECT_BYTES if len(ray.nodes()) > 1 else ONE_NODE_OBJECT_BYTES


def _slices(
    columns: Mapping[str, Jagged], num_rows: int, num_most: int | None
) -> list[tuple[int, int]]:
    """Of consecutive rows that make an object together; at most `num_most`, if it is given."""
    num_bytes = np.zeros(num_rows, np.int64)
    for column in columns.values():
        num_bytes += column.lengths * column.values.itemsize * math.prod(column.values.shape[1:])
    ends, most_bytes = np.cumsum(num_bytes), _object_bytes()
    cuts = [0] if num_rows else []
    while cuts and cuts[-1] < num_rows:
        start = cuts[-1]
        before = ends[start - 1] if start else 0
        cuts.append(max(int(np.searchsorted(ends, before + most_bytes, "right")), start + 1))
    if num_most is not None and len(cuts) > num_most + 1:
        # By the equal share of all bytes that a row begins in.
        numbers = np.minimum((ends - num_bytes) * num_most // ends[-1], num_most - 1)
        cuts = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), num_rows]
    return list(pairwise(cuts))


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

    Rows that follow each other in one object are views of it, and read-only. Others are joined when
    they are looked at.

    Raises:
        LostColumnsError: a process that has stored some has died.
        TimeoutError: an object has not arrived in `timeout_s`.
    """
    places = {id(column.places): column.places for column in batch.remote.values()}
    references = dict.fromkeys(ref for one in places.values() for ref in one.references)
    objects = dict(zip(references, _objects(list(references), timeout_s), strict=True))
    spans = {key: one.span() for key, one in places.items()}
    columns: dict[str, Column] = {}
    known: dict[tuple[int, str], Jagged] = {}  # a column may be there under two names
    for name, column in batch.remote.items():
        key = id(column.places), column.stored_name
        if key not in known:
            sources = [objects[ref][column.stored_name] for ref in column.places.references]
            span = spans[id(column.places)]
            rows = _slice(sources[0], *span) if span else _gathered(column, sources, batch, name)
            known[key] = rows
        columns[name] = known[key]
    return Batch({**columns, **batch.own.columns})


def lost_rows(batches: Sequence[RemoteBatch]) -> list[npt.NDArray[np.bool_]]:
    """[samples] of each batch: whether an object with columns of it died with its node.

    For objects that this process owns, as those of `pieces`. What they contain is not looked at.
    While no node has died this asks the nodes whether they live, which has nothing to do with how
    many objects there are.
    """
    alive = living_nodes()
    if all(alive.values()):
        return [np.zeros(len(batch), np.bool_) for batch in batches]
    places = [list({id(c.places): c.places for c in b.remote.values()}.values()) for b in batches]
    references = dict.fromkeys(ref for those in places for one in those for ref in one.references)
    gone = _gone(list(references), {node for node, is_alive in alive.items() if is_alive})
    found = []
    for batch, those in zip(batches, places, strict=True):
        is_lost = np.zeros(len(batch), np.bool_)
        for one in those:
            numbers = [number for number, ref in enumerate(one.references) if ref in gone]
            is_lost |= np.isin(one.objects, numbers)
        found.append(is_lost)
    return found


def _gone(references: list[Any], alive: set[str]) -> set[Any]:
    """In the place of an object that is lost Ray puts an error, into the store of this node.

    So what another node that lives has is there. The others are asked for: they are here.
    """
    elsewhere = alive - {ray.get_runtime_context().get_node_id()}
    known = get_local_object_locations(references)
    places = {ref: known[ref]["node_ids"] if ref in known else () for ref in references}
    asked = [ref for ref, nodes in places.items() if elsewhere.isdisjoint(nodes)]
    return set() if _are_here(asked) else {ref for ref in asked if not _are_here([ref])}


def _are_here(references: list[Any]) -> bool:
    try:
        ray.get(references, timeout=_LOST_S)
    except RayError:
        return False
    return True


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


def _gathered(column: RemoteColumn, sources: list[Jagged], batch: RemoteBatch, name: str) -> Jagged:
    numbers, rows = column.places.objects, column.places.rows
    if not len(rows):
        return Jagged(column.empty, np.zeros(1, np.int64))
    if (is_filled := numbers == NOWHERE).any():
        lengths = batch.lengths("response_ids")[is_filled]
        numbers, rows = numbers.copy(), rows.copy()
        numbers[is_filled], rows[is_filled] = len(sources), np.arange(len(lengths))
        sources.append(Jagged(np.full(lengths.sum(), FILL_VALUES[name]), _offsets(lengths)))
    return GatheredRows(sources, numbers, rows)


def _slice(source: Jagged, first: int, end: int) -> Jagged:
    if end - first == len(source):
        return source
    offsets = source.offsets[first : end + 1]
    return Jagged(source.values[offsets[0] : offsets[-1]], offsets - offsets[0])


def _offsets(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


class GatheredRows(Jagged):
    """Rows of several objects, joined when `values` is first looked at.

    `take` copies the rows that it takes, straight from the objects: a micro-batch does not copy the
    batch, and a column that nobody looks at costs nothing.
    """

    __slots__ = ("_joined", "_numbers", "_rows", "_sources")
    _sources: Sequence[Jagged]
    _numbers: Rows
    _rows: Rows
    _joined: Array | None

    def __init__(self, sources: Sequence[Jagged], numbers: Rows, rows: Rows) -> None:
        """Row i is row rows[i] of sources[numbers[i]]."""
        lengths = np.zeros(len(rows), np.int64)
        for number in np.unique(numbers):
            of_it = numbers == number
            lengths[of_it] = sources[number].lengths[rows[of_it]]
        own = {"_sources": sources, "_numbers": numbers, "_rows": rows, "_joined": None}
        for name, value in {**own, "offsets": _offsets(lengths)}.items():
            object.__setattr__(self, name, value)

    def __getitem__(self, row: int) -> Array:
        return self._sources[self._numbers[row]][self._rows[row]]

    @property
    def values(self) -> Array:  # type: ignore[override]
        if self._joined is None:
            runs = list(_runs(self._numbers, self._rows))
            parts = [_slice(self._sources[n], row, row + num).values for n, row, num in runs]
            object.__setattr__(self, "_joined", np.concatenate(parts))
        return cast(Array, self._joined)

    def take(self, rows: Sequence[int]) -> Jagged:
        index = np.asarray(rows, np.int64)
        if self._joined is not None or not len(index):
            return super().take(rows)
        return GatheredRows(self._sources, self._numbers[index], self._rows[index])

    def with_values(self, values: Array) -> Jagged:
        if len(values) != self.offsets[-1]:
            raise ValueError(f"{len(values)} values for rows of {self.offsets[-1]} in all")
        return Jagged(values, self.offsets)


def _runs(numbers: Rows, rows: Rows) -> Iterator[tuple[int, int, int]]:
    """(object, its first row, how many) of rows that follow each other in one object."""
    is_cut = (np.diff(numbers) != 0) | (np.diff(rows) != 1)
    bounds = [0, *(np.flatnonzero(is_cut) + 1).tolist(), len(rows)]
    for first, end in pairwise(bounds):
        yield int(numbers[first]), int(rows[first]), end - first
