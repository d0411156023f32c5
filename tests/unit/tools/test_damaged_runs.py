"""Damaged files of runs: a report names the file, and none ends in a traceback."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from mcore_rl.config.errors import ConfigError
from mcore_rl.data.sample_tables import METADATA, get_table_path
from mcore_rl.jobs.output import write_json
from mcore_rl.tools.report.page import build_data
from mcore_rl.tools.report.runs import read_runs
from mcore_rl.tools.samples.tables import SampleReader, read_segments
from tests.unit.tools.report_runs import write_eval_run, write_rl_run

WRONG = (5, "x", [], {"a": 5})
SUMMARY = {
    "evaluation": {"before": {"test": {"accuracy": 0.25, "accuracy_stderr": 0.03}}},
    "gpu_memory": {"actor": {"max_allocated_bytes": [1, 2], "max_reserved_bytes": [3, 4]}},
    "versions": {"torch": "2"},
    "wall_s": 12.0,
    "peak_memory_bytes": 1e9,
    "max_logprob_gap": 0.1,
}
Path_ = tuple[str | int, ...]


def list_paths(value: Any, path: Path_ = ()) -> Iterator[Path_]:
    entries = value.items() if isinstance(value, dict) else ()
    entries = enumerate(value) if isinstance(value, list) else entries
    for key, part in entries:
        yield (*path, key)
        yield from list_paths(part, (*path, key))


def replace_part(value: Any, path: Path_, part: object) -> Any:
    changed = part_of = copy.deepcopy(value)
    for key in path[:-1]:
        part_of = part_of[key]
    part_of[path[-1]] = part
    return changed


def read_report(folder: Path, num_samples: int = 0) -> str:
    """Build the data of a report; return the error that refuses a file."""
    try:
        json.dumps(build_data(read_runs([folder]), num_samples), allow_nan=False)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def rl_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rl_run(tmp_path_factory.mktemp("rl") / "run")


def test_report_reads_or_names_a_summary_with_any_part_replaced(rl_run: Path) -> None:
    refused = set()
    for path in list_paths(SUMMARY):
        for part in WRONG:
            write_json(rl_run / "summary.json", replace_part(SUMMARY, path, part))
            if error := read_report(rl_run):
                assert error.startswith(f"{rl_run / 'summary.json'}: $.{path[0]}"), error
                refused.add(path)
    assert refused == {*list_paths(SUMMARY)}  # a part that is read has a type
    write_json(rl_run / "summary.json", SUMMARY)
    assert read_report(rl_run) == ""


def test_report_reads_or_names_scores_with_any_part_replaced(tmp_path: Path) -> None:
    folder = write_eval_run(tmp_path / "run")
    summary = json.loads((folder / "summary.json").read_text())
    for path in list_paths(summary):
        for part in WRONG:
            write_json(folder / "summary.json", replace_part(summary, path, part))
            error = read_report(folder)
            assert not error or str(folder / "summary.json") in error


@pytest.mark.parametrize(
    ("file", "path", "part"),
    [
        ("timeline.jsonl", ("spans",), {}),
        ("timeline.jsonl", ("spans",), []),
        ("timeline.jsonl", ("spans", 0), 5),
        ("expert_load.jsonl", ("tokens",), [[]]),
        ("metrics.jsonl", ("step",), "x"),
        ("config.json", ("model", "dtype"), [5]),
        ("config.json", ("profile", "ranks"), [{}]),
        ("config.json", ("actor", "layout"), 5),
    ],
)
def test_report_has_one_line_for_a_damaged_file(
    rl_run: Path, file: str, path: Path_, part: object
) -> None:
    content = (rl_run / file).read_text()
    first, *rest = [content] if file == "config.json" else content.splitlines()
    changed = json.dumps(replace_part(json.loads(first), path, part))
    (rl_run / file).write_text("\n".join([changed, *rest, ""]))
    try:
        error = read_report(rl_run)
    finally:
        (rl_run / file).write_text(content)
    assert file == "config.json" or str(rl_run / file) in error  # a plan says what it lacks


@pytest.mark.parametrize("metadata", [b"no JSON", b"{}", b"[1]", b"\xff"])
def test_table_whose_metadata_are_damaged_is_named(tmp_path: Path, metadata: bytes) -> None:
    folder = write_rl_run(tmp_path / "run", num_steps=1)
    path = get_table_path(folder, 1)
    pq.write_table(pq.read_table(path).replace_schema_metadata({METADATA: metadata}), path)
    with pytest.raises(ConfigError, match=r"step_000001\.parquet cannot be read"):
        SampleReader(str(folder)).count_left_out([1])


def test_table_with_any_byte_changed_is_read_or_named(tmp_path: Path) -> None:
    folder = write_rl_run(tmp_path / "run", num_steps=1)
    path = get_table_path(folder, 1)
    content = path.read_bytes()
    for position in range(0, len(content), 101):
        damaged = bytearray(content)
        damaged[position] ^= 0x84
        path.unlink()  # a map of the earlier file stays as it is
        path.write_bytes(damaged)
        assert str(path) in (read_report(folder, 4) or str(path))
        try:
            for summary in SampleReader(str(folder)).read_summaries([1]):
                read_segments(summary)
        except ConfigError as error:
            assert str(path) in str(error)
