"""Memory that no process maps, files without a name: a look or a cgroup counts them."""

import ctypes
import os
import subprocess
import threading
from pathlib import Path

import pytest

from mcore_rl.sandbox import usage
from mcore_rl.sandbox.cgroup import PREFIX, find_parent, list_candidate_folders
from tests.nightly import all_but
from tests.unit.sandbox.places import CONTAINER, NOBODY, PLACES, SYSTEM_PYTHON, require
from tests.unit.sandbox.test_containment import find_processes, marked, until

BY_NAME = {place.name: place for place in PLACES}
IN_A_CGROUP = BY_NAME["bwrap in a cgroup"]
SELECTED = [BY_NAME[name] for name in ("bwrap", "bwrap as nobody", CONTAINER)]
BWRAP = [place for place in PLACES if place.tier.name == "bwrap"]
LANDLOCK = [place for place in PLACES if place.tier.name == "landlock"]
in_bwrap = pytest.mark.parametrize("place", all_but([*SELECTED[:2], IN_A_CGROUP], BWRAP), ids=str)
in_landlock = pytest.mark.parametrize("place", all_but([SELECTED[2]], LANDLOCK), ids=str)
LIMITS = {"memory_mb": 64, "scratch_mb": 8}

# A program prints how many MiB it holds by now.
START = """
import ctypes, mmap, os, socket, sys, time

held = 0
def hold(num_bytes):
    global held
    held += num_bytes
    print(held >> 20, flush=True)

def fill(sender):
    sender.setblocking(False)
    sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 24)
    sent = 0
    while True:
        try:
            sent += sender.send(bytes(1 << 16))
        except BlockingIOError:
            return sent
"""
# Connections that nobody accepts: their senders are closed.
BACKLOG = """
server = socket.socket(socket.AF_UNIX)
server.bind("socket")
server.listen(4000)
for _ in range(4000):
    with socket.socket(socket.AF_UNIX) as sender:
        sender.connect("socket")
        hold(fill(sender))
"""
# Sockets that are in messages of others, full: as many as may be.
MESSAGES = """
carrier = socket.socketpair()
for _ in range(100):
    left, right = socket.socketpair()
    size = fill(left)
    socket.send_fds(carrier[0], [b"x"], [right.fileno()])
    left.close(), right.close()
    hold(size)
time.sleep(60)
"""
PAIRS = """
for _ in range(15):
    if not os.fork():
        pairs = [socket.socketpair() for _ in range(50)]
        for left, right in pairs:
            hold(fill(left) + fill(right))
        time.sleep(60)
time.sleep(60)
"""
LOOPBACK = """
for _ in range(10):
    if not os.fork():
        server, ends = socket.create_server(("127.0.0.1", 0)), []
        for _ in range(50):
            ends.append(socket.create_connection(server.getsockname()))
            ends.append(server.accept()[0])
            hold(fill(ends[-1]) + fill(ends[-2]))
        time.sleep(60)
time.sleep(1)
"""
INODES = """
os.chdir({folder!r})
number = 0
while True:
    os.mknod("n" * 200 + str(number))
    number += 1
    if number % 500 == 0:
        hold(500 << 11)
"""
# Files of 1 MiB that have no name any more: open, or closed with a page of each mapped.
NAMELESS = """
files = []
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
while True:
    if held >= 40 << 20:  # before the limit on open files; a look may be late
        time.sleep(0.1)
        continue
    files.append(open("file", "w+b", buffering=0))
    os.unlink("file")
    files[-1].write(bytes(1 << 20))
    hold(1 << 20)
"""
CLOSED = """
    assert libc.mmap(None, ctypes.c_size_t(4096), 1, 1, files[-1].fileno(), 0)
    files.pop().close()
"""
# A process that others of its user cannot look into: nobody may read its program.
HIDDEN = """
with os.fdopen(os.open("program", os.O_CREAT | os.O_WRONLY, 0o111), "wb") as file:
    file.write(open("/bin/sleep", "rb").read())
os.execv("program", ["program", "60"])
"""


def held_mib(stdout: str) -> int:
    return int(stdout.split()[-1])


