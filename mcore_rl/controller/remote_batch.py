"""A batch by reference: what the driver has of samples whose columns along tokens are elsewhere.

    batch = servers.generate(...)                 # columns stay with the server that made them
    batch = batch.take(rows)                      # metadata only
    batch = batch.union(actor.compute_log_probs(batch, temperature=1.0))
    actor.update(batch.select("response_ids", ...))   # each rank fetches its rows

The columns of one value a sample are in the driver. Those along tokens are in Ray's object store:
an object has some columns of some samples, and a column is a place in objects for each row. Pure:
no Ray, references are opaque (controller/object_columns.py stores and fetches).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mcore_rl.data.batch import FILL_VALUES, Array, Batch, Samples

NOWHERE = -1  # the object of a row that has no entry in a column, and gets what FILLED says
PROMPT_TOKENS, RESPONSE_TOKENS = LENGTHS = "prompt_tokens", "response_tokens"  # as columns
_FEW = 128  # different numbers that a code of one byte tells apart
_LENGTHS = {"prompt_ids": PROMPT_TOKENS}  # of other columns: those of the response
Rows = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Where the rows of columns are that were stored together."""

    references: tuple[Any, ...]  # Ray's, of objects
    objects: Rows  # [samples]: which of them has the row
    rows: Rows  # [samples]: its number in that object

    def span(self) -> tuple[int, int] | None:
        """The first row and the end, if these are rows of one object that follow each other."""
        if not len(self.rows) or self.objects.any() or (np.diff(self.rows) != 1).any():
            return None
        return int(self.rows[0]), int(self.rows[-1]) + 1

    def take(self, index: npt.NDArray[np.int64]) -> Places:
        """Without the objects that no row is left of: they may go."""
        objects, rows = self.objects[index], self.rows[index]
        used = np.unique(objects[objects != NOWHERE])
        moved = np.full(len(self.references) + 1, NOWHERE, np.int32)  # its last entry: of NOWHERE
        moved[used] = np.arange(len(used), dtype=np.int32)
        return Places(tuple(self.references[i] for i in used), moved[objects], rows)

    @staticmethod
    def nowhere(num: int) -> Places:
        return Places((), np.full(num, NOWHERE, np.int32), np.zeros(num, np.int32))

    @staticmethod
    def concat(parts: Sequence[Places]) -> Places:
        starts = np.cumsum([0] + [len(part.references) for part in parts[:-1]])
        objects = [
            np.where(part.objects == NOWHERE, NOWHERE, part.objects + start).astype(np.int32)
            for part, start in zip(parts, starts, strict=True)
        ]
        references = tuple(one for part in parts for one in part.references)
        return Places(references, np.concatenate(objects), np.concatenate([p.rows for p in parts]))


@dataclass(frozen=True, slots=True, eq=False)
class RemoteColumn:
    """A column along tokens."""

    places: Places  # the same object for columns that were stored together
    stored_name: str  # in the objects; a column may be renamed since
    empty: Array  # [0, ...]: with its dtype and the shape of an entry


