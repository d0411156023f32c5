"""The seccomp filter, call by call, by an interpreter of BPF written from the kernel's manual.

Numbers of calls are from the kernel's tables of each machine.
"""

import errno
import struct

import pytest

from mcore_rl.sandbox.seccomp_filter import PID as PLACEHOLDER
from mcore_rl.sandbox.seccomp_filter import build_filter

PID = 4321
ALLOW, KILL, DONE = 0x7FFF0000, 0x80000000, 0x50000  # the last returns 0 and does nothing
EPERM, ENOSYS, EINVAL = DONE | errno.EPERM, DONE | errno.ENOSYS, DONE | errno.EINVAL
MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
THREAD_FLAGS, FORK_FLAGS, NEW_USER = 0x3D0F00, 0x1200011, 0x10000000
# (call on x86_64, on aarch64), arguments, what follows without namespaces, and with them
CALLS = [
    ((0, 63), (0, 0, 0), ALLOW, ALLOW),  # read
    ((59, 221), (0, 0, 0), ALLOW, ALLOW),  # execve
    ((62, 129), (PID, 9), ALLOW, ALLOW),  # kill
    ((62, 129), (PID + 1, 9), EPERM, ALLOW),
    ((62, 129), (0xFFFFFFFF, 9), EPERM, ALLOW),
    ((234, 131), (PID, PID + 5, 6), ALLOW, ALLOW),  # tgkill
    ((234, 131), (1, 1, 6), EPERM, ALLOW),
    ((200, 130), (1, 9), EPERM, ALLOW),  # tkill
    ((424, 424), (3, 9), EPERM, ALLOW),  # pidfd_send_signal
    ((56, 220), (THREAD_FLAGS,), ALLOW, ALLOW),  # clone
    ((56, 220), (FORK_FLAGS,), EPERM, ALLOW),
    ((56, 220), (FORK_FLAGS | NEW_USER,), EPERM, EPERM),
    ((435, 435), (0, 0), ENOSYS, ENOSYS),  # clone3
    ((41, 198), (2, 1), EPERM, EPERM),  # socket: inet
    ((41, 198), (1, 1), EPERM, ALLOW),  # unix
    ((41, 198), (40, 1), EPERM, EPERM),  # vsock
    ((41, 198), (16, 3), EPERM, EPERM),  # netlink
    ((53, 199), (1, 1 | 0o2000000), ALLOW, ALLOW),  # socketpair: stream, close-on-exec
    ((53, 199), (1, 2), EPERM, ALLOW),  # datagram
    ((53, 199), (1, 5), EPERM, ALLOW),  # seqpacket
    ((157, 167), (15, 0), ALLOW, ALLOW),  # prctl: PR_SET_NAME
    ((157, 167), (1, 0), EPERM, ALLOW),  # PR_SET_PDEATHSIG
    ((72, 25), (3, 3), ALLOW, ALLOW),  # fcntl: F_GETFL
    ((72, 25), (3, 8, 1), EPERM, ALLOW),  # F_SETOWN
    ((72, 25), (3, 15, 1), EPERM, ALLOW),  # F_SETOWN_EX
    ((16, 29), (3, 0x5401), ALLOW, ALLOW),  # ioctl: TCGETS
    ((16, 29), (3, 0x8901), EPERM, ALLOW),  # FIOSETOWN
    ((302, 261), (0, 7), ALLOW, ALLOW),  # prlimit64
    ((302, 261), (1, 7), EPERM, ALLOW),
    ((268, 53), (0, 0, 0), EPERM, ALLOW),  # fchmodat
    ((280, 88), (0, 0, 0), EPERM, ALLOW),  # utimensat
    ((188, 5), (0, 0, 0), EPERM, EPERM),  # setxattr
    ((157, 167), (4, 0), EPERM, EPERM),  # PR_SET_DUMPABLE
    ((157, 167), (78, 1, 1 << 24), EPERM, EPERM),  # PR_FUTEX_HASH
    ((72, 25), (3, 1024, 0), EPERM, EPERM),  # F_SETLEASE
    ((72, 25), (3, 1026, 4), EPERM, EPERM),  # F_NOTIFY
    ((72, 25), (3, 1031, 1 << 20), EPERM, EPERM),  # F_SETPIPE_SZ
    ((72, 25), (3, 1032), ALLOW, ALLOW),  # F_GETPIPE_SZ
    ((9, 222), (0, 4096, 3, 0x22), ALLOW, ALLOW),  # mmap: private anonymous
    ((9, 222), (0, 4096, 3, 0x01), ALLOW, ALLOW),  # a file, shared
    ((9, 222), (0, 4096, 3, 0x21), EPERM, EPERM),  # shared anonymous
    ((9, 222), (0, 4096, 3, 0x23), EPERM, EPERM),  # the same, validated
    ((9, 222), (0, 4096, 3, 0x40022), EPERM, EPERM),  # of hugetlbfs
    ((54, 208), (3, 1, 7), DONE, DONE),  # setsockopt: SO_SNDBUF
    ((54, 208), (3, 1, 32), DONE, DONE),  # SO_SNDBUFFORCE
    ((54, 208), (3, 1, 2), ALLOW, ALLOW),  # SO_REUSEADDR
    ((54, 208), (3, 6, 7), ALLOW, ALLOW),  # of another level
    ((40, 71), (3, 4, 0, 9), EINVAL, EINVAL),  # sendfile
    ((275, 76), (3, 0, 4, 0, 9), EINVAL, EINVAL),  # splice
    ((278, 75), (3, 0, 1), EPERM, EPERM),  # vmsplice
    ((46, 211), (3, 0, 0), EPERM, ALLOW),  # sendmsg
    ((30, 196), (3, 0, 0), EPERM, EPERM),  # shmat
    ((70, 188), (3, 0, 0), EPERM, EPERM),  # msgrcv
    ((66, 191), (3, 0, 16), EPERM, EPERM),  # semctl
    ((241, 181), (0,), EPERM, EPERM),  # mq_unlink
    ((294, 26), (0,), EPERM, EPERM),  # inotify_init1
    ((300, 262), (0,), EPERM, EPERM),  # fanotify_init
    ((206, 0), (1,), EPERM, EPERM),  # io_setup
    ((444, 444), (0,), EPERM, EPERM),  # landlock_create_ruleset
    ((279, 239), (1,), EPERM, ALLOW),  # move_pages
    ((319, 279), (0, 0), EPERM, EPERM),  # memfd_create
    ((29, 194), (0, 0), EPERM, EPERM),  # shmget
    ((425, 425), (0, 0), EPERM, EPERM),  # io_uring_setup
    ((272, 97), (0,), EPERM, EPERM),  # unshare
    ((308, 268), (0,), EPERM, EPERM),  # setns
    ((165, 40), (0,), EPERM, EPERM),  # mount
    ((101, 117), (0,), EPERM, EPERM),  # ptrace
    ((310, 270), (0,), EPERM, EPERM),  # process_vm_readv
    ((321, 280), (0,), EPERM, EPERM),  # bpf
    ((250, 219), (0,), EPERM, EPERM),  # keyctl
]


