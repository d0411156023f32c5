"""State and Python stacks of processes that take too long, this one or others of the machine.

py-spy reads the stacks of others from outside, also of a process that is stopped, holds the
interpreter's lock or loops in C. Where the system forbids that (ptrace), a process that has called
`dump_stacks_on_signal` writes them to its stderr when it gets SIGUSR2.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

_SIGNAL = signal.SIGUSR2
_PY_SPY_S = 20.0  # how long py-spy may take for a process
_ANSWER_S = 5.0  # how long a process may take to write its own stacks
_MOST_CHILDREN = 8  # children of a process that are inspected
_GONE, _STOPPED, _WAITING = "gone", "stopped by a signal", "waiting"
STUCK_STATES = frozenset({_GONE, _STOPPED})  # states that never end by themselves
_STATES = {
    psutil.STATUS_ZOMBIE: _GONE,
    psutil.STATUS_DEAD: _GONE,
    psutil.STATUS_STOPPED: _STOPPED,
    psutil.STATUS_TRACING_STOP: "stopped by a debugger",
    psutil.STATUS_DISK_SLEEP: "waiting for a disk",
    psutil.STATUS_RUNNING: "running",
}
_URGENCY = [*dict.fromkeys(_STATES.values()), _WAITING]  # the likeliest cause first
_FRAME = re.compile(r'^ {4}(.+ \(.+\))$|^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ProcessState:
    """State and stacks of one process."""

    pid: int
    name: str  # the start of its command line
    state: str
    stacks: str  # of all its threads, or why there are none

    @property
    def urgency(self) -> int:
        """The process with the lowest most likely blocks the others."""
        return _URGENCY.index(self.state)


def dump_stacks_on_signal() -> None:
    """Write the stacks of all threads to stderr on SIGUSR2."""
    faulthandler.register(_SIGNAL, file=2, all_threads=True, chain=False)


def inspect_process(pid: int) -> list[ProcessState]:
    """Return the states of a process and of its Python children. Never raise."""
    states = []
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        states.append(_read_state(process))
        children = [p for p in process.children(recursive=True) if _is_python(p)]
        states += [_read_state(child) for child in children[:_MOST_CHILDREN]]
    return states or [ProcessState(pid, "", _GONE, "")]


def describe_stopped_processes(processes: Iterable[psutil.Process]) -> str:
    """Name the processes that a signal has stopped, on a line; say so if there are none."""
    names = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if _STATES.get(process.status()) == _STOPPED:
                names.append(f"process {process.pid} ({_get_command(process)})")
    if not names:
        return "no process of the run is stopped"
    return f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} {_STOPPED}"


def summarize_states(states: Sequence[ProcessState]) -> str:
    """Return a line with the state and the innermost frame of the likeliest cause of a hang.

    >>> engine = ProcessState(8, "engine", "gone", "")
    >>> summarize_states([ProcessState(7, "ray::Actor", "waiting", ""), engine])
    'its process 8 (engine) is gone'
    """
    worst = min(states, key=lambda state: state.urgency)
    child = "" if worst is states[0] else f"its process {worst.pid} ({worst.name}) is "
    frame = _find_innermost_frame(worst.stacks)
    return f"{child}{worst.state}{frame and f', in {frame}'}"


def format_stacks(states: Sequence[ProcessState]) -> str:
    """Return the stacks of all processes."""
    return "\n".join(f"pid {x.pid} ({x.name}), {x.state}\n{x.stacks}".rstrip() for x in states)


def _read_state(process: psutil.Process) -> ProcessState:
    name, state = "", _GONE
    with contextlib.suppress(psutil.Error):
        name = _get_command(process)
        state = _STATES.get(process.status(), _WAITING)
    stacks = "" if state == _GONE else _read_stacks(process.pid, state)
    return ProcessState(process.pid, name, state, stacks)


def _get_command(process: psutil.Process) -> str:
    program, *words = process.cmdline() or [""]
    return " ".join([Path(program).name, *words])[:60].strip()


def _is_python(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        is_tracker = any("multiprocessing.resource_tracker" in word for word in process.cmdline())
        is_alive = process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
        return is_alive and not is_tracker and "python" in Path(process.exe()).name
    return False


def _read_stacks(pid: int, state: str) -> str:
    try:
        return _run_py_spy(pid)
    except (OSError, subprocess.SubprocessError) as error:
        message = getattr(error, "stderr", None) or str(error)
        refusal = f"py-spy cannot read them: {' '.join(str(message).split())}"
    try:
        return f"({refusal}; from the process itself)\n{_request_stacks(pid, state)}"
    except (OSError, RuntimeError) as error:
        return f"no stacks: {refusal}; nor does the process write them: {error}"


def _run_py_spy(pid: int) -> str:
    tool = Path(sysconfig.get_path("scripts"), "py-spy")
    command = [str(tool), "dump", "--nonblocking", "--pid", str(pid)]
    return subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=_PY_SPY_S
    ).stdout.strip()


def _request_stacks(pid: int, state: str) -> str:
    """Request the stacks by SIGUSR2. A stopped process is continued, and writes first of all."""
    caught = re.search(r"^SigCgt:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    if caught is None or not int(caught[1], 16) >> (_SIGNAL - 1) & 1:
        raise RuntimeError("it does not heed SIGUSR2")
    stderr = Path(f"/proc/{pid}/fd/2")
    if not stderr.is_file():
        raise RuntimeError("its stderr is not a file")
    before = stderr.stat().st_size
    os.kill(pid, _SIGNAL)
    if state == _STOPPED:
        os.kill(pid, signal.SIGCONT)
    deadline, size = time.monotonic() + _ANSWER_S, before
    while time.monotonic() < deadline:
        time.sleep(0.2)
        size, last = stderr.stat().st_size, size
        if before < size == last:  # all of it is there
            break
    if size == before:
        raise RuntimeError(f"it did not answer SIGUSR2 in {_ANSWER_S:g} s")
    with stderr.open("rb") as file:
        file.seek(before)
        return file.read(size - before).decode(errors="replace")


def _find_innermost_frame(stacks: str) -> str:
    """Return the innermost frame of the thread of a rank's call, or else of the main thread."""
    threads = [text for text in re.split(r"\n(?=Thread |Current thread )", stacks) if text]
    call_threads = [text for text in threads if "worker_process.py" in text]
    main_threads = [
        text for text in threads if '"MainThread"' in text or text.startswith("Current")
    ]
    match = _FRAME.search("\n".join((call_threads or main_threads or threads)[:1]))
    if match is None:
        return ""
    frame, file, line, name = match.groups()
    return frame or f"{name} ({file}:{line})"


class StackTimer:
    """Writes the stacks of this process where an operation takes too long, one at a time."""

    def __init__(self, process_name: str, after_s: float) -> None:
        """Create a timer; `process_name` stands in the first line."""
        self._process_name, self._after_s = process_name, after_s
        self._timer: threading.Timer | None = None

    def start(self, operation: str) -> None:
        """Start the time of an operation, in place of the one before."""
        self.stop()
        self._timer = threading.Timer(self._after_s, self._write, [operation])
        self._timer.daemon = True
        self._timer.start()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _write(self, operation: str) -> None:
        """Write all at once, so that it stays in one piece beside the texts of other processes."""
        with tempfile.TemporaryFile() as file:
            faulthandler.dump_traceback(file, all_threads=True)
            stacks = os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0)
        line = (
            f"{self._process_name}: {operation} takes longer than {self._after_s:g} s; its threads:"
        )
        sys.stderr.write(f"{line}\n{stacks.decode(errors='replace')}\n")
        sys.stderr.flush()
