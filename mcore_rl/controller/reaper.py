"""A small process that outlives the driver just long enough to clean up after it.

A driver that is killed with SIGKILL cannot clean up. Ray's own processes then share its fate, some
immediately and some after seconds; processes that workers started, shared memory and Ray's folder
stay. The reaper remembers which processes descend from the driver and which shared-memory files
they map: it looks twice a second, and when a file has been made. When the driver goes, or ends the
session by a word on the reaper's stdin, it kills every one of them that is not a descendant of a
living driver. Then it keeps what Ray has logged, and removes those files, the scratch folder, and
from the run's own folders what was still being written: everything in this project is written under
the name `.<name>.partial` and renamed when it is whole.

A batch system may kill the reaper as well. So the scratch folder holds a lock, which goes with
both, and a note of what to look for; the next one to start on the machine sweeps folders that
nobody has locked (`sweep_abandoned`).

A driver that is killed cannot say so, and one whose Ray has died is ended by Ray's C++ code, at
once or after a minute, without a word. The reaper then writes the file of traces and the one line
on stderr (`Reaper.tell`). It watches Ray's own processes while `RAY_NOTE` names them.

Runs as a script (`python -I -S reaper.py DRIVER_PID MARKER SCRATCH LOGS TRACE_FILE COMMAND
[FOLDER...]`; LOGS is empty where Ray's are not wanted, TRACE_FILE where nothing is to be said)
with the standard library only, in a separate session, so that a signal to the driver's process
group does not reach it. Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import glob
import json
import os
import select
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence

POLL_S = 0.5
LOOKS = 3  # polls in which a new shared-memory file may be claimed: it is mapped after it is made
MAPPED_S = 0.1  # after a file has been made, at least, before it is looked at
SWEEP_S = 20.0  # a process in uninterruptible sleep may outlast SIGKILL; then it is left
REMOVE_S = 2.0  # for the scratch folder of a living driver whose threads still write there
TRACKER_S = 3.0  # for Python's resource trackers: they unlink what dead processes have made
SHM = "/dev/shm"
RAY_DIR = "r"  # of Ray in the scratch folder: short, because sockets are in it
IN_CREATE = 0x100  # <sys/inotify.h>
PREFIX = "mcr_"  # of scratch folders
LOCK, NOTE = "lock", "note.json"  # in them
RAY_NOTE = "ray.json"  # in them, as long as Ray is to live: the pids of its processes, by name
TOLD = b"told"  # on stdout: why the run ends is said, and the driver is to go
GO_S = 10.0  # for the driver to go then
SETTLE_S = 0.3  # after a death, for others that it causes, and for Ray's logs
GCS, RAYLET = "GCS", "raylet"
_LOG_LINES = 20  # of each log, in the file of traces
UNLOCKED_S = 60.0  # a folder without a lock may be one that is being made

SharedMemory = dict[str, int]  # name -> inode
Processes = dict[int, tuple[int, str]]  # pid -> (parent pid, start time); zombies left out


def processes() -> Processes:
    found: Processes = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                # "pid (command) state parent ..."; the command may contain any bytes
                fields = file.read().rpartition(b")")[2].decode().split()
                if fields[0] not in "ZX":
                    found[int(name)] = (int(fields[1]), fields[19])
    return found


def descendants(roots: set[int], table: Processes) -> set[int]:
    children: dict[int, list[int]] = {}
    for pid, (parent, _) in table.items():
        children.setdefault(parent, []).append(pid)
    found: set[int] = set()
    frontier = list(roots)
    while frontier:
        for child in children.get(frontier.pop(), ()):
            if child not in found:
                found.add(child)
                frontier.append(child)
    return found


def shared_memory() -> SharedMemory:
    found: SharedMemory = {}
    for name in os.listdir(SHM):
        with contextlib.suppress(OSError):
            found[name] = os.stat(f"{SHM}/{name}").st_ino
    return found


def mapped_by(pids: set[int]) -> set[int]:
    """Inodes of the shared-memory files that any of these processes maps.

    Not names: a semaphore is mapped under a temporary name before it gets its own.
    """
    inodes: set[int] = set()
    for pid in pids:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", "rb") as file:
            inodes |= {int(line.split(None, 5)[4]) for line in file if f" {SHM}/".encode() in line}
    return inodes


@contextlib.contextmanager
def made_in(folder: str) -> Iterator[list[int]]:
    """Yields [a descriptor that can be read when a file has been made in `folder`] (inotify(7)).

    [] when the folder cannot be watched, and says so on stderr: then only the polls look.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    events = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if events < 0 or libc.inotify_add_watch(events, folder.encode(), IN_CREATE) < 0:
        why = os.strerror(ctypes.get_errno())
        print(
            f"reaper: cannot watch {folder} ({why}; limits: fs.inotify.*); what is made "
            f"there within {POLL_S} s of a SIGKILL may stay",
            file=sys.stderr,
        )
        yield []
        return
    try:
        yield [events]
    finally:
        os.close(events)


