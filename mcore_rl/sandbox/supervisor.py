"""Runs one program in a sandbox, and outlives its caller just long enough to clean up.

Reads one line of JSON from stdin, answers with JSON on stdout. The end of stdin, a SIGTERM, or the
death of the thread that started this process ends the call. However a call ends, all that the
program has started is dead and its scratch folder is gone before this process exits.

Limits on wall time, output, scratch folder, and the sums of CPU time, memory and threads are kept
here, by looking every POLL_S; the others are of the kernel (launcher.py).

Runs as a script (`python -I -S supervisor.py`) with the standard library only. Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import IO, Any

POLL_S = 0.05
KILL_S = 5.0  # a process in uninterruptible sleep may outlast SIGKILL; then the call fails
PREFIX = "mcore-rl-sandbox-"  # of scratch folders
FIRST_UID = 2_000_000_000  # user ids of sandboxes: this and a pid, which nobody else has

_CHUNK = 1 << 16
_BLOCK = 4096  # the least that a file counts for
_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36  # of prctl
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class CancelledError(Exception):
    """Nobody waits for the result any more."""


def main() -> None:
    libc = ctypes.CDLL(None)
    libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # what loses its parent becomes our child
    signal.signal(signal.SIGTERM, _cancel)
    libc.prctl(_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    try:
        answer = supervised(json.loads(_request_line()))
    except CancelledError:
        return
    except OSError as error:
        answer = {"error": str(error)}
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.write(json.dumps(answer))
        sys.stdout.flush()


def _cancel(*_: object) -> None:
    raise CancelledError


def _request_line() -> bytes:
    """Not through sys.stdin: nothing after the line may be read ahead."""
    line = bytearray()
    while not line.endswith(b"\n"):
        if not (chunk := os.read(0, _CHUNK)):
            raise CancelledError
        line += chunk
    return bytes(line)


def supervised(request: dict[str, Any]) -> dict[str, Any]:
    launch = request["launch"]
    launch["uid"] = FIRST_UID + os.getpid() if request["own_uid"] else None
    scratch = ""
    try:
        if not launch["scratch"]:  # there is none inside of the sandbox
            scratch = tempfile.mkdtemp(prefix=PREFIX, dir=request["scratch_parent"])
            if launch["uid"] is not None:
                os.chown(scratch, launch["uid"], launch["uid"])
            launch["scratch"] = scratch
            for name in ("HOME", "TMPDIR"):
                launch["environment"][name] = scratch
        return _Call(request, scratch).result()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _kill_all()
        if scratch:
            remove(scratch)


class _Call:
    """One program, from its start to its end."""

    def __init__(self, request: dict[str, Any], scratch: str) -> None:
        self._limits: dict[str, float] = request["limits"]
        self._own_processes: int = request["own_processes"]  # of the sandbox itself
        self._stdin = memoryview(request["stdin"].encode())
        self._scratch = scratch
        self._output = {"stdout": bytearray(), "stderr": bytearray()}
        self._reached = ""  # the status of a limit that it has reached
        self._start = time.monotonic()
        launch = {**request["launch"], "supervisor": os.getpid()}
        with _memory_file(json.dumps(launch).encode()) as request_fd:
            self._ready, ready = os.pipe()
            self._child = subprocess.Popen(
                [*request["command"], str(request_fd), str(ready)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(request_fd, ready),
                start_new_session=True,
                env={},
            )
            os.close(ready)

    def result(self) -> dict[str, Any]:
        with selectors.DefaultSelector() as selector:
            self._watch(selector)
        wall_s = time.monotonic() - self._start
        code = _kill_all().get(self._child.pid, -signal.SIGKILL)
        self._child.returncode = code
        for name in self._output:
            self._drain(name)
        is_ready = os.read(self._ready, 5) == b"ready"
        text = {name: bytes(found).decode(errors="replace") for name, found in self._output.items()}
        if not is_ready and not self._reached:
            raise OSError(text["stderr"].strip() or f"the sandbox ended with status {code}")
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        code = 128 - code if code < 0 else code
        cpu_s = usage.ru_utime + usage.ru_stime
        status = self._reached or _status(code, text["stderr"], cpu_s >= self._limits["cpu_s"])
        return {"status": status, "exit_code": code, **text, "wall_s": wall_s, "cpu_s": cpu_s}

    def _watch(self, selector: selectors.BaseSelector) -> None:
        """Returns when the program has ended or has reached a limit."""
        end = os.pidfd_open(self._child.pid)
        for stream, name in ((self._child.stdout, "stdout"), (self._child.stderr, "stderr")):
            assert stream is not None  # they are pipes
            os.set_blocking(stream.fileno(), False)
            selector.register(stream, selectors.EVENT_READ, name)
        assert self._child.stdin is not None
        os.set_blocking(self._child.stdin.fileno(), False)
        selector.register(self._child.stdin, selectors.EVENT_WRITE, "stdin")
        selector.register(0, selectors.EVENT_READ, "caller")
        selector.register(end, selectors.EVENT_READ, "end")
        looked = self._start
        while not self._reached:
            for key, _ in selector.select(POLL_S):
                if key.data == "caller":
                    if not os.read(0, _CHUNK):
                        raise CancelledError
                elif key.data == "end":
                    os.close(end)
                    return
                elif key.data == "stdin":
                    if not self._write(self._child.stdin):
                        selector.unregister(key.fileobj)
                        self._child.stdin.close()
                elif not self._read(key.data, key.fd):
                    selector.unregister(key.fileobj)
            now = time.monotonic()
            if now - self._start > self._limits["wall_s"]:
                self._reached = "timeout"
            elif now - looked > POLL_S:
                self._look()
                looked = time.monotonic()

    def _write(self, stdin: IO[bytes]) -> bool:
        """Whether there is more to write."""
        with contextlib.suppress(BlockingIOError):
            try:
                self._stdin = self._stdin[os.write(stdin.fileno(), self._stdin[:_CHUNK]) :]
            except BrokenPipeError:
                return False
        return bool(self._stdin)

    def _read(self, name: str, fd: int) -> bool:
        """Whether there may be more to read."""
        room = int(self._limits["output"]) - sum(map(len, self._output.values()))
        try:
            found = os.read(fd, _CHUNK)
        except BlockingIOError:
            return True
        self._output[name] += found[:room]
        if len(found) > room:
            self._reached = self._reached or "output"
            return False
        return bool(found)

    def _drain(self, name: str) -> None:
        """What it wrote before it ended: all writers are dead."""
        stream = getattr(self._child, name)
        with contextlib.closing(stream):
            os.set_blocking(stream.fileno(), True)
            while self._read(name, stream.fileno()):
                pass

    def _look(self) -> None:
        memory = cpu_s = 0.0
        threads = -self._own_processes
        for pid in _descendants():
            with contextlib.suppress(OSError, ValueError, IndexError):
                status = _fields(f"/proc/{pid}/status")
                for kind in ("RssAnon", "RssShmem"):  # which a zombie has not
                    memory += int(status.get(kind, "0 kB").split()[0])
                threads += int(status["Threads"])
                with open(f"/proc/{pid}/stat") as file:
                    ticks = file.read().rpartition(")")[2].split()[11:15]  # also of reaped children
                cpu_s += sum(map(int, ticks)) * _TICK_S
        limits = self._limits
        if threads > limits["processes"]:
            self._reached = "processes"
        elif memory * 1024 > limits["memory"]:
            self._reached = "memory"
        elif cpu_s > limits["cpu_s"]:
            self._reached = "timeout"
        elif self._scratch and is_larger(self._scratch, limits["scratch"]):
            self._reached = "disk"


def _status(code: int, stderr: str, used_cpu: bool) -> str:
    """Of a program that has ended by itself, or by a signal of the kernel."""
    if code == 128 + signal.SIGXCPU or (code == 128 + signal.SIGKILL and used_cpu):
        return "timeout"
    if code == 128 + signal.SIGXFSZ:
        return "disk"
    if code and stderr.rstrip().rpartition("\n")[2].startswith("MemoryError"):
        return "memory"
    return "killed" if code > 128 else "error" if code else "ok"


@contextlib.contextmanager
def _memory_file(content: bytes) -> Iterator[int]:
    with os.fdopen(os.memfd_create("request"), "w+b") as file:
        file.write(content)
        file.flush()
        file.seek(0)
        yield file.fileno()


def _descendants() -> list[int]:
    """Processes started by this one, by those, and so on; also where a parent has died."""
    found: list[int] = []
    frontier = [os.getpid()]
    while frontier:
        folder = f"/proc/{frontier.pop()}/task"
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for task in os.listdir(folder):
                with open(f"{folder}/{task}/children") as file:
                    children = [int(pid) for pid in file.read().split()]
                found += children
                frontier += children
    return found


def _fields(path: str) -> dict[str, str]:
    with open(path) as file:
        return dict(line.split(":", 1) for line in file)  # type: ignore[misc]


def _kill_all() -> dict[int, int]:
    """Ends all descendants; returns for each child its exit status, negative for a signal."""
    ended: dict[int, int] = {}
    deadline = time.monotonic() + KILL_S
    while True:
        for pid in _descendants():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                ended[found[0]] = os.waitstatus_to_exitcode(found[1])
        except ChildProcessError:
            return ended
        if time.monotonic() > deadline:
            raise OSError(f"processes {_descendants()} outlive SIGKILL by {KILL_S:g} s")
        time.sleep(0.001)


def is_larger(folder: str, limit: float) -> bool:
    """Whether the files in it take more; a folder that cannot be looked into counts as full."""
    size, frontier = 0, [folder]
    while frontier:
        try:
            with os.scandir(frontier.pop()) as entries:
                for entry in entries:
                    size += _BLOCK
                    if entry.is_dir(follow_symlinks=False):
                        frontier.append(entry.path)
                    else:
                        size += entry.stat(follow_symlinks=False).st_blocks * 512
        except FileNotFoundError:
            continue
        except OSError:
            return True
        if size > limit:
            return True
    return False


def remove(folder: str) -> None:
    """Also where a program made folders too deep for Python, or without rights."""
    try:
        shutil.rmtree(folder)
    except (OSError, RecursionError):
        subprocess.run(["chmod", "-R", "u+rwx", folder], stderr=subprocess.DEVNULL)
        subprocess.run(["rm", "-rf", folder], check=True)


if __name__ == "__main__":
    main()
