"""Run inside of a sandbox: gives up what the program must not have, then becomes the program.

    python -I -S launcher.py REQUEST_FD STATUS_FD

Reads its JSON request from one descriptor, writes the files of the program, sets limits, changes to
the sandbox's user id, applies Landlock and a seccomp filter, writes "ready" to the other descriptor
and executes the program. Any failure before that leaves "ready" unwritten and is told on stderr.
Standard library only. Kernel interfaces: landlock(7), seccomp(2), prctl(2), setrlimit(2).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import resource
import signal
import struct
import sys
from typing import Any

MIN_LANDLOCK = 3  # its version from which files cannot be truncated either; Linux 6.2

_LIBC = ctypes.CDLL(None, use_errno=True)
_SET_PDEATHSIG, _CAPBSET_DROP, _SET_NO_NEW_PRIVS, _SET_SECCOMP = 1, 24, 38, 22  # of prctl
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446  # on all machines

# <linux/landlock.h>
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_MAKE_CHAR, _MAKE_SOCK, _MAKE_BLOCK = 1 << 6, 1 << 9, 1 << 11
_ALL_FILES = {3: (1 << 15) - 1, 5: (1 << 16) - 1}  # by version: all rights of files there are
_SCOPES = 0b11  # from version 6: abstract sockets and signals

# Name: numbers on x86_64 and on aarch64; None: there is no such call.
_NUMBERS: dict[str, tuple[int | None, int | None]] = {
    "add_key": (248, 217),
    "bind": (49, 200),
    "bpf": (321, 280),
    "chmod": (90, None),
    "chown": (92, None),
    "chroot": (161, 51),
    "clone": (56, 220),
    "clone3": (435, 435),
    "connect": (42, 203),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "fchown": (93, 55),
    "fchownat": (260, 54),
    "fcntl": (72, 25),
    "file_setattr": (469, 469),
    "fork": (57, None),
    "fremovexattr": (199, 16),
    "fsconfig": (431, 431),
    "fsetxattr": (190, 7),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "futimesat": (261, None),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "ioctl": (16, 29),
    "ioprio_set": (251, 30),
    "kcmp": (312, 272),
    "keyctl": (250, 219),
    "kill": (62, 129),
    "lchown": (94, None),
    "lremovexattr": (198, 15),
    "lsetxattr": (189, 6),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "migrate_pages": (256, 238),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "move_pages": (317, 239),
    "mq_open": (240, 180),
    "msgget": (68, 186),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "pidfd_getfd": (438, 438),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "pivot_root": (155, 41),
    "prctl": (157, 167),
    "prlimit64": (302, 261),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "removexattr": (197, 14),
    "removexattrat": (466, 466),
    "request_key": (249, 218),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "semget": (64, 190),
    "setns": (308, 268),
    "setpriority": (141, 140),
    "setxattr": (188, 5),
    "setxattrat": (463, 463),
    "shmget": (29, 194),
    "socket": (41, 198),
    "socketpair": (53, 199),
    "syslog": (103, 116),
    "tgkill": (234, 131),
    "tkill": (200, 130),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
    "utime": (132, None),
    "utimensat": (280, 88),
    "utimes": (235, None),
    "vfork": (58, None),
}
# Memory that no limit counts, other families of sockets, new namespaces, other processes, the
# kernel: refused in every sandbox.
_REFUSED = (
    "add_key bpf chroot fsconfig fsmount fsopen fspick io_uring_enter io_uring_register "
    "io_uring_setup kcmp keyctl memfd_create memfd_secret mount mount_setattr move_mount mq_open "
    "msgget open_tree perf_event_open pidfd_getfd pivot_root process_madvise process_mrelease "
    "process_vm_readv process_vm_writev ptrace request_key semget setns shmget syslog umount2 "
    "unshare userfaultfd"
)
# Where there are no namespaces, also: sockets, new processes, signals to others and settings of
# others, and what Landlock does not restrict: owners, modes and times of files.
_REFUSED_WITHOUT_NAMESPACES = (
    "bind chmod chown connect fchmod fchmodat fchmodat2 fchown fchownat file_setattr fork "
    "fremovexattr fsetxattr futimesat ioprio_set lchown lremovexattr lsetxattr migrate_pages "
    "move_pages pidfd_open pidfd_send_signal removexattr removexattrat rt_sigqueueinfo "
    "rt_tgsigqueueinfo sched_setaffinity sched_setattr sched_setparam sched_setscheduler "
    "setpriority setxattr setxattrat socket tkill utime utimensat utimes vfork"
)
_FAMILIES = 1, 2, 10  # AF_UNIX, AF_INET, AF_INET6; not vsock, which has no namespaces
_CLONE_THREAD, _CLONE_NAMESPACES = 0x10000, 0x7E020000
_SOCK_STREAM, _TYPE_MASK = 1, 0xF  # a pair of datagram sockets can send to others
_SIGNAL_OWNER_FCNTL, _SIGNAL_OWNER_IOCTL = (8, 15), (0x8901, 0x8902)  # F_SETOWN(_EX), FIOSETOWN

# <linux/filter.h>: one instruction is a code, two jumps, and a constant
_LOAD, _JUMP_EQUAL, _JUMP_ANY_BIT, _JUMP_GREATER, _AND, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x54, 0x06
_ALLOW, _ERROR, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}  # AUDIT_ARCH_*, column
_NUMBER, _MACHINE, _ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data

Instruction = tuple[int, int, int, int]


def main() -> None:
    request_fd, status_fd = int(sys.argv[1]), int(sys.argv[2])
    with open(request_fd) as file:
        request = json.load(file)
    has_namespaces = request["tier"] == "bwrap"  # which go with the supervisor
    if not has_namespaces:
        die_with(request["supervisor"])
    os.chdir(request["scratch"])
    change_user(request["uid"])
    write_files(request["files"])
    set_limits(request["limits"])
    if not has_namespaces:
        die_with(request["supervisor"])  # a change of the user id clears it
    if request["tier"] != "unsafe":
        drop_capabilities()
        _prctl(_SET_NO_NEW_PRIVS, 1)
        if not has_namespaces:
            restrict_files(request["readable"], request["scratch"])
        apply_filter(has_namespaces)
    os.set_inheritable(status_fd, False)
    os.write(status_fd, b"ready")
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores
        signal.signal(number, signal.SIG_DFL)
    program = request["program"]
    try:
        os.execvpe(program[0], program, request["environment"])
    except OSError as error:
        print(f"{program[0]}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(127)


def die_with(supervisor: int) -> None:
    _prctl(_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:  # it has died before
        os._exit(1)


def change_user(uid: int | None) -> None:
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)


def write_files(files: dict[str, str]) -> None:
    for name, text in files.items():
        if folder := os.path.dirname(name):
            os.makedirs(folder, exist_ok=True)
        with open(name, "x", encoding="utf-8") as file:
            file.write(text)


def set_limits(limits: dict[str, list[int]]) -> None:
    """By the names of the module resource: soft and hard limit."""
    for name, (soft, hard) in limits.items():
        kind = getattr(resource, name)
        _, most = resource.getrlimit(kind)
        allowed = hard if most == resource.RLIM_INFINITY else min(hard, most)
        resource.setrlimit(kind, (min(soft, allowed), allowed))


def drop_capabilities() -> None:
    """All of them. Those that exec would give uid 0 are held back by no_new_privs."""
    for number in range(64):
        # EPERM without CAP_SETPCAP, EINVAL for one that the kernel does not know
        _LIBC.prctl(_CAPBSET_DROP, number, 0, 0, 0)
    header = struct.pack("Ii", 0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    if _LIBC.capset(header, bytes(24)) < 0:
        raise _os_error("capset")


def landlock_version() -> int:
    """0 without Landlock."""
    return max(0, int(_LIBC.syscall(_LANDLOCK_CREATE, None, 0, 1)))


def restrict_files(readable: list[str], scratch: str) -> None:
    """Only these paths can be read and executed, and only the scratch folder written to."""
    version = landlock_version()
    if version < MIN_LANDLOCK:
        raise OSError(f"Landlock has version {version}; needed: {MIN_LANDLOCK} (Linux 6.2)")
    handled = _ALL_FILES[5 if version >= 5 else 3]
    ruleset = struct.pack("QQQ", handled, 0, _SCOPES if version >= 6 else 0)
    size = 24 if version >= 6 else 8
    rules = _LIBC.syscall(_LANDLOCK_CREATE, ruleset, ctypes.c_size_t(size), 0)
    if rules < 0:
        raise _os_error("landlock_create_ruleset")
    unwanted = _MAKE_CHAR | _MAKE_BLOCK | _MAKE_SOCK
    _allow_path(rules, scratch, handled & ~unwanted)
    _allow_path(rules, "/dev/null", _READ_FILE | _WRITE_FILE)
    for path in [*readable, "/dev/zero", "/dev/random", "/dev/urandom"]:
        with contextlib.suppress(FileNotFoundError):
            rights = _READ_DIR | _EXECUTE if os.path.isdir(path) else 0
            _allow_path(rules, path, _READ_FILE | rights)
    if _LIBC.syscall(_LANDLOCK_RESTRICT, rules, 0) < 0:
        raise _os_error("landlock_restrict_self")
    os.close(rules)


def _allow_path(rules: int, path: str, rights: int) -> None:
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    rule = struct.pack("=Qi", rights, fd)
    if _LIBC.syscall(_LANDLOCK_ADD, rules, 1, rule, 0) < 0:
        raise _os_error(f"landlock_add_rule of {path}")
    os.close(fd)


def apply_filter(has_namespaces: bool) -> None:
    machine = os.uname().machine
    if machine not in _MACHINES:
        raise OSError(f"there is no seccomp filter for {machine}; allowed: {', '.join(_MACHINES)}")
    code = b"".join(
        struct.pack("HBBI", *one) for one in filter_code(machine, os.getpid(), has_namespaces)
    )
    buffer = ctypes.create_string_buffer(code)
    program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer))
    if _LIBC.prctl(_SET_SECCOMP, 2, program, 0, 0) < 0:
        raise _os_error("prctl(PR_SET_SECCOMP)")


def filter_code(machine: str, pid: int, has_namespaces: bool) -> list[Instruction]:
    """Allows all calls but those above, and those only with harmless arguments below."""
    audit, column = _MACHINES[machine]
    denied = _ERROR | errno.EPERM
    code: list[Instruction] = [
        (_LOAD, 0, 0, _MACHINE),
        (_JUMP_EQUAL, 1, 0, audit),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if machine == "x86_64":  # numbers of x32, another way to each call
        code += [(_JUMP_GREATER, 0, 1, 0x40000000), (_RETURN, 0, 0, _KILL)]

    def rule(name: str, *body: Instruction) -> None:
        number = _NUMBERS[name][column]
        if number is not None:
            code.extend([(_JUMP_EQUAL, 0, len(body), number), *body])

    def only(argument: int, values: tuple[int, ...], load: list[Instruction] | None = None) -> Any:
        """Allowed with one of these values."""
        jumps = [(_JUMP_EQUAL, len(values) - i, 0, v) for i, v in enumerate(values)]
        start = load or [(_LOAD, 0, 0, _ARGUMENT + 8 * argument)]
        return [*start, *jumps, (_RETURN, 0, 0, denied), (_RETURN, 0, 0, _ALLOW)]

    def never(argument: int, values: tuple[int, ...]) -> Any:
        jumps = [(_JUMP_EQUAL, len(values) - i, 0, v) for i, v in enumerate(values)]
        load = (_LOAD, 0, 0, _ARGUMENT + 8 * argument)
        return [load, *jumps, (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, denied)]

    names = _REFUSED if has_namespaces else f"{_REFUSED} {_REFUSED_WITHOUT_NAMESPACES}"
    for name in names.split():
        rule(name, (_RETURN, 0, 0, denied))
    rule("clone3", (_RETURN, 0, 0, _ERROR | errno.ENOSYS))  # its flags are in memory; use clone
    flags = (_LOAD, 0, 0, _ARGUMENT)
    if not has_namespaces:
        thread = (_JUMP_ANY_BIT, 1, 0, _CLONE_THREAD)
        rule("clone", flags, thread, (_RETURN, 0, 0, denied), (_RETURN, 0, 0, _ALLOW))
        for name in ("kill", "tgkill"):
            rule(name, *only(0, (pid,)))
        rule("prlimit64", *only(0, (0, pid)))
        rule("prctl", *never(0, (_SET_PDEATHSIG,)))
        rule("fcntl", *never(1, _SIGNAL_OWNER_FCNTL))
        rule("ioctl", *never(1, _SIGNAL_OWNER_IOCTL))
        kind = [(_LOAD, 0, 0, _ARGUMENT + 8), (_AND, 0, 0, _TYPE_MASK)]
        rule("socketpair", *only(1, (_SOCK_STREAM,), kind))
    else:
        new = (_JUMP_ANY_BIT, 0, 1, _CLONE_NAMESPACES)
        rule("clone", flags, new, (_RETURN, 0, 0, denied), (_RETURN, 0, 0, _ALLOW))
        rule("socket", *only(0, _FAMILIES))
    code.append((_RETURN, 0, 0, _ALLOW))
    return code


def _prctl(option: int, value: int) -> None:
    if _LIBC.prctl(option, value, 0, 0, 0) < 0:
        raise _os_error(f"prctl({option})")


def _os_error(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        sys.exit(str(error))
