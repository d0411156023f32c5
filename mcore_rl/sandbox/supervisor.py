"""Script that runs a program in a sandbox, enforces limits, and cleans up.

Reads a line of JSON from stdin, answers with JSON on stdout. The end of stdin, a SIGTERM, or the
death of the thread that started this process ends the call. However a call ends, all processes of
the program are dead and its scratch folder is gone before this process exits. The answer does not
wait for processes that outlive SIGKILL in an uninterruptible sleep: a child of this process waits
for them and then removes the folder.

Limits on wall time, output, scratch folder, and the sums of CPU time, memory and threads are
checked here every POLL_S; the kernel enforces the rest (launcher.py, cgroup.py).

Runs as a script (`python -I -S supervisor.py`) with the standard library only. Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

sys.path.append(str(Path(__file__).parents[2]))  # as a script it has no package; searched last

from mcore_rl.sandbox import usage
from mcore_rl.sandbox.cgroup import PREFIX, Cgroup

POLL_S = 0.05
KILL_S = 2.0  # wait for SIGKILL to end processes in an uninterruptible sleep
FIRST_UID = 2_000_000_000  # a sandbox has the user id FIRST_UID + pid, which nobody else has

_CHUNK = 1 << 16
_RAM_FOLDERS = "/tmp", "/dev/shm"  # in bubblewrap; the kernel limits their size, not inodes
_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36  # of prctl


class CancelledError(Exception):
    """The caller has cancelled the call."""


def main() -> None:
    """Run a call and write its answer."""
    libc = ctypes.CDLL(None)
    libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans become children of this process
    signal.signal(signal.SIGTERM, _cancel)
    libc.prctl(_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    call = None
    answer: dict[str, Any] = {}
    try:
        call = _Call(json.loads(_read_request()))
        answer = call.run()
    except CancelledError:
        pass
    except OSError as error:
        answer = {"error": str(error)}
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    survivors = kill_all()[1] if call is None or call.survivors is None else call.survivors
    if answer:
        with contextlib.suppress(BrokenPipeError):
            sys.stdout.write(json.dumps(answer | {"survivors": len(survivors)}))
            sys.stdout.flush()
    if survivors and os.fork():
        return
    wait_for(survivors)
    if call is not None:
        call.clean_up()


def _cancel(*_: object) -> None:
    raise CancelledError


def _read_request() -> bytes:
    """Read the line of the request; sys.stdin would read ahead."""
    line = bytearray()
    while not line.endswith(b"\n"):
        if not (chunk := os.read(0, _CHUNK)):
            raise CancelledError
        line += chunk
    return bytes(line)


class _Call:
    """A program, from its start to its end."""

    def __init__(self, request: dict[str, Any]) -> None:
        self._request = request
        self._limits: dict[str, float] = request["limits"]
        self._num_own_processes: int = request["own_processes"]  # processes of the sandbox itself
        self._stdin = memoryview(request["stdin"].encode(errors="surrogatepass"))
        self._scratch = ""  # empty for bubblewrap, which has a tmpfs
        self._cgroup: Cgroup | None = None
        self._output = {"stdout": bytearray(), "stderr": bytearray()}
        self._reached = ""  # status of the limit that the program has reached
        self.survivors: list[int] | None = None  # processes that SIGKILL has not ended

    def run(self) -> dict[str, Any]:
        """Run the program and return its result; OSError if it cannot be started."""
        request = self._request
        launch = {**request["launch"], "supervisor": os.getpid(), "uid": None}
        if request["own_uid"]:
            launch["uid"] = FIRST_UID + os.getpid()
        if not launch["scratch"]:
            self._scratch = tempfile.mkdtemp(prefix=PREFIX, dir=request["scratch_parent"])
            if launch["uid"] is not None:
                os.chown(self._scratch, launch["uid"], launch["uid"])
            launch["scratch"] = self._scratch
            for name in ("HOME", "TMPDIR"):
                launch["environment"][name] = self._scratch
        if request["cgroup"]:
            self._cgroup = Cgroup(**request["cgroup"])
        self._start = time.monotonic()
        with _create_memory_file(json.dumps(launch).encode()) as request_fd:
            self._ready, ready = os.pipe()
            os.set_blocking(self._ready, False)
            try:
                self._child = subprocess.Popen(
                    [*request["command"], str(request_fd), str(ready)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    pass_fds=(request_fd, ready),
                    start_new_session=True,
                    env={},
                    preexec_fn=lambda: self._prepare_process(launch["uid"]),
                )
            except subprocess.SubprocessError as error:
                raise OSError(f"the program cannot join its cgroup: {error}") from error
            finally:
                os.close(ready)
        return self._collect_result()

    def clean_up(self) -> None:
        """Remove scratch folder and cgroup, after all processes have ended."""
        if self._scratch:
            remove_folder(self._scratch)
        if self._cgroup:
            self._cgroup.remove()

    def _prepare_process(self, uid: int | None) -> None:
        """Join the cgroup, in the new process before exec; make pipes those of the program's user.

        By its names of them, as /dev/stdin, it can open only pipes that its user may read or write.
        """
        if self._cgroup:
            self._cgroup.join()
        if uid is not None:
            for stream in range(3):
                os.fchown(stream, uid, uid)
        with contextlib.suppress(OSError):  # the first to go when the machine is out of memory
            Path("/proc/self/oom_score_adj").write_text("1000")

    def _collect_result(self) -> dict[str, Any]:
        """Wait for the program to end, kill its remaining processes, and return the result."""
        with selectors.DefaultSelector() as selector:
            self._watch(selector)
        wall_s = time.monotonic() - self._start
        ended, self.survivors = kill_all()
        code = ended.get(self._child.pid, -signal.SIGKILL)
        self._child.returncode = code
        for name in self._output:
            self._drain(name)
        text = {n: bytes(output).decode(errors="replace") for n, output in self._output.items()}
        if self._cgroup and self._cgroup.has_killed():
            self._reached = "memory"
        if not self._is_ready() and not self._reached:
            raise OSError(text["stderr"].strip() or f"the sandbox ended with status {code}")
        times = resource.getrusage(resource.RUSAGE_CHILDREN)
        code = 128 - code if code < 0 else code
        cpu_s = times.ru_utime + times.ru_stime
        status = self._reached or _get_status(code, text["stderr"], cpu_s >= self._limits["cpu_s"])
        return {"status": status, "exit_code": code, **text, "wall_s": wall_s, "cpu_s": cpu_s}

    def _watch(self, selector: selectors.BaseSelector) -> None:
        """Wait until the program has ended or reached a limit."""
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
        checked = self._start
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
                else:
                    with contextlib.suppress(BlockingIOError):
                        if not self._read(key.data, key.fd):
                            selector.unregister(key.fileobj)
            elapsed_s = time.monotonic() - self._start
            if elapsed_s > self._limits["wall_s"]:
                self._reached = "timeout"
            elif time.monotonic() - checked > POLL_S:
                self._check_usage()
                checked = time.monotonic()

    def _write(self, stdin: IO[bytes]) -> bool:
        """Write to stdin; return whether there is more to write."""
        with contextlib.suppress(BlockingIOError):
            try:
                self._stdin = self._stdin[os.write(stdin.fileno(), self._stdin[:_CHUNK]) :]
            except BrokenPipeError:
                return False
        return bool(self._stdin)

    def _read(self, name: str, fd: int) -> bool:
        """Read output; return whether there may be more. BlockingIOError if there is none yet."""
        remaining = int(self._limits["output"]) - sum(map(len, self._output.values()))
        chunk = os.read(fd, _CHUNK)
        self._output[name] += chunk[:remaining]
        if len(chunk) > remaining:
            self._reached = self._reached or "output"
            return False
        return bool(chunk)

    def _drain(self, name: str) -> None:
        """Read the rest of the output; only processes that outlive SIGKILL could write more."""
        stream = getattr(self._child, name)
        with contextlib.closing(stream), contextlib.suppress(BlockingIOError):
            while self._read(name, stream.fileno()):
                pass

    def _is_ready(self) -> bool:
        """Return whether the launcher has started the program."""
        if self._ready >= 0:
            with contextlib.suppress(BlockingIOError):
                if os.read(self._ready, 5) == b"ready":
                    self._ready = -1
        return self._ready < 0

    def _check_usage(self) -> None:
        """Set `_reached` if the program's processes together are beyond a limit."""
        pids = usage.find_descendants()
        memory, cpu_s, threads = 0, 0.0, -self._num_own_processes
        for pid in pids:
            with contextlib.suppress(OSError, ValueError, IndexError):
                used = usage.read_process(pid)
                memory, cpu_s, threads = memory + used[0], cpu_s + used[1], threads + used[2]
        is_full = bool(self._scratch) and usage.is_larger(self._scratch, self._limits["scratch"])
        if self._is_ready():
            hidden_bytes, is_hidden_full = self._measure_hidden(pids[self._num_own_processes :])
            memory, is_full = memory + hidden_bytes, is_full or is_hidden_full
        if threads > self._limits["processes"]:
            self._reached = "processes"
        elif memory > self._limits["memory"] or (self._cgroup and self._cgroup.has_killed()):
            self._reached = "memory"
        elif cpu_s > self._limits["cpu_s"]:
            self._reached = "timeout"
        elif is_full:
            self._reached = "disk"

    def _measure_hidden(self, pids: list[int]) -> tuple[int, bool]:
        """Return bytes of unmapped memory, and whether there are too many unnamed files."""
        memory, limit = 0, self._limits["scratch"]
        for pid in pids:
            try:
                if not self._scratch:
                    if not self._cgroup:
                        memory = usage.bound_socket_bytes(pid)
                    counts = [usage.count_inodes(pid, folder) for folder in _RAM_FOLDERS]
                    return memory, max(counts) * usage.BLOCK > limit
                size, socket_bytes = usage.read_open_files(pid, self._scratch)
                if size > limit:
                    return memory, True
                memory += socket_bytes
            except PermissionError:  # the process hides its files, or ends at this moment
                if usage.has_memory(pid):
                    return memory, True
            except OSError:  # the process has ended
                continue
        return memory, False


