"""Columns along tokens in Ray's object store: stored where they are made, fetched where read.

An object is a dict of Jagged columns of consecutive samples. numpy arrays lie in it as they are, so
that a reader on the same node views them without a copy. It is freed when no RemoteBatch refers to
it. What a rank has stored is lost when it dies. Samples that a server makes are results of a call:
they belong to the driver, and the server may die (`split_into_objects`).

Columns "NAME/PART" are for readers of that part (`RemoteBatch.select_part`): each has objects of
its own. All others are together.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.experimental import get_local_object_locations

from mcore_rl.config.event_loop import run_coroutine
from mcore_rl.controller.remote_batch import (
    NO_OBJECT,
    PROMPT_TOKENS,
    RESPONSE_TOKENS,
    RemoteBatch,
    RemoteColumn,
    RowLocations,
    Rows,
    is_part_column,
)
from mcore_rl.data.batch import FILL_VALUES, Array, Batch, Column, Jagged

# Size of an object, unless a single sample is larger. A node that reads some rows of an object gets
# all of it; on one node nothing travels, and few objects take the least time to be made.
OBJECT_BYTES, ONE_NODE_OBJECT_BYTES = 4 << 20, 128 << 20
# Objects that a call may return of columns that are together. An unused one takes 4 us of the
# driver and 50 bytes of the reply, a used one 0.13 ms and 900 bytes.
DEFAULT_OBJECTS, MAX_OBJECTS = 8, 256
# Ray sends a smaller result to the driver, in place of a reference to it (its
# max_direct_call_object_size is 100 KiB).
_MIN_BYTES = 128 << 10
_LOST_S = 30.0  # for Ray to notice the loss of an object whose node has died
_FILLER = "."  # a column of an object that would be smaller than _MIN_BYTES
_CONNECT_S = 2.0  # for a node to accept a connection
_NOTICE_S = 30.0  # for Ray to notice the death of a node
_POLL_S = 0.2
_unreachable: set[str] = set()  # ids of nodes that are alive for Ray, and are not asked again
Object = dict[str, Jagged]
Objects = Sequence[Mapping[str, Jagged]]


class LostColumnsError(RuntimeError):
    """Columns were in a process that has died."""


def store_columns(batch: Batch, skip: Collection[str] = ()) -> RemoteBatch:
    """Store columns along tokens on this node; return the batch by reference.

    Columns of one value a sample are in the RemoteBatch itself, with prompt_tokens and
    response_tokens if there are prompts and responses. Columns in `skip` are left out.
    """
    remote, objects = _divide_columns(batch, skip)
    return remote.with_references([ray.put(columns) for columns in objects])


def count_objects(num_bytes: int) -> int:
    """Return how many objects a call needs to return so many bytes in objects of the usual size.

    At least DEFAULT_OBJECTS, and at most MAX_OBJECTS.
    """
    return min(max(-(-num_bytes // _get_object_bytes()), DEFAULT_OBJECTS), MAX_OBJECTS)


def split_into_objects(
    batch: Batch, num_objects: int, num_parts: int = 0
) -> tuple[RemoteBatch, list[Object | None]]:
    """Split a batch into objects that a call returns as its results.

    Args:
        num_objects: Most objects of the columns that are stored together, and of each part.
        num_parts: Most columns NAME/PART.

    Returns:
        The batch with numbers of objects in place of references (`RemoteBatch.with_references`),
        and num_objects * (1 + num_parts) objects. Unused ones are None; the others are large enough
        that Ray does not send them with the reply.

    Raises:
        ValueError: there are more parts than the group of this process was started for.
    """
    remote, objects = _divide_columns(batch, (), num_objects)
    if len({id(column.locations) for column in remote.remote.values()}) > 1 + num_parts:
        parts = [name for name in remote.remote if is_part_column(name)]
        raise ValueError(
            f"new samples have the parts {parts}; allowed: {num_parts}, the num_parts of their "
            "WorkerGroup"
        )
    for columns in objects:
        missing = _MIN_BYTES - sum(column.values.nbytes for column in columns.values())
        if missing > 0:
            columns[_FILLER] = Jagged(np.zeros(missing, np.int8), np.array([0, missing]))
    num_results = num_objects * (1 + num_parts)
    return remote, [*objects, *[None] * (num_results - len(objects))]


def _divide_columns(
    batch: Batch, skip: Collection[str], num_objects: int | None = None
) -> tuple[RemoteBatch, list[Object]]:
    """Return the batch with numbers of objects in place of references, and the objects.

    `num_objects` limits the objects of columns that are together.
    """
    selected = {name: column for name, column in batch.columns.items() if name not in skip}
    local: dict[str, Column] = {n: c for n, c in selected.items() if not isinstance(c, Jagged)}
    for ids, name in (("prompt_ids", PROMPT_TOKENS), ("response_ids", RESPONSE_TOKENS)):
        if ids in selected:
            local[name] = batch.lengths(ids)
    together: dict[str, dict[str, Jagged]] = {}
    for name, column in selected.items():
        if isinstance(column, Jagged):
            together.setdefault(name if is_part_column(name) else "", {})[name] = column
    objects, remote, num_rows = list[Object](), dict[str, RemoteColumn](), len(batch)
    for columns in together.values():
        first = len(objects)
        object_index, row_index = np.zeros(num_rows, np.int32), np.zeros(num_rows, np.int32)
        for start, end in _choose_slices(columns, num_rows, num_objects):
            object_index[start:end] = len(objects) - first
            row_index[start:end] = np.arange(end - start)
            objects.append(_slice_columns(columns, start, end))
        numbers = tuple(range(first, len(objects)))
        locations = RowLocations(numbers, object_index, row_index)
        remote |= {n: RemoteColumn(locations, n, c.values[:0].copy()) for n, c in columns.items()}
    return RemoteBatch(Batch(local), remote, num_rows), objects


@functools.cache
def _get_object_bytes() -> int:
    return OBJECT_BYTES if len(ray.nodes()) > 1 else ONE_NODE_OBJECT_BYTES


def _choose_slices(
    columns: Mapping[str, Jagged], num_rows: int, num_objects: int | None
) -> list[tuple[int, int]]:
    """Return start and end of the consecutive rows of each object."""
    num_bytes = np.zeros(num_rows, np.int64)
    for column in columns.values():
        num_bytes += column.lengths * column.values.itemsize * math.prod(column.values.shape[1:])
    ends, max_bytes = np.cumsum(num_bytes), _get_object_bytes()
    cuts = [0] if num_rows else []
    while cuts and cuts[-1] < num_rows:
        start = cuts[-1]
        before = ends[start - 1] if start else 0
        cuts.append(max(int(np.searchsorted(ends, before + max_bytes, "right")), start + 1))
    if num_objects is not None and len(cuts) > num_objects + 1:
        # A row belongs to the equal share of all bytes that its first byte is in.
        shares = np.minimum((ends - num_bytes) * num_objects // ends[-1], num_objects - 1)
        cuts = [0, *(np.flatnonzero(np.diff(shares)) + 1).tolist(), num_rows]
    return list(pairwise(cuts))


def _slice_columns(columns: Mapping[str, Jagged], start: int, end: int) -> dict[str, Jagged]:
    # Columns with the same lengths share their offsets.
    offsets: dict[int, npt.NDArray[np.int64]] = {}
    slices = {}
    for name, column in columns.items():
        key = id(column.offsets)
        if key not in offsets:
            offsets[key] = column.offsets[start : end + 1] - column.offsets[start]
        values = column.values[column.offsets[start] : column.offsets[end]]
        slices[name] = Jagged(np.ascontiguousarray(values), offsets[key])
    return slices


def fetch_columns(batch: RemoteBatch, timeout_s: float | None = None) -> Batch:
    """Fetch all columns into this process.

    Consecutive rows of one object are read-only views of it. Other rows are joined when their
    values are first used.

    Raises:
        LostColumnsError: a process that has stored some has died.
        TimeoutError: an object has not arrived in `timeout_s`.
    """
    locations = {id(column.locations): column.locations for column in batch.remote.values()}
    references = dict.fromkeys(
        ref for location in locations.values() for ref in location.references
    )
    objects = dict(zip(references, _get_objects(list(references), timeout_s), strict=True))
    spans = {key: location.get_span() for key, location in locations.items()}
    columns: dict[str, Column] = {}
    fetched: dict[tuple[int, str], Jagged] = {}  # a stored column may have two names in the batch
    for name, column in batch.remote.items():
        key = id(column.locations), column.stored_name
        if key not in fetched:
            sources = [objects[ref][column.stored_name] for ref in column.locations.references]
            span = spans[id(column.locations)]
            if span:
                fetched[key] = _slice_rows(sources[0], *span)
            else:
                fetched[key] = _gather_rows(column, sources, batch, name)
        columns[name] = fetched[key]
    return Batch({**columns, **batch.local.columns})


def _get_objects(references: list[ray.ObjectRef], timeout_s: float | None) -> Objects:
    """Return the objects of references, in order; raise as `fetch_columns`."""
    try:
        objects: Objects = ray.get(references, timeout=timeout_s)
    except GetTimeoutError as error:
        raise TimeoutError(
            f"columns of {len(references)} objects have not arrived in {timeout_s:g} s"
        ) from error
    except RayError as error:
        raise LostColumnsError(
            f"columns are lost: the process that had stored them has died ({type(error).__name__})"
        ) from error
    return objects


def _gather_rows(
    column: RemoteColumn, sources: list[Jagged], batch: RemoteBatch, name: str
) -> Jagged:
    """Return the rows of a column from its objects; rows that have none get FILL_VALUES."""
    numbers, rows = column.locations.objects, column.locations.rows
    if not len(rows):
        return Jagged(column.empty, np.zeros(1, np.int64))
    if (is_missing := numbers == NO_OBJECT).any():
        lengths = batch.lengths("response_ids")[is_missing]
        numbers, rows = numbers.copy(), rows.copy()
        numbers[is_missing], rows[is_missing] = len(sources), np.arange(len(lengths))
        fill = np.full(lengths.sum(), FILL_VALUES[name])
        sources.append(Jagged(fill, _compute_offsets(lengths)))
    return GatheredRows(sources, numbers, rows)


def _slice_rows(source: Jagged, first: int, end: int) -> Jagged:
    """Return the rows from `first` up to, not including, `end` as a view."""
    if end - first == len(source):
        return source
    offsets = source.offsets[first : end + 1]
    return Jagged(source.values[offsets[0] : offsets[-1]], offsets - offsets[0])


def _compute_offsets(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


class GatheredRows(Jagged):
    """Rows of several objects, joined when `values` is first used.

    `take` copies its rows straight from the objects: a micro-batch does not copy the batch, and an
    unused column costs nothing.
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
            is_in_source = numbers == number
            lengths[is_in_source] = sources[number].lengths[rows[is_in_source]]
        slots = {"_sources": sources, "_numbers": numbers, "_rows": rows, "_joined": None}
        for name, value in {**slots, "offsets": _compute_offsets(lengths)}.items():
            object.__setattr__(self, name, value)

    def __getitem__(self, row: int) -> Array:
        return self._sources[int(self._numbers[row])][int(self._rows[row])]

    @property
    def values(self) -> Array:
        if self._joined is None:
            runs = list(_iterate_runs(self._numbers, self._rows))
            parts = [_slice_rows(self._sources[n], row, row + num).values for n, row, num in runs]
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


