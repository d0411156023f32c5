"""Random access to rows of data: parquet, JSONL, folders of `datasets`, functions of a user.

No reader keeps a file in memory:

- parquet: a row group at a time, with a cache of the last ones.
- JSONL: by the offset of each line, 8 bytes per row.
- a folder of `Dataset.save_to_disk`: Arrow files, mapped into memory.
- `module:function` or `path/to/file.py:function`: rows that the function returns.

`Digest` tells whether a resumed run reads the same rows.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from abc import ABC, abstractmethod
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mcore_rl.config.checks import check_exists
from mcore_rl.config.errors import ConfigError, describe_error
from mcore_rl.config.import_path import load_user_function
from mcore_rl.config.json_file import MAX_BYTES as MAX_LINE_BYTES
from mcore_rl.config.json_file import parse_json_object, read_json_object
from mcore_rl.config.python_objects import get_object, is_object_name
from mcore_rl.config.regular_file import check_regular, find_below, open_regular_fd

ALLOWED = (
    "a parquet file, a file.jsonl, a folder of save_to_disk of `datasets`, or an import path, "
    "module:function or path/to/file.py:function"
)
CACHE_BYTES = 64 << 20  # row groups of a parquet file in memory, at least one
MAX_GROUP_BYTES = 2 << 30  # of a row group
_CHUNK_ROWS = 1000  # rows converted to Python objects at a time when a file is read in order
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_IMPORT_PATH = r"(.+\.py|[\w.]+):\w+"


@dataclass(frozen=True, slots=True)
class Row:
    """The columns of a row, its source and its index."""

    source: str  # setting and file, as in "data.train_file='train.parquet'"
    index: int
    values: dict[str, Any]
    # Objects have the keys of all rows, with null for those that a row does not have.
    is_table: bool = False

    def build_error(self, reason: str) -> ConfigError:
        """Build an error that names source and row."""
        return ConfigError(f"{self.source}: row {self.index} {reason}")

    def check_text(self) -> Row:
        """Return the row; ConfigError if a text has half a surrogate pair, as JSON allows.

        No tokenizer takes one.
        """
        for name, value in self.values.items():
            self._check_text(name, value)
        return self

    def parse_json(self, column: str, text: str) -> Any:
        """Return the value of JSON text in a column.

        Raises:
            ConfigError: a text in it has half a surrogate pair.
            ValueError: it is no JSON.
        """
        value = json.loads(text)
        self._check_text(column, value)
        return value

    def _check_text(self, column: str, value: Any) -> None:
        values = [value]
        while values:
            if halves := [v for v in values if isinstance(v, str) and _SURROGATE.search(v)]:
                raise self.build_error(
                    f"of column {column!r} has half a surrogate pair in {halves[0][:80]!r}; "
                    "allowed: whole characters"
                )
            inner = (
                [*v, *v.values()] if isinstance(v, dict) else v
                for v in values
                if isinstance(v, dict | list)
            )
            values = [v for container in inner for v in container]


class RowSource(ABC):
    """Rows of a source, by index or in order."""

    def __init__(self, source: str) -> None:
        self.source = source

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, row: int) -> Row: ...

    def __iter__(self) -> Iterator[Row]:
        return (self[row] for row in range(len(self)))

    def read_first(self) -> Row:
        """Return the first row, at little cost."""
        return self[0]


def open_rows(name: str | Path, setting: str) -> RowSource:
    """Open the rows of a file, a folder or a function; `setting` names it in errors.

    Raises:
        ConfigError: it does not exist, cannot be read, or has no rows. Reading a damaged row raises
            it, too.
    """
    path, source = Path(name), f"{setting}={str(name)!r}"
    rows: RowSource
    if is_object_name(str(name)):
        value = get_object(setting, str(name))
        rows = _FunctionRows(source, value if callable(value) else lambda: value)
    elif not path.exists() and re.fullmatch(_IMPORT_PATH, str(name)):
        rows = _FunctionRows(source, load_user_function(setting, str(name)))
    else:
        check_exists(setting, name)
        rows = open_file(path, source)
    if not len(rows):
        raise ConfigError(f"{source} has no rows")
    return rows


def open_file(path: Path, source: str, *, max_rows: int | None = None) -> RowSource:
    """Open the rows of an existing path; `source` begins its errors.

    Args:
        max_rows: Rows of JSONL to look for. None: all.
    """
    if path.is_dir():
        return _ArrowRows(source, path)
    if path.suffix == ".jsonl":
        return _JsonRows(source, path, max_rows)
    return _ParquetRows(source, path)


def read_first_row(name: str, setting: str) -> Row | None:
    """Read the first row of a file, folder or list, and little else of it; None for a function.

    Raises:
        ConfigError: As `open_rows`.
    """
    path, source = Path(name), f"{setting}={name!r}"
    if is_object_name(name):
        return None if callable(get_object(setting, name)) else open_rows(name, setting)[0]
    if not path.exists() and re.fullmatch(_IMPORT_PATH, name):
        return None
    check_exists(setting, name)
    rows = open_file(path, source, max_rows=1)
    if not len(rows):
        raise ConfigError(f"{source} has no rows")
    return rows.read_first()


# Arrow widens their numbers: 0.1 of a float32 column is 0.10000000149011612, which nobody answers.
_SHORT_FLOATS = {pa.float16(): np.float16, pa.float32(): np.float32}


class _TableRows(RowSource):
    """Rows of Arrow tables, one after the other."""

    def __init__(self, source: str, num_rows: Sequence[int]) -> None:
        super().__init__(source)
        self._ends = np.cumsum(num_rows, dtype=np.int64)  # index after the last row of each table

    @abstractmethod
    def _read_table(self, index: int) -> pa.Table | pa.RecordBatch: ...

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, row: int) -> Row:
        index = int(np.searchsorted(self._ends, row, side="right"))
        begin = int(self._ends[index - 1]) if index else 0
        return self._convert(self._read_table(index).slice(row - begin, 1), row)[0]

    def __iter__(self) -> Iterator[Row]:
        row = 0
        for index in range(len(self._ends)):
            table = self._read_table(index)
            for begin in range(0, table.num_rows, _CHUNK_ROWS):
                rows = self._convert(table.slice(begin, _CHUNK_ROWS), row)
                yield from rows
                row += len(rows)

    def _convert(self, table: pa.Table | pa.RecordBatch, first: int) -> list[Row]:
        """Convert a table to rows, numbered from `first`; name the first with text of no UTF-8."""
        try:
            values = table.to_pylist()
        except UnicodeDecodeError as error:
            if table.num_rows > 1:
                return [
                    row
                    for index in range(table.num_rows)
                    for row in self._convert(table.slice(index, 1), first + index)
                ]
            reason = f"has text that is no UTF-8: {error}; allowed: whole characters"
            raise Row(self.source, first, {}).build_error(reason) from error
        for field in table.schema:
            if (kind := _SHORT_FLOATS.get(field.type)) is not None:
                for row in values:
                    if (value := row[field.name]) is not None:
                        row[field.name] = float(str(kind(value)))
        return [Row(self.source, first + i, row, is_table=True) for i, row in enumerate(values)]


class _ParquetRows(_TableRows):
    """Rows of a parquet file, whose tables are its row groups."""

    def __init__(self, source: str, path: Path) -> None:
        try:
            check_regular(path)
            self._file = pq.ParquetFile(path)
        except (pa.ArrowInvalid, OSError) as error:
            raise ConfigError(
                f"{source} cannot be read as parquet: {error}; allowed: {ALLOWED}"
            ) from error
        metadata = self._file.metadata
        groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
        super().__init__(source, [group.num_rows for group in groups])
        self._cache: OrderedDict[int, pa.Table] = OrderedDict()  # least recently used first
        largest = max((group.total_byte_size for group in groups), default=0)
        if largest > MAX_GROUP_BYTES:
            raise ConfigError(
                f"{source} has a row group of {largest} bytes, and is read by row groups; allowed: "
                f"up to {MAX_GROUP_BYTES}. Write it with a smaller row_group_size"
            )

    def read_first(self) -> Row:
        try:
            batch = next(self._file.iter_batches(batch_size=1))
        except (pa.ArrowInvalid, OSError) as error:
            raise ConfigError(f"{self.source} cannot be read as parquet: {error}") from error
        return self._convert(batch, 0)[0]

    def _read_table(self, index: int) -> pa.Table:
        table = self._cache.pop(index, None)
        if table is None:
            try:
                table = self._file.read_row_group(index)
            except (pa.ArrowInvalid, OSError) as error:
                raise ConfigError(f"{self.source} cannot be read as parquet: {error}") from error
        self._cache[index] = table
        while len(self._cache) > 1 and sum(t.nbytes for t in self._cache.values()) > CACHE_BYTES:
            self._cache.popitem(last=False)
        return table


class _ArrowRows(_TableRows):
    """Rows of `Dataset.save_to_disk` of Hugging Face's `datasets`, whose state.json names files."""

    def __init__(self, source: str, folder: Path) -> None:
        self._batches: list[pa.RecordBatch] = []  # memory-mapped
        for path in _list_arrow_files(source, folder):
            try:
                check_regular(path)
                self._batches += pa.ipc.open_stream(pa.memory_map(str(path)))
            except (pa.ArrowInvalid, OSError, ValueError) as error:  # ValueError: a null byte
                raise ConfigError(f"{source}: {path.name} cannot be read: {error}") from error
        super().__init__(source, [batch.num_rows for batch in self._batches])

    def _read_table(self, index: int) -> pa.RecordBatch:
        return self._batches[index]