def _get_status(code: int, stderr: str, used_cpu: bool) -> str:
    """Return the status of a program that ended by itself or by a signal of the kernel."""
    if code == 128 + signal.SIGXCPU or (code == 128 + signal.SIGKILL and used_cpu):
        return "timeout"
    if code == 128 + signal.SIGXFSZ:
        return "disk"
    if code and stderr.rstrip().rpartition("\n")[2].startswith("MemoryError"):
        return "memory"
    return "killed" if code > 128 else "error" if code else "ok"


@contextlib.contextmanager
def _create_memory_file(content: bytes) -> Iterator[int]:
    """Open an anonymous file with this content, at its start."""
    with os.fdopen(os.memfd_create("request"), "w+b") as file:
        file.write(content)
        file.flush()
        file.seek(0)
        yield file.fileno()


def kill_all() -> tuple[dict[int, int], list[int]]:
    """Kill all descendants.

    Returns:
        The exit status of each child that has ended (negative for a signal), and the processes that
        have not ended.
    """
    ended: dict[int, int] = {}
    deadline = time.monotonic() + KILL_S
    while True:
        for pid in usage.find_descendants():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        try:
            while (child := os.waitpid(-1, os.WNOHANG))[0]:
                ended[child[0]] = os.waitstatus_to_exitcode(child[1])
        except ChildProcessError:
            return ended, []
        if time.monotonic() > deadline:
            return ended, usage.find_descendants()
        time.sleep(0.001)


def wait_for(pids: list[int]) -> None:
    """Wait for processes that are not children of this process."""
    if not pids:
        return
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(null, fd)  # so that the caller does not wait for this process
    for pid in pids:
        with contextlib.suppress(OSError):
            select.select([os.pidfd_open(pid)], [], [])


def remove_folder(folder: str) -> None:
    """Remove a folder, also one with subfolders too deep for Python or without permissions."""
    try:
        shutil.rmtree(folder)
    except (OSError, RecursionError):
        subprocess.run(["chmod", "-R", "u+rwx", folder], stderr=subprocess.DEVNULL)
        subprocess.run(["rm", "-rf", folder], check=False)


if __name__ == "__main__":
    main()
