"""Clean-up: when this process ends, nothing that it started is left; signals end it in order.

The reaper (controller/reaper.py) does the part that this process cannot do itself. No Ray here.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mcore_rl.config.atomic_file import write_file
from mcore_rl.controller import reaper
from mcore_rl.observability.warnings import warn

MARKER = "MCORE_RL_SESSION"  # in the environment of every process of a session
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
EXIT_STOPPED = os.EX_TEMPFAIL  # exit status 75: start it again with resume=auto
_REPORT_S = 30.0  # for the reaper to report a death of Ray's; it takes a moment
_SUPERVISE_S = 1.0  # between looks at the reaper
_MAX_CLEAN_UPS = 3  # reapers that may die while they clean up
_DEATH_S = 0.5  # for a process to die after it has closed its connections
_SAME_MOMENT_S = 5.0
_MAX_TEMP_DIR = 24  # Ray adds about 80 characters; the path of a socket may have 107
_reapers: list[_ReaperProcess] = []  # of the scopes of this process, the innermost last
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
    an earlier scope has left because its reaper was killed, too, is removed first, also where that
    had another TMPDIR.

    SIGTERM raises SystemExit(143) in the main thread, and SIGHUP SystemExit(129), unless it is
    ignored, as under nohup.

    Args:
        folders: Folders of this run. Whatever is called `.<name>.partial` there is removed.
        logs: Folder to which Ray's logs are copied.
        locks: Descriptors of locked files, which stay locked until all is cleaned up.
        trace_file: With it, the reaper reports a death that this process cannot report itself, of
            its own or of its Ray (`watch_ray_processes`), on one line of stderr and in that file.
            Then the exit status is 1, or that of the signal which has killed it. A second signal
            ends this process, also where it is busy in C code.
    """
    place = get_short_temp_dir()
    reaper.remove_all_abandoned(place)
    temp_dir = Path(tempfile.mkdtemp(prefix=reaper.PREFIX, dir=place)).resolve()
    session = secrets.token_hex(8)
    paths = [str(path.absolute()) if path else "" for path in (logs, trace_file)]
    settings = {
        "driver": os.getpid(),
        "marker": f"{MARKER}={session}",
        "temp_dir": str(temp_dir),
        "folders": [str(folder.resolve()) for folder in folders],
        "logs": paths[0],
        "trace_file": paths[1],
        "command": _get_command_name(),
        "locks": [os.readlink(f"/proc/self/fd/{lock}") for lock in locks],
    }
    with (
        _exit_on_signals(),
        _lock_folder(temp_dir) as lock,
        _run_reaper(settings, [*locks, lock]) as process,
        process.receive_signals() if trace_file else contextlib.nullcontext(),
        set_environment(**{MARKER: session, "TMPDIR": str(temp_dir)}),
    ):
        yield temp_dir


class _ReaperProcess:
    """The reaper of a scope. One that dies is started again, one that is stopped is continued."""

    def __init__(self, settings: Mapping[str, Any], locks: Sequence[int]) -> None:
        """Start the reaper.

        Args:
            settings: Arguments of `reaper.Reaper`.
            locks: Descriptors that the reaper inherits.
        """
        self._locks, self.temp_dir = locks, Path(settings["temp_dir"])
        self._command = [sys.executable, "-I", "-S", reaper.__file__, json.dumps(settings)]
        # Both ends stay open here: words wait for the next reaper when one has died.
        self._words, self._sender = os.pipe()
        os.set_blocking(self._sender, False)
        self._is_ending = False
        self._process = self._start()
        self._thread = threading.Thread(target=self._supervise, name="reaper", daemon=True)
        self._thread.start()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self._command,
            stdin=self._words,
            stdout=subprocess.PIPE,
            start_new_session=True,
            pass_fds=self._locks,
        )

    @contextlib.contextmanager
    def receive_signals(self) -> Iterator[None]:
        """Let the reaper know of each signal inside, also while C code runs in this process."""
        if threading.current_thread() is not threading.main_thread():
            yield  # only the main thread may
            return
        before = signal.set_wakeup_fd(self._sender, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)

    def send(self, word: bytes) -> None:
        """Send a word to the reaper."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._sender, word)

    def close(self) -> None:
        """Have the reaper clean up; wait for it."""
        self._is_ending = True
        self.send(reaper.END)
        self._thread.join()
        os.close(self._words)
        os.close(self._sender)

    def _supervise(self) -> None:
        """Wait until the reaper has cleaned up. End this process when the reaper says so."""
        num_deaths = 0
        while True:
            status = self._wait_for_status()
            if status:
                os._exit(status[0])
            if self._process.wait() == 0:
                return
            num_deaths += 1
            how = f"the process {self._process.pid}, which cleans up after the run, has died"
            if self._is_ending and num_deaths > _MAX_CLEAN_UPS:
                warn(f"{how}; what is left in {self.temp_dir}, the next run removes")
                return
            warn(f"{how}; it is started again")
            if self._is_ending:  # the word may have been read
                self.send(reaper.END)
            time.sleep(
                _SUPERVISE_S if num_deaths > 1 else 0.0
            )  # it may die for a reason of its own
            self._process = self._start()

    def _wait_for_status(self) -> bytes:
        """Wait for a byte of the reaper, or for its end; continue it if it is stopped."""
        output, was_stopped = self._process.stdout, False
        assert output is not None
        with output:
            while not select.select([output], [], [], _SUPERVISE_S)[0]:
                is_stopped = reaper.is_stopped(self._process.pid)
                if is_stopped and was_stopped:
                    warn(f"the process {self._process.pid}, which cleans up, is continued")
                    os.kill(self._process.pid, signal.SIGCONT)
                was_stopped = is_stopped
            return output.read(1)


@contextlib.contextmanager
def _run_reaper(settings: Mapping[str, Any], locks: Sequence[int]) -> Iterator[_ReaperProcess]:
    reaper.register_folder(settings["temp_dir"])
    process = _ReaperProcess(settings, locks)
    _reapers.append(process)
    try:
        yield process
    finally:
        _reapers.remove(process)
        process.close()


def end_hanging_process(report: str) -> None:
    """Have the reaper end this process, with a report of which the first line is for the terminal.

    For a thread that sees another one wait for too long. Returns at once.
    """
    if _reapers:
        (_reapers[-1].temp_dir / reaper.HANG_NOTE).write_text(report)
        _reapers[-1].send(reaper.HANG)


def _get_command_name() -> str:
    """Return the first words of this process's messages."""
    words = [word for word in sys.argv[1:2] if word.isalpha()]
    return " ".join(["mcore-rl", *words])


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
    """Wait for the reaper to end this process, if a process of its Ray has died or is stopped.

    All failures are consequences then, and no rank is to blame. A process that dies closes its
    connections before it is gone, so this checks for a moment; once for failures of one moment.
    """
    global _ray_checked_at
    until = time.monotonic() + _DEATH_S
    ended_at = time.monotonic() + reaper.STOPPED_S + _REPORT_S
    while any(map(reaper.is_stopped, _ray_pids.values())) and time.monotonic() < ended_at:
        time.sleep(_DEATH_S)
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
    last = -reaper.REPEATED_S

    def leave(signum: int, frame: object) -> None:
        nonlocal last
        now_s = time.monotonic()
        is_new, last = now_s - last > reaper.REPEATED_S, now_s
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
            if time.monotonic() - received_at > reaper.REPEATED_S:
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
