"""A conversion from its plan to a folder: resumable, bounded in memory, atomic.

The output NAME is written as `.NAME.partial`, with a journal in it, `.conversion.jsonl`: what is
converted and how, the fingerprint, and then a line for each complete file. A file gets its
name when it is complete, and its line after that. So a killed run continues where it stopped,
to the same bytes. The journal goes when the folder has its name.

Nothing is flushed to the disk, as when files are copied: a killed process loses
none of what it wrote, and a flush would take as long as the rest. A machine that loses its power
may lose the last seconds of writes. A file whose end is lost is then shorter than the journal
says, and is written again.
"""

from __future__ import annotations

import errno
import fcntl
import json
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

from rich.console import Console

from mcore_rl.config.errors import ConfigError
from mcore_rl.jobs.convert.options import Resources, choose_workers, format_bytes
from mcore_rl.jobs.convert.progress import ByteProgress
from mcore_rl.jobs.convert.workers import Unit, writer
from mcore_rl.jobs.failure import RunFailed
from mcore_rl.observability.console import show_line

_JOURNAL = ".conversion.jsonl"
_CONTINUE = "run the same command again to continue"


@dataclass(frozen=True, slots=True)
class Conversion:
    """What is to be written: a file for each unit, and what `finish` adds when they are there."""

    output: Path
    fingerprint: Mapping[str, Any]  # equal fingerprints make equal bytes; JSON
    units: Sequence[Unit]
    # Gets the folder, and what each unit returned in the order of the units.
    finish: Callable[[Path, list[Any]], None]
    notes: Sequence[str] = ()  # lines that a user should see first
    finish_bytes: int = 0  # of memory that `finish` takes
    # What planning has opened, for units that are written in this process.
    kept: Mapping[str, Any] = field(default_factory=dict)


def run(conversion: Conversion, resources: Resources, console: Console | None = None) -> None:
    """Carry out a conversion, or the rest of one that was interrupted.

    Raises:
        ConfigError: the output folder is not empty, too little memory or disk space is allowed or
            left, the rest is of another conversion, a source is damaged. Nothing is on disk.
        RunFailed: the disk is full, a worker died. What is finished stays for the same command.
    """
    output = conversion.output
    work = output.with_name(f".{output.name}.partial")
    say = partial(show_line, console=console)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        if _read_journal(output)[:1] != [_as_json(conversion.fingerprint)]:
            raise ConfigError(
                f"output folder {output} is not empty; allowed: a new or empty folder"
            )
        (output / _JOURNAL).unlink()  # it was killed just before
        say(f"{output} was complete")
        return
    results = _finished(work, conversion)
    todo = [unit for unit in conversion.units if unit.name not in results]
    _check_space(output, todo)
    memory = [unit.memory_bytes for unit in todo]
    workers, bound = choose_workers(memory, resources, conversion.finish_bytes)
    for line in (*conversion.notes, bound):
        say(line)
    total, left = (sum(u.nbytes for u in units) for units in (conversion.units, todo))
    if left < total:
        say(f"going on behind {format_bytes(total - left)} of {format_bytes(total)}")
    with (
        _claimed(work, conversion.fingerprint) as journal,
        _told_in_one_line(work),
        writer(workers, work, {type(unit) for unit in todo}, conversion.kept) as write,
        ByteProgress("converting", total, total - left, console) as progress,
    ):
        for unit, result in write(todo, progress.add):
            results[unit.name] = result
            size = (work / unit.name).stat().st_size
            _append(journal, {"file": unit.name, "bytes": size, "result": result})
        conversion.finish(work, [results[unit.name] for unit in conversion.units])
        work.rename(output)
        (output / _JOURNAL).unlink()
        took = str(progress)
    say(took)


def _finished(work: Path, conversion: Conversion) -> dict[str, Any]:
    """What the units gave whose files are whole, by name.

    Raises:
        ConfigError: `work` has something else than the first part of this conversion.
    """
    fingerprint, lines = _as_json(conversion.fingerprint), _read_journal(work)
    if not lines and (not work.is_dir() or all(f.name == _JOURNAL for f in work.iterdir())):
        return {}
    theirs, *entries = lines or [{}]
    for name in sorted(theirs.keys() | fingerprint.keys()):
        if theirs.get(name) != fingerprint.get(name):
            raise ConfigError(
                f"{work} contains the first part of another conversion: {name} is "
                f"{json.dumps(theirs.get(name))} there and {json.dumps(fingerprint.get(name))} "
                "here; remove that folder to start over"
            )
    return {
        entry["file"]: entry["result"]
        for entry in entries
        if (file := work / entry["file"]).is_file() and file.stat().st_size == entry["bytes"]
    }


def _read_journal(folder: Path) -> list[Any]:
    """Its lines, except one that a killed run has truncated."""
    lines = []
    with suppress(OSError):
        for line in (folder / _JOURNAL).read_text().splitlines():
            with suppress(ValueError):
                lines.append(json.loads(line))
    return lines


def _append(journal: IO[str], value: Any) -> None:
    journal.write(f"\n{json.dumps(value)}")  # a truncated line ends here
    journal.flush()


def _as_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _check_space(output: Path, todo: Sequence[Unit]) -> None:
    needed = sum(unit.nbytes for unit in todo)
    place = next(folder for folder in output.absolute().parents if folder.exists())
    free = shutil.disk_usage(place).free
    if needed > free:
        raise ConfigError(
            f"output folder {output} needs {format_bytes(needed)}, and {place} has "
            f"{format_bytes(free)} left"
        )


@contextmanager
def _claimed(work: Path, fingerprint: Mapping[str, Any]) -> Iterator[IO[str]]:
    """The journal in `work`, locked. After a ConfigError `work` is gone, with what led there."""
    made = [folder for folder in (work, *work.absolute().parents) if not folder.exists()]
    try:
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
        except ConfigError:  # what is there came from bad input
            shutil.rmtree(work)
            with suppress(OSError):  # somebody else may have put something there
                for folder in made[1:]:
                    folder.rmdir()
            raise


@contextmanager
def _told_in_one_line(work: Path) -> Iterator[None]:
    """What stops a run from outside, as one line; what is finished stays."""
    before = signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted; {_CONTINUE}") from None
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        reason = f"no space left in {work.absolute().parent}" if full else str(error)
        raise RunFailed(f"{reason}; {_CONTINUE}") from error
    except RunFailed as error:
        raise RunFailed(f"{error}; {_CONTINUE}") from error
    finally:
        signal.signal(signal.SIGTERM, before)


def _exit(signum: int, frame: object) -> None:
    raise SystemExit(128 + signum)
