"""A small process that outlives the driver just long enough to clean up after it.

A driver that is killed with SIGKILL cannot clean up. Ray's own processes then die with it, some
immediately and some after seconds; processes that workers started, shared memory and Ray's folder
stay. The reaper records which processes descend from the driver and which shared-memory files they
map: twice a second, and when a file has been created. When the driver dies, or ends the session by
a word on the reaper's stdin, it kills every one of them that is not a descendant of a living
driver. Then it copies Ray's logs, and removes those files, the temporary folder, and unfinished
files from the run's own folders: everything in this project is written under the name
`.<name>.partial` and renamed when it is complete.

A reaper that dies is started again by its driver, and reads the note of the one before. A batch
system may kill both. So the temporary folder has a lock, which both hold, and that note of what
belongs to the session; the next driver on the machine cleans up after folders that nobody has
locked (`remove_abandoned`), also where it has another TMPDIR: a link in `get_registry` leads there.

A driver that is killed cannot report it, and one whose Ray has died is ended by Ray's C++ code, at
once or after a minute, without a word. The reaper then writes the file of traces and the one line
on stderr (`Reaper.report_end`). It watches Ray's own processes while `RAY_NOTE` names them: whether
they are there, and whether a signal has stopped them, as calls of Ray then never return.

It also ends a driver that does not end itself: one that waits in Ray for longer than its limit
(`HANG`), or that is busy in C code when a second signal comes. Python writes the number of each
signal to the pipe of words at once, even when it cannot run the handler (signal.set_wakeup_fd).

Runs as a script (`python -I -S reaper.py ARGUMENTS`, the arguments of `Reaper` as JSON) with the
standard library only, in a separate session, so that a signal to the driver's process group does
not reach it. Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import fcntl
import glob
import json
import os
import select
import shutil
import signal
import socket
import stat
import sys
import time
from collections.abc import Iterator, Sequence

POLL_S = 0.5
MAX_CHECKS = 3  # polls in which a new shared-memory file may be claimed: it is created, then mapped
MAPPED_S = 0.1  # after a file has been created, at least, before it is checked
KILL_S = 20.0  # a process in uninterruptible sleep may outlast SIGKILL; then it is left
REMOVE_S = 2.0  # for the temporary folder of a living driver whose threads still write there
TRACKER_S = 3.0  # for Python's resource trackers: they unlink what dead processes have created
SHM = "/dev/shm"
RAY_DIR = "r"  # of Ray in the temporary folder: short, because sockets are in it
IN_CREATE = 0x100  # <sys/inotify.h>
PREFIX = "mcr_"  # of temporary folders
LOCK, NOTE = "lock", "note.json"  # in them
RAY_NOTE = "ray.json"  # in them, as long as Ray has to live: the pids of its processes, by name
HANG_NOTE = "hang.txt"  # in them: the report of a driver that waits for too long
END, HANG = b"end", b"hang"  # words of the driver; its signals are other bytes
END_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGTERM)
# A terminal or a batch system may signal a process and its session with the same signal.
REPEATED_S = 1.0
SECOND_SIGNAL_S = 20.0  # for the driver to end by itself after a second signal
STOPPED_S = 30.0  # for which a process of Ray's may be stopped, while the driver runs
EXIT_S = 10.0  # for the driver to exit when it is told to; its status is then a byte on stdout
SETTLE_S = 0.3  # after a death, for others that it causes, and for Ray's logs
GCS, RAYLET = "GCS", "raylet"
_LOG_LINES = 20  # of each log, in the file of traces
UNLOCKED_S = 60.0  # a folder without a lock may be one that is being created

SharedMemory = dict[str, int]  # inode by name
Processes = dict[int, tuple[int, str]]  # (parent pid, start time) by pid, without zombies


def list_processes() -> Processes:
    """Return all processes of this machine."""
    table: Processes = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                # "pid (command) state parent ..."; the command may contain any bytes
                fields = file.read().rpartition(b")")[2].decode().split()
                if fields[0] not in "ZX":
                    table[int(name)] = (int(fields[1]), fields[19])
    return table


def is_stopped(pid: int) -> bool:
    """Return whether a signal has stopped the process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] == b"T"
    except (OSError, IndexError):
        return False


def list_descendants(roots: set[int], table: Processes) -> set[int]:
    """Return the pids of all descendants of `roots`."""
    children: dict[int, list[int]] = {}
    for pid, (parent, _) in table.items():
        children.setdefault(parent, []).append(pid)
    descendants: set[int] = set()
    frontier = list(roots)
    while frontier:
        for child in children.get(frontier.pop(), ()):
            if child not in descendants:
                descendants.add(child)
                frontier.append(child)
    return descendants