def carries(pid: int, marker: bytes) -> bool:
    """Whether the process was started with the marker in its environment."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return marker in file.read()
    except OSError:
        return False


def command_line(pid: int) -> bytes:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read()
    except OSError:
        return b""


def is_tracker(pid: int) -> bool:
    """Whether it is a resource tracker of Python's, which ends with those that it tracks for."""
    return b"multiprocessing.resource_tracker" in command_line(pid)


def remove_partials(folder: str) -> None:
    """Removes what is called `.<name>.partial`, at any depth."""
    for place, folders, files in os.walk(folder):
        for name in [*folders, *files]:
            if name.startswith(".") and name.endswith(".partial"):
                path = os.path.join(place, name)
                shutil.rmtree(path, ignore_errors=True)
                with contextlib.suppress(OSError):  # a file, or a link
                    os.unlink(path)


def remove_whole(folder: str) -> None:
    """Again, if somebody who lives on wrote into it meanwhile."""
    deadline = time.monotonic() + REMOVE_S
    while os.path.exists(folder) and time.monotonic() < deadline:
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.02)


def keep_logs(scratch: str, folder: str) -> None:
    """Copies the logs of Ray's session, as far as there is disk space."""
    for logs in glob.glob(os.path.join(glob.escape(scratch), RAY_DIR, "session_2*", "logs")):
        with contextlib.suppress(OSError):  # shutil.Error is one, after all files were tried
            shutil.copytree(logs, folder, symlinks=True, dirs_exist_ok=True)


def last_lines(scratch: str, name: str) -> list[str]:
    """Read the end of a log of Ray's session; [] where there is none."""
    lines: list[str] = []
    for file in glob.glob(os.path.join(glob.escape(scratch), RAY_DIR, "session_2*", "logs", name)):
        with contextlib.suppress(OSError), open(file, errors="replace") as log:
            lines += log.read().splitlines()
    return lines[-_LOG_LINES:]