def _iterate_runs(numbers: Rows, rows: Rows) -> Iterator[tuple[int, int, int]]:
    """Yield object, first row and count of consecutive rows in one object."""
    is_cut = (np.diff(numbers) != 0) | (np.diff(rows) != 1)
    bounds = [0, *(np.flatnonzero(is_cut) + 1).tolist(), len(rows)]
    for first, end in pairwise(bounds):
        yield int(numbers[first]), int(rows[first]), end - first


def find_lost_rows(batches: Sequence[RemoteBatch]) -> list[npt.NDArray[np.bool_]]:
    """Return for each batch whether an object with columns of a row died with its node: [samples].

    Only for objects that this process owns, such as those of `split_into_objects`; objects are not
    fetched. While all nodes live, the cost is a connection to each of them, whatever the number of
    objects.
    """
    is_alive = check_nodes()
    if all(is_alive.values()):
        return [np.zeros(len(batch), np.bool_) for batch in batches]
    locations = [
        list({id(c.locations): c.locations for c in batch.remote.values()}.values())
        for batch in batches
    ]
    references = dict.fromkeys(
        ref
        for batch_locations in locations
        for location in batch_locations
        for ref in location.references
    )
    lost = _find_lost_references(list(references), {node for node in is_alive if is_alive[node]})
    masks = []
    for batch, batch_locations in zip(batches, locations, strict=True):
        is_lost = np.zeros(len(batch), np.bool_)
        for location in batch_locations:
            numbers = [number for number, ref in enumerate(location.references) if ref in lost]
            is_lost |= np.isin(location.objects, numbers)
        masks.append(is_lost)
    return masks