class RemoteBatch(Samples):
    """Rows of samples by reference; immutable, as a Batch.

    `own` has the columns of one value a sample, among them prompt_tokens and response_tokens.
    `select, union, concat, take, chunk` move metadata only.
    """

    def __init__(
        self, own: Batch, remote: Mapping[str, RemoteColumn], num_rows: int | None = None
    ) -> None:
        """`num_rows` of a batch that may have no column.

        Raises ValueError for columns of other numbers of rows than `own` has.
        """
        lengths = {name: len(column.places.rows) for name, column in remote.items()}
        counts = {*lengths.values(), *([len(own)] if own.columns else [])}
        if len(counts) > 1:
            raise ValueError(f"remote columns of a batch of {len(own)} rows have {lengths}")
        self.own, self.remote = own, dict(remote)
        self._num_rows = max(counts, default=0) if num_rows is None else num_rows

    def __reduce__(self) -> tuple[Any, ...]:
        own = {name: _packed(self.own.array(name)) for name in self.own.columns}
        stored: dict[int, tuple[Any, dict[str, Any]]] = {}  # by their places
        for name, column in self.remote.items():
            places, empty = column.places, column.empty
            if id(places) not in stored:
                packed = places.references, _packed(places.objects), _packed(places.rows)
                stored[id(places)] = packed, {}
            columns = stored[id(places)][1]
            columns[name] = column.stored_name, empty.dtype.char, empty.shape[1:]
        return _restored, (own, list(stored.values()), len(self))

    def __len__(self) -> int:
        return self._num_rows

    def __contains__(self, name: str) -> bool:
        return name in self.own or name in self.remote

    @property
    def names(self) -> list[str]:
        return [*self.own.columns, *self.remote]

    def array(self, name: str) -> Array:
        """A column of one value a sample.

        Raises:
            TypeError: it is along tokens, and not in the driver.
            KeyError: there is none of that name.
        """
        if name in self.remote:
            raise TypeError(f"column {name!r} is along tokens: it is not in the driver")
        return self.own.array(name)

    def lengths(self, name: str) -> npt.NDArray[np.int64]:
        """[samples]: how many entries a column along tokens has."""
        return self.own.array(_LENGTHS.get(name, RESPONSE_TOKENS)).astype(np.int64)

    @property
    def num_tokens(self) -> npt.NDArray[np.int64]:
        """Prompt and response tokens of each sample."""
        return self.lengths("prompt_ids") + self.lengths("response_ids")

    def with_columns(self, **columns: Array) -> RemoteBatch:
        """With columns of one value a sample."""
        return RemoteBatch(self.own.with_columns(**columns), self.remote)

    def select(self, *names: str) -> RemoteBatch:
        """With these columns only. Lengths stay.

        Raises:
            KeyError: there is none of a name.
        """
        if missing := [name for name in names if name not in self]:
            raise KeyError(f"the batch has no column {missing[0]!r}; it has {sorted(self.names)}")
        kept = {*names, *LENGTHS}
        own = Batch({name: c for name, c in self.own.columns.items() if name in kept})
        remote = {name: self.remote[name] for name in names if name in self.remote}
        return RemoteBatch(own, remote, len(self))

    def let_go(self) -> RemoteBatch:
        """The same columns without what they refer to: none of it can be fetched any more."""
        nowhere = Places.nowhere(len(self))
        remote = {n: RemoteColumn(nowhere, c.stored_name, c.empty) for n, c in self.remote.items()}
        return RemoteBatch(self.own, remote, len(self))

    def to_read(self) -> RemoteBatch:
        """As a worker needs it: without lengths, which its columns say, where none is filled in."""
        if not self.remote or any(
            (c.places.objects == NOWHERE).any() for c in self.remote.values()
        ):
            return self
        kept = {n: c for n, c in self.own.columns.items() if n not in LENGTHS}
        return RemoteBatch(Batch(kept), self.remote, len(self))

    def of_part(self, part: str) -> RemoteBatch:
        """Of the columns "NAME/PART" along tokens with those of that part only."""
        others = [n for n in self.remote if is_of_part(n) and n.partition("/")[2] != part]
        return self.drop_columns(*others)

    def drop_columns(self, *names: str) -> RemoteBatch:
        return self.select(*(name for name in self.names if name not in names))

    def rename_columns(self, **names: str) -> RemoteBatch:
        """With remote columns under other names: renamed(log_probs="reference_log_probs")."""
        remote = {names.get(n, n): c for n, c in self.remote.items()}
        return RemoteBatch(self.own, remote, len(self))

    def union(self, other: RemoteBatch) -> RemoteBatch:
        """The columns of both, of the same samples in the same order; those of `other` count.

        Raises:
            ValueError: they differ in rows.
        """
        if len(self) != len(other):
            raise ValueError(f"the union of batches of {len(self)} and {len(other)} rows")
        own = self.own.with_columns(**other.own.columns)
        return RemoteBatch(own, {**self.remote, **other.remote})

    def at(self, references: Sequence[Any]) -> RemoteBatch:
        """With references in the place of their numbers."""
        moved: dict[int, Places] = {}
        for places in {id(c.places): c.places for c in self.remote.values()}.values():
            found = tuple(references[number] for number in places.references)
            moved[id(places)] = Places(found, places.objects, places.rows)
        return self._at(moved)

    def _at(self, moved: Mapping[int, Places]) -> RemoteBatch:
        """`moved`: by the id of the places that were."""
        columns = self.remote.items()
        remote = {n: RemoteColumn(moved[id(c.places)], c.stored_name, c.empty) for n, c in columns}
        return RemoteBatch(self.own, remote, len(self))

    def take(self, rows: Sequence[int]) -> RemoteBatch:
        index = np.asarray(rows, dtype=np.int64)
        taken = {id(c.places): c.places for c in self.remote.values()}
        moved = {key: places.take(index) for key, places in taken.items()}
        remote = {
            name: RemoteColumn(moved[id(c.places)], c.stored_name, c.empty)
            for name, c in self.remote.items()
        }
        return RemoteBatch(self.own.take(index.tolist()), remote, len(index))

    def chunk(self, num: int) -> list[RemoteBatch]:
        """`num` parts of consecutive rows, whose numbers differ by one at most."""
        return [self.take(part.tolist()) for part in np.array_split(np.arange(len(self)), num)]

    @staticmethod
    def concat(batches: Sequence[RemoteBatch]) -> RemoteBatch:
        """What some lack of the columns that not every sample has is filled in, as Batch.concat."""
        filled = [batch for batch in batches if len(batch)] or list(batches[:1])
        names = dict.fromkeys(name for batch in filled for name in batch.remote)
        known: dict[tuple[int, ...], tuple[Places, list[Places]]] = {}  # what ids are of stays
        remote: dict[str, RemoteColumn] = {}
        for name in names:
            parts: list[Places] = []
            stored = {b.remote[name].stored_name for b in filled if name in b.remote}
            if len(stored) > 1:
                raise ValueError(f"column {name!r} is stored under the names {sorted(stored)}")
            for batch in filled:
                if name not in batch.remote and name not in FILL_VALUES:
                    raise KeyError(f"a batch to be joined has no column {name!r}")
                has = name in batch.remote
                parts.append(batch.remote[name].places if has else Places.nowhere(len(batch)))
            key = tuple(map(id, parts))
            if key not in known:
                known[key] = Places.concat(parts), parts
            empty = next(b.remote[name].empty for b in filled if name in b.remote)
            remote[name] = RemoteColumn(known[key][0], stored.pop(), empty)
        return RemoteBatch(Batch.concat([batch.own for batch in filled]), remote)


