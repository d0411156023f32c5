"""Clean-up: when this process ends, nothing that it started is left; signals end it in order.

The reaper (controller/reaper.py) does the part that this process cannot do itself. No Ray here.
"""

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

from mcore_rl.config.atomic_file import write_file
from mcore_rl.controller import reaper

MARKER = "MCORE_RL_SESSION"  # in the environment of every process of a session
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
EXIT_STOPPED = os.EX_TEMPFAIL  # exit status 75: start it again with resume=auto
# A terminal or a batch system may signal a process and its session with the same signal.
_REPEATED_S = 1.0
_REPORT_S = 30.0  # for the reaper to report a death of Ray's; it takes a moment
_DEATH_S = 0.5  # for a process to die after it has closed its connections
_SAME_MOMENT_S = 5.0
_MAX_TEMP_DIR = 24  # Ray adds about 80 characters; the path of a socket may have 107
_ray_pids: dict[str, int] = {}  # Ray's processes that have to live
_ray_checked_at = -_SAME_MOMENT_S


@contextlib.contextmanager
def clean_up_on_exit(
    *folders: Path,
    logs: Path | None = None,
    locks: Sequence[int] = (),
    trace_file: Path | None = None,
) -> Iterator[Path]:
    """Yield a temporary folder with a short path, the TMPDIR of every process started inside.

    However this process ends, even by SIGKILL, what it started inside is gone a moment later:
    processes, shared-memory files, the temporary folder, and unfinished files in `folders`. What
    an earlier scope has left because its reaper was killed, too, is removed first.

    SIGTERM raises SystemExit(143) in the main thread, and SIGHUP SystemExit(129), unless it is
    ignored, as under nohup.

    Args:
        folders: Folders of this run. Whatever is called `.<name>.partial` there is removed.
        logs: Folder to which Ray's logs are copied.
        locks: Descriptors of locked files, which stay locked until all is cleaned up.
        trace_file: With it, the reaper reports a death that this process cannot report itself, of
            its own or of its Ray (`watch_ray_processes`), on one line of stderr and in that file.
            Then the exit status is 1, or that of the signal which has killed it.
    """
    place = get_short_temp_dir()
    reaper.remove_abandoned(place)
    temp_dir = Path(tempfile.mkdtemp(prefix=reaper.PREFIX, dir=place))
    session = secrets.token_hex(8)
    with (
        _exit_on_signals(),
        _lock_folder(temp_dir) as lock,
        _start_reaper(f"{MARKER}={session}", temp_dir, folders, logs, [*locks, lock], trace_file),
        set_environment(**{MARKER: session, "TMPDIR": str(temp_dir)}),
    ):
        yield temp_dir