def list_shared_memory() -> SharedMemory:
    """Return all files in /dev/shm."""
    files: SharedMemory = {}
    for name in os.listdir(SHM):
        with contextlib.suppress(OSError):
            files[name] = os.stat(f"{SHM}/{name}").st_ino
    return files


def list_mapped_inodes(pids: set[int]) -> set[int]:
    """Return the inodes of the shared-memory files that any of these processes maps.

    Not names: a semaphore is mapped under a temporary name before it is renamed.
    """
    inodes: set[int] = set()
    for pid in pids:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", "rb") as file:
            inodes |= {int(line.split(None, 5)[4]) for line in file if f" {SHM}/".encode() in line}
    return inodes


@contextlib.contextmanager
def watch_new_files(folder: str) -> Iterator[list[int]]:
    """Yield [a descriptor that can be read when a file has been created in `folder`] (inotify(7)).

    Yield [] if the folder cannot be watched, and print that to stderr: then only the polls check.
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


def has_marker(pid: int, marker: bytes) -> bool:
    """Return whether the process was started with the marker in its environment."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return marker in file.read()
    except OSError:
        return False


def read_command_line(pid: int) -> bytes:
    """Return the command line of a process; empty if it is gone."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read()
    except OSError:
        return b""


def is_tracker(pid: int) -> bool:
    """Return whether it is a resource tracker of Python, which ends after its processes."""
    return b"multiprocessing.resource_tracker" in read_command_line(pid)


def remove_partials(folder: str) -> None:
    """Remove files and folders called `.<name>.partial`, at any depth."""
    for place, folders, files in os.walk(folder):
        for name in [*folders, *files]:
            if name.startswith(".") and name.endswith(".partial"):
                path = os.path.join(place, name)
                shutil.rmtree(path, ignore_errors=True)
                with contextlib.suppress(OSError):  # a file, or a link
                    os.unlink(path)


def remove_folder(folder: str) -> None:
    """Remove a folder; try again if a living process writes into it meanwhile."""
    deadline = time.monotonic() + REMOVE_S
    while os.path.exists(folder) and time.monotonic() < deadline:
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.02)


def copy_ray_logs(temp_dir: str, folder: str) -> None:
    """Copy the logs of Ray's session, as far as there is disk space."""
    for logs in glob.glob(os.path.join(glob.escape(temp_dir), RAY_DIR, "session_2*", "logs")):
        with contextlib.suppress(OSError):  # shutil.Error is one, after all files were tried
            shutil.copytree(logs, folder, symlinks=True, dirs_exist_ok=True)


def read_last_lines(temp_dir: str, name: str) -> list[str]:
    """Read the end of a log of Ray's session; [] if there is none."""
    lines: list[str] = []
    for file in glob.glob(os.path.join(glob.escape(temp_dir), RAY_DIR, "session_2*", "logs", name)):
        with contextlib.suppress(OSError), open(file, errors="replace") as log:
            lines += log.read().splitlines()
    return lines[-_LOG_LINES:]