def followed(code: list[tuple[int, int, int, int]], data: bytes) -> int:
    """Run a classic BPF program on a struct seccomp_data."""
    place = accumulator = 0
    while True:
        operation, if_true, if_false, constant = code[place]
        place += 1
        if operation == 0x20:  # BPF_LD | BPF_W | BPF_ABS
            [accumulator] = struct.unpack_from("<I", data, constant)
        elif operation == 0x54:  # BPF_ALU | BPF_AND | BPF_K
            accumulator &= constant
        elif operation == 0x06:  # BPF_RET | BPF_K
            return constant
        else:
            holds = {
                0x15: accumulator == constant,  # BPF_JMP | BPF_JEQ | BPF_K
                0x35: accumulator >= constant,  # BPF_JGE
                0x45: bool(accumulator & constant),  # BPF_JSET
            }[operation]
            place += if_true if holds else if_false


def answer(
    machine: str,
    has_namespaces: bool,
    number: int,
    *arguments: int,
    audit: int = 0,
    has_cgroup: bool = False,
) -> int:
    padded = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack("<IIQ6Q", number, audit or MACHINES[machine], 0, *padded)
    code = [
        (*head, PID if constant == PLACEHOLDER else constant)
        for *head, constant in build_filter(machine, has_namespaces, has_cgroup)
    ]
    return followed(code, data)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("has_namespaces", [False, True])
def test_each_call(machine, has_namespaces):
    column = list(MACHINES).index(machine)
    for numbers, arguments, without, with_namespaces in CALLS:
        expected = with_namespaces if has_namespaces else without
        result = answer(machine, has_namespaces, numbers[column], *arguments)
        assert result == expected, (numbers, arguments, hex(result))


@pytest.mark.parametrize("family", [2, 10])
def test_sockets_of_a_network_need_a_cgroup_that_counts_their_buffers(family):
    assert answer("x86_64", True, 41, family, 1, has_cgroup=True) == ALLOW
    assert answer("x86_64", True, 41, family, 1) == EPERM
    assert answer("x86_64", False, 41, family, 1, has_cgroup=True) == EPERM


def test_an_unknown_machine_is_refused():
    with pytest.raises(OSError, match="no seccomp filter for riscv64; allowed: x86_64, aarch64"):
        build_filter("riscv64", True, True)


@pytest.mark.parametrize("has_namespaces", [False, True])
def test_calls_of_another_machine_or_x32_end_the_program(has_namespaces):
    assert answer("x86_64", has_namespaces, 0, audit=0x40000003) == KILL  # i386
    assert answer("x86_64", has_namespaces, 0x40000000) == KILL  # x32
    assert answer("aarch64", has_namespaces, 0, audit=0x40000028) == KILL  # arm
