"""Commands that see a small file system of their own, in a namespace that needs no rights."""

from __future__ import annotations

import functools
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest


def build_small_disk_command(
    folder: Path, size: str, command: Sequence[str | os.PathLike[str]]
) -> list[str]:
    """Return a command that runs `command` with a file system of `size` on the empty `folder`.

    `size` is that of tmpfs, whose other options may follow: "4m,nr_inodes=7". Other processes see
    the files below /proc/PID/root. The test is skipped where mounting is not allowed.
    """
    if not can_mount():
        pytest.skip("this machine lets nobody mount a file system")
    mount = f'mount -t tmpfs -o size={size} none "$0" && exec "$@"'
    return ["unshare", "-Urm", "sh", "-c", mount, str(folder), *map(os.fspath, command)]


@functools.cache
def can_mount() -> bool:
    attempt = ["unshare", "-Urm", "mount", "-t", "tmpfs", "none", "/mnt"]
    return subprocess.run(attempt, capture_output=True).returncode == 0
