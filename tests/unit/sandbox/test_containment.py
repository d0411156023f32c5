"""Containment of programs, in every tier, as several users, in containers."""

import contextlib
import ctypes
import functools
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.nightly import all_but
from tests.unit.sandbox import attempts
from tests.unit.sandbox.places import CONTAINER, PLACES, SECRET, Place, require

SOURCE = Path(attempts.__file__).read_text()
NAMES = [attempt.__name__ for attempt in attempts.ATTEMPTS]
BY_NAME = {place.name: place for place in PLACES}
SELECTED = [BY_NAME[name] for name in ("bwrap", "bwrap as root", CONTAINER)]
WITH_ATTEMPTS = [
    *SELECTED, BY_NAME["bwrap in a cgroup"], BY_NAME["bwrap without proc"], BY_NAME["landlock"],
]  # fmt: skip
in_each_place = pytest.mark.parametrize("place", all_but(SELECTED, PLACES), ids=str)
# Ends when it is told to; a signal is told of by a line.
_OTHER = """
import signal, sys
signal.signal(signal.SIGUSR1, lambda *_: print("signalled", flush=True))
print("ready", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def other_process() -> Iterator[subprocess.Popen[str]]:
    pipe = subprocess.PIPE
    program = [sys.executable, "-I", "-S", "-c", _OTHER]
    environment = {"SECRET": SECRET}
    with subprocess.Popen(program, stdin=pipe, stdout=pipe, env=environment, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def attempted(run: Callable[[str, str], str]) -> dict[str, bool]:
    """Return by name which attempts to escape work for programs run by `run(source, stdin)`."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        os.chmod(folder, 0o777)  # so that it is not the rights of a user that protect it
        place = {name: f"{folder}/{name}" for name in ("file", "truncated", "renamed", "unlinked")}
        for path in place.values():
            Path(path).write_text("of the machine")
            os.chmod(path, 0o666)
        place |= {"folder": folder, "secret": SECRET}
        shared = stack.enter_context(tempfile.NamedTemporaryFile(dir="/dev/shm"))
        place["shared_memory"] = shared.name
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        udp = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        udp.bind(("127.0.0.1", 0))
        unix = stack.enter_context(socket.socket(socket.AF_UNIX))
        unix.bind(f"{folder}/unix")
        unix.listen()
        datagram = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        datagram.bind(f"{folder}/datagram")
        place |= {"tcp": tcp.getsockname()[1], "udp": udp.getsockname()[1]}
        place |= {"unix": unix.getsockname(), "unix_datagram": datagram.getsockname()}
        for path in (place["unix"], place["unix_datagram"]):
            os.chmod(path, 0o777)
        place |= stack.enter_context(shared_objects())
        names = "pid", "signalled", "owner"
        rest = {name: stack.enter_context(other_process()) for name in names}
        message = place | {name: process.pid for name, process in rest.items()}
        worked = json.loads(run(SOURCE, json.dumps(message)))
        worked["udp"] = _can_be_read(udp)
        worked["signal_other"] = _can_be_read(rest["signalled"].stdout)
        worked["signal_by_owner"] = _can_be_read(rest["owner"].stdout)
        assert all(process.poll() is None for process in rest.values())
        return worked


@contextlib.contextmanager
def shared_objects() -> Iterator[dict[str, object]]:
    """Create System V objects and a message queue for all users; remove them afterwards."""
    libc, rights = ctypes.CDLL(None, use_errno=True), 0o1666  # IPC_CREAT
    name = f"mcore_rl_attempt_{os.getpid()}"
    queue = libc.mq_open(f"/{name}".encode(), os.O_CREAT | os.O_RDWR, 0o666, None)
    ids = {
        "shared_memory_id": libc.shmget(0, 4096, rights),
        "removed_id": libc.shmget(0, 4096, rights),
        "queue_id": libc.msgget(0, rights),
        "semaphore_id": libc.semget(0, 1, rights),
    }
    message = struct.pack("l", 1) + b"told"
    libc.msgsnd(ids["queue_id"], message, 4, 0)
    try:
        assert min(queue, *ids.values()) >= 0
        yield {**ids, "queue_name": name}
    finally:
        os.close(queue)
        libc.mq_unlink(f"/{name}".encode())
        for number in ids["shared_memory_id"], ids["removed_id"]:
            libc.shmctl(number, 0, None)
        libc.msgctl(ids["queue_id"], 0, None)
        libc.semctl(ids["semaphore_id"], 0, 0)


