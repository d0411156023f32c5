"""Run a conversion: resumable, bounded in memory, atomic.

The output NAME is written as `.NAME.partial` with a journal, `.conversion.jsonl`: the fingerprint
of the conversion, then a line for each complete file. A file is renamed when it is complete, and
gets its line after that, so a killed run continues where it stopped, to the same bytes. The journal
is removed when the folder has its name.

As in a copy of files, nothing is flushed to disk: a killed process loses none of its writes, and a
flush would double the time. After a power failure a file may have lost its end: it is shorter than
the journal says, and is written again.

Units of work are done by threads: what takes time in a unit, reading, writing, checksums and
operations of torch, runs beside other threads.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any, Protocol

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from mcore_rl.config.atomic_file import get_partial_path
from mcore_rl.config.errors import ConfigError
from mcore_rl.jobs.convert.plan import Resources, choose_workers, format_bytes
from mcore_rl.jobs.failure import RunFailed
from mcore_rl.observability.console import get_stdout_console, show_line

_JOURNAL = ".conversion.jsonl"
_CONTINUE = "run the same command again to continue"
_LINE_INTERVAL_S = 5.0  # between progress lines without a terminal

ReportBytes = Callable[[int], None]


class Unit(Protocol):
    """One output file. Units are written in any order, several at a time."""

    @property
    def name(self) -> str: ...

    @property
    def nbytes(self) -> int: ...  # of the file, without headers

    @property
    def memory_bytes(self) -> int: ...  # the most memory that writing it takes

    def write(self, folder: Path, report_bytes: ReportBytes, shared: dict[str, Any]) -> Any:
        """Write the file under another name, then rename it.

        Args:
            report_bytes: Called with the number of bytes after each write. It raises if another
                unit has failed, or the conversion is interrupted.
            shared: Objects that the units of one thread share, such as an open reader.

        Returns:
            A value that JSON can hold.
        """
        ...


UnitResult = tuple[Unit, Any]


@dataclass(frozen=True, slots=True)
class Conversion:
    """A planned conversion: a file for each unit, and a function that completes the folder."""

    output: Path
    fingerprint: Mapping[str, Any]  # equal fingerprints make equal bytes; JSON
    units: Sequence[Unit]
    finish: Callable[[Path, list[Any]], None]  # takes the folder, and the results of all units
    notes: Sequence[str] = ()  # lines to print first
    finish_bytes: int = 0  # memory of `finish`
    # Objects that planning has opened, for a conversion in one thread.
    shared: Mapping[str, Any] = field(default_factory=dict)


def run(conversion: Conversion, resources: Resources, console: Console | None = None) -> None:
    """Run a conversion, or the rest of an interrupted one.

    Raises:
        ConfigError: The output folder is not empty or of another conversion, memory or disk space
            are too small, or a source is damaged. Nothing is left on disk.
        RunFailed: The disk is full. Finished files stay, and the same command continues.
    """
    output = conversion.output
    work = get_partial_path(output)
    print_line = partial(show_line, console=console)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        if _read_journal(output)[:1] != [_normalize_json(conversion.fingerprint)]:
            raise ConfigError(
                f"output folder {output} is not empty; allowed: a new or empty folder"
            )
        (output / _JOURNAL).unlink()  # the run was killed just before
        print_line(f"{output} was complete")
        return
    results = _read_results(work, conversion)
    todo = [unit for unit in conversion.units if unit.name not in results]
    _check_space(output, todo)
    total, left = (sum(u.nbytes for u in units) for units in (conversion.units, todo))
    memory = [unit.memory_bytes for unit in todo]
    workers, bound = choose_workers(memory, resources, conversion.finish_bytes)
    for line in (*conversion.notes, bound):
        print_line(line)
    if left < total:
        print_line(f"continuing after {format_bytes(total - left)} of {format_bytes(total)}")
    with (
        _lock_work_dir(work, conversion.fingerprint) as journal,
        _summarize_interruption(work),
        ByteProgress("converting", total, total - left, console) as progress,
        closing(write_units(todo, workers, work, progress.add, conversion.shared)) as written,
    ):
        for unit, result in written:
            results[unit.name] = result
            size = (work / unit.name).stat().st_size
            _append(journal, {"file": unit.name, "bytes": size, "result": result})
        conversion.finish(work, [results[unit.name] for unit in conversion.units])
        work.rename(output)
        (output / _JOURNAL).unlink()
        speed = str(progress)
    print_line(speed)


def _read_results(work: Path, conversion: Conversion) -> dict[str, Any]:
    """Return the results of the units whose files are complete, by name.

    Raises:
        ConfigError: `work` has something else than the first part of this conversion.
    """
    fingerprint, lines = _normalize_json(conversion.fingerprint), _read_journal(work)
    if not lines and (not work.is_dir() or all(f.name == _JOURNAL for f in work.iterdir())):
        return {}
    saved, *entries = lines or [{}]
    for name in sorted(saved.keys() | fingerprint.keys()):
        if saved.get(name) != fingerprint.get(name):
            raise ConfigError(
                f"{work} contains the first part of another conversion: {name} is "
                f"{json.dumps(saved.get(name))} there and {json.dumps(fingerprint.get(name))} "
                "here; remove that folder to start over"
            )
    return {
        entry["file"]: entry["result"]
        for entry in entries
        if (file := work / entry["file"]).is_file() and file.stat().st_size == entry["bytes"]
    }


def _read_journal(folder: Path) -> list[Any]:
    """Return the lines of a journal, except one that a killed run has truncated."""
    lines = []
    with suppress(OSError):
        for line in (folder / _JOURNAL).read_text().splitlines():
            with suppress(ValueError):
                lines.append(json.loads(line))
    return lines


def _append(journal: IO[str], value: Any) -> None:
    """Append a line of JSON to the journal."""
    journal.write(f"\n{json.dumps(value)}")  # a truncated line ends here
    journal.flush()


def _normalize_json(value: Any) -> Any:
    """Convert a value to JSON and back."""
    return json.loads(json.dumps(value))


def _check_space(output: Path, todo: Sequence[Unit]) -> None:
    """Raise ConfigError if the disk has not enough room for the units that are left."""
    needed = sum(unit.nbytes for unit in todo)
    parent = next(folder for folder in output.absolute().parents if folder.exists())
    free = shutil.disk_usage(parent).free
    if needed > free:
        raise ConfigError(
            f"output folder {output} needs {format_bytes(needed)}, and {parent} has "
            f"{format_bytes(free)} left"
        )


@contextmanager
def _lock_work_dir(work: Path, fingerprint: Mapping[str, Any]) -> Iterator[IO[str]]:
    """Make and lock `work`; yield its journal.

    A ConfigError removes `work` and the parent folders that were made for it.
    """
    new_folders = [folder for folder in (work, *work.absolute().parents) if not folder.exists()]
    try:
        if work.is_symlink():  # files below it would be written somewhere else
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        work.mkdir(parents=True, exist_ok=True)
        journal = (work / _JOURNAL).open("a")
    except OSError as error:
        raise ConfigError(f"{work} cannot be made: {error.strerror}") from error
    with journal:
        try:
            fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another process is at work in {work}") from None
        try:
            if not _read_journal(work):
                _append(journal, fingerprint)
            yield journal
        except ConfigError:  # the files came from bad input
            shutil.rmtree(work)
            with suppress(OSError):  # another program may have put something there
                for folder in new_folders[1:]:
                    folder.rmdir()
            raise


@contextmanager
def _summarize_interruption(work: Path) -> Iterator[None]:
    """Turn signals and a full disk into errors of one line; finished files stay."""
    previous = signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted; {_CONTINUE}") from None
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        reason = f"no space left in {work.absolute().parent}" if is_full else str(error)
        raise RunFailed(f"{reason}; {_CONTINUE}") from error
    finally:
        signal.signal(signal.SIGTERM, previous)


def _exit(signum: int, frame: object) -> None:
    raise SystemExit(128 + signum)


# Progress


class ByteProgress:
    """Progress of `total` bytes, of which an earlier run has written `done`. A context manager.

    A live bar on a terminal, a line now and then elsewhere.

    >>> with ByteProgress("writing", 100, console=Console(width=80)) as progress:
    ...     progress.add(100)
    """

    def __init__(
        self, title: str, total: int, done: int = 0, console: Console | None = None
    ) -> None:
        self._title, self._total, self._done_before = title, total, done
        self._console = console or get_stdout_console()
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=30),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task(title, total=total, completed=done)
        self._started_s = self._printed_s = time.monotonic()
        self._num_bytes = 0  # by this run
        self._lock = threading.Lock()

    def __str__(self) -> str:
        """Bytes of this run, its duration and speed."""
        done = format_bytes(self._num_bytes)
        seconds = time.monotonic() - self._started_s
        return f"{done} in {seconds:.2f} s, {format_bytes(self._num_bytes / max(seconds, 1e-9))}/s"

    def add(self, num_bytes: int) -> None:
        """Count bytes, and show the progress. Called by any thread."""
        with self._lock:
            self._num_bytes += num_bytes
            self._bar.update(self._task, advance=num_bytes)
            if self._bar.disable and time.monotonic() - self._printed_s > _LINE_INTERVAL_S:
                self._printed_s = time.monotonic()
                num_done = self._done_before + self._num_bytes
                done, left = format_bytes(num_done), self._total - num_done
                left_s = left * (self._printed_s - self._started_s) / max(self._num_bytes, 1)
                line = f"{self._title} {done} of {format_bytes(self._total)}, {left_s:.0f} s left"
                show_line(line, self._console)

    def __enter__(self) -> ByteProgress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


class _StoppedError(Exception):
    """Another unit has failed, or the conversion is interrupted."""


def write_units(
    units: Sequence[Unit],
    workers: int,
    folder: Path,
    report_bytes: ReportBytes,
    shared: Mapping[str, Any],
) -> Generator[UnitResult]:
    """Write units in threads; yield each with its result when it is done.

    After an error of a unit the others end where they next report bytes. Close the iterator to end
    them early.

    Args:
        shared: Objects for `Unit.write`, if there is one thread.

    Raises:
        ConfigError, OSError: The first error of a unit.
    """
    is_stopped, local = threading.Event(), threading.local()
    first_error: BaseException | None = None

    def initialize() -> None:
        torch.set_num_threads(1)
        local.shared = dict(shared) if workers == 1 else {}

    def report(num_bytes: int) -> None:
        if is_stopped.is_set():
            raise _StoppedError
        report_bytes(num_bytes)

    def write(unit: Unit) -> Any:
        report(0)
        try:
            return _write_unit(unit, folder, report, local.shared)
        except Exception:
            is_stopped.set()
            raise

    with ThreadPoolExecutor(workers, initializer=initialize) as pool:
        try:
            futures = {pool.submit(write, unit): unit for unit in units}
            for future in as_completed(futures):
                error = future.exception()
                if error is None:
                    yield futures[future], future.result()
                elif not isinstance(error, _StoppedError):
                    first_error = first_error or error
        finally:
            is_stopped.set()
    if first_error is not None:
        raise first_error


def _write_unit(unit: Unit, folder: Path, report_bytes: ReportBytes, shared: dict[str, Any]) -> Any:
    """Write a unit; a ConfigError that was caused by the output's disk becomes its OSError."""
    try:
        return unit.write(folder, report_bytes, shared)
    except ConfigError as error:
        if isinstance(error.__cause__, OSError):  # such as a full disk: no bad input
            raise error.__cause__ from None
        raise
