"""A batch by reference: the driver has one value a sample; columns along tokens are elsewhere.

    batch = servers.generate(...)  # columns stay with the server that made them
    batch = batch.take(rows)  # metadata only
    batch = actor.call(ModelWorker.compute_log_probs, batch, temperature=1.0)
    actor.call(ModelWorker.update, batch.select("response_ids", ...))  # each rank fetches its rows

Columns along tokens are in Ray's object store: an object has some columns of some samples, and a
column is a location in objects for each row. Pure: no Ray, references are opaque
(controller/object_columns.py stores and fetches).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mcore_rl.data.batch import FILL_VALUES, Array, Batch, Samples

NO_OBJECT = (
    -1
)  # the object of a row without an entry in a column, which gets its value in FILL_VALUES
PROMPT_TOKENS, RESPONSE_TOKENS = LENGTHS = "prompt_tokens", "response_tokens"  # as columns
_MAX_CODES = 128  # distinct numbers that a code of one byte tells apart
_LENGTHS = {"prompt_ids": PROMPT_TOKENS}  # lengths by column; of all others RESPONSE_TOKENS
Rows = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class RowLocations:
    """The object and row of each sample, for columns that were stored together."""

    references: tuple[Any, ...]  # Ray's, to objects
    objects: Rows  # [samples]: index into `references`, or NO_OBJECT
    rows: Rows  # [samples]: row in that object

    def get_span(self) -> tuple[int, int] | None:
        """Return first row and end, if these are consecutive rows of one object."""
        if not len(self.rows) or self.objects.any() or (np.diff(self.rows) != 1).any():
            return None
        return int(self.rows[0]), int(self.rows[-1]) + 1

    def take(self, index: npt.NDArray[np.int64]) -> RowLocations:
        """Select rows; drop references to objects of which no row is left, so they may be freed."""
        objects, rows = self.objects[index], self.rows[index]
        used = np.flatnonzero(np.bincount(objects[objects != NO_OBJECT]))
        if len(used) == len(self.references):
            return RowLocations(self.references, objects, rows)
        new_index = np.full(len(self.references) + 1, NO_OBJECT, np.int32)  # last: of NO_OBJECT
        new_index[used] = np.arange(len(used), dtype=np.int32)
        return RowLocations(tuple(self.references[i] for i in used), new_index[objects], rows)

    @staticmethod
    def create_missing(num_rows: int) -> RowLocations:
        """Return locations of rows that have no entry."""
        return RowLocations(
            (), np.full(num_rows, NO_OBJECT, np.int32), np.zeros(num_rows, np.int32)
        )

    @staticmethod
    def concat(parts: Sequence[RowLocations]) -> RowLocations:
        """Join the rows of several locations."""
        starts = np.cumsum([0] + [len(part.references) for part in parts[:-1]])
        objects = [
            np.where(part.objects == NO_OBJECT, NO_OBJECT, part.objects + start).astype(np.int32)
            for part, start in zip(parts, starts, strict=True)
        ]
        references = tuple(reference for part in parts for reference in part.references)
        rows = np.concatenate([part.rows for part in parts])
        return RowLocations(references, np.concatenate(objects), rows)


@dataclass(frozen=True, slots=True, eq=False)
class RemoteColumn:
    """A column along tokens."""

    locations: RowLocations  # the same object for columns that were stored together
    stored_name: str  # in the objects; a column may have been renamed since
    empty: Array  # [0, ...]: dtype and shape of an entry


class RemoteBatch(Samples):
    """Rows of samples by reference; immutable, as a Batch.

    `local` has the columns of one value a sample, with prompt_tokens and response_tokens.
    `select, union, concat, take, chunk` move metadata only.
    """

    def __init__(
        self, local: Batch, remote: Mapping[str, RemoteColumn], num_rows: int | None = None
    ) -> None:
        """Create a batch.

        Args:
            num_rows: Rows of a batch that may have no column.

        Raises:
            ValueError: columns differ in their number of rows.
        """
        lengths = {name: len(column.locations.rows) for name, column in remote.items()}
        counts = {*lengths.values(), *([len(local)] if local.columns else [])}
        if len(counts) > 1:
            raise ValueError(f"remote columns of a batch of {len(local)} rows have {lengths}")
        self.local, self.remote = local, dict(remote)
        self._num_rows = max(counts, default=0) if num_rows is None else num_rows

    def __reduce__(self) -> tuple[Any, ...]:
        local = {name: _pack_column(self.local.array(name)) for name in self.local.columns}
        stored: dict[int, tuple[Any, dict[str, Any]]] = {}  # by the id of their locations
        for name, column in self.remote.items():
            locations, empty = column.locations, column.empty
            if id(locations) not in stored:
                objects, rows = _pack_column(locations.objects), _pack_column(locations.rows)
                stored[id(locations)] = (locations.references, objects, rows), {}
            columns = stored[id(locations)][1]
            columns[name] = column.stored_name, empty.dtype.char, empty.shape[1:]
        return _unpack_batch, (local, list(stored.values()), len(self))

    def __len__(self) -> int:
        return self._num_rows

    def __contains__(self, name: str) -> bool:
        return name in self.local or name in self.remote

    @property
    def names(self) -> list[str]:
        return [*self.local.columns, *self.remote]

    def array(self, name: str) -> Array:
        """Return a column of one value a sample.

        Raises:
            TypeError: it is along tokens, and not in the driver.
            KeyError: there is none of that name.
        """
        if name in self.remote:
            raise TypeError(f"column {name!r} is along tokens: it is not in the driver")
        return self.local.array(name)

    def lengths(self, name: str) -> npt.NDArray[np.int64]:
        """Return the number of entries of a column along tokens: [samples]."""
        return self.local.array(_LENGTHS.get(name, RESPONSE_TOKENS)).astype(np.int64)

    @property
    def num_tokens(self) -> npt.NDArray[np.int64]:
        """Prompt and response tokens of each sample."""
        return self.lengths("prompt_ids") + self.lengths("response_ids")

    def with_columns(self, **columns: Array) -> RemoteBatch:
        """Add or replace columns of one value a sample."""
        return RemoteBatch(self.local.with_columns(**columns), self.remote)

    def select(self, *names: str) -> RemoteBatch:
        """Select columns; lengths always stay.

        Raises:
            KeyError: there is none of a name.
        """
        if missing := [name for name in names if name not in self]:
            raise KeyError(f"the batch has no column {missing[0]!r}; it has {sorted(self.names)}")
        local_names = {*names, *LENGTHS}
        local = Batch({name: c for name, c in self.local.columns.items() if name in local_names})
        remote = {name: self.remote[name] for name in names if name in self.remote}
        return RemoteBatch(local, remote, len(self))

    def drop_references(self) -> RemoteBatch:
        """Drop all references: objects may be freed, and remote columns cannot be fetched."""
        missing = RowLocations.create_missing(len(self))
        remote = {n: RemoteColumn(missing, c.stored_name, c.empty) for n, c in self.remote.items()}
        return RemoteBatch(self.local, remote, len(self))

    def drop_lengths(self) -> RemoteBatch:
        """Drop lengths for a worker that fetches the columns, unless it needs them to fill some."""
        columns = self.remote.values()
        if not columns or any((c.locations.objects == NO_OBJECT).any() for c in columns):
            return self
        local = {n: c for n, c in self.local.columns.items() if n not in LENGTHS}
        return RemoteBatch(Batch(local), self.remote, len(self))

    def select_part(self, part: str) -> RemoteBatch:
        """Drop the remote columns "NAME/PART" of other parts."""
        dropped = [n for n in self.remote if is_part_column(n) and n.partition("/")[2] != part]
        return self.drop_columns(*dropped)

    def drop_columns(self, *names: str) -> RemoteBatch:
        """Drop columns."""
        return self.select(*(name for name in self.names if name not in names))

    def rename_columns(self, **names: str) -> RemoteBatch:
        """Rename remote columns: rename_columns(log_probs="reference_log_probs")."""
        remote = {names.get(n, n): c for n, c in self.remote.items()}
        return RemoteBatch(self.local, remote, len(self))

    def union(self, other: RemoteBatch) -> RemoteBatch:
        """Add the columns of `other`, which has the same samples in the same order.

        Raises:
            ValueError: they differ in rows.
        """
        if len(self) != len(other):
            raise ValueError(f"the union of batches of {len(self)} and {len(other)} rows")
        local = self.local.with_columns(**other.local.columns)
        return RemoteBatch(local, {**self.remote, **other.remote})

    def with_references(self, references: Sequence[Any]) -> RemoteBatch:
        """Replace the numbers of objects by references."""
        new: dict[int, RowLocations] = {}
        for old in {id(c.locations): c.locations for c in self.remote.values()}.values():
            in_order = tuple(references[number] for number in old.references)
            new[id(old)] = RowLocations(in_order, old.objects, old.rows)
        return RemoteBatch(self.local, self._move_columns(new), len(self))

    def _move_columns(self, new: Mapping[int, RowLocations]) -> dict[str, RemoteColumn]:
        """Return the columns at new locations, given by the id of the old."""
        return {
            name: RemoteColumn(new[id(c.locations)], c.stored_name, c.empty)
            for name, c in self.remote.items()
        }

    def take(self, rows: Sequence[int]) -> RemoteBatch:
        """Select rows, in this order."""
        index = np.asarray(rows, dtype=np.int64)
        old = {id(c.locations): c.locations for c in self.remote.values()}
        new = {key: locations.take(index) for key, locations in old.items()}
        return RemoteBatch(self.local.take(index.tolist()), self._move_columns(new), len(index))

    def chunk(self, num: int) -> list[RemoteBatch]:
        """Split into `num` parts of consecutive rows, whose sizes differ by one at most."""
        return [self.take(part.tolist()) for part in np.array_split(np.arange(len(self)), num)]

    @staticmethod
    def concat(batches: Sequence[RemoteBatch]) -> RemoteBatch:
        """Join rows. Fill columns of FILL_VALUES that a batch lacks, as Batch.concat does."""
        filled = [batch for batch in batches if len(batch)] or list(batches[:1])
        names = dict.fromkeys(name for batch in filled for name in batch.remote)
        # By the ids of their parts, which are referred to as long as their ids are in use.
        known: dict[tuple[int, ...], tuple[RowLocations, list[RowLocations]]] = {}
        remote: dict[str, RemoteColumn] = {}
        for name in names:
            parts: list[RowLocations] = []
            stored = {b.remote[name].stored_name for b in filled if name in b.remote}
            if len(stored) > 1:
                raise ValueError(f"column {name!r} is stored under the names {sorted(stored)}")
            for batch in filled:
                if name in batch.remote:
                    parts.append(batch.remote[name].locations)
                elif name in FILL_VALUES:
                    parts.append(RowLocations.create_missing(len(batch)))
                else:
                    raise KeyError(f"a batch to be joined has no column {name!r}")
            key = tuple(map(id, parts))
            if key not in known:
                known[key] = RowLocations.concat(parts), parts
            empty = next(b.remote[name].empty for b in filled if name in b.remote)
            remote[name] = RemoteColumn(known[key][0], stored.pop(), empty)
        return RemoteBatch(Batch.concat([batch.local for batch in filled]), remote)


def is_part_column(name: str) -> bool:
    """Return whether a column along tokens is for the readers of one part, as NAME/PART."""
    return "/" in name


def _unpack_batch(local: Mapping[str, Any], stored: Sequence[Any], num_rows: int) -> RemoteBatch:
    remote = {}
    for (references, objects, rows), columns in stored:
        locations = RowLocations(references, _unpack_column(objects), _unpack_column(rows))
        for name, (stored_name, dtype, shape) in columns.items():
            remote[name] = RemoteColumn(locations, stored_name, np.empty((0, *shape), dtype))
    columns = {name: _unpack_column(packed) for name, packed in local.items()}
    return RemoteBatch(Batch(columns), remote, num_rows)


def _pack_column(column: Array) -> Any:
    """Pack a column to be sent: integers in as few bytes as they need, equal texts once.

    Fractions with few distinct values, such as rewards, are sent once, too, bit for bit. numpy's
    own pickle of an array takes more than a rank's rows of a column.
    """
    kind, sent = column.dtype.kind, column
    if kind == "U":
        texts, codes = np.unique(column, return_inverse=True)
        return column.dtype.str, texts.tolist(), _pack_column(codes.reshape(column.shape))
    if kind not in "iufb":
        return column
    shape = len(column) if column.ndim == 1 else column.shape
    if kind == "f" and column.ndim == 1 and column.itemsize in (4, 8):
        bits, codes = np.unique(column.view(f"i{column.itemsize}"), return_inverse=True)
        if len(bits) <= _MAX_CODES and 2 * len(bits) < len(column):
            return column.dtype.str, bits.view(column.dtype).tobytes(), _pack_column(codes)
    if kind == "i" and column.size:
        steps = np.diff(column, axis=0)
        if column.ndim == 1 and not (steps != steps[:1]).any():
            return column.dtype.char, shape, int(column[0]), int(steps[0]) if len(steps) else 0
        sent = column.astype(_choose_integer(int(column.min()), int(column.max())))
    return column.dtype.char, shape, sent.dtype.char, sent.tobytes()


def _choose_integer(least: int, most: int) -> npt.DTypeLike:
    kinds = (np.iinfo(kind) for kind in (np.int8, np.int16, np.int32, np.int64))
    return next(kind.dtype for kind in kinds if kind.min <= least and most <= kind.max)


def _unpack_column(packed: Any) -> Array:
    if isinstance(packed, np.ndarray):
        return packed
    if len(packed) == 3:
        dtype, distinct, codes = packed
        is_text = isinstance(distinct, list)
        values = np.array(distinct, dtype) if is_text else np.frombuffer(distinct, dtype)
        column: Array = values[_unpack_column(codes)]
        return column
    dtype, shape, sent, content = packed
    if isinstance(sent, int):  # evenly spaced: the first, and the step
        spaced: Array = (sent + content * np.arange(shape)).astype(dtype)
        return spaced
    return np.frombuffer(content, sent).astype(dtype).reshape(shape)