def _can_be_read(source: object) -> bool:
    return bool(select.select([source], [], [], 0.5)[0])


@functools.cache
def attempted_in(place: Place) -> dict[str, bool]:
    def run(source: str, stdin: str) -> str:
        result = place.run(source, stdin)
        assert result.status == "ok", result
        return result.stdout

    return attempted(run)


@functools.cache
def attempted_outside() -> dict[str, bool]:
    def run(source: str, stdin: str) -> str:
        with tempfile.TemporaryDirectory() as folder:
            program = [sys.executable, "-c", source]
            return subprocess.run(
                program, input=stdin, stdout=subprocess.PIPE, text=True, cwd=folder, check=True
            ).stdout

    return attempted(run)


@pytest.mark.parametrize("place", all_but(WITH_ATTEMPTS, PLACES), ids=str)
def test_no_attempt_to_get_out_works(place):
    worked = attempted_in(require(place))
    assert worked == dict.fromkeys(NAMES, False)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may do all of it outside of a sandbox")
@pytest.mark.parametrize("name", NAMES)
def test_outside_of_a_sandbox_it_works(name):
    if (
        name in ("vsock", "io_uring", "table_of_locks", "access_list")
        and not attempted_outside()[name]
    ):
        pytest.skip("this kernel has none")
    assert attempted_outside()[name]


FORK_BOMB = """
import os, sys, time
started = 0
try:
    while started < 200:
        if not os.fork():
            time.sleep(60)
            os._exit(0)
        started += 1
except OSError as error:
    print(started, error.errno, flush=True)
time.sleep(1)
"""


@in_each_place
def test_a_fork_bomb_stops_at_the_limit(place):
    result = require(place).run(FORK_BOMB)
    if place.tier.name == "landlock":
        assert result.stdout.split() == ["0", "1"]  # EPERM: there is one process only
    elif place.counts_processes:
        assert 8 < int(result.stdout.split()[0]) < 16
    else:
        assert result.status == "processes"


THREAD_BOMB = """
import threading, time
for _ in range(1000):
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
time.sleep(10)
"""


@in_each_place
def test_a_thread_bomb_stops_at_the_limit(place):
    # Address space for the stacks of all: the limit of memory is not to come first.
    result = require(place).run(THREAD_BOMB, memory_mb=32768)
    if place.tier.name == "bwrap" and place.counts_processes:
        assert result.status == "error" and "can't start new thread" in result.stderr
    else:
        assert result.status == "processes"


@in_each_place
def test_memory_of_one_process(place):
    result = require(place).run("b = bytearray(1 << 30)\nprint(len(b))")
    assert (result.status, result.stdout) == ("memory", "")
    assert "MemoryError" in result.stderr


EATERS = """
import ctypes, os, time
ctypes.CDLL(None).prctl(15, NAME)  # of the process
for _ in range(6):
    if not os.fork():
        eaten = b"x" * (60 << 20)
        time.sleep(60)
time.sleep(60)
"""


@in_each_place
@pytest.mark.parametrize("name", [b"eater", b"\xff\xfe)"], ids=["a name", "no text"])
def test_memory_of_all_processes_together(place, name):
    if require(place).tier.name == "landlock":
        pytest.skip("there is one process only")
    assert place.run(EATERS.replace("NAME", repr(name))).status == "memory"


