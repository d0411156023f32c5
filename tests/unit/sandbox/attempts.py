"""A program that tries to get out of a sandbox; run inside of it, by tests.

Reads from stdin where to try it; prints by name whether it worked. Without imports of the project.
"""

import contextlib
import ctypes
import fcntl
import glob
import json
import os
import resource
import signal
import socket
import sys
from pathlib import Path

LIBC = ctypes.CDLL(None, use_errno=True)
SYSTEM_V_SHARED = 0o1600  # IPC_CREAT and rights


def tcp(place):
    socket.create_connection(("127.0.0.1", place["tcp"]), timeout=2).sendall(b"out")


def udp(place):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.sendto(b"out", ("127.0.0.1", place["udp"]))
    raise SystemExit  # sending is no proof: the receiver tells


def unix_socket(place):
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(place["unix"])


def unix_datagram(place):
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    pair[0].sendto(b"out", place["unix_datagram"])


def vsock(place):
    socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM).close()


def read_shadow(place):
    Path("/etc/shadow").read_text()


def read_file(place):
    Path(place["file"]).read_text()


def list_folder(place):
    os.listdir(place["folder"])


def read_through_link(place):
    os.symlink(place["file"], "link")
    Path("link").read_text()


def write_through_link(place):
    os.symlink(place["folder"], "folder")
    open("folder/through_link", "x").close()


def hard_link(place):
    os.link(place["file"], "hard_link")


def create_file(place):
    open(place["folder"] + "/created", "x").close()


def append(place):
    with open(place["file"], "a") as file:
        file.write("more")


def truncate(place):
    os.truncate(place["truncated"], 0)


def change_mode(place):
    os.chmod(place["file"], 0o777)


def change_time(place):
    os.utime(place["file"], (0, 0))


def rename(place):
    os.rename(place["renamed"], place["renamed"] + ".new")


def unlink(place):
    os.unlink(place["unlinked"])


def write_in_system(place):
    path = "/usr/lib/mcore_rl_attempt"
    open(path, "x").close()
    os.unlink(path)


def write_in_memory_folder(place):
    path = f"/dev/shm/mcore_rl_attempt_{os.getpid()}"
    open(path, "x").close()
    if not os.path.exists(place["shared_memory"]):
        raise PermissionError("it is a folder of its own")
    os.unlink(path)


def read_environment(place):
    for path in [f"/proc/{place['pid']}/environ", *glob.glob("/proc/[0-9]*/environ")]:
        with contextlib.suppress(OSError), open(path) as file:
            if place["secret"] in file.read():
                return
    if place["secret"] not in str(os.environ):
        raise PermissionError("not found")


def signal_other(place):
    os.kill(place["signalled"], signal.SIGUSR1)
    raise SystemExit  # the one that is signalled tells


def signal_by_owner(place):
    """A descriptor's owner is sent a signal of one's choice when there is something to read."""
    read, write = os.pipe()
    fcntl.fcntl(read, fcntl.F_SETOWN, place["owner"])
    fcntl.fcntl(read, fcntl.F_SETSIG, signal.SIGUSR1)
    fcntl.fcntl(read, fcntl.F_SETFL, os.O_ASYNC)
    os.write(write, b"x")
    raise SystemExit


def limit_other(place):
    resource.prlimit(place["pid"], resource.RLIMIT_CORE, (0, 0))


def slow_other(place):
    os.setpriority(os.PRIO_PROCESS, place["pid"], 19)


def trace_other(place):
    if LIBC.ptrace(0x4206, place["pid"], 0, 0) < 0:  # PTRACE_SEIZE
        raise OSError(ctypes.get_errno())


def anonymous_file(place):
    os.close(os.memfd_create("hidden"))


def system_v_memory(place):
    number = LIBC.shmget(0, 4096, SYSTEM_V_SHARED)
    if number < 0:
        raise OSError(ctypes.get_errno())
    LIBC.shmctl(number, 0, None)  # removes it


def io_uring(place):
    if (fd := LIBC.syscall(425, 1, ctypes.create_string_buffer(120))) < 0:
        raise OSError(ctypes.get_errno())
    os.close(fd)


def new_user_namespace(place):
    child = os.fork()
    if not child:
        os._exit(int(LIBC.unshare(0x10000000) < 0))
    if os.waitpid(child, 0)[1]:
        raise OSError("refused")


ATTEMPTS = [
    tcp, udp, unix_socket, unix_datagram, vsock, read_shadow, read_file, list_folder,
    read_through_link, write_through_link, hard_link, create_file, append, truncate, change_mode,
    change_time, rename, unlink, write_in_system, write_in_memory_folder, read_environment,
    signal_other, signal_by_owner, limit_other, slow_other, trace_other, anonymous_file,
    system_v_memory, io_uring, new_user_namespace,
]  # fmt: skip

if __name__ == "__main__":
    told = json.loads(sys.stdin.read())
    worked = {}
    for attempt in ATTEMPTS:
        try:
            attempt(told)
            worked[attempt.__name__] = True
        except (Exception, SystemExit):  # noqa: BLE001 (whatever stops it)
            worked[attempt.__name__] = False
    print(json.dumps(worked))
