"""The seccomp filter of a sandbox, as instructions of BPF. Pure; standard library only.

Kernel interfaces: seccomp(2), <linux/filter.h>, and the table of calls of each machine.
"""

from __future__ import annotations

import errno

PID = -1  # placeholder of the program's process id, which the launcher fills in

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, constant

# Names of system calls with their numbers on x86_64 and on aarch64; "-": no such call.
_TABLE = """
add_key 248 217, bind 49 200, bpf 321 280, chmod 90 -, chown 92 -, chroot 161 51, clone 56 220,
clone3 435 435, connect 42 203, fanotify_init 300 262, fanotify_mark 301 263, fchmod 91 52,
fchmodat 268 53, fchmodat2 452 452, fchown 93 55, fchownat 260 54, fcntl 72 25,
file_setattr 469 469, flock 73 32, fork 57 -, fremovexattr 199 16, fsconfig 431 431,
fsetxattr 190 7, fsmount 432 432, fsopen 430 430, fspick 433 433, futimesat 261 -,
inotify_add_watch 254 27, inotify_init 253 -, inotify_init1 294 26, io_setup 206 0,
io_uring_enter 426 426, io_uring_register 427 427, io_uring_setup 425 425, ioctl 16 29,
ioprio_set 251 30, kcmp 312 272, keyctl 250 219, kill 62 129, landlock_add_rule 445 445,
landlock_create_ruleset 444 444, landlock_restrict_self 446 446, lchown 94 -,
lremovexattr 198 15, lsetxattr 189 6, memfd_create 319 279, memfd_secret 447 447,
migrate_pages 256 238, mmap 9 222, mount 165 40, mount_setattr 442 442, move_mount 429 429,
move_pages 279 239, mq_open 240 180, mq_unlink 241 181, msgctl 71 187, msgget 68 186,
msgrcv 70 188, msgsnd 69 189, open_tree 428 428, open_tree_attr 467 467,
perf_event_open 298 241, pidfd_getfd 438 438, pidfd_open 434 434, pidfd_send_signal 424 424,
pivot_root 155 41, prctl 157 167, prlimit64 302 261, process_madvise 440 440,
process_mrelease 448 448, process_vm_readv 310 270, process_vm_writev 311 271, ptrace 101 117,
removexattr 197 14, removexattrat 466 466, request_key 249 218, rt_sigqueueinfo 129 138,
rt_tgsigqueueinfo 297 240, sched_setaffinity 203 122, sched_setattr 314 274,
sched_setparam 142 118, sched_setscheduler 144 119, semctl 66 191, semget 64 190, semop 65 193,
semtimedop 220 192, sendfile 40 71, sendmmsg 307 269, sendmsg 46 211, setns 308 268,
setpriority 141 140, setsockopt 54 208, setxattr 188 5, setxattrat 463 463, shmat 30 196,
shmctl 31 195, shmget 29 194, socket 41 198, socketpair 53 199, splice 275 76, syslog 103 116,
tee 276 77, tgkill 234 131, tkill 200 130, umount2 166 39, unshare 272 97, userfaultfd 323 282,
utime 132 -, utimensat 280 88, utimes 235 -, vfork 58 -, vmsplice 278 75
"""
_COLUMNS = {"x86_64": 0, "aarch64": 1}
_AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # AUDIT_ARCH_*
_NUMBERS: dict[str, list[str]] = {
    name: numbers for name, *numbers in (entry.split() for entry in _TABLE.split(","))
}
# Refused in every sandbox: memory that usage.py does not count, other socket families, new
# namespaces, other processes, System V objects and message queues (also of others, by their ids),
# watches and leases on files, kernel administration.
_REFUSED = (
    "add_key bpf chroot fanotify_init fanotify_mark fsconfig fsetxattr fsmount fsopen fspick "
    "inotify_add_watch inotify_init inotify_init1 io_setup io_uring_enter io_uring_register "
    "io_uring_setup kcmp keyctl landlock_add_rule landlock_create_ruleset landlock_restrict_self "
    "lsetxattr memfd_create memfd_secret mount mount_setattr move_mount mq_open mq_unlink msgctl "
    "msgget msgrcv msgsnd open_tree open_tree_attr perf_event_open pidfd_getfd pivot_root "
    "process_madvise process_mrelease process_vm_readv process_vm_writev ptrace request_key "
    "semctl semget semop semtimedop setns setxattr setxattrat shmat shmctl shmget syslog tee "
    "umount2 unshare userfaultfd vmsplice"
)
# Also refused without namespaces: sockets, messages with descriptors, new processes, signals to
# and settings of other processes, and owners, modes, times and locks of files, which Landlock does
# not restrict.
_REFUSED_WITHOUT_NAMESPACES = (
    "bind chmod chown connect fchmod fchmodat fchmodat2 fchown fchownat file_setattr flock fork "
    "fremovexattr futimesat ioprio_set lchown lremovexattr migrate_pages move_pages pidfd_open "
    "pidfd_send_signal removexattr removexattrat rt_sigqueueinfo rt_tgsigqueueinfo "
    "sched_setaffinity sched_setattr sched_setparam sched_setscheduler sendmmsg sendmsg "
    "setpriority socket tkill utime utimensat utimes vfork"
)
# Pages of a file or of another process, lent to a pipe or a socket, are unmapped memory, up to
# 2 MiB per byte: programs copy instead, as they do if a file system has no splice.
_COPIED = "sendfile splice"
# AF_UNIX, AF_INET, AF_INET6. Only a cgroup counts buffers of the latter two. vsock has no
# namespaces.
_LOCAL_FAMILIES, _FAMILIES = (1,), (1, 2, 10)
_CLONE_THREAD, _CLONE_NAMESPACES = 0x10000, 0x7E020000
_MAP_SHARED, _MAP_ANONYMOUS, _MAP_HUGETLB = 0x1, 0x20, 0x40000
_SOCK_STREAM, _TYPE_MASK = 1, 0xF  # datagram socket pairs can send to other sockets
_SOL_SOCKET, _SO_SNDBUF, _SO_SNDBUFFORCE = 1, 7, 32
_SET_PDEATHSIG, _SET_DUMPABLE, _FUTEX_HASH = 1, 4, 78  # of prctl; the last allocates gigabytes
_LEASE_NOTIFY_PIPE_SIZE = 1024, 1026, 1031  # F_SETLEASE, F_NOTIFY, F_SETPIPE_SZ
_SIGNAL_OWNER_FCNTL, _SIGNAL_OWNER_IOCTL = (8, 15), (0x8901, 0x8902)  # F_SETOWN(_EX), FIOSETOWN