@in_bwrap
@pytest.mark.parametrize("program", [BACKLOG, MESSAGES, PAIRS], ids=["backlog", "sent", "pairs"])
def test_what_is_in_sockets_counts_as_memory(place, program):
    result = require(place).run(START + program, **LIMITS, wall_s=2)
    if place.tier.in_cgroup:  # it counts what is there, not what could be, and is never exceeded
        assert result.status in ("memory", "timeout")
        assert held_mib(result.stdout) <= 64 + 2 * 8 + 32
    else:
        assert result.status == "memory"
        assert held_mib(result.stdout) < 1000  # what a busy machine lets pass between two looks


@in_bwrap
def test_sockets_of_a_network_are_counted_by_a_cgroup_or_refused(place):
    result = require(place).run(START + LOOPBACK, **LIMITS)
    if place.tier.in_cgroup:
        assert 0 < held_mib(result.stdout) <= 64
    else:
        assert result.stdout == "" and "PermissionError" in result.stderr


@in_bwrap
@pytest.mark.parametrize("folder", ["/tmp", "/dev/shm"])
def test_inodes_of_a_folder_in_memory_count_as_files(place, folder):
    result = require(place).run(START + INODES.format(folder=folder), **LIMITS)
    assert result.status == "disk"
    assert held_mib(result.stdout) < 64


FILL_FOLDERS = """
import errno
for folder in ("/dev/shm", "/tmp"):
    num_bytes = 0
    try:
        for number in range(16):
            with open(f"{folder}/{number}", "wb", buffering=0) as file:
                num_bytes += file.write(bytes(1 << 20))
    except OSError as error:
        print(folder, num_bytes >> 20, errno.errorcode[error.errno])
for folder in ("/dev", "/", "/usr", "/proc", "/proc/sys"):
    try:
        open(f"{folder}/file", "wb").close()
        print("a file in", folder)
    except OSError:
        pass
"""


@in_bwrap
def test_folders_in_memory_have_the_size_of_the_scratch_folder(place):
    # A fill of /dev/shm counts no more than one of /tmp.
    result = require(place).run(FILL_FOLDERS)
    lines = [line.split() for line in result.stdout.splitlines()]
    assert [(name, error) for name, _, error in lines] == [
        ("/dev/shm", "ENOSPC"),
        ("/tmp", "ENOSPC"),
    ]
    assert all(7 <= int(size) <= 8 for _, size, _ in lines), result


MAP_SHARED = """
import mmap, os, sys, time
with open(f"{sys.argv[1]}/shared", "wb+") as file:
    file.truncate(80 << 20)
    memory = mmap.mmap(file.fileno(), 80 << 20)
for start in range(0, len(memory), 4096):
    memory[start] = 1
for _ in range(3):
    if os.fork() == 0:
        assert sum(memory[start] for start in range(0, len(memory), 4096)) == 80 << 8
        time.sleep(5)
        os._exit(0)
time.sleep(5)
"""


@in_bwrap
@pytest.mark.parametrize("folder", ["/tmp", "/dev/shm"])
def test_shared_memory_that_processes_map_counts_in_each(place, folder):
    # Four of 80 MiB, each below its own limit; all pages are of a file, none is anonymous.
    program = ["python3", "-c", MAP_SHARED, folder]
    assert require(place).run(program, scratch_mb=100).status == "memory"


@in_landlock
@pytest.mark.parametrize("source", [NAMELESS, NAMELESS + CLOSED], ids=["open", "mapped"])
def test_files_without_a_name_count(place, source):
    result = require(place).run(START + source, **LIMITS)
    assert result.status == "disk"


@pytest.mark.parametrize("place", [place for place in LANDLOCK if place.is_container], ids=str)
def test_a_process_that_cannot_be_looked_into_is_ended(place):
    result = require(place).run(START + HIDDEN, **LIMITS)
    assert result.status == "disk"


SEIZE, DETACH, TRACE_EXIT = 0x4206, 17, 0x40  # of ptrace(2): a process stops before it ends


