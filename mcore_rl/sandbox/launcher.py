"""Script that drops privileges inside of a sandbox, then executes the program.

    python -I -S launcher.py REQUEST_FD STATUS_FD

Reads its JSON request from one descriptor, writes the files of the program, sets limits, changes to
the sandbox's user id, applies Landlock and a seccomp filter, writes "ready" to the other descriptor
and executes the program. A failure before that is printed to stderr, and "ready" is not written.
Standard library only. Kernel interfaces: landlock(7), seccomp(2), prctl(2), setrlimit(2).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import struct
import sys

MIN_LANDLOCK = 3  # the first version that restricts truncation; Linux 6.2

_LIBC = ctypes.CDLL(None, use_errno=True)
_SET_PDEATHSIG, _CAPBSET_DROP, _SET_NO_NEW_PRIVS, _SET_SECCOMP = 1, 24, 38, 22  # of prctl
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446  # on all machines

# <linux/landlock.h>
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_MAKE_CHAR, _MAKE_SOCK, _MAKE_BLOCK = 1 << 6, 1 << 9, 1 << 11
_ALL_FILES = {3: (1 << 15) - 1, 5: (1 << 16) - 1}  # all file rights, by version
_SCOPES = 0b11  # version 6 and later: abstract sockets and signals


def main() -> None:
    """Read the request, restrict this process and execute the program."""
    request_fd, status_fd = int(sys.argv[1]), int(sys.argv[2])
    with open(request_fd) as file:
        request = json.load(file)
    has_namespaces = request["tier"] == "bwrap"  # bubblewrap dies with the supervisor
    if not has_namespaces:
        die_with_supervisor(request["supervisor"])
    os.chdir(request["scratch"])
    change_user(request["uid"])
    write_files(request["files"])
    set_limits(request["limits"])
    if not has_namespaces:
        die_with_supervisor(request["supervisor"])  # changing the user id clears it
    if request["tier"] != "unsafe":
        drop_capabilities()
        _prctl(_SET_NO_NEW_PRIVS, 1)
        if not has_namespaces:
            restrict_files(request["readable"], request["scratch"])
        apply_filter(request["filter"])
    os.set_inheritable(status_fd, False)
    os.write(status_fd, b"ready")
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these
        signal.signal(number, signal.SIG_DFL)
    program = request["program"]
    try:
        os.execvpe(program[0], program, request["environment"])
    except OSError as error:
        print(f"{program[0]}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(127)


def die_with_supervisor(supervisor: int) -> None:
    """Let the kernel kill this process when its supervisor dies."""
    _prctl(_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:  # it is dead already
        os._exit(1)


def change_user(uid: int | None) -> None:
    """Change to a user and group id, unless it is None."""
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)


def write_files(files: dict[str, str]) -> None:
    """Write texts by relative path."""
    for name, text in files.items():
        if folder := os.path.dirname(name):
            os.makedirs(folder, exist_ok=True)
        # The program may have half a surrogate pair, which is its error.
        with open(name, "x", encoding="utf-8", errors="surrogatepass") as file:
            file.write(text)


def set_limits(limits: dict[str, list[int]]) -> None:
    """Set soft and hard limits, by their names in the module resource."""
    for name, (soft, hard) in limits.items():
        kind = getattr(resource, name)
        _, maximum = resource.getrlimit(kind)
        allowed = hard if maximum == resource.RLIM_INFINITY else min(hard, maximum)
        resource.setrlimit(kind, (min(soft, allowed), allowed))


def drop_capabilities() -> None:
    """Drop all capabilities. no_new_privs keeps exec from giving some to uid 0."""
    for number in range(64):
        # EPERM without CAP_SETPCAP, EINVAL for numbers unknown to the kernel
        _LIBC.prctl(_CAPBSET_DROP, number, 0, 0, 0)
    header = struct.pack("Ii", 0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    if _LIBC.capset(header, bytes(24)) < 0:
        raise _build_os_error("capset")


def get_landlock_version() -> int:
    """Return the version of Landlock; 0 if the kernel has none."""
    return max(0, int(_LIBC.syscall(_LANDLOCK_CREATE, None, 0, 1)))


def restrict_files(readable: list[str], scratch: str) -> None:
    """Restrict reads and execution to these paths, and writes to the scratch folder."""
    version = get_landlock_version()
    if version < MIN_LANDLOCK:
        raise OSError(f"Landlock has version {version}; needed: {MIN_LANDLOCK} (Linux 6.2)")
    handled = _ALL_FILES[5 if version >= 5 else 3]
    ruleset = struct.pack("QQQ", handled, 0, _SCOPES if version >= 6 else 0)
    size = 24 if version >= 6 else 8
    rules = _LIBC.syscall(_LANDLOCK_CREATE, ruleset, ctypes.c_size_t(size), 0)
    if rules < 0:
        raise _build_os_error("landlock_create_ruleset")
    unwanted = _MAKE_CHAR | _MAKE_BLOCK | _MAKE_SOCK
    _allow_path(rules, scratch, handled & ~unwanted)
    _allow_path(rules, "/dev/null", _READ_FILE | _WRITE_FILE)
    for path in [*readable, "/dev/random", "/dev/urandom"]:  # pages of /dev/zero can be mapped
        with contextlib.suppress(FileNotFoundError):
            rights = _READ_DIR | _EXECUTE if os.path.isdir(path) else 0
            _allow_path(rules, path, _READ_FILE | rights)
    if _LIBC.syscall(_LANDLOCK_RESTRICT, rules, 0) < 0:
        raise _build_os_error("landlock_restrict_self")
    os.close(rules)


def _allow_path(rules: int, path: str, rights: int) -> None:
    """Add a rule to a Landlock ruleset: these rights on a path and all below it."""
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    rule = struct.pack("=Qi", rights, fd)
    if _LIBC.syscall(_LANDLOCK_ADD, rules, 1, rule, 0) < 0:
        raise _build_os_error(f"landlock_add_rule of {path}")
    os.close(fd)


def apply_filter(instructions: list[list[int]]) -> None:
    """Apply a seccomp filter, in which a constant of -1 stands for this process id."""
    pid = os.getpid()
    code = b"".join(
        struct.pack("HBBI", *head, pid if constant == -1 else constant)
        for *head, constant in instructions
    )
    buffer = ctypes.create_string_buffer(code)
    program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer))
    if _LIBC.prctl(_SET_SECCOMP, 2, program, 0, 0) < 0:
        raise _build_os_error("prctl(PR_SET_SECCOMP)")


def _prctl(option: int, value: int) -> None:
    if _LIBC.prctl(option, value, 0, 0, 0) < 0:
        raise _build_os_error(f"prctl({option})")


def _build_os_error(what: str) -> OSError:
    """Return the error of the last call of libc; `what` names the call."""
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        sys.exit(str(error))
