"""A conversion from its plan to a folder: resumable, bounded in memory, whole or not there.

Beside the output NAME, the folder `.NAME.partial` holds what is finished so far:

    conversion.json     the fingerprint: what is converted, and how
    lock                held by the run that writes
    units/FILE.json     what writing the output file FILE gave: FILE is whole
    output/             becomes NAME at the end

A file gets its name when it is whole, and its entry in units/ after that. So a run that was killed
goes on where it stopped, to the same bytes.

Nothing is flushed to the disk here, as nothing is when files are copied: a killed process loses
none of what it wrote, and a flush would take as long as the rest. A machine that loses its power
may lose the last seconds of writes. A file whose end is lost is then shorter than its entry says,
and is written again.
"""

from __future__ import annotations

import errno
import fcntl
import gc
import json
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from mcore_rl.config.errors import ConfigError
from mcore_rl.jobs.convert.memory import choose_workers
from mcore_rl.jobs.convert.options import Resources, format_bytes
from mcore_rl.jobs.convert.progress import ByteProgress
from mcore_rl.jobs.convert.workers import Unit, writer
from mcore_rl.jobs.failure import RunFailed

_FINGERPRINT = "conversion.json"
_GOES_ON = "the same command goes on where this one stopped"


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
            left, the rest is of another conversion, a source is damaged. Nothing stands on disk.
        RunFailed: the disk is full, a worker died. What is finished stays for the same command.
    """
    console = console or Console()
    work = conversion.output.with_name(f".{conversion.output.name}.partial")
    if _is_finished(conversion, work):
        _tidy(work)
        _say(console, f"{conversion.output} was complete")
        return
    todo = [unit for unit in conversion.units if not _is_written(work, unit)]
    _check_space(conversion.output, todo)
    units = [unit.memory_bytes for unit in todo]
    workers, bound = choose_workers(units, resources, conversion.finish_bytes)
    for line in (*conversion.notes, bound):
        _say(console, line)
    with _claimed(work, conversion.fingerprint), _told_in_one_line(work):
        _write(conversion, todo, work, workers, console)


def _is_finished(conversion: Conversion, work: Path) -> bool:
    """Whether an earlier run wrote the output and was killed before it could tidy up.

    Raises:
        ConfigError: the output folder holds something else, or `work` another conversion.
    """
    earlier = _read_fingerprint(work)
    if earlier is not None:
        _check_same(earlier, conversion.fingerprint, work)
    output = conversion.output
    if not output.exists():
        return False
    if not output.is_dir() or any(output.iterdir()):
        # The fingerprint goes before the folder does, so an empty one is the end of tidying up.
        was_ours = earlier is not None or (work.is_dir() and not any(work.iterdir()))
        if was_ours and not (work / "output").exists():
            return True
        raise ConfigError(f"output folder {output} is not empty; allowed: a new or empty folder")
    return False


def _read_fingerprint(work: Path) -> dict[str, Any] | None:
    with suppress(FileNotFoundError):
        return json.loads((work / _FINGERPRINT).read_text())
    return None


def _check_same(theirs: Mapping[str, Any], mine: Mapping[str, Any], work: Path) -> None:
    for name in sorted(theirs.keys() | mine.keys()):
        if theirs.get(name) != mine.get(name):
            raise ConfigError(
                f"{work} holds the first part of another conversion: {name} is "
                f"{json.dumps(theirs.get(name))} there and {json.dumps(mine.get(name))} here; "
                "remove that folder to start over"
            )


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
def _claimed(work: Path, fingerprint: Mapping[str, Any]) -> Iterator[None]:
    """The folder `work`, locked; gone again after a ConfigError, with what was made on the way."""
    made = [folder for folder in (work, *work.absolute().parents) if not folder.exists()]
    try:
        (work / "units").mkdir(parents=True, exist_ok=True)
        (work / "output").mkdir(exist_ok=True)
        lock = (work / "lock").open("w")
    except OSError as error:
        raise ConfigError(f"{work} cannot be made: {error.strerror}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another process is at work in {work}") from None
        try:
            _write_json(work / _FINGERPRINT, fingerprint)
            yield
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
        raise KeyboardInterrupt(f"interrupted; {_GOES_ON}") from None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise RunFailed(f"no space left in {work.absolute().parent}; {_GOES_ON}") from error
        raise RunFailed(f"{error}; {_GOES_ON}") from error
    except RunFailed as error:
        raise RunFailed(f"{error}; {_GOES_ON}") from error
    finally:
        signal.signal(signal.SIGTERM, before)


def _exit(signum: int, frame: object) -> None:
    raise SystemExit(128 + signum)


def _write(
    conversion: Conversion, todo: Sequence[Unit], work: Path, workers: int, console: Console
) -> None:
    total, left = (sum(u.nbytes for u in units) for units in (conversion.units, todo))
    if left < total:
        _say(console, f"going on behind {format_bytes(total - left)} of {format_bytes(total)}")
    gc.freeze()  # what planning and imports have left is not looked through again
    with (
        writer(workers, work / "output", {type(unit) for unit in todo}, conversion.kept) as write,
        ByteProgress("converting", total, total - left, console) as progress,
    ):
        for unit, result in write(todo, progress.add):
            size = (work / "output" / unit.name).stat().st_size
            _write_json(_entry(work, unit), {"bytes": size, "result": result})
        _complete(conversion, work)
        took = f"{format_bytes(left)} in {progress.seconds:.2f} s, {progress.rate}"
    _say(console, took)


def _say(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def _complete(conversion: Conversion, work: Path) -> None:
    folder = work / "output"
    entries = [json.loads(_entry(work, unit).read_text()) for unit in conversion.units]
    conversion.finish(folder, [entry["result"] for entry in entries])
    folder.rename(conversion.output)
    _tidy(work)


def _tidy(work: Path) -> None:
    """Remove what is left of a run; at last what tells, should it be killed, that it had ended."""
    for path in work.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != _FINGERPRINT:
            path.unlink()
    (work / _FINGERPRINT).unlink(missing_ok=True)
    work.rmdir()


def _is_written(work: Path, unit: Unit) -> bool:
    try:
        size = json.loads(_entry(work, unit).read_text())["bytes"]
        return bool((work / "output" / unit.name).stat().st_size == size)
    except (FileNotFoundError, ValueError):
        return False


def _entry(work: Path, unit: Unit) -> Path:
    return work / "units" / f"{unit.name}.json"


def _write_json(path: Path, value: Any) -> None:
    aside = path.with_name(f".{path.name}.partial")
    aside.write_text(json.dumps(value))
    aside.replace(path)