def acquire_lock(temp_dir: str) -> int:
    """Return a descriptor that holds the lock of a temporary folder.

    Raises:
        BlockingIOError: another process holds it.
        OSError: it cannot be locked.
    """
    file = os.open(os.path.join(temp_dir, LOCK), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        raise
    return file


def get_registry() -> str:
    """Return the folder with links to this user's temporary folders; TMPDIR does not change it."""
    return f"/tmp/mcore-rl-sessions-{os.getuid()}"


def register_folder(temp_dir: str) -> None:
    """Link to a temporary folder from the registry, if that is a folder of this user alone."""
    registry = get_registry()
    with contextlib.suppress(OSError):
        with contextlib.suppress(FileExistsError):
            os.mkdir(registry, 0o700)
        if _is_own_folder(registry):
            os.symlink(temp_dir, os.path.join(registry, os.path.basename(temp_dir)))


def unregister_folder(temp_dir: str) -> None:
    """Remove the link of `register_folder`."""
    with contextlib.suppress(OSError):
        os.unlink(os.path.join(get_registry(), os.path.basename(temp_dir)))


def list_registered_places() -> list[str]:
    """Return the folders in which the registered temporary folders are."""
    registry, places = get_registry(), set()
    with contextlib.suppress(OSError):
        if _is_own_folder(registry):
            for name in os.listdir(registry):
                places.add(os.path.dirname(os.readlink(os.path.join(registry, name))))
    return sorted(places)


def _is_own_folder(path: str) -> bool:
    status = os.lstat(path)
    is_private = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o022
    return is_private and status.st_uid == os.getuid()


def remove_all_abandoned(place: str) -> list[str]:
    """Do as `remove_abandoned` here, and wherever a driver of this user has had its folder."""
    places = {os.path.realpath(path): path for path in (*list_registered_places(), place)}
    return [temp_dir for path in places.values() for temp_dir in remove_abandoned(path)]


def remove_abandoned(place: str) -> list[str]:
    """Remove temporary folders of this user that nobody has locked, and what belonged to them.

    `place` is the folder in which they are created. Return their paths.
    """
    removed = []
    for temp_dir in glob.glob(os.path.join(glob.escape(place), f"{PREFIX}*")):
        with contextlib.suppress(OSError):
            status = os.lstat(temp_dir)
            has_lock = os.path.exists(os.path.join(temp_dir, LOCK))
            is_new = not has_lock and time.time() - status.st_mtime < UNLOCKED_S
            if status.st_uid != os.getuid() or os.path.islink(temp_dir) or is_new:
                continue
            file = acquire_lock(temp_dir)
            try:
                _clean_up_by_note(temp_dir)
                remove_folder(temp_dir)
                unregister_folder(temp_dir)
            finally:
                os.close(file)
            removed.append(temp_dir)
    return removed


@dataclasses.dataclass(frozen=True)
class SessionNote:
    """Files, processes and folders of a session."""

    marker: str
    files: SharedMemory
    earlier: SharedMemory  # shared memory that was there before the session
    folders: tuple[str, ...]  # of the run, which may contain unfinished files
    locks: tuple[str, ...]  # files that are locked while the run has its folders


def read_note(temp_dir: str) -> SessionNote | None:
    """Read the note in a temporary folder; None: there is none that can be read."""
    try:
        with open(os.path.join(temp_dir, NOTE)) as file:
            note = json.load(file)
        folders, locks = map(tuple, (note.get("folders", ()), note.get("locks", ())))
        files, earlier = dict(note["files"]), dict(note.get("earlier", {}))
        return SessionNote(str(note["marker"]), files, earlier, folders, locks)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _clean_up_by_note(temp_dir: str) -> None:
    """End the processes of a folder's note; unlink their shared memory and unfinished files."""
    note = read_note(temp_dir)
    if note is None:
        return
    marker, files = note.marker.encode(), note.files
    start = time.monotonic()
    while victims := [pid for pid in list_processes() if marker and has_marker(pid, marker)]:
        for pid in victims:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() - start > KILL_S:
            break
        time.sleep(0.02)
    for name, inode in files.items():
        path = os.path.join(SHM, os.path.basename(name))
        with contextlib.suppress(OSError):
            if os.stat(path).st_ino == inode:
                os.unlink(path)
    with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
        for path in note.locks:  # another run may have these folders by now
            with contextlib.suppress(FileNotFoundError):
                lock = stack.enter_context(open(path, "rb"))
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for folder in note.folders:
            remove_partials(folder)


class RayProcesses:
    """Ray's own processes. A run cannot continue when one of them has died."""

    def __init__(self, temp_dir: str) -> None:
        self.temp_dir = temp_dir
        self.names: dict[int, str] = {}  # by pid
        self.ends: dict[int, int] = {}  # pid by a descriptor that can be read when it has died
        self.gone: list[int] = []  # pids that had died before they could be watched
        self.stopped_s: dict[int, float] = {}  # for which a pid was found stopped, without a break
        self.observed_at = time.monotonic()

    def read_note(self) -> dict[str, int]:
        """Return the processes that have to live, by name: none before Ray is up and at its end."""
        try:
            with open(os.path.join(self.temp_dir, RAY_NOTE)) as file:
                return {str(name): int(pid) for name, pid in json.load(file).items()}
        except (OSError, ValueError, AttributeError, TypeError):
            return {}

    def observe_stops(self, driver: int) -> None:
        """Measure for how long processes are stopped; not while the driver is stopped, too."""
        now_s = time.monotonic()
        passed_s, self.observed_at = min(now_s - self.observed_at, 2 * POLL_S), now_s
        if not is_stopped(driver):
            stopped = [pid for pid in self.names if is_stopped(pid)]
            self.stopped_s = {pid: self.stopped_s.get(pid, 0.0) + passed_s for pid in stopped}

    def list_stopped(self) -> list[int]:
        """Return the processes that are stopped for too long and should run."""
        late = [pid for pid, seconds in self.stopped_s.items() if seconds > STOPPED_S]
        return late if late and self.read_note() else []

    def observe(self) -> None:
        """Watch the processes of the note."""
        for name, pid in self.read_note().items():
            if pid not in self.names:
                self.names[pid] = name
                try:
                    self.ends[os.pidfd_open(pid)] = pid
                except OSError:
                    self.gone.append(pid)

    def list_dead(self) -> list[int]:
        """Return the pids of the processes that have died and should be alive."""
        if not self.read_note():
            return []
        ready = select.select([*self.ends], [], [], 0)[0] if self.ends else []
        return [*self.gone, *(self.ends[descriptor] for descriptor in ready)]

    def find_causes(self) -> list[int]:
        """Return the pids of those whose death is not the consequence of another.

        An agent's death ends its raylet, which logs that, and with the raylet all agents end.
        """
        dead = self.list_dead()
        log = " ".join(read_last_lines(self.temp_dir, "raylet.err")).replace("_", " ")
        by_log = [pid for pid in dead if f"agent name = {self.names[pid]}" in log]
        servers = [pid for pid in dead if self.names[pid] in (GCS, RAYLET)]
        return by_log or servers or dead

    def has_dead_agent(self) -> bool:
        """Return whether an agent of the raylet has died."""
        return any(self.names[pid] not in (GCS, RAYLET) for pid in self.list_dead())

    def describe(self, pids: Sequence[int]) -> list[str]:
        """Return processes as an error names them."""
        return [f"Ray's {self.names[pid]} (process {pid})" for pid in pids]


class Reaper:
    """Watches the driver, and cleans up after it."""

    def __init__(
        self,
        driver: int,
        marker: str,
        temp_dir: str,
        folders: list[str],
        logs: str = "",
        trace_file: str = "",
        command: str = "mcore-rl",
        locks: Sequence[str] = (),
    ) -> None:
        self.driver, self.locks = driver, locks
        self.trace_file, self.command = trace_file, command
        self.ray = RayProcesses(temp_dir)
        self.marker = marker.encode()
        self.temp_dir = temp_dir
        self.folders = folders  # of the run, which may contain unfinished files
        self.logs = logs  # where Ray's are copied to
        self.known: dict[int, str] = {}  # start time by pid; a pid may be used again
        self.files: SharedMemory = {}  # of the session
        self.earlier = list_shared_memory()  # of others
        if note := read_note(temp_dir):  # of an earlier reaper of this session, which has died
            self.files, self.earlier = note.files, note.earlier
        self.num_checks = dict.fromkeys(self.earlier, MAX_CHECKS)  # by file
        self.noted: SharedMemory | None = None
        self.has_ended, self.is_hanging = False, False  # words of the driver
        self.signals: list[tuple[int, float]] = []  # the first two signals of the driver, and when

    def is_driver_alive(self) -> bool:
        """Return whether the driver is still the parent of this process."""
        return os.getppid() == self.driver

    def observe(self, *, is_poll: bool = True) -> Processes:
        """Record new descendants, and the new shared-memory files they or the driver map."""
        table = list_processes()
        self.known = {p: s for p, s in self.known.items() if p in table and table[p][1] == s}
        roots = set(self.known) | ({self.driver} if self.is_driver_alive() else set())
        for pid in list_descendants(roots, table) - {os.getpid()}:
            self.known[pid] = table[pid][1]
        self._claim_files(is_poll)
        return table

    def _claim_files(self, is_poll: bool) -> None:
        present = list_shared_memory()
        self.files = {n: i for n, i in self.files.items() if present.get(n) == i}
        self.num_checks = {name: self.num_checks.get(name, 0) for name in present}
        new = {name for name in present if self.num_checks[name] < MAX_CHECKS}
        if new:
            mapped = list_mapped_inodes({*self.known, self.driver})
            self.files |= {name: present[name] for name in new if present[name] in mapped}
            self.num_checks |= {name: self.num_checks[name] + is_poll for name in new}
        if self.files != self.noted:
            self._write_note()

    def _write_note(self) -> None:
        """Write what belongs to the session into the temporary folder, for `remove_abandoned`."""
        partial = os.path.join(self.temp_dir, f".{NOTE}.partial")
        with contextlib.suppress(OSError):
            with open(partial, "w") as file:
                note = SessionNote(
                    self.marker.decode(), self.files, self.earlier, (*self.folders,), (*self.locks,)
                )
                json.dump(dataclasses.asdict(note), file)
            os.replace(partial, os.path.join(self.temp_dir, NOTE))
            self.noted = dict(self.files)

    def _list_spared(self, table: Processes) -> set[int]:
        """Return the living driver and its descendants."""
        if not self.is_driver_alive():
            return set()
        return {self.driver} | list_descendants({self.driver}, table)

    def list_victims(self, table: Processes) -> set[int]:
        """Return the processes of the session that have to be killed."""
        marked = {pid for pid in table if pid not in self.known and has_marker(pid, self.marker)}
        return (set(self.known) | marked) - self._list_spared(table) - {os.getpid()}

    def clean_up(self) -> None:
        """Kill processes, copy logs, remove shared memory, folder and unfinished files."""
        start = only_trackers_since = time.monotonic()
        while victims := self.list_victims(self.observe()):
            now_s = time.monotonic()
            if now_s - start > KILL_S:
                break
            first = {pid for pid in victims if not is_tracker(pid)}
            if first:
                only_trackers_since = now_s
            for pid in victims if now_s - only_trackers_since > TRACKER_S else first:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        in_use = list_mapped_inodes(self._list_spared(list_processes()))
        for name, inode in self.files.items():
            if inode not in in_use:
                with contextlib.suppress(OSError):
                    os.unlink(f"{SHM}/{name}")
        if self.logs:
            copy_ray_logs(self.temp_dir, self.logs)
        remove_folder(self.temp_dir)
        unregister_folder(self.temp_dir)
        for folder in self.folders:
            remove_partials(folder)

    def watch(self, words: int = 0) -> bool:
        """Wait for the end of the driver, or for a reason to end it.

        Reasons are a process of its Ray that has died or is stopped, a word, and a second signal.
        A process that was started since the last check has the marker in its environment.

        Args:
            words: Descriptor by which the driver sends words and its signals.

        Returns:
            Whether the driver ends by itself, and reports that.
        """
        with contextlib.suppress(ProcessLookupError), watch_new_files(SHM) as events:
            ends = [words, os.pidfd_open(self.driver)]
            news: list[int] = []
            while self.is_driver_alive():
                start = time.monotonic()
                self.observe(is_poll=not news)
                if self.trace_file:
                    self.ray.observe()
                    self.ray.observe_stops(self.driver)
                    if (self.ray.gone and self.ray.list_dead()) or self.ray.list_stopped():
                        break
                if self.is_driver_late():
                    break
                # A tenth of a core at most, where other programs create files all the time.
                pause = max(MAPPED_S, 9 * (time.monotonic() - start))
                watched = [*ends, *self.ray.ends]
                ready = select.select([*watched, *events], [], [], POLL_S)[0]
                news = [descriptor for descriptor in ready if descriptor in events]
                if news and len(news) == len(ready):
                    ready = select.select(watched, [], [], pause)[0]
                if words in ready and self._read_words(words):
                    return self.has_ended
                if self.ray.ends.keys() & set(ready):
                    if self.ray.list_dead():
                        break
                    self.ray = RayProcesses(self.temp_dir)  # the driver ends it
                elif ends[1] in ready:
                    break
                for descriptor in news:
                    os.read(descriptor, 1 << 16)  # `observe` lists the folder
        if select.select([words], [], [], 0)[0]:
            self._read_words(words)
        return self.has_ended

    def _read_words(self, words: int) -> bool:
        """Read what the driver has sent; return whether to stop watching it."""
        text = os.read(words, 1 << 12)
        self.has_ended = self.has_ended or END in text
        self.is_hanging = self.is_hanging or HANG in text
        for number in text if self.trace_file else b"":
            if number in END_SIGNALS and len(self.signals) < 2:
                now_s = time.monotonic()
                if not self.signals or now_s - self.signals[0][1] > REPEATED_S:
                    self.signals.append((number, now_s))
        return not text or self.has_ended or self.is_hanging

    def is_driver_late(self) -> bool:
        """Return whether a second signal has not ended the driver in time."""
        late_at = [when + SECOND_SIGNAL_S for _, when in self.signals[1:]]
        return bool(late_at) and time.monotonic() > late_at[0]

    def report_end(self) -> None:
        """Report why the driver ends, on one line and in the file of traces; then let it exit."""
        if self.ray.has_dead_agent():  # the raylet follows, and Ray complains of that
            self._dismiss_driver()
        status, stacks = 1, ""
        if self.is_hanging:
            with contextlib.suppress(OSError), open(os.path.join(self.temp_dir, HANG_NOTE)) as file:
                stacks = file.read()
            line, _, stacks = stacks.partition("\n")
        elif self.is_driver_late() and self.is_driver_alive():
            status = 128 + self.signals[1][0]
            name = signal.Signals(self.signals[1][0]).name
            line = f"{name}, the second signal, did not end the run in {SECOND_SIGNAL_S:g} s"
        elif (stopped := self.ray.list_stopped()) and self.is_driver_alive():
            names = " and ".join(self.ray.describe(stopped))
            are, they = ("is", "it") if len(stopped) == 1 else ("are", "them")
            line = f"{names} {are} stopped by a signal, and the run ends with {they}"
        else:
            line = self._describe_death()
        where = self._write_traces(line, stacks) if self.trace_file else ""
        if sys.stderr.isatty():  # the line of a progress bar may be unfinished, its cursor hidden
            print("\x1b[?25h", file=sys.stderr)
        with contextlib.suppress(OSError):  # a terminal that has hung up
            print(f"{self.command}: {line}{where}", file=sys.stderr, flush=True)
        self._dismiss_driver(status)

    def _dismiss_driver(self, status: int = 1) -> None:
        """Have the driver end itself with this status; kill it if it does not."""
        if self.is_driver_alive():
            with contextlib.suppress(OSError):
                os.write(1, bytes([status]))
            with contextlib.suppress(ProcessLookupError):
                if not select.select([os.pidfd_open(self.driver)], [], [], EXIT_S)[0]:
                    os.kill(self.driver, signal.SIGKILL)

    def _describe_death(self) -> str:
        """Describe what has died first: the driver, or processes of its Ray.

        The kernel kills GCS and raylet with the driver that has started them, and a moment before
        it is gone itself: if all three are gone, the first one is not known.
        """
        driver = f"the driver (process {self.driver})"
        crashed = "was killed or has crashed"
        if not self.is_driver_alive() and not self.ray.list_dead():
            return f"{driver} has died: it {crashed}{_describe_cluster()}"
        time.sleep(SETTLE_S)
        causes = self.ray.find_causes()
        if not causes:  # the driver was killed while it ended its Ray
            return f"{driver} has died: it {crashed}"
        names = self.ray.describe(causes)
        if {GCS, RAYLET} <= {self.ray.names[pid] for pid in causes}:
            time.sleep(SETTLE_S)
            if not self.is_driver_alive():
                return f"{driver}, {' and '.join(names)} have died: killed or crashed"
        have, they = ("has", "it") if len(names) == 1 else ("have", "them")
        return f"{' and '.join(names)} {have} died, and the run with {they}"

    def _write_traces(self, line: str, stacks: str = "") -> str:
        """Write the file of traces, with the ends of Ray's logs; return where it is, in brackets.

        What the driver has written on its way out stays in front.
        """
        text, earlier = [line, *([stacks] if stacks else [])], ""
        for name in ("gcs_server.out", "gcs_server.err", "raylet.out", "raylet.err"):
            if lines := read_last_lines(self.temp_dir, name):
                text += ["", f"The end of {name}:", *lines]
        partial = os.path.join(os.path.dirname(self.trace_file), ".error.partial")
        try:
            began = os.stat(os.path.join(self.temp_dir, LOCK)).st_mtime
            if os.stat(self.trace_file).st_mtime >= began:
                with open(self.trace_file) as file:
                    earlier = f"{file.read()}\n\n"
        except OSError:
            pass
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(partial)  # which may be a link to somebody's file
            with open(partial, "x") as file:
                file.write("\n".join([f"{earlier}{text[0]}", *text[1:], ""]))
            os.replace(partial, self.trace_file)
        except OSError as error:
            return f" (nothing more can be written: {error.strerror})"
        return f" ({'traceback' if earlier else 'more'}: {self.trace_file})"


def _describe_cluster() -> str:
    """Describe whether the cluster at RAY_ADDRESS answers: without it Ray ends the driver."""
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
    """Run as a script."""
    # A batch system signals every process of a job, and some of these signals are for the driver.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    reaper = Reaper(**json.loads(sys.argv[1]))
    if not reaper.watch() and (reaper.trace_file or reaper.is_hanging):
        reaper.report_end()
    reaper.clean_up()


if __name__ == "__main__":
    main()