def _list_arrow_files(source: str, folder: Path) -> list[Path]:
    """Return the Arrow files that state.json lists; ConfigError for a folder of several splits."""
    if (folder / "dataset_dict.json").is_file():
        splits = read_json_object(folder / "dataset_dict.json").get("splits")
        names = [str(folder / str(name)) for name in splits] if isinstance(splits, list) else []
        raise ConfigError(f"{source} has several splits; allowed: {' or '.join(names)}")
    if not (folder / "state.json").is_file():
        raise ConfigError(f"{source} is a folder without state.json; allowed: {ALLOWED}")
    try:
        files = read_json_object(folder / "state.json")["_data_files"]
        return [find_below(folder, file["filename"]) for file in files]
    except OSError as error:
        raise ConfigError(
            f"{source}: its state.json names {error.filename!r}: {error.strerror}"
        ) from error
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{source}: its state.json does not name _data_files") from error


class _JsonRows(RowSource):
    """Rows of JSON Lines; blank lines are skipped."""

    def __init__(self, source: str, path: Path, max_rows: int | None = None) -> None:
        super().__init__(source)
        try:
            self._file = os.fdopen(open_regular_fd(path), "rb")
        except OSError as error:
            raise ConfigError(f"{source} cannot be read: {error.strerror}") from error
        self._offsets, begin = array("q"), 0
        while len(self._offsets) != max_rows and (line := self._file.readline(MAX_LINE_BYTES + 1)):
            if len(line) > MAX_LINE_BYTES:
                raise ConfigError(
                    f"{source}: row {len(self._offsets)} has more than {MAX_LINE_BYTES} bytes"
                )
            if line.strip():
                self._offsets.append(begin)
            begin += len(line)

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, row: int) -> Row:
        offset = self._offsets[row]
        self._file.seek(offset)
        line = self._file.readline()
        try:
            values = parse_json_object(line, f"{self.source}: row {row}")
        except ConfigError as error:
            self._file.seek(0)
            line_number = next(n for n, _ in enumerate(self._file, 1) if self._file.tell() > offset)
            raise ConfigError(f"{error} (line {line_number} of the file)") from error
        parsed = Row(self.source, row, values)
        return parsed.check_text() if b"\\u" in line else parsed