@in_each_place
def test_a_program_that_sleeps(place):
    start = time.monotonic()
    result = require(place).run("print('here', flush=True)\nimport time\ntime.sleep(600)", wall_s=3)
    assert (result.status, result.stdout, result.exit_code) == ("timeout", "here\n", 137)
    assert 3 <= result.wall_s < 13
    assert time.monotonic() - start < 23


@in_each_place
def test_a_program_that_computes_for_ever(place):
    result = require(place).run("while True: pass", cpu_s=0.3)
    assert result.status == "timeout"
    assert result.cpu_s < 5 and result.wall_s < 15


# One child after another: each is far below cpu_s, and so is the parent.
SHORT_CHILDREN = """
import os, time
while True:
    if os.fork() == 0:
        while time.process_time() < 0.2:
            pass
        os._exit(0)
    os.wait()
"""


@in_each_place
def test_the_time_of_children_that_have_ended_counts(place):
    if require(place).tier.name == "landlock":
        pytest.skip("there is one process only")
    result = place.run(SHORT_CHILDREN, cpu_s=0.8, wall_s=30)
    assert result.status == "timeout" and result.wall_s < 25


@in_each_place
def test_a_flood_of_output(place):
    result = require(place).run("while True: print('x' * 1000)", output_kb=64)
    assert result.status == "output"
    assert len(result.stdout) + len(result.stderr) == 64 << 10


FILLER = """
import os
names = 0
while names < 2000:
    with open(f"file{names}", "wb") as file:
        file.write(bytes(1 << 20))
    names += 1
"""


@in_each_place
def test_a_scratch_folder_that_is_filled(place):
    result = require(place).run(FILLER)
    if place.tier.name == "landlock":
        assert result.status == "disk"
    else:
        assert result.status == "error" and "No space left" in result.stderr


BY_FILE_NAME = """
for name in ("/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"):
    with open(name, "w") as file:
        file.write(f"{name}\\n")
with open("/dev/stderr", "w") as file:
    file.write("an error")
print(open("/dev/stdin").read())
"""


@in_each_place
def test_standard_streams_can_be_opened_by_the_names_of_their_files(place):
    if not require(place).tier.has_proc:
        pytest.skip("the names lead to /proc")
    result = place.run(BY_FILE_NAME, "3 4")
    assert result.stdout == "/dev/stdout\n/dev/fd/1\n/proc/self/fd/1\n3 4\n", result
    assert (result.status, result.stderr) == ("ok", "an error")


@in_each_place
def test_standard_streams_of_a_subprocess_can_be_opened_by_name(place):
    if require(place).tier.name == "landlock" or not place.tier.has_proc:
        pytest.skip("no subprocesses, or no names")
    result = place.run(
        ["sh", "-c", "cat /dev/stdin > /dev/stdout; echo no >&2 2> /dev/stderr"], "a"
    )
    assert (result.stdout, result.stderr) == ("a", "no\n")


OOM_SCORE = """
import os
for name in ("oom_score_adj", "oom_adj"):
    for pid in ("self", os.getpid(), os.getppid()):
        try:
            with open(f"/proc/{pid}/{name}", "w") as file:
                file.write("0")
        except OSError:
            pass
with open("/proc/self/oom_score_adj") as file:
    print(file.read())
"""


@in_each_place
def test_a_program_stays_the_first_that_the_kernel_ends_without_memory(place):
    result = require(place).run(OOM_SCORE)
    if place.tier.name == "landlock" or not place.tier.has_proc:
        assert "/proc/self/oom_score_adj" in result.stderr  # there is none for it
    else:
        assert result.stdout.strip() == "1000", result


RAISES_LIMITS = """
import resource
for name in ("CORE", "MSGQUEUE", "SIGPENDING", "NOFILE", "FSIZE", "CPU", "AS"):
    kind = getattr(resource, f"RLIMIT_{name}")
    soft, hard = resource.getrlimit(kind)
    try:
        resource.setrlimit(kind, (hard, hard + 1))
        print(name, "was raised")
    except (OSError, ValueError):
        pass
    print(name, hard)
"""