def _find_lost_references(references: list[ray.ObjectRef], alive: set[str]) -> set[ray.ObjectRef]:
    """Return references whose objects are lost; `alive` are the ids of living nodes.

    Ray replaces a lost object by an error, in the store of this node. So an object on another
    living node is not lost, and all others can be read here.
    """
    elsewhere = alive - {ray.get_runtime_context().get_node_id()}
    locations = get_local_object_locations(references)
    nodes = {ref: locations[ref]["node_ids"] if ref in locations else () for ref in references}
    unconfirmed = [ref for ref, node_ids in nodes.items() if elsewhere.isdisjoint(node_ids)]
    if _are_available(unconfirmed):
        return set()
    return {ref for ref in unconfirmed if not _are_available([ref])}


def _are_available(references: list[ray.ObjectRef]) -> bool:
    """Return whether all of these objects can be read on this node."""
    try:
        ray.get(references, timeout=_LOST_S)
    except RayError:
        return False
    return True


def check_nodes() -> dict[str, bool]:
    """Return whether each node is alive, by Ray's node id.

    Ray takes seconds to notice a death. So with several nodes each raylet is asked for a
    connection. While one refuses, wait until Ray knows of its death or it answers again. A node for
    which that takes too long is not asked again.
    """
    deadline = time.monotonic() + _NOTICE_S
    while True:
        nodes = ray.nodes()
        alive = [node for node in nodes if node["Alive"] and node["NodeID"] not in _unreachable]
        silent = run_coroutine(_find_silent_nodes(alive)) if len(nodes) > 1 else []
        if not silent:
            return {node["NodeID"]: node["Alive"] for node in nodes}
        if time.monotonic() > deadline:
            _give_up(silent)
        time.sleep(_POLL_S)


def _give_up(nodes: Sequence[dict[str, Any]]) -> None:
    """Print which nodes refuse connections, and stop asking them."""
    names = ", ".join(f"{n['NodeName']} (port {n['NodeManagerPort']})" for n in nodes)
    print(
        f"no connection from the driver to Ray on {names}, which Ray says live: if one of "
        "them dies, its samples count as lost only once Ray notices"
    )
    _unreachable.update(node["NodeID"] for node in nodes)


async def _find_silent_nodes(nodes: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the nodes whose raylet does not accept a connection in _CONNECT_S."""

    async def can_connect(node: dict[str, Any]) -> bool:
        host, port = node["NodeManagerAddress"], node["NodeManagerPort"]
        with contextlib.suppress(OSError):  # TimeoutError is one
            async with asyncio.timeout(_CONNECT_S):
                _, writer = await asyncio.open_connection(host, port)
            writer.close()
            return True
        return False

    answers = await asyncio.gather(*map(can_connect, nodes))
    return [node for node, has_answered in zip(nodes, answers, strict=True) if not has_answered]