def locked(scratch: str) -> int:
    """A descriptor that holds the lock of a scratch folder; raises BlockingIOError, OSError."""
    file = os.open(os.path.join(scratch, LOCK), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        raise
    return file


def sweep_abandoned(place: str) -> list[str]:
    """Removes scratch folders of this user's that nobody holds, and what belonged to them.

    Returns their paths. `place` is where scratch folders are made.
    """
    swept = []
    for scratch in glob.glob(os.path.join(glob.escape(place), f"{PREFIX}*")):
        with contextlib.suppress(OSError):
            found = os.lstat(scratch)
            has_lock = os.path.exists(os.path.join(scratch, LOCK))
            is_new = not has_lock and time.time() - found.st_mtime < UNLOCKED_S
            if found.st_uid != os.getuid() or os.path.islink(scratch) or is_new:
                continue
            file = locked(scratch)
            try:
                _sweep_noted(scratch)
                remove_whole(scratch)
            finally:
                os.close(file)
            swept.append(scratch)
    return swept


def _sweep_noted(scratch: str) -> None:
    """Ends the processes that a folder's note tells of, and unlinks their shared memory."""
    try:
        with open(os.path.join(scratch, NOTE)) as file:
            note = json.load(file)
        marker, files = str(note["marker"]).encode(), dict(note["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return
    start = time.monotonic()
    while victims := [pid for pid in processes() if marker and carries(pid, marker)]:
        for pid in victims:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() - start > SWEEP_S:
            break
        time.sleep(0.02)
    for name, inode in files.items():
        path = os.path.join(SHM, os.path.basename(name))
        with contextlib.suppress(OSError):
            if os.stat(path).st_ino == inode:
                os.unlink(path)


class RayProcesses:
    """Ray's own processes. A run cannot go on when one of them has died."""

    def __init__(self, scratch: str) -> None:
        self.scratch = scratch
        self.names: dict[int, str] = {}  # by pid
        self.ends: dict[int, int] = {}  # pid by a descriptor that can be read when it has died
        self.gone: list[int] = []  # pids that were no longer there when they were to be watched

    def read_note(self) -> dict[str, int]:
        """Return the processes that are to live, by name: none before Ray is up and at its end."""
        try:
            with open(os.path.join(self.scratch, RAY_NOTE)) as file:
                return {str(name): int(pid) for name, pid in json.load(file).items()}
        except (OSError, ValueError, AttributeError, TypeError):
            return {}

    def observe(self) -> None:
        """Watch the processes of the note."""
        for name, pid in self.read_note().items():
            self._watch(pid, name)

    def _watch(self, pid: int, name: str) -> None:
        if pid in self.names:
            return
        self.names[pid] = name
        try:
            self.ends[os.pidfd_open(pid)] = pid
        except OSError:
            self.gone.append(pid)

    def list_dead(self) -> list[int]:
        """Return the pids of those that have died while they were to live."""
        if not self.read_note():
            return []
        ready = select.select([*self.ends], [], [], 0)[0] if self.ends else []
        return [*self.gone, *(self.ends[descriptor] for descriptor in ready)]

    def find_causes(self) -> list[int]:
        """Return the pids of those that have not died of the death of another.

        An agent's death ends its raylet, which logs that, and with the raylet all agents end.
        """
        dead = self.list_dead()
        said = " ".join(last_lines(self.scratch, "raylet.err")).replace("_", " ")
        by_log = [pid for pid in dead if f"agent name = {self.names[pid]}" in said]
        servers = [pid for pid in dead if self.names[pid] in (GCS, RAYLET)]
        return by_log or servers or dead

    def has_dead_agent(self) -> bool:
        return any(self.names[pid] not in (GCS, RAYLET) for pid in self.list_dead())

    def describe(self, pids: Sequence[int]) -> list[str]:
        return [f"Ray's {self.names[pid]} (process {pid})" for pid in pids]


class Reaper:
    def __init__(
        self,
        driver: int,
        marker: str,
        scratch: str,
        folders: list[str],
        logs: str = "",
        trace_file: str = "",
        command: str = "mcore-rl",
    ) -> None:
        self.driver = driver
        self.trace_file, self.command = trace_file, command
        self.ray = RayProcesses(scratch)
        self.marker = marker.encode()
        self.scratch = scratch
        self.folders = folders  # of the run, which may contain unfinished files
        self.logs = logs  # where Ray's are kept
        self.known: dict[int, str] = {}  # pid -> start time; a pid may be used again
        self.files: SharedMemory = {}  # of the session
        self.looks = dict.fromkeys(shared_memory(), LOOKS)  # how often each file was looked at
        self.noted: SharedMemory | None = None

    def driver_lives(self) -> bool:
        return os.getppid() == self.driver

    def observe(self, *, is_poll: bool = True) -> Processes:
        """Remembers new descendants, and the new shared-memory files they or the driver map."""
        table = processes()
        self.known = {p: s for p, s in self.known.items() if p in table and table[p][1] == s}
        roots = set(self.known) | ({self.driver} if self.driver_lives() else set())
        for pid in descendants(roots, table) - {os.getpid()}:
            self.known[pid] = table[pid][1]
        self.claim_files(is_poll)
        return table

    def claim_files(self, is_poll: bool) -> None:
        present = shared_memory()
        self.files = {n: i for n, i in self.files.items() if present.get(n) == i}
        self.looks = {name: self.looks.get(name, 0) for name in present}
        fresh = {name for name in present if self.looks[name] < LOOKS}
        if fresh:
            mapped = mapped_by({*self.known, self.driver})
            self.files |= {name: present[name] for name in fresh if present[name] in mapped}
            self.looks |= {name: self.looks[name] + is_poll for name in fresh}
        if self.files != self.noted:
            self.note()

    def note(self) -> None:
        """Says in the scratch folder what belongs to the session, for who finds it abandoned."""
        aside = os.path.join(self.scratch, f".{NOTE}.partial")
        with contextlib.suppress(OSError):
            with open(aside, "w") as file:
                json.dump({"marker": self.marker.decode(), "files": self.files}, file)
            os.replace(aside, os.path.join(self.scratch, NOTE))
            self.noted = dict(self.files)

    def spared(self, table: Processes) -> set[int]:
        """The living driver and what it started that still hangs on it."""
        if not self.driver_lives():
            return set()
        return {self.driver} | descendants({self.driver}, table)

    def victims(self, table: Processes) -> set[int]:
        marked = {pid for pid in table if pid not in self.known and carries(pid, self.marker)}
        return (set(self.known) | marked) - self.spared(table) - {os.getpid()}

    def sweep(self) -> None:
        start = only_trackers_since = time.monotonic()
        while victims := self.victims(self.observe()):
            now = time.monotonic()
            if now - start > SWEEP_S:
                break
            others = {pid for pid in victims if not is_tracker(pid)}
            if others:
                only_trackers_since = now
            for pid in victims if now - only_trackers_since > TRACKER_S else others:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        in_use = mapped_by(self.spared(processes()))
        for name, inode in self.files.items():
            if inode not in in_use:
                with contextlib.suppress(OSError):
                    os.unlink(f"{SHM}/{name}")
        if self.logs:
            keep_logs(self.scratch, self.logs)
        remove_whole(self.scratch)
        for folder in self.folders:
            remove_partials(folder)

    def watch(self, words: int = 0) -> bool:
        """Return whether the driver has sent a word: it ends by itself, and says why.

        Else when it is gone, or a process of its Ray that is to live. `words` is the descriptor
        that the word comes by.

        A process that was started since the last look has the marker in its environment.
        """
        with contextlib.suppress(ProcessLookupError), made_in(SHM) as made:
            ends = [words, os.pidfd_open(self.driver)]
            news: list[int] = []
            while self.driver_lives():
                start = time.monotonic()
                self.observe(is_poll=not news)
                if self.trace_file:
                    self.ray.observe()
                    if self.ray.gone and self.ray.list_dead():
                        break
                # A tenth of a core at most, where others make files all the time.
                pause = max(MAPPED_S, 9 * (time.monotonic() - start))
                watched = [*ends, *self.ray.ends]
                ready = select.select([*watched, *made], [], [], POLL_S)[0]
                news = [descriptor for descriptor in ready if descriptor in made]
                if news and len(news) == len(ready):
                    ready = select.select(watched, [], [], pause)[0]
                if words in ready:
                    return bool(os.read(words, 8))
                if self.ray.ends.keys() & set(ready):
                    if self.ray.list_dead():
                        break
                    self.ray = RayProcesses(self.scratch)  # the driver ends it
                elif ends[1] in ready:
                    break
                for descriptor in news:
                    os.read(descriptor, 1 << 16)  # what they tell is found in the folder
        return bool(select.select([words], [], [], 0)[0] and os.read(words, 8))

    def tell(self) -> None:
        """Say on one line, and in the file of traces, what has died; then let the driver go."""
        if self.ray.has_dead_agent():  # the raylet follows, and Ray complains of that
            self._dismiss_driver()
        what = self.describe_end()
        where = self._write(what)
        if sys.stderr.isatty():  # the line of a progress bar may be unfinished, and its cursor gone
            print("\x1b[?25h", file=sys.stderr)
        with contextlib.suppress(OSError):  # a terminal that has hung up
            print(f"{self.command}: {what}{where}", file=sys.stderr, flush=True)
        self._dismiss_driver()

    def _dismiss_driver(self) -> None:
        """Have the driver end itself with status 1; kill it if it does not."""
        if self.driver_lives():
            with contextlib.suppress(OSError):
                os.write(1, TOLD)
            with contextlib.suppress(ProcessLookupError):
                if not select.select([os.pidfd_open(self.driver)], [], [], GO_S)[0]:
                    os.kill(self.driver, signal.SIGKILL)

    def describe_end(self) -> str:
        """Say what has died first: the driver, or processes of its Ray.

        The kernel kills GCS and raylet with the driver that has started them, and a moment before
        it is seen to be gone: when all three are, nobody can tell which was the first.
        """
        driver = f"the driver (process {self.driver})"
        crashed = "was killed or has crashed"
        if not self.driver_lives() and not self.ray.list_dead():
            return f"{driver} has died: it {crashed}{_describe_cluster()}"
        time.sleep(SETTLE_S)
        causes = self.ray.find_causes()
        if not causes:  # the driver ends its Ray, and has been killed in that
            return f"{driver} has died: it {crashed}"
        names = self.ray.describe(causes)
        if {GCS, RAYLET} <= {self.ray.names[pid] for pid in causes}:
            time.sleep(SETTLE_S)
            if not self.driver_lives():
                return f"{driver}, {' and '.join(names)} have died: killed or crashed"
        have, they = ("has", "it") if len(names) == 1 else ("have", "them")
        return f"{' and '.join(names)} {have} died, and the run with {they}"

    def _write(self, what: str) -> str:
        """Write the file of traces, with the ends of Ray's logs; return where it is, in brackets.

        What the driver has written on its way out stays in front.
        """
        text, earlier = [what], ""
        for name in ("gcs_server.out", "gcs_server.err", "raylet.out", "raylet.err"):
            if lines := last_lines(self.scratch, name):
                text += ["", f"The end of {name}:", *lines]
        aside = os.path.join(os.path.dirname(self.trace_file), ".error.partial")
        try:
            began = os.stat(os.path.join(self.scratch, LOCK)).st_mtime
            if os.stat(self.trace_file).st_mtime >= began:
                with open(self.trace_file) as file:
                    earlier = f"{file.read()}\n\n"
        except OSError:
            pass
        try:
            with open(aside, "w") as file:
                file.write("\n".join([f"{earlier}{text[0]}", *text[1:], ""]))
            os.replace(aside, self.trace_file)
        except OSError as error:
            return f" (nothing more can be written: {error.strerror})"
        return f" ({'traceback' if earlier else 'more'}: {self.trace_file})"


def _describe_cluster() -> str:
    """Whether the cluster that the driver has joined answers: without it Ray ends the driver."""
    address = os.environ.get("RAY_ADDRESS", "")
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        return ""
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=2).close()
    except OSError as error:
        return f"; Ray at RAY_ADDRESS={address} does not answer ({error.strerror or error})"
    return ""


def main() -> None:
    # A batch system tells every process of a job, and some of them stop the driver alone.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    driver, marker, scratch, logs, trace_file, command, *folders = sys.argv[1:]
    reaper = Reaper(int(driver), marker, scratch, folders, logs, trace_file, command)
    if not reaper.watch() and trace_file:
        reaper.tell()
    reaper.sweep()


if __name__ == "__main__":
    main()
