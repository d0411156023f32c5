"""Properties of processes. One may end at any moment, which is never an error here."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import time
from collections.abc import Iterable
from pathlib import Path

import psutil


def environ(process: psutil.Process) -> dict[str, str]:
    """Return the environment it was started with; empty for one that has ended."""
    with contextlib.suppress(psutil.Error, OSError):
        return process.environ()
    return {}


def started_with(name: str, value: str) -> list[psutil.Process]:
    """Return the living descendants of this process with this variable in their environment."""
    descendants = psutil.Process().children(recursive=True)
    return [p for p in descendants if lives(p) and environ(p).get(name) == value]


def wait_until_gone(name: str, value: str, seconds: float = 30) -> None:
    """Wait; raise AssertionError when some of `started_with` are left after that time."""
    deadline = time.monotonic() + seconds
    while left := started_with(name, value):
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.05)


def free_port() -> int:
    """Return a port above those of launch scripts and below those that the kernel hands out."""
    for port in random.sample(range(32600, 32768), 168):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise RuntimeError("no free port")


_GONE = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


def lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() not in _GONE
    return False


def command_line(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def session(leader: int) -> list[psutil.Process]:
    """Return the living processes of a session, also those whose parent has died."""
    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(process.pid) == leader and lives(process):
                processes.append(process)
    return processes


def listeners(processes: Iterable[psutil.Process]) -> dict[tuple[str, int], str]:
    """Return the addresses on which they accept TCP connections, with their command lines."""
    commands = {}
    for process in processes:
        with contextlib.suppress(psutil.Error, OSError):
            for connection in process.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    commands[connection.laddr.ip, connection.laddr.port] = command_line(process)
    return commands


def shared_memory(process: psutil.Process) -> set[Path]:
    """Return files of /dev/shm it maps, by inode: a semaphore is mapped before it is renamed."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
        inodes = {int(line.split(None, 5)[4]) for line in lines if " /dev/shm/" in line}
        return {file for file in Path("/dev/shm").iterdir() if file.stat().st_ino in inodes}
    return set()


def processes_of(job, server: int) -> list[psutil.Process]:
    """Return the living processes of a server by their log: the actor, then its engine."""
    alive = [p for p in set(job.processes) if lives(p) and prints_to(p, f"rollout-{server}-0.log")]
    return sorted(alive, key=lambda process: process.create_time())


def prints_to(process: psutil.Process, log: str) -> bool:
    """Return whether it writes to a log of this name."""
    try:
        return os.path.realpath(f"/proc/{process.pid}/fd/2").endswith(f"/{log}")
    except OSError:
        return False