@contextlib.contextmanager
def _start_reaper(
    marker: str,
    temp_dir: Path,
    folders: tuple[Path, ...],
    logs: Path | None,
    locks: Sequence[int],
    trace_file: Path | None,
) -> Iterator[None]:
    paths = [str(path.absolute()) if path else "" for path in (logs, trace_file)]
    cleaned = [str(folder.resolve()) for folder in folders]
    command = [sys.executable, "-I", "-S", reaper.__file__, str(os.getpid()), marker]
    process = subprocess.Popen(
        [*command, str(temp_dir.resolve()), *paths, _get_command_name(), *cleaned],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        pass_fds=locks,
    )
    thread = threading.Thread(target=_exit_after_report, args=(process.stdout,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # a child forked from us may keep the pipe open,
            process.stdin.write(b"end")  # so a word ends the session, not the end of the file
            process.stdin.close()
        process.wait()
        thread.join()


def _get_command_name() -> str:
    """Return the first words of this process's messages."""
    words = [word for word in sys.argv[1:2] if word.isalpha()]
    return " ".join(["mcore-rl", *words])


def _exit_after_report(reaper_output: IO[bytes]) -> None:
    """End this process when the reaper has reported that Ray has died: waits for it never end."""
    with reaper_output:
        if reaper_output.read(len(reaper.REPORTED)) == reaper.REPORTED:
            os._exit(1)


@contextlib.contextmanager
def _lock_folder(temp_dir: Path) -> Iterator[int]:
    lock = reaper.acquire_lock(str(temp_dir))
    try:
        yield lock
    finally:
        os.close(lock)


def get_short_temp_dir() -> str:
    """Return the folder for temporary files, or /tmp if its path is too long for Ray."""
    usual = tempfile.gettempdir()
    return usual if len(usual) <= _MAX_TEMP_DIR else "/tmp"


@contextlib.contextmanager
def set_environment(**variables: str) -> Iterator[None]:
    """Set environment variables inside."""
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
def watch_ray_processes(temp_dir: Path, pids: Mapping[str, int]) -> Iterator[None]:
    """Let the reaper report if one of Ray's processes, given by name, dies inside."""
    note = temp_dir / reaper.RAY_NOTE
    write_file(note, json.dumps(pids))
    _ray_pids.update(pids)
    try:
        yield
    finally:
        _ray_pids.clear()
        note.unlink(missing_ok=True)


def wait_if_ray_died() -> None:
    """Wait for the reaper to end this process, if one of its Ray's processes has died.

    All failures are consequences then, and no rank is to blame. A process that dies closes its
    connections before it is gone, so this checks for a moment; once for failures of one moment.
    """
    global _ray_checked_at
    until = time.monotonic() + _DEATH_S
    while _ray_pids:
        alive = reaper.list_processes()
        if any(pid not in alive for pid in _ray_pids.values()):
            time.sleep(_REPORT_S)
            return
        if time.monotonic() > until or time.monotonic() - _ray_checked_at < _SAME_MOMENT_S:
            break
        time.sleep(_DEATH_S / 10)
    _ray_checked_at = time.monotonic()


@contextlib.contextmanager
def _exit_on_signals() -> Iterator[None]:
    """Raise SystemExit on SIGTERM and SIGHUP inside."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return
    received: list[int] = []
    last = -_REPEATED_S

    def leave(signum: int, frame: object) -> None:
        nonlocal last
        now_s = time.monotonic()
        is_new, last = now_s - last > _REPEATED_S, now_s
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
def keep_sigterm_handler() -> Iterator[None]:
    """Keep the handler of SIGTERM around a call that sets its own, which exits."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    except SystemExit as error:
        if callable(handler):
            handler(signal.SIGTERM, None)
        raise SystemExit(128 + signal.SIGTERM) from error
    finally:
        signal.signal(signal.SIGTERM, handler)


class RunStopped(Exception):
    """A signal has ended a run, which can be resumed from what it has saved."""


class StopSignals:
    """Signals that ask a run to end once it has saved what it has learned.

    `requested` is the name of the signal, "" before there is one.
    """

    def __init__(self, resume_hint: str = "") -> None:
        """Wait for a signal; `resume_hint` says how the run can be resumed."""
        self._resume_hint = resume_hint
        self.requested = ""
        self._is_in_step = False

    @contextlib.contextmanager
    def defer_to_step_end(self) -> Iterator[None]:
        """Let the caller check `requested` inside; elsewhere a signal ends the run at once.

        Raises:
            RunStopped: a signal came, and the caller has not ended the run.
        """
        self._is_in_step = True
        try:
            yield
        finally:
            self._is_in_step = False
        if self.requested:
            raise self.create_error()

    def create_error(self) -> RunStopped:
        """Return the error of a run that ends outside of a step."""
        return RunStopped(f"{self.requested}: the run was in no step; {self._resume_hint}")

    def receive(self, signum: int) -> bool:
        """Record a signal; return whether the run has to end at once."""
        self.requested = signal.Signals(signum).name
        message = "the run ends after this step, when it is saved; a second one ends it now"
        if self._is_in_step:
            with contextlib.suppress(OSError):  # nobody may read it any more
                os.write(2, f"{self.requested}: {message}\n".encode())
        return not self._is_in_step


@contextlib.contextmanager
def catch_stop_signals(resume_hint: str) -> Iterator[StopSignals]:
    """Take the first of SIGTERM, SIGUSR1 and SIGINT as a request; the next acts as before.

    Raises:
        RunStopped: the run was not in a step, and has ended at once.
    """
    stop = StopSignals(resume_hint)
    if threading.current_thread() is not threading.main_thread():
        yield stop  # only the main thread may set handlers
        return
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    received_at, has_ended_at_once = 0.0, False

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def receive(signum: int, frame: object) -> None:
        nonlocal received_at, has_ended_at_once
        if stop.requested:
            if time.monotonic() - received_at > _REPEATED_S:
                restore()
                signal.raise_signal(signum)
            return
        received_at = time.monotonic()
        if stop.receive(signum):
            has_ended_at_once = True
            raise SystemExit(EXIT_STOPPED)

    for number in STOP_SIGNALS:
        signal.signal(number, receive)
    try:
        yield stop
    finally:
        restore()
        if has_ended_at_once:  # a call into Ray that was interrupted forgets the exit code
            raise stop.create_error()
