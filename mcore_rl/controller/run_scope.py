"""Clean-up: when this process ends, nothing that it started is left. No Ray here."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from mcore_rl.controller import reaper

MARKER = "MCORE_RL_SESSION"  # in the environment of every process of a session
_TWICE_S = 1.0  # a terminal that hangs up tells its session's leader and its processes
_TOLD_S = 30.0  # for the reaper to tell of a death of Ray's; it takes a moment
_GONE_S, _ONE_MOMENT_S = 0.5, 5.0
_looked_at = -_ONE_MOMENT_S
_NOTED: dict[str, int] = {}  # Ray's processes that are to live
_LONGEST_TEMP_DIR = 24  # Ray adds about 80 characters; a socket's path may have 107


@contextlib.contextmanager
def run_scope(
    *folders: Path,
    logs: Path | None = None,
    locks: Sequence[int] = (),
    trace_file: Path | None = None,
) -> Iterator[Path]:
    """Yields a scratch folder with a short path, the TMPDIR of every process started meanwhile.

    However this process ends, even by SIGKILL, what it started meanwhile is gone a moment later:
    processes, shared-memory files, the scratch folder, and in `folders`, which must belong to this
    run, whatever is called `.<name>.partial`. Until then `locks`, descriptors of locked files, stay
    locked. What Ray has logged in the scratch folder becomes the folder `logs`. What an earlier
    scope has left because its reaper was killed, too, is removed first.

    With a `trace_file` a death that this process cannot tell of itself, of its own or of its Ray
    (`noted_ray`), is told on one line of stderr and in that file. Then the exit status is 1, or
    that of the signal which has killed it.

    SIGTERM raises SystemExit(143) in the main thread, and SIGHUP SystemExit(129), unless it is
    ignored, as under nohup.
    """
    place = short_temp_dir()
    reaper.sweep_abandoned(place)
    scratch = Path(tempfile.mkdtemp(prefix=reaper.PREFIX, dir=place))
    session = secrets.token_hex(8)
    with (
        _signals_exit(),
        _locked(scratch) as lock,
        _reaper(f"{MARKER}={session}", scratch, folders, logs, [*locks, lock], trace_file),
        environment(**{MARKER: session, "TMPDIR": str(scratch)}),
    ):
        yield scratch


@contextlib.contextmanager
def _reaper(
    marker: str,
    scratch: Path,
    folders: tuple[Path, ...],
    logs: Path | None,
    locks: Sequence[int],
    trace_file: Path | None,
) -> Iterator[None]:
    places = [str(path.absolute()) if path else "" for path in (logs, trace_file)]
    swept = [str(folder.resolve()) for folder in folders]
    command = [sys.executable, "-I", "-S", reaper.__file__, str(os.getpid()), marker]
    process = subprocess.Popen(
        [*command, str(scratch.resolve()), *places, _command(), *swept],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        pass_fds=locks,
    )
    told = threading.Thread(target=_go_when_told, args=(process.stdout,), daemon=True)
    told.start()
    try:
        yield
    finally:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # a child forked from us may keep the pipe open,
            process.stdin.write(b"end")  # so a word ends the session, not the end of the file
            process.stdin.close()
        process.wait()
        told.join()


def _command() -> str:
    """What messages of this process begin with."""
    words = [word for word in sys.argv[1:2] if word.isalpha()]
    return " ".join(["mcore-rl", *words])


def _go_when_told(reaper_says: IO[bytes]) -> None:
    """End this process when the reaper has told why: Ray has died, and waits for it never end."""
    with reaper_says:
        if reaper_says.read(len(reaper.TOLD)) == reaper.TOLD:
            os._exit(1)


@contextlib.contextmanager
def noted_ray(scratch: Path, pids: Mapping[str, int]) -> Iterator[None]:
    """Inside, Ray's processes are to live: the reaper watches them, by name."""
    note = scratch / reaper.RAY_NOTE
    aside = note.with_name(f".{note.name}.partial")
    aside.write_text(json.dumps(pids))
    aside.replace(note)
    _NOTED.update(pids)
    try:
        yield
    finally:
        _NOTED.clear()
        note.unlink(missing_ok=True)


def wait_if_ray_died() -> None:
    """Wait for the reaper to end this process, if a process of its Ray has died.

    Whatever fails then is a consequence, and no rank is to blame. A process that dies closes its
    connections before it is gone, so it is looked for a moment; once for failures of one moment.
    """
    global _looked_at
    until = time.monotonic() + _GONE_S
    while _NOTED:
        alive = reaper.processes()
        if any(pid not in alive for pid in _NOTED.values()):
            time.sleep(_TOLD_S)
            return
        if time.monotonic() > until or time.monotonic() - _looked_at < _ONE_MOMENT_S:
            break
        time.sleep(_GONE_S / 10)
    _looked_at = time.monotonic()


@contextlib.contextmanager
def _locked(scratch: Path) -> Iterator[int]:
    lock = reaper.locked(str(scratch))
    try:
        yield lock
    finally:
        os.close(lock)


@contextlib.contextmanager
def environment(**variables: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _signals_exit() -> Iterator[None]:
    """The handlers from before come back at the end."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return
    received: list[int] = []
    last = -_TWICE_S

    def leave(signum: int, frame: object) -> None:
        nonlocal last
        now = time.monotonic()
        is_new, last = now - last > _TWICE_S, now
        if is_new:
            received.append(signum)
            raise SystemExit(128 + signum)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if number == signal.SIGTERM or handler is not signal.SIG_IGN:
            signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if received:  # a call into Ray that was interrupted forgets the exit code
            raise SystemExit(128 + received[0])


@contextlib.contextmanager
def own_sigterm() -> Iterator[None]:
    """Around a call that sets its own SIGTERM handler, which exits: ours hears of it, too."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ours = signal.getsignal(signal.SIGTERM)
    try:
        yield
    except SystemExit as error:
        if callable(ours):
            ours(signal.SIGTERM, None)
        raise SystemExit(128 + signal.SIGTERM) from error
    finally:
        signal.signal(signal.SIGTERM, ours)


def short_temp_dir() -> str:
    usual = tempfile.gettempdir()
    return usual if len(usual) <= _LONGEST_TEMP_DIR else "/tmp"