@in_each_place
def test_limits_of_the_kernel_are_those_of_the_settings_and_cannot_be_raised(place):
    # Without core dumps, which the machine may write outside.
    result = require(place).run(RAISES_LIMITS)
    limits = "CORE 0", "MSGQUEUE 0", "SIGPENDING 128", "NOFILE 128"
    sizes = f"FSIZE {8 << 20}", "CPU 6", f"AS {256 << 20}"
    assert result.stdout.splitlines() == [*limits, *sizes], result


@in_each_place
def test_a_file_larger_than_the_scratch_folder(place):
    result = require(place).run("f = open('f', 'wb')\nwhile True: f.write(bytes(1 << 20))")
    assert result.status in ("disk", "error")
    assert result.stdout == ""


def find_processes(marker: str) -> list[int]:
    """Return the processes with this word on their command line."""
    values = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if marker.encode() in path.read_bytes():
                values.append(int(path.parent.name))
    return values


DAEMON = """
import os, subprocess, sys
print(os.getcwd(), flush=True)
open("mine", "w").write("x")
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv("/bin/sleep", ["sleep", "MARKER"])
    os._exit(0)
os.wait()
"""


def marked() -> str:
    return f"{3000 + time.monotonic_ns() % 10**9 / 10**9:.9f}"


@in_each_place
def test_nothing_is_left(place):
    marker = marked()
    result = require(place).run(DAEMON.replace("MARKER", marker))
    if place.tier.name == "landlock":
        assert "PermissionError" in result.stderr
        assert not Path(result.stdout.strip()).exists()
    else:
        assert result.status == "ok", result
        assert result.stdout == "/tmp\n"
    assert find_processes(marker) == []


def test_outside_of_a_sandbox_something_is_left(tmp_path):
    marker = marked()
    source = DAEMON.replace("MARKER", marker)
    subprocess.run([sys.executable, "-c", source], cwd=tmp_path, check=True)
    deadline = time.monotonic() + 10
    while not (left := find_processes(marker)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(left) == 1
    os.kill(left[0], signal.SIGKILL)


@in_each_place
@pytest.mark.parametrize("how", ["killed", "told"])
def test_nothing_is_left_of_a_caller_that_ends(place, how, tmp_path):
    marker = marked()
    source = (
        f"import os, sys, time\nopen('mine', 'w')\nos.execv('/bin/sleep', ['sleep', '{marker}'])"
    )
    request = {"settings": {"wall_s": 300}, "program": source, "stdin": "", "files": {}}
    tier = {name: getattr(require(place).tier, name) for name in place.tier.__dataclass_fields__}
    with place.start() as process:
        assert process.stdin is not None
        process.stdin.write(json.dumps({**request, "tier": tier}) + "\n")
        process.stdin.flush()
        until(lambda: find_processes(marker) != [], "a start")
        folders = {Path(os.readlink(f"/proc/{pid}/cwd")) for pid in find_processes(marker)}
        process.send_signal(signal.SIGKILL if how == "killed" else signal.SIGINT)
        until(lambda: find_processes(marker) == [], "an end")
    if place.tier.name == "landlock":
        assert any("mcore-rl-sandbox-" in str(folder) for folder in folders)
        until(lambda: not any(map(os.path.exists, folders)), "removal of the scratch folder")


def until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline, f"waited for {what}"
        time.sleep(0.02)


DEEP = """
import os
for _ in range(1500):
    os.mkdir("d" * 50)
    os.chdir("d" * 50)
os.mkdir("closed", 0)
"""


@in_each_place
def test_a_scratch_folder_too_deep_for_python_is_removed(place):
    result = require(place).run("import os\nprint(os.getcwd(), flush=True)" + DEEP, scratch_mb=64)
    assert result.status in ("ok", "disk")
    if place.tier.name == "landlock":
        assert not Path(result.stdout.strip()).exists()
