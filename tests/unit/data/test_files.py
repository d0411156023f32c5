"""Rows of every kind of source: the same rows, in any order, in bounded memory; damage is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mcore_rl.config.errors import ConfigError
from mcore_rl.data import files
from mcore_rl.data.files import open_rows

# Folders that `datasets` 4.4.1 has written with save_to_disk: seven rows in two files, and a
# DatasetDict of two splits.
SAVED = Path(__file__).parent / "saved_by_datasets"
SEVEN = [
    {"messages": [{"role": "user", "content": f"Add {i} and 1."}], "answer": str(i + 1)}
    for i in range(7)
]


def parquet(folder: Path) -> str:
    pq.write_table(pa.Table.from_pylist(SEVEN), folder / "rows.parquet", row_group_size=3)
    return str(folder / "rows.parquet")


def jsonl(folder: Path) -> str:
    """Write rows with blank lines, and no line break at the end."""
    lines = [json.dumps(row) for row in SEVEN]
    text = "\n".join([*lines[:3], "", "  ", *lines[3:]])
    (folder / "rows.jsonl").write_text(text)
    return str(folder / "rows.jsonl")


def saved(folder: Path) -> str:
    return str(SAVED / "seven")


def function(text: str) -> Callable[[Path], str]:
    def write(folder: Path) -> str:
        (folder / "mine.py").write_text(f"ROWS = {SEVEN!r}\n{text}\n")
        return f"{folder / 'mine.py'}:rows"

    return write


INDEXED = """
class Indexed:
    def __len__(self): return 7
    def __getitem__(self, row): return ROWS[row]
    def __iter__(self): raise AssertionError("read as a whole")
def rows(): return Indexed()"""
SOURCES = {
    "parquet": parquet,
    "jsonl": jsonl,
    "datasets": saved,
    "list": function("def rows(): return ROWS"),
    "generator": function("def rows(): yield from ROWS"),
    "indexed": function(INDEXED),
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=list(SOURCES))
def test_every_kind_of_source_gives_the_same_rows_in_any_order(tmp_path, source):
    rows = open_rows(source(tmp_path), "data.train_file")
    assert len(rows) == 7
    assert [row.values for row in rows] == SEVEN
    assert [rows[i].values for i in (6, 0, 3, 2, 3, 5)] == [SEVEN[i] for i in (6, 0, 3, 2, 3, 5)]
    assert [(row.index, rows[row.index].index) for row in rows] == [(i, i) for i in range(7)]


def test_row_groups_are_cached_up_to_a_size_and_the_least_used_is_evicted(tmp_path, monkeypatch):
    read: list[int] = []
    original = pq.ParquetFile.read_row_group
    monkeypatch.setattr(
        pq.ParquetFile,
        "read_row_group",
        lambda f, index: [read.append(index), original(f, index)][1],
    )
    rows = open_rows(parquet(tmp_path), "data.train_file")
    rows[0], rows[6], rows[1]
    assert read == [0, 2]
    monkeypatch.setattr(files, "CACHE_BYTES", 2 * original(rows._file, 0).nbytes)
    rows[3]  # group 2 was used before group 0 was
    rows[0], rows[6]
    assert read == [0, 2, 1, 2]


def damaged_parquet(folder: Path) -> str:
    path = Path(parquet(folder))
    data = bytearray(path.read_bytes())
    data[4:200] = bytes(196)  # the first pages; the footer is whole
    path.write_bytes(data)
    return str(path)


def written(name: str, text: str) -> Callable[[Path], str]:
    def write(folder: Path) -> str:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return str(path if "/" not in name else path.parent)

    return write


def cut_arrow(folder: Path) -> str:
    (folder / "state.json").write_text((SAVED / "seven" / "state.json").read_text())
    for path in (SAVED / "seven").glob("*.arrow"):
        (folder / path.name).write_bytes(path.read_bytes()[:-100])
    return str(folder)


BROKEN = {
    "no such file": (lambda _: "no/such.jsonl", "='no/such.jsonl' does not exist"),
    "an address": (lambda _: "s3://bucket/x.parquet", "='s3://bucket/x.parquet' does not exist"),
    "text": (written("rows.csv", "a,b\n"), r"cannot be read as parquet: .*allowed: a parquet file"),
    "damage": (damaged_parquet, r"rows\.parquet' cannot be read as parquet"),
    "empty": (written("rows.jsonl", "\n \n"), "has no rows"),
    "a list": (
        written("rows.jsonl", '{"a": 1}\n\n[1]\n'),
        r"rows\.jsonl': row 1 is a JSON list, not an object \(line 3 of the file\)",
    ),
    "no JSON": (
        written("rows.jsonl", '{"a": 1}\n{"a": \n'),
        r"row 1 is not valid JSON: Expecting value.* \(line 2 of the file\)",
    ),
    "no UTF-8": (
        lambda folder: (
            (folder / "rows.jsonl").write_bytes(b'{"a": "\xff"}') and str(folder / "rows.jsonl")
        ),
        r"row 0 is not valid JSON: 'utf-8' codec .* \(line 1 of the file\)",
    ),
    "a folder": (written("rows/x.txt", ""), r"is a folder without state\.json; allowed: a parquet"),
    "a state of nothing": (written("rows/state.json", "{}"), "does not name _data_files"),
    "several splits": (
        lambda _: str(SAVED / "splits"),
        r"has several splits; allowed: .*/splits/train or .*/splits/test",
    ),
    "a cut file": (cut_arrow, r"data-0000.-of-00002\.arrow cannot be read"),
    "no such function": (function(""), r"mine\.py' has no function 'rows'; it has: none"),
    "no rows": (function("def rows(): return None"), "returned 'None'; allowed: rows, each a dict"),
    "text of a function": (function("def rows(): return 'a.csv'"), "returned 'a.csv'; allowed"),
    "a function that raises": (
        function("def rows(): return open('/no/such')"),
        "raised FileNotFoundError: .*/no/such",
    ),
    "a generator that raises": (
        function("def rows():\n    yield ROWS[0]\n    raise KeyError('x')"),
        "rows' raised KeyError: 'x'",
    ),
    "rows that are no dicts": (
        function("def rows(): return [ROWS[0], 'x']"),
        "row 1 is 'x'; it must be a dict of columns",
    ),
}


@pytest.mark.parametrize(("source", "message"), BROKEN.values(), ids=list(BROKEN))
def test_what_is_wrong_with_a_source_is_named(tmp_path, source, message):
    name = source(tmp_path)
    with pytest.raises(ConfigError, match=message) as caught:
        list(open_rows(name, "data.train_files[1]"))
    assert str(caught.value).startswith(f"data.train_files[1]={name!r}")


def test_a_row_group_that_does_not_fit_in_memory_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_GROUP_BYTES", 50)
    with pytest.raises(ConfigError, match=r"row group of \d+ bytes.*allowed: up to 50\. Write it"):
        open_rows(parquet(tmp_path), "data.train_file")


MEASURE = """
import sys, threading
from mcore_rl.config.schema import DataConfig
from mcore_rl.data import files
from mcore_rl.data.datasets import PromptDataset, load_prompts
from mcore_rl.data.prompt_batches import PromptBatches
from mcore_rl.examples.tasks import tiny_model

