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

Runs as a script (`python -I -S reaper.py DRIVER_PID MARKER SCRATCH LOGS [FOLDER...]`, LOGS empty
where Ray's are not wanted) with the standard library only, in a separate session, so that a
signal to the driver's process group does not reach it. Linux only.
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
import sys
import time
from collections.abc import Iterator

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
UNLOCKED_S = 60.0  # a folder without a lock may be one that is being made

SharedMemory = dict[str, int]  # name -> inode
Processes = dict[int, tuple[int, str]]  # pid -> (parent pid, start time); zombies left out


def processes() -> Processes:
    found: Processes = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", errors="replace") as file:
                # "pid (command) state parent ..."; the command may contain blanks and brackets
                fields = file.read().rpartition(")")[2].split()
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
        with contextlib.suppress(OSError), open(f"/proc/{pid}/maps") as file:
            inodes |= {int(line.split(None, 5)[4]) for line in file if f" {SHM}/" in line}
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


def is_tracker(pid: int) -> bool:
    """Whether it is a resource tracker of Python's, which ends with those that it tracks for."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return b"multiprocessing.resource_tracker" in file.read()
    except OSError:
        return False


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


class Reaper:
    def __init__(
        self, driver: int, marker: str, scratch: str, folders: list[str], logs: str = ""
    ) -> None:
        self.driver = driver
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

    def watch(self, words: int = 0) -> None:
        """Returns when the driver has sent a word, or immediately when it is gone.

        `words` is the descriptor that they come by.

        A process that was started since the last look has the marker in its environment.
        """
        with contextlib.suppress(ProcessLookupError), made_in(SHM) as made:
            ends = [words, os.pidfd_open(self.driver)]
            news: list[int] = []
            while self.driver_lives():
                start = time.monotonic()
                self.observe(is_poll=not news)
                # A tenth of a core at most, where others make files all the time.
                pause = max(MAPPED_S, 9 * (time.monotonic() - start))
                ready = select.select([*ends, *made], [], [], POLL_S)[0]
                news = [descriptor for descriptor in ready if descriptor in made]
                if len(news) < len(ready) or (news and select.select(ends, [], [], pause)[0]):
                    break
                for descriptor in news:
                    os.read(descriptor, 1 << 16)  # what they tell is found in the folder


def main() -> None:
    # A batch system tells every process of a job, and some of them stop the driver alone.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    reaper = Reaper(int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[5:], sys.argv[4])
    reaper.watch()
    reaper.sweep()


if __name__ == "__main__":
    main()
