"""`mcore-rl data`: data files from published data sets and from built-in tasks."""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pyarrow.parquet as pq

from mcore_rl.config.allowed import MAX_SEED
from mcore_rl.config.checks import check_between, check_exists
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.json_file import read_json_object
from mcore_rl.config.regular_file import open_regular
from mcore_rl.data.files import Row, RowSource, open_file, open_rows
from mcore_rl.data.publishers import PUBLISHERS, Publisher, RowSkipped, Values
from mcore_rl.examples.tasks.registry import TASKS
from mcore_rl.jobs.failure import RunFailed

GROUP_ROWS = 1000  # rows of a row group, which a reader of one row reads


def make_published(
    name: str, inputs: Sequence[Path], output: Path, instruction: str | None = None
) -> None:
    """Write one parquet file from the files of a publisher, in their order.

    Args:
        instruction: Text that is added to each prompt; None adds the publisher's.

    Raises:
        ConfigError: An input is not what the publisher ships, or `output` exists.
        RunFailed: The file cannot be written. In both cases nothing is left.
    """
    publisher = PUBLISHERS[name]
    if output.suffix != ".parquet":
        raise ConfigError(f"--output={str(output)!r}; allowed: a name that ends in .parquet")
    if output.exists():
        raise ConfigError(f"--output={str(output)!r} exists; allowed: a new file")
    if not output.parent.is_dir():
        raise ConfigError(f"--output={str(output)!r}: there is no folder {output.parent}")
    if instruction is None:
        instruction = publisher.instruction or ""
    dropped: Counter[str] = Counter()
    try:
        with TemporaryDirectory(dir=output.parent, prefix=".", suffix=".partial") as folder:
            sources = [_open_input(path, Path(folder)) for path in inputs]
            rows = _convert_rows(publisher, chain.from_iterable(sources), instruction, dropped)
            num_rows = _write_rows(rows, publisher, Path(folder) / output.name)
            if not num_rows:
                note = _describe_dropped(dropped)
                raise ConfigError(f"--output={str(output)!r}: no row is left; {note}")
            (Path(folder) / output.name).rename(output)
    except OSError as error:
        raise RunFailed(f"--output={str(output)!r} cannot be written: {error}") from error
    total = sum(map(len, sources))
    print(f"{output}: {num_rows} of {total} rows; {_describe_dropped(dropped)}")


def make_task(name: str, output: Path, seed: int, worked_share: float) -> None:
    """Make a built-in task: model, training and held-out prompts, supervised examples."""
    check_between("--seed", seed, 0, MAX_SEED)
    check_between("--worked-share", worked_share, 0, 1)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"--output={str(output)!r} exists; allowed: a new or empty folder")
    try:
        task = TASKS[name](output, seed, worked_share)
    except OSError as error:
        raise RunFailed(f"--output={str(output)!r} cannot be written: {error}") from error
    for file in (task.train_file, task.test_file, task.warm_start_file):
        print(f"{file}: {pq.read_metadata(file).num_rows} rows")
    print(f"{task.model_dir}: an untrained model and its tokenizer")


class _JsonFiles(RowSource):
    """Source with one JSON object per file, as in the first release of MATH."""

    def __init__(self, files: Sequence[Path]) -> None:
        super().__init__("--input")
        self._files = files

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, row: int) -> Row:
        path = self._files[row]
        return Row(f"--input={str(path)!r}", 0, read_json_object(path))


def _open_input(path: Path, folder: Path) -> RowSource:
    """Open what `open_rows` opens, compressed JSONL (unpacked to `folder`) or JSON files."""
    if path.name.endswith(".jsonl.gz"):
        check_exists("--input", path)
        unpacked = folder / f"{len(list(folder.iterdir()))}.jsonl"
        try:
            with (
                open_regular(path) as packed,
                gzip.open(packed) as archive,
                unpacked.open("wb") as file,
            ):
                shutil.copyfileobj(archive, file)
        except (OSError, EOFError, zlib.error) as error:
            raise ConfigError(f"--input={str(path)!r} cannot be unpacked: {error}") from error
        return open_file(unpacked, f"--input={str(path)!r}")
    if path.is_dir() and not (path / "state.json").exists():
        files = sorted(file for file in path.rglob("*.json") if file.name != "dataset_dict.json")
        if files and not (path / "dataset_dict.json").exists():
            return _JsonFiles(files)
    return open_rows(path, "--input")


def _convert_rows(
    publisher: Publisher, rows: Iterable[Row], instruction: str, dropped: Counter[str]
) -> Iterator[Values]:
    """Yield the converted rows; count dropped rows by reason."""
    answers: dict[bytes, str] = {}  # by the digest of a prompt
    for row in rows:
        try:
            values = publisher.make(row, instruction)
            if publisher.is_repeated:
                prompt = hashlib.sha256(json.dumps(values["messages"]).encode()).digest()
                if prompt in answers:
                    is_same = answers[prompt] == values["answer"]
                    raise RowSkipped(f"prompt seen before, {'same' if is_same else 'other'} answer")
                answers[prompt] = values["answer"]
        except RowSkipped as reason:
            dropped[str(reason)] += 1
        else:
            yield values


def _write_rows(rows: Iterator[Values], publisher: Publisher, path: Path) -> int:
    """Write rows in row groups; return their number."""
    schema, num_rows = pa.schema(publisher.columns), 0
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        while group := list(islice(rows, GROUP_ROWS)):
            writer.write_table(pa.Table.from_pylist(group, schema=schema))
            num_rows += len(group)
    return num_rows


def _describe_dropped(dropped: Counter[str]) -> str:
    reasons = ", ".join(f"{count} ({reason})" for reason, count in dropped.most_common())
    return f"left out: {reasons or 'none'}"
