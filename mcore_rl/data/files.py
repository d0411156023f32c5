"""Rows of a data file, one at a time: parquet, JSONL, folders of `datasets`, functions of a user.

No reader keeps a file in memory. Any row can be read at any time, in any order:

- parquet: a row group at a time; the last ones that were read are kept.
- JSONL: by the offset of each line, 8 bytes a row.
- a folder of `Dataset.save_to_disk`: Arrow files, mapped into memory.
- `module:function` or `path/to/file.py:function`: what that function returns.
"""

from __future__ import annotations

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
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.import_path import load_user_function
from mcore_rl.config.json_file import parse_json_object, read_json_object

ALLOWED = (
    "a parquet file, a file.jsonl, a folder of save_to_disk of `datasets`, or an import path, "
    "module:function or path/to/file.py:function"
)
KEPT_BYTES = 64 << 20  # row groups of a parquet file in memory; one at least, whatever its size
MOST_GROUP_BYTES = 2 << 30  # of a row group
_AT_ONCE = 1000  # rows that become Python objects together, where a file is read in its order
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_IMPORT_PATH = r"(.+\.py|[\w.]+):\w+"


@dataclass(frozen=True, slots=True)
class Row:
    """The columns of one row, and where it is."""

    source: str  # the setting and the file, as in "data.train_file='train.parquet'"
    index: int
    values: dict[str, Any]

    def refusal(self, reason: str) -> ConfigError:
        return ConfigError(f"{self.source}: row {self.index} {reason}")

    def check_text(self) -> Row:
        """Return the row. Raises ConfigError for half a surrogate pair, which no tokenizer takes.

        JSON may have one, as may what a function returns.
        """
        for name, value in self.values.items():
            values = [value]
            while values:
                if halves := [v for v in values if isinstance(v, str) and _SURROGATE.search(v)]:
                    raise self.refusal(
                        f"of column {name!r} has half a surrogate pair in {halves[0][:80]!r}; "
                        "allowed: whole characters"
                    )
                inner = (
                    [*v, *v.values()] if isinstance(v, dict) else v
                    for v in values
                    if isinstance(v, dict | list)
                )
                values = [v for some in inner for v in some]
        return self


class RowSource(ABC):
    """All rows of one source, by number, or in its order."""

    def __init__(self, source: str) -> None:
        self.source = source

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, row: int) -> Row: ...

    def __iter__(self) -> Iterator[Row]:
        return (self[row] for row in range(len(self)))


def open_rows(name: str | Path, setting: str) -> RowSource:
    """The rows of a file, a folder or a function; `setting` names it in errors.

    Raises:
        ConfigError: there is none, it cannot be read, or it has no rows. Reading a row raises it,
            too, where the file is damaged there.
    """
    path, source = Path(name), f"{setting}={str(name)!r}"
    rows: RowSource
    if not path.exists() and re.fullmatch(_IMPORT_PATH, str(name)):
        rows = _FunctionRows(source, load_user_function(setting, str(name)))
    else:
        check_exists(setting, name)
        rows = open_file(path, source)
    if not len(rows):
        raise ConfigError(f"{source} has no rows")
    return rows


def open_file(path: Path, source: str) -> RowSource:
    """The same for a path that exists; `source` begins the errors."""
    if path.is_dir():
        return _ArrowRows(source, path)
    return _JsonRows(source, path) if path.suffix == ".jsonl" else _ParquetRows(source, path)


class _Tables(RowSource):
    """Rows in Arrow tables, one after the other."""

    def __init__(self, source: str, num_rows: Sequence[int]) -> None:
        super().__init__(source)
        self._ends = np.cumsum(num_rows, dtype=np.int64)  # the first row after each table

    @abstractmethod
    def _table(self, index: int) -> pa.Table | pa.RecordBatch: ...

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, row: int) -> Row:
        index = int(np.searchsorted(self._ends, row, side="right"))
        begin = int(self._ends[index - 1]) if index else 0
        return self._rows(self._table(index).slice(row - begin, 1), row)[0]

    def __iter__(self) -> Iterator[Row]:
        row = 0
        for index in range(len(self._ends)):
            table = self._table(index)
            for begin in range(0, table.num_rows, _AT_ONCE):
                rows = self._rows(table.slice(begin, _AT_ONCE), row)
                yield from rows
                row += len(rows)

    def _rows(self, table: pa.Table | pa.RecordBatch, first: int) -> list[Row]:
        try:
            values = table.to_pylist()
        except UnicodeDecodeError as error:
            if table.num_rows > 1:
                return [
                    row
                    for place in range(table.num_rows)
                    for row in self._rows(table.slice(place, 1), first + place)
                ]
            reason = f"has text that is no UTF-8: {error}; allowed: whole characters"
            raise Row(self.source, first, {}).refusal(reason) from error
        return [Row(self.source, first + place, row) for place, row in enumerate(values)]


