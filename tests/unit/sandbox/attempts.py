"""A program that tries to get out of a sandbox; run inside of it, by tests.

Reads from stdin where to try it; prints by name whether it worked. Without imports of the project.
"""

import contextlib
import ctypes
import errno
import fcntl
import glob
import json
import mmap
import os
import resource
import signal
import socket
import struct
import sys
from pathlib import Path

LIBC = ctypes.CDLL(None, use_errno=True)
SYSTEM_V_SHARED = 0o1600  # IPC_CREAT and rights
MQ_UNLINK, IO_SETUP = {"x86_64": (241, 206), "aarch64": (181, 0)}[os.uname().machine]


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
    """Set another process as owner of a descriptor, which is sent a signal on input."""
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


def system_v_memory_of_others(place):
    LIBC.shmat.restype = ctypes.c_void_p
    if LIBC.shmat(place["shared_memory_id"], None, 0) == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno())


def system_v_message_of_others(place):
    if LIBC.msgrcv(place["queue_id"], ctypes.create_string_buffer(64), 8, 0, 0o4000) < 0:
        raise OSError(ctypes.get_errno())


def system_v_semaphore_of_others(place):
    if LIBC.semctl(place["semaphore_id"], 0, 16, 5) < 0:  # SETVAL
        raise OSError(ctypes.get_errno())


def system_v_removal(place):
    if LIBC.shmctl(place["removed_id"], 0, None) < 0:
        raise OSError(ctypes.get_errno())


def message_queue_of_others(place):
    if LIBC.syscall(MQ_UNLINK, place["queue_name"].encode()) < 0:
        raise OSError(ctypes.get_errno())


def watch_folder(place):
    watcher = LIBC.inotify_init1(0)
    if watcher < 0 or LIBC.inotify_add_watch(watcher, place["folder"].encode(), 0xFFF) < 0:
        raise OSError(ctypes.get_errno())


def watch_any_file(place):
    watcher = LIBC.fanotify_init(0x200, 0)  # FAN_REPORT_FID, for any user
    if watcher < 0:
        raise OSError(ctypes.get_errno())
    os.close(watcher)


def watch_system_folder(place):
    fcntl.fcntl(os.open("/usr", os.O_RDONLY), fcntl.F_NOTIFY, 4)  # DN_CREATE


def lease_of_file(place):
    """Take a lease, for which a writer waits up to 45 s."""
    with open(os.__file__) as file:
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)


def shared_anonymous_memory(place):
    """Partly unmapped, it keeps its pages: no sum of what processes map counts them."""
    mmap.mmap(-1, 1 << 20).close()


def shared_memory_of_a_device(place):
    with open("/dev/zero") as file:
        mmap.mmap(file.fileno(), 1 << 20, prot=mmap.PROT_READ).close()


def memory_of_hugetlbfs(place):
    try:
        mmap.mmap(-1, 2 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40000).close()
    except OSError as error:
        if error.errno != errno.ENOMEM:  # the kernel would give it, of a pool that is empty
            raise


def large_pipe(place):
    fcntl.fcntl(os.pipe()[1], 1031, 1 << 20)  # F_SETPIPE_SZ


def memory_lent_to_a_pipe(place):
    """Lend a byte of a huge page, which keeps the page in memory."""
    page = ctypes.create_string_buffer(8192)
    vector = (ctypes.c_void_p * 2)(ctypes.addressof(page), 4096)
    if LIBC.vmsplice(os.pipe()[1], vector, 1, 0) < 0:
        raise OSError(ctypes.get_errno())


def file_lent_to_a_pipe(place):
    with open(sys.executable, "rb") as file:
        if LIBC.splice(file.fileno(), None, os.pipe()[1], None, 4096, 0) < 0:
            raise OSError(ctypes.get_errno())


def file_lent_to_a_socket(place):
    pair = socket.socketpair()
    with open(sys.executable, "rb") as file:
        os.sendfile(pair[0].fileno(), file.fileno(), 0, 4096)


def large_socket(place):
    pair = socket.socketpair()
    before = pair[0].getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    pair[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 3 * before // 4)
    if pair[0].getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == before:
        raise OSError("it has not changed")


def table_of_locks(place):
    if LIBC.prctl(78, 1, ctypes.c_ulong(1 << 12), ctypes.c_ulong(0), 0) < 0:  # PR_FUTEX_HASH
        raise OSError(ctypes.get_errno())


def access_list(place):
    """64 KiB for each file, in kernel memory."""
    entries = [(1, 7), (2, 7), (4, 7), (16, 7), (32, 7)]
    packed = [struct.pack("<HHI", t, p, 0 if t == 2 else 0xFFFFFFFF) for t, p in entries]
    open("with_list", "w").close()
    os.setxattr("with_list", "system.posix_acl_access", struct.pack("<I", 2) + b"".join(packed))


def rules_of_landlock(place):
    if LIBC.syscall(444, struct.pack("QQQ", 0, 3, 0), ctypes.c_size_t(24), 0) < 0:
        raise OSError(ctypes.get_errno())


def asynchronous_io(place):
    context = ctypes.c_ulong(0)
    if LIBC.syscall(IO_SETUP, 1, ctypes.byref(context)) < 0:
        raise OSError(ctypes.get_errno())


def hide_from_looks(place):
    if LIBC.prctl(4, 0, 0, 0, 0) < 0:  # PR_SET_DUMPABLE
        raise OSError(ctypes.get_errno())


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
    system_v_memory, system_v_memory_of_others, system_v_message_of_others,
    system_v_semaphore_of_others, system_v_removal, message_queue_of_others, watch_folder,
    watch_any_file, watch_system_folder, lease_of_file, shared_anonymous_memory,
    shared_memory_of_a_device, memory_of_hugetlbfs, large_pipe, memory_lent_to_a_pipe,
    file_lent_to_a_pipe, file_lent_to_a_socket, large_socket, table_of_locks, access_list,
    rules_of_landlock, asynchronous_io, io_uring, new_user_namespace, hide_from_looks,
]  # fmt: skip

if __name__ == "__main__":
    message = json.loads(sys.stdin.read())
    worked = {}
    for attempt in ATTEMPTS:
        try:
            attempt(message)
            worked[attempt.__name__] = True
        except (Exception, SystemExit):  # noqa: BLE001 (whatever stops it)
            worked[attempt.__name__] = False
    print(json.dumps(worked))