def is_of_part(name: str) -> bool:
    """Of a column along tokens: whether it is for those who read one part of NAME/PART."""
    return "/" in name


def _restored(own: Mapping[str, Any], stored: Sequence[Any], num_rows: int) -> RemoteBatch:
    remote = {}
    for (references, objects, rows), columns in stored:
        places = Places(references, _unpacked(objects), _unpacked(rows))
        for name, (stored_name, dtype, shape) in columns.items():
            remote[name] = RemoteColumn(places, stored_name, np.empty((0, *shape), dtype))
    columns = {name: _unpacked(one) for name, one in own.items()}
    return RemoteBatch(Batch(columns), remote, num_rows)


def _packed(column: Array) -> Any:
    """To travel: numbers as bytes, integers in as few as they need; equal texts once.

    Fractions too, where few differ, as rewards do: bit for bit. numpy's own pickle of an array
    takes more than what a rank gets of a column.
    """
    kind, sent = column.dtype.kind, column
    if kind == "U":
        texts, codes = np.unique(column, return_inverse=True)
        return column.dtype.str, texts.tolist(), _packed(codes.reshape(column.shape))
    if kind not in "iufb":
        return column
    shape = len(column) if column.ndim == 1 else column.shape
    if kind == "f" and column.ndim == 1 and column.itemsize in (4, 8):
        bits, codes = np.unique(column.view(f"i{column.itemsize}"), return_inverse=True)
        if len(bits) <= _FEW and 2 * len(bits) < len(column):
            return column.dtype.str, bits.view(column.dtype).tobytes(), _packed(codes)
    if kind == "i" and column.size:
        steps = np.diff(column, axis=0)
        if column.ndim == 1 and not (steps != steps[:1]).any():
            return column.dtype.char, shape, int(column[0]), int(steps[0]) if len(steps) else 0
        sent = column.astype(_narrowest(int(column.min()), int(column.max())))
    return column.dtype.char, shape, sent.dtype.char, sent.tobytes()


def _narrowest(least: int, most: int) -> npt.DTypeLike:
    kinds = (np.iinfo(kind) for kind in (np.int8, np.int16, np.int32, np.int64))
    return next(kind.dtype for kind in kinds if kind.min <= least and most <= kind.max)


def _unpacked(packed: Any) -> Array:
    if isinstance(packed, np.ndarray):
        return packed
    if len(packed) == 3:
        dtype, different, codes = packed
        is_text = isinstance(different, list)
        values = np.array(different, dtype) if is_text else np.frombuffer(different, dtype)
        return values[_unpacked(codes)]
    dtype, shape, sent, content = packed
    if isinstance(sent, int):  # evenly spaced: the first, and the step
        return (sent + content * np.arange(shape)).astype(dtype)
    return np.frombuffer(content, sent).astype(dtype).reshape(shape)