@pytest.mark.parametrize("place", all_but([SELECTED[0], SELECTED[2]], PLACES), ids=str)
def test_a_process_that_outlives_sigkill_does_not_fail_the_call(place):
    # It holds nothing up, and what is left of its call goes when it does.
    marker, results = marked(), []
    source = (
        f"import os\nprint(os.getcwd(), flush=True)\nos.execv('/bin/sleep', ['sleep', '{marker}'])"
    )
    running_call = require(place).run
    call = threading.Thread(target=lambda: results.append(running_call(source, wall_s=1)))
    call.start()
    until(lambda: find_processes(marker) != [], "a start")
    [pid] = find_processes(marker)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(SEIZE, pid, 0, ctypes.c_long(TRACE_EXIT)) < 0:
        call.join()
        pytest.skip(f"ptrace: {os.strerror(ctypes.get_errno())}")
    call.join()
    assert [result.status for result in results] == ["timeout"]
    assert find_processes(marker) == [pid]
    assert libc.ptrace(DETACH, pid, 0, 0) == 0
    until(lambda: find_processes(marker) == [], "an end")
    if place.tier.name == "landlock":
        folder = results[0].stdout.strip()
        until(lambda: not os.path.exists(folder), "removal of the scratch folder")


ENDED = """
child = os.fork()
if not child:
    os._exit(0)
os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
try:
    read_open_files(child, "/tmp")
except PermissionError:
    print(has_memory(child), has_memory(os.getpid()))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_a_process_that_ends_does_not_count_as_one_that_hides_its_files():
    source = Path(usage.__file__).read_text() + ENDED
    program = [SYSTEM_PYTHON, "-I", "-c", source]
    result = subprocess.run(program, capture_output=True, text=True, user=NOBODY, check=True)
    assert result.stdout == "False True\n"


@pytest.mark.skipif(find_parent() is None, reason="no memory cgroup can be made here")
@pytest.mark.parametrize("place", [p for p in PLACES if p.tier.in_cgroup], ids=str)
def test_a_cgroup_is_gone_after_a_call_and_those_of_killed_supervisors_after_the_next(place):
    parent = Path(find_parent().folder)
    abandoned = parent / f"{PREFIX}{2**22 + 1}"  # no process has such an id
    abandoned.mkdir()
    assert require(place).run("print(1)").status == "ok"
    user_file = [path for path in parent.glob(f"{PREFIX}*") if not is_running(path)]
    assert user_file == []


def is_running(cgroup: Path) -> bool:
    """Return whether the supervisor of a cgroup runs: other tests have cgroups, too."""
    return os.path.exists(f"/proc/{cgroup.name.removeprefix(PREFIX).partition('-')[0]}")


V1 = "35 31 0:32 {root} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory"
V2 = "41 31 0:38 {root} {mount} rw,relatime - cgroup2 cgroup2 rw"


@pytest.mark.parametrize(
    ("root", "membership", "expected"),
    [
        ("/", "4:memory:/jobs/7\n0::/", ["/sys/fs/cgroup/memory/jobs/7"]),
        ("/docker/3", "4:cpu,memory:/docker/3/a\n0::/", ["/sys/fs/cgroup/memory/a"]),
        ("/docker/3", "4:memory:/docker/3", ["/sys/fs/cgroup/memory"]),
        ("/", "4:cpu:/jobs/7\n0::/", []),
    ],
)
def test_a_cgroup_of_version_1_is_made_in_our_own(root, membership, expected):
    result = list_candidate_folders(V1.format(root=root), membership)
    assert [os.path.normpath(folder) for folder in result] == expected


def test_a_cgroup_of_version_2_is_made_above_where_children_count_memory(tmp_path):
    for name, text in (("", "memory pids"), ("slice", "cpu memory"), ("slice/scope", "")):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "cgroup.subtree_control").write_text(text + "\n")
    mounts = V2.format(root="/", mount=tmp_path)
    result = list(list_candidate_folders(mounts, "0::/slice/scope"))
    assert result == [str(tmp_path / "slice"), str(tmp_path)]
    assert list(list_candidate_folders(mounts, "4:memory:/slice")) == []
