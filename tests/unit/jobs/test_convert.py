"""Conversions: limits, complete or no output, and runs that continue."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from rich.console import Console

from mcore_rl.config.errors import ConfigError
from mcore_rl.jobs.convert import plan
from mcore_rl.jobs.convert.plan import Resources, format_bytes, parse_bytes
from mcore_rl.jobs.convert.run import Conversion, run, write_units
from mcore_rl.jobs.failure import RunFailed
from tests.nightly import nightly
from tests.small_disk import build_small_disk_command
from tests.waiting import wait_until

# A module that processes can import by name; with importlib mode this file is none.
UNITS = """
import errno, os, time
from dataclasses import dataclass
from pathlib import Path
from mcore_rl.config.errors import ConfigError

@dataclass(frozen=True)
class Unit:
    name: str
    nbytes: int = 1000
    memory_bytes: int = 5_000_000
    what: str = "well"
    log: str = ""

    def write(self, folder, report_bytes, shared):
        if self.log:
            with open(self.log, "a") as log:
                print(self.name, file=log)
        if self.what == "bad input":
            raise ConfigError(f"tensor of {self.name} is damaged")
        if self.what == "full":
            raise OSError(errno.ENOSPC, "No space left on device", self.name)
        if self.what == "full, raised by a writer":
            try:
                raise OSError(errno.ENOSPC, "No space left on device", self.name)
            except OSError as error:
                raise ConfigError(f"{self.name} cannot be written") from error
        deadline = time.monotonic() + 60
        while self.what == "waits" and time.monotonic() < deadline:
            report_bytes(0)
            time.sleep(0.01)
        aside = folder / f".{self.name}.partial"
        aside.write_bytes(self.name.encode() * (self.nbytes // len(self.name)))
        aside.rename(folder / self.name)
        report_bytes(self.nbytes)
        return {"of": self.name}

def finish(folder, results):
    (folder / "index").write_text(",".join(result["of"] for result in results))
"""


@pytest.fixture
def units(tmp_path, monkeypatch):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "convert_units.py").write_text(UNITS)
    monkeypatch.syspath_prepend(tmp_path / "lib")
    monkeypatch.delitem(sys.modules, "convert_units", raising=False)
    import convert_units

    return convert_units


@pytest.fixture
def make(units, tmp_path):
    """make(b="killed", ...) is a conversion of the files a to f, these with something else."""

    def conversion(fingerprint=None, **what):
        log = str(tmp_path / "log")
        all_units = tuple(
            units.Unit(f"file-{name}", what=what.get(name, "well"), log=log) for name in "abcdef"
        )
        facts = {"--dtype": "bfloat16", **(fingerprint or {})}
        return Conversion(tmp_path / "new" / "out", facts, all_units, units.finish)

    return conversion


@pytest.fixture
def log(tmp_path):
    def written():
        file = tmp_path / "log"
        lines = file.read_text().split() if file.exists() else []
        file.unlink(missing_ok=True)
        return sorted(lines)

    return written


def go(conversion, workers=1, **resources):
    console = Console(width=200, record=True, file=io.StringIO())
    run(conversion, Resources(workers, **resources), console)
    return console.export_text()


JOURNAL = ".conversion.jsonl"
ALL = [f"file-{name}" for name in "abcdef"]
ALL_FILES = sorted([*ALL, "index"])


def finished_in(work: Path) -> list[str]:
    lines = map(json.loads, (work / JOURNAL).read_text().split("\n")[2:])
    return [entry["file"] for entry in lines]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


@pytest.mark.parametrize("workers", [1, 2])
def test_a_conversion_is_there_whole_and_nothing_beside_it(make, tmp_path, workers):
    printed = go(make(), workers)
    assert names(tmp_path / "new") == ["out"]
    assert names(tmp_path / "new" / "out") == ALL_FILES
    assert (tmp_path / "new" / "out" / "index").read_text() == ",".join(ALL)
    assert re.search(r"^at most [\d.]+ [MG]B of memory: ", printed)
    assert re.search(r"6 kB in \d+\.\d\d s, ", printed)


@pytest.mark.parametrize(("how", "workers"), [("full", 1), ("full, raised by a writer", 2)])
def test_what_is_finished_is_not_written_again(make, log, tmp_path, how, workers):
    with pytest.raises(RunFailed, match="run the same command again to continue"):
        go(make(d=how), workers)
    work = tmp_path / "new" / ".out.partial"
    finished = finished_in(work)
    assert finished
    assert "file-d" not in finished
    log()
    printed = go(make(), workers)
    assert log() == sorted(set(ALL) - set(finished))
    assert f"continuing after {len(finished)} kB of 6 kB" in printed
    assert names(tmp_path / "new" / "out") == ALL_FILES


def test_run_on_a_full_disk_names_the_full_disk(make):
    with pytest.raises(RunFailed, match=r"^no space left in .*new; run the same command again"):
        go(make(c="full"))


@pytest.mark.parametrize("workers", [1, 2])
def test_bad_input_leaves_nothing(make, tmp_path, workers):
    with pytest.raises(ConfigError, match=r"^tensor of file-d is damaged$"):
        go(make(d="bad input"), workers)
    assert not (tmp_path / "new").exists()


def test_the_rest_of_another_conversion_is_not_gone_on_with(make, tmp_path):
    with pytest.raises(RunFailed):
        go(make(d="full"))
    message = r"another conversion: --dtype is \"bfloat16\" there and \"float32\" here; remove"
    with pytest.raises(ConfigError, match=message):
        go(make({"--dtype": "float32"}))
    assert names(tmp_path / "new") == [".out.partial"]
    go(make())


def test_an_output_folder_that_is_not_empty_is_left_alone(make, tmp_path):
    out = tmp_path / "new" / "out"
    out.mkdir(parents=True)
    go(make())
    before = {path: path.stat() for path in out.iterdir()}
    with pytest.raises(ConfigError, match=r"new/out is not empty; allowed: a new or empty folder"):
        go(make())
    assert {path: path.stat() for path in out.iterdir()} == before
    assert names(tmp_path / "new") == ["out"]


def test_a_run_that_was_killed_before_its_journal_was_gone_is_complete(make, log, tmp_path):
    with pytest.raises(RunFailed):
        go(make(d="full"))
    shutil.copy(tmp_path / "new" / ".out.partial" / JOURNAL, tmp_path / "kept")
    go(make())
    shutil.copy(tmp_path / "kept", tmp_path / "new" / "out" / JOURNAL)
    with pytest.raises(ConfigError, match="is not empty"):
        go(make({"--dtype": "float32"}))
    log()
    assert "out was complete" in go(make())
    assert log() == []
    assert names(tmp_path / "new") == ["out"]
    assert names(tmp_path / "new" / "out") == ALL_FILES


def test_a_journal_that_was_cut_tells_of_what_comes_before(make, log, tmp_path):
    with pytest.raises(RunFailed):
        go(make(d="full"))
    journal = tmp_path / "new" / ".out.partial" / JOURNAL
    os.truncate(journal, journal.stat().st_size - 10)
    log()
    with pytest.raises(RunFailed):
        go(make(e="full"))
    assert log() == ["file-c", "file-d", "file-e"]
    go(make())
    assert log() == ["file-e", "file-f"]
    assert names(tmp_path / "new" / "out") == ALL_FILES


@pytest.mark.parametrize("text", ["", '\n{"--dtype": "bfl'])
def test_a_run_that_was_killed_before_its_journal_began_starts_over(make, log, tmp_path, text):
    work = tmp_path / "new" / ".out.partial"
    work.mkdir(parents=True)
    (work / JOURNAL).write_text(text)
    with pytest.raises(RunFailed):
        go(make(b="full"))
    assert log() == ["file-a", "file-b"]
    go(make())
    assert log() == [f"file-{name}" for name in "bcdef"]


def test_a_folder_of_somebody_else_is_not_written_into(make, tmp_path):
    work = tmp_path / "new" / ".out.partial"
    work.mkdir(parents=True)
    (work / "notes").write_text("somebody's")
    with pytest.raises(ConfigError, match="remove that folder to start over"):
        go(make())
    assert names(work) == ["notes"]


def test_a_file_whose_end_was_lost_is_written_again(make, log, tmp_path):
    with pytest.raises(RunFailed):
        go(make(d="full"))
    os.truncate(tmp_path / "new" / ".out.partial" / "file-b", 10)
    log()
    go(make())
    assert log() == ["file-b", "file-d", "file-e", "file-f"]
    assert (tmp_path / "new" / "out" / "file-b").stat().st_size == 996


def test_run_refuses_a_disk_without_space_before_writing(make, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=5999)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ConfigError, match=rf"needs 6 kB, and {tmp_path} has 6 kB left"):
        go(make())
    assert not (tmp_path / "new").exists()


@pytest.mark.job
def test_a_disk_that_turns_out_full_leaves_what_is_finished(units, tmp_path):
    """Use a real file system with space for bytes and none for files."""
    script = f"""
import os, pickle, sys
sys.path.insert(0, {str(tmp_path / "lib")!r})
from rich.console import Console
from mcore_rl.jobs.convert.run import run
from mcore_rl.jobs.convert.plan import Resources
from mcore_rl.jobs.failure import RunFailed
conversion = pickle.load(open({str(tmp_path / "plan")!r}, "rb"))
try:
    run(conversion, Resources(1), Console(quiet=True))
except RunFailed as error:
    print(error)
finished = open({str(tmp_path / "disk/.out.partial" / JOURNAL)!r}).read().count('"file"')
os.system("mount -o remount,nr_inodes=100 {tmp_path}/disk")
run(conversion, Resources(1), Console(quiet=True))
print(finished, sorted(os.listdir({str(tmp_path / "disk/out")!r})))
"""
    disk = tmp_path / "disk"
    disk.mkdir()
    all_units = tuple(units.Unit(name) for name in ALL)
    plan = Conversion(disk / "out", {}, all_units, units.finish)
    (tmp_path / "plan").write_bytes(pickle.dumps(plan))
    (tmp_path / "script.py").write_text(script)
    command = build_small_disk_command(
        disk, "8m,nr_inodes=7", [sys.executable, tmp_path / "script.py"]
    )
    done = subprocess.run(command, capture_output=True, text=True)
    first, second = done.stdout.splitlines()
    assert first == f"no space left in {disk}; run the same command again to continue"
    finished, files = second.split(" ", 1)
    assert 0 < int(finished) < 6
    assert files == str(ALL_FILES)


def test_two_runs_do_not_write_the_same_folder(make, tmp_path):
    (tmp_path / "plan").write_bytes(pickle.dumps(make(b="waits")))
    process = started(tmp_path, workers=1)
    try:
        wait_until((tmp_path / "log").exists)
        with pytest.raises(ConfigError, match=r"another process is at work in .*\.out\.partial"):
            go(make(b="waits"))
    finally:
        process.kill()
        process.wait()


def started(tmp_path: Path, workers: int) -> subprocess.Popen:
    script = f"""
import pickle, sys
sys.path.insert(0, {str(tmp_path / "lib")!r})
from mcore_rl.jobs.convert.run import run
from mcore_rl.jobs.convert.plan import Resources
if __name__ == "__main__":
    run(pickle.load(open({str(tmp_path / "plan")!r}, "rb")), Resources({workers}))
"""
    (tmp_path / "script.py").write_text(script)
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, tmp_path / "script.py"], **streams)


@pytest.mark.job
@pytest.mark.parametrize("number", [signal.SIGINT, nightly(signal.SIGTERM)])
def test_signal_ends_all_threads(make, tmp_path, number):
    (tmp_path / "plan").write_bytes(pickle.dumps(make(a="waits", b="waits")))
    process = started(tmp_path, workers=2)
    wait_until(
        lambda: (tmp_path / "log").exists() and len((tmp_path / "log").read_text().split()) == 2
    )
    process.send_signal(number)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode != 0
    assert finished_in(tmp_path / "new" / ".out.partial") == []
    if number == signal.SIGINT:
        assert "interrupted; run the same command again to continue" in stderr


def test_bytes_of_all_threads_are_counted(units, tmp_path):
    all_units = [units.Unit(str(number), nbytes=3000) for number in range(8)]
    counted = []
    with closing(write_units(all_units, 4, tmp_path, counted.append, {})) as written:
        assert {unit.name for unit, _ in written} == set("01234567")
    assert sum(counted) == 24_000


def test_other_threads_end_after_an_error(units, tmp_path):
    kinds = {"a": "waits", "b": "waits", "c": "bad input"}
    all_units = [units.Unit(name, what=kind) for name, kind in kinds.items()]
    with pytest.raises(ConfigError, match="tensor of c is damaged"):
        list(write_units(all_units, 3, tmp_path, lambda num_bytes: None, {}))
    assert not set(names(tmp_path)) & kinds.keys()


GIB = 1 << 30


def test_the_bound_grows_with_the_largest_unit_and_the_workers(monkeypatch):
    monkeypatch.setattr(plan, "get_peak_memory", lambda: 400 << 20)
    single, double = plan.compute_memory_bound(1, GIB), plan.compute_memory_bound(2, GIB)
    assert single == GIB + plan.compute_memory_bound(1, 0)
    assert plan.compute_memory_bound(1, 0) > 432 << 20
    assert double - plan.compute_memory_bound(2, 0) == 2 * GIB


@pytest.mark.parametrize(
    ("workers", "allowed", "expected"),
    [(1, None, 1), (2, None, 2), (9, None, 3), (None, 10 * GIB, 3), (None, 2 * GIB, 1)],
)
def test_choose_workers_takes_the_option_or_as_many_as_fit(monkeypatch, workers, allowed, expected):
    monkeypatch.setattr(plan, "get_peak_memory", lambda: 400 << 20)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    num_workers, line = plan.choose_workers([GIB, GIB, 7], Resources(workers, allowed))
    assert num_workers == expected
    assert line.startswith(
        f"at most {format_bytes(plan.compute_memory_bound(expected, GIB))} of memory: "
    )


def test_too_little_memory_is_refused_with_what_is_enough(monkeypatch):
    monkeypatch.setattr(plan, "get_peak_memory", lambda: 400 << 20)
    message = r"--max-memory=1 GB is too small for 1 thread; allowed: at least (\d+)MB"
    with pytest.raises(ConfigError, match=message) as raised:
        plan.choose_workers([GIB], Resources(None, 10**9))
    enough = int(re.search(r"least (\d+)MB", str(raised.value))[1]) * 10**6
    assert plan.choose_workers([GIB], Resources(None, enough))[0] == 1
    with pytest.raises(ConfigError, match="for 2 threads"):
        plan.choose_workers([GIB, GIB], Resources(2, enough))


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1e9", "5 parsecs", "0", "1.5.5GB", "9" * 30])
def test_a_size_that_is_none_is_refused(text):
    with pytest.raises(ConfigError, match=r"--max-memory="):
        parse_bytes("--max-memory", text)


@pytest.mark.parametrize(("text", "size"), [("1", 1), ("2kb", 2000), ("1.5GiB", 3 << 29)])
def test_a_size_has_a_unit_or_none(text, size):
    assert parse_bytes("--max-memory", text) == size


def test_workers_below_one_are_refused():
    with pytest.raises(ConfigError, match=r"--workers=0; allowed: at least 1"):
        Resources(workers=0)
