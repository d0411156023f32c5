"""What another process of this machine is doing: its state, and the Python stacks of its threads.

py-spy reads them from outside, whatever the process does: it may be stopped, hold the interpreter's
lock, or loop in C. Where the system lets no process look into another (ptrace), a process that has
called `answer_signals` writes them to its stderr when it is asked.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import subprocess
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

_SIGNAL = signal.SIGUSR2
_PY_SPY_S = 20.0  # how long py-spy may take for a process
_ANSWER_S = 5.0  # how long a process may take to write its own stacks
_MOST_CHILDREN = 8  # processes of a process that are looked at
_GONE, _STOPPED, _WAITING = "gone", "stopped by a signal", "waiting"
HELD_UP = frozenset({_GONE, _STOPPED})  # states that end by themselves never
_STATES = {
    psutil.STATUS_ZOMBIE: _GONE,
    psutil.STATUS_DEAD: _GONE,
    psutil.STATUS_STOPPED: _STOPPED,
    psutil.STATUS_TRACING_STOP: "stopped by a debugger",
    psutil.STATUS_DISK_SLEEP: "waiting for a disk",
    psutil.STATUS_RUNNING: "running",
}
_URGENCY = [*dict.fromkeys(_STATES.values()), _WAITING]  # likeliest to be the trouble first
_FRAME = re.compile(r'^ {4}(.+ \(.+\))$|^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Look:
    """What one process was doing."""

    pid: int
    name: str  # the start of its command line
    state: str
    stacks: str  # of all its threads, or why there are none

    @property
    def urgency(self) -> int:
        """The lowest most likely blocks the others."""
        return _URGENCY.index(self.state)


def answer_signals() -> None:
    """On SIGUSR2 this process writes the stacks of its threads to its stderr."""
    faulthandler.register(_SIGNAL, file=2, all_threads=True, chain=False)


def look_at(pid: int) -> list[Look]:
    """The process, then the Python processes that it has started. Never raises."""
    looks = []
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        looks.append(_look(process))
        children = [p for p in process.children(recursive=True) if _runs_python(p)]
        looks += [_look(child) for child in children[:_MOST_CHILDREN]]
    return looks or [Look(pid, "", _GONE, "")]


def in_short(looks: Sequence[Look]) -> str:
    """On one line: the state of the process that is likeliest to be the trouble, and where it is.

    >>> in_short([Look(7, "ray::Actor", "waiting", ""), Look(8, "engine", "gone", "")])
    'its process 8 (engine) is gone'
    """
    worst = min(looks, key=lambda look: look.urgency)
    whose = "" if worst is looks[0] else f"its process {worst.pid} ({worst.name}) is "
    frame = _innermost(worst.stacks)
    return f"{whose}{worst.state}{frame and f', in {frame}'}"


def in_full(looks: Sequence[Look]) -> str:
    """The stacks of all processes."""
    return "\n".join(f"pid {x.pid} ({x.name}), {x.state}\n{x.stacks}".rstrip() for x in looks)


def _look(process: psutil.Process) -> Look:
    name, state = "", _GONE
    with contextlib.suppress(psutil.Error):
        program, *words = process.cmdline() or [""]
        name = " ".join([Path(program).name, *words])[:60].strip()
        state = _STATES.get(process.status(), _WAITING)
    return Look(process.pid, name, state, "" if state == _GONE else _stacks(process.pid, state))


def _runs_python(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        is_tracker = any("multiprocessing.resource_tracker" in word for word in process.cmdline())
        lives = process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
        return lives and not is_tracker and "python" in Path(process.exe()).name
    return False


def _stacks(pid: int, state: str) -> str:
    try:
        return _by_py_spy(pid)
    except (OSError, subprocess.SubprocessError) as error:
        told = getattr(error, "stderr", None) or str(error)
        refusal = f"py-spy cannot read them: {' '.join(str(told).split())}"
    try:
        return f"({refusal}; from the process itself)\n{_by_itself(pid, state)}"
    except (OSError, RuntimeError) as error:
        return f"no stacks: {refusal}; nor does the process write them: {error}"


def _by_py_spy(pid: int) -> str:
    tool = Path(sysconfig.get_path("scripts"), "py-spy")
    command = [str(tool), "dump", "--nonblocking", "--pid", str(pid)]
    return subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=_PY_SPY_S
    ).stdout.strip()


def _by_itself(pid: int, state: str) -> str:
    """Asks by a signal. A stopped process continues for it; it writes first of all."""
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


def _innermost(stacks: str) -> str:
    """The frame in which the thread of a rank's call is, or else the main thread."""
    threads = [text for text in re.split(r"\n(?=Thread |Current thread )", stacks) if text]
    of_call = [text for text in threads if "worker_process.py" in text]
    main = [text for text in threads if '"MainThread"' in text or text.startswith("Current")]
    found = _FRAME.search("\n".join((of_call or main or threads)[:1]))
    if found is None:
        return ""
    frame, file, line, name = found.groups()
    return frame or f"{name} ({file}:{line})"