def anonymous_mb():
    status = open("/proc/self/status").read()
    return int(status.split("RssAnon:")[1].split()[0]) / 1024

def use(path):
    prompts = PromptBatches(PromptDataset(load_prompts(path, DataConfig(), words)), 16, seed=0)
    for _ in range(12):
        next(prompts)

files.CACHE_BYTES = 8 << 20
words = tiny_model.train_tokenizer(["user Add 1 and 2. assistant"] * 20)
small, *large = sys.argv[1:]
use(small)
for path in large:
    before, most, done = anonymous_mb(), 0, threading.Event()
    def watch():
        global most
        while not done.wait(0.005):
            most = max(most, anonymous_mb())
    watching = threading.Thread(target=watch)
    watching.start()
    use(path)
    done.set()
    watching.join()
    print(round(most - before))
"""


@pytest.mark.job
def test_memory_is_bounded_whatever_the_size_of_a_file(tmp_path):
    """96 MB in each file: prompts from it take less than three quarters.

    It is 20 to 30 MB on a quiet machine, and was 48 on a busy one.
    Memory that was freed is not given back at once: what takes the most comes last.
    """
    num_rows, text = 12_000, os.urandom(4000).hex()
    chunks = [text[i % 97 :] for i in range(num_rows)]
    chats = [[{"role": "user", "content": f"Add {i} and 1."}] for i in range(num_rows)]
    table = pa.table(
        {"messages": chats, "answer": [str(i) for i in range(num_rows)], "text": chunks}
    )
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=250, use_dictionary=False)
    with (tmp_path / "b.jsonl").open("w") as file:
        for row in table.to_pylist():
            file.write(json.dumps(row) + "\n")
    (tmp_path / "c").mkdir()
    with pa.ipc.new_stream(str(tmp_path / "c" / "x.arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=1000)
    (tmp_path / "c" / "state.json").write_text('{"_data_files": [{"filename": "x.arrow"}]}')
    paths = [parquet(tmp_path), *(str(tmp_path / name) for name in ("c", "b.jsonl", "a.parquet"))]
    command = [sys.executable, "-c", MEASURE, *paths]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert [mb for mb in map(int, done.stdout.split()) if mb >= 72] == []
    assert len(done.stdout.split()) == 3