_LOAD, _JUMP_EQUAL, _JUMP_ANY_BIT, _JUMP_GREATER, _AND, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x54, 0x06
_ALLOW, _ERROR, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER, _MACHINE, _ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
_ALLOWED: Instruction = (_RETURN, 0, 0, _ALLOW)
_DENIED: Instruction = (_RETURN, 0, 0, _ERROR | errno.EPERM)


def build_filter(machine: str, has_namespaces: bool, has_cgroup: bool) -> list[Instruction]:
    """Build a filter that allows all calls except those above and harmful arguments of some.

    Args:
        machine: Architecture, as in os.uname().
        has_namespaces: Whether the sandbox has its own mounts, processes, network and IPC.
        has_cgroup: Whether a cgroup counts kernel memory.

    Raises:
        OSError: the system calls of the machine are unknown.
    """
    if machine not in _COLUMNS:
        raise OSError(f"there is no seccomp filter for {machine}; allowed: {', '.join(_COLUMNS)}")
    code: list[Instruction] = [
        (_LOAD, 0, 0, _MACHINE),
        (_JUMP_EQUAL, 1, 0, _AUDIT[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if machine == "x86_64":  # numbers of x32, another ABI of each call
        code += [(_JUMP_GREATER, 0, 1, 0x40000000), (_RETURN, 0, 0, _KILL)]

    def add_rule(name: str, *body: Instruction) -> None:
        number = _NUMBERS[name][_COLUMNS[machine]]
        if number != "-":
            code.extend([(_JUMP_EQUAL, 0, len(body), int(number)), *body])

    names = _REFUSED if has_namespaces else f"{_REFUSED} {_REFUSED_WITHOUT_NAMESPACES}"
    for name in names.split():
        add_rule(name, _DENIED)
    for name in _COPIED.split():
        add_rule(name, (_RETURN, 0, 0, _ERROR | errno.EINVAL))
    add_rule("clone3", (_RETURN, 0, 0, _ERROR | errno.ENOSYS))  # flags are in memory; use clone
    add_rule("mmap", *_REFUSE_SHARED_ANONYMOUS)
    add_rule("setsockopt", *_IGNORE_BUFFER_SIZE)
    if has_namespaces:
        new = (_JUMP_ANY_BIT, 0, 1, _CLONE_NAMESPACES)
        add_rule("clone", _load(0), new, _DENIED, _ALLOWED)
        add_rule("socket", *_allow_only(0, _FAMILIES if has_cgroup else _LOCAL_FAMILIES))
        add_rule("prctl", *_deny(0, (_SET_DUMPABLE, _FUTEX_HASH)))
        add_rule("fcntl", *_deny(1, _LEASE_NOTIFY_PIPE_SIZE))
    else:
        thread = (_JUMP_ANY_BIT, 1, 0, _CLONE_THREAD)
        add_rule("clone", _load(0), thread, _DENIED, _ALLOWED)
        for name in ("kill", "tgkill"):
            add_rule(name, *_allow_only(0, (PID,)))
        add_rule("prlimit64", *_allow_only(0, (0, PID)))
        add_rule("prctl", *_deny(0, (_SET_PDEATHSIG, _SET_DUMPABLE, _FUTEX_HASH)))
        add_rule("fcntl", *_deny(1, (*_LEASE_NOTIFY_PIPE_SIZE, *_SIGNAL_OWNER_FCNTL)))
        add_rule("ioctl", *_deny(1, _SIGNAL_OWNER_IOCTL))
        kind = [_load(1), (_AND, 0, 0, _TYPE_MASK)]
        add_rule("socketpair", *_allow_only(1, (_SOCK_STREAM,), kind))
    code.append(_ALLOWED)
    return code


def _load(argument: int) -> Instruction:
    """Load the lower half of an argument of the call, counted from 0."""
    return (_LOAD, 0, 0, _ARGUMENT + 8 * argument)


def _allow_only(
    argument: int, values: tuple[int, ...], load: list[Instruction] | None = None
) -> list[Instruction]:
    """Deny a call unless an argument, or what `load` makes of it, has one of these values."""
    jumps = [(_JUMP_EQUAL, len(values) - i, 0, v) for i, v in enumerate(values)]
    return [*(load or [_load(argument)]), *jumps, _DENIED, _ALLOWED]


def _deny(argument: int, values: tuple[int, ...]) -> list[Instruction]:
    """Deny a call if an argument has one of these values."""
    jumps = [(_JUMP_EQUAL, len(values) - i, 0, v) for i, v in enumerate(values)]
    return [_load(argument), *jumps, _ALLOWED, _DENIED]


# Pages of a shared anonymous mapping stay in memory as long as any byte of it is mapped; pages of
# hugetlbfs are not counted anywhere.
_REFUSE_SHARED_ANONYMOUS: list[Instruction] = [
    _load(3),
    (_JUMP_ANY_BIT, 3, 0, _MAP_HUGETLB),
    (_JUMP_ANY_BIT, 0, 1, _MAP_ANONYMOUS),
    (_JUMP_ANY_BIT, 1, 0, _MAP_SHARED),
    _ALLOWED,
    _DENIED,
]
# usage.py counts the default buffer size of each socket: setting another succeeds without effect.
_IGNORE_BUFFER_SIZE: list[Instruction] = [
    _load(1),
    (_JUMP_EQUAL, 0, 3, _SOL_SOCKET),
    _load(2),
    (_JUMP_EQUAL, 2, 0, _SO_SNDBUF),
    (_JUMP_EQUAL, 1, 0, _SO_SNDBUFFORCE),
    _ALLOWED,
    (_RETURN, 0, 0, _ERROR),
]