class _FunctionRows(RowSource):
    """Rows that a user's function returns: a sequence, or an iterable, which is read once."""

    def __init__(self, source: str, function: Any) -> None:
        super().__init__(source)
        rows = self._call(function)
        if isinstance(rows, str | bytes | Mapping) or not hasattr(rows, "__iter__"):
            raise ConfigError(
                f"{source} returned {str(rows)[:80]!r}; allowed: rows, each a dict of columns"
            )
        self._is_table = hasattr(rows, "features")  # a Dataset of Hugging Face's `datasets`
        is_indexed = hasattr(rows, "__len__") and hasattr(rows, "__getitem__")
        self._items: Sequence[Any] = rows if is_indexed else self._call(lambda: list(rows))

    def _call(self, function: Any) -> Any:
        """Call a user's code; report an exception as an error of the source."""
        try:
            return function()
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"{self.source} raised {describe_error(error)}") from error

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, row: int) -> Row:
        values = self._call(lambda: self._items[row])
        if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
            raise ConfigError(
                f"{self.source}: row {row} is {str(values)[:80]!r}; it must be a dict of columns"
            )
        return Row(self.source, row, dict(values), self._is_table).check_text()


class Digest:
    """Digest of a sequence of values, the same in every process."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)

    def add(self, value: Any) -> None:
        """Add a value: its JSON, with `_describe` for objects that JSON cannot hold."""
        text = json.dumps(value, default=_describe, skipkeys=True)
        self._hash.update(text.encode())

    def hexdigest(self) -> str:
        """Return the digest as text."""
        return self._hash.hexdigest()


def _describe(value: Any) -> Any:
    """Describe an object without its address, and a set in sorted order."""
    if isinstance(value, bytes):
        return hashlib.blake2b(value, digest_size=16).hexdigest()
    if hasattr(value, "tolist"):  # arrays and tensors, whose repr leaves elements out
        return value.tolist()
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