class _ParquetRows(_Tables):
    def __init__(self, source: str, path: Path) -> None:
        try:
            self._file = pq.ParquetFile(path)
        except (pa.ArrowInvalid, OSError) as error:
            raise ConfigError(
                f"{source} cannot be read as parquet: {error}; allowed: {ALLOWED}"
            ) from error
        about = self._file.metadata
        groups = [about.row_group(index) for index in range(about.num_row_groups)]
        super().__init__(source, [group.num_rows for group in groups])
        self._kept: OrderedDict[int, pa.Table] = OrderedDict()  # the last one used comes last
        largest = max((group.total_byte_size for group in groups), default=0)
        if largest > MOST_GROUP_BYTES:
            raise ConfigError(
                f"{source} has a row group of {largest} bytes, and is read by row groups; allowed: "
                f"up to {MOST_GROUP_BYTES}. Write it with a smaller row_group_size"
            )

    def _table(self, index: int) -> pa.Table:
        table = self._kept.pop(index, None)
        if table is None:
            try:
                table = self._file.read_row_group(index)
            except (pa.ArrowInvalid, OSError) as error:
                raise ConfigError(f"{self.source} cannot be read as parquet: {error}") from error
        self._kept[index] = table
        while len(self._kept) > 1 and sum(t.nbytes for t in self._kept.values()) > KEPT_BYTES:
            self._kept.popitem(last=False)
        return table


class _ArrowRows(_Tables):
    """`Dataset.save_to_disk` of Hugging Face's `datasets`: state.json names files of streams."""

    def __init__(self, source: str, folder: Path) -> None:
        self._batches: list[pa.RecordBatch] = []  # their data stays on disk until it is looked at
        for path in _arrow_files(source, folder):
            try:
                self._batches += pa.ipc.open_stream(pa.memory_map(str(path)))
            except (pa.ArrowInvalid, OSError) as error:
                raise ConfigError(f"{source}: {path.name} cannot be read: {error}") from error
        super().__init__(source, [batch.num_rows for batch in self._batches])

    def _table(self, index: int) -> pa.RecordBatch:
        return self._batches[index]


def _arrow_files(source: str, folder: Path) -> list[Path]:
    if (folder / "dataset_dict.json").is_file():
        splits = read_json_object(folder / "dataset_dict.json").get("splits")
        names = [str(folder / str(name)) for name in splits] if isinstance(splits, list) else []
        raise ConfigError(f"{source} has several splits; allowed: {' or '.join(names)}")
    if not (folder / "state.json").is_file():
        raise ConfigError(f"{source} is a folder without state.json; allowed: {ALLOWED}")
    try:
        files = read_json_object(folder / "state.json")["_data_files"]
        return [folder / file["filename"] for file in files]
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{source}: its state.json does not name _data_files") from error


class _JsonRows(RowSource):
    """A JSON object a line; lines with nothing but blanks do not count."""

    def __init__(self, source: str, path: Path) -> None:
        super().__init__(source)
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise ConfigError(f"{source} cannot be read: {error.strerror}") from error
        self._offsets, begin = array("q"), 0
        for line in self._file:
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
    """What a function of the user's returns: something with a length and numbers, or an iterable.

    Of the first a row is read when it is needed, as of a file. The second is read once, and kept.
    """

    def __init__(self, source: str, function: Any) -> None:
        super().__init__(source)
        found = self._told(function)
        if isinstance(found, str | bytes | Mapping) or not hasattr(found, "__iter__"):
            raise ConfigError(
                f"{source} returned {str(found)[:80]!r}; allowed: rows, each a dict of columns"
            )
        is_indexed = hasattr(found, "__len__") and hasattr(found, "__getitem__")
        self._found: Sequence[Any] = found if is_indexed else self._told(lambda: list(found))

    def _told(self, function: Any) -> Any:
        """What a call into code of the user's gives; what it raises is an error of that source."""
        try:
            return function()
        except ConfigError:
            raise
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise ConfigError(f"{self.source} raised {reason}") from error

    def __len__(self) -> int:
        return len(self._found)

    def __getitem__(self, row: int) -> Row:
        values = self._told(lambda: self._found[row])
        if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
            raise ConfigError(
                f"{self.source}: row {row} is {str(values)[:80]!r}; it must be a dict of columns"
            )
        return Row(self.source, row, dict(values)).check_text()
