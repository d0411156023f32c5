"""Commands that see a small file system of their own, in a namespace that needs no rights."""

from __future__ import annotations

import functools
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest


def on_small_disk(folder: Path, size: str, command: Sequence[str | os.PathLike[str]]) -> list[str]:
    """The command, for which the empty `folder` is a file system of `size`, such as "4m".

    More options of tmpfs may follow: "4m,nr_inodes=7".
    Others see what is in there below /proc/PID/root. The test is skipped where this is not allowed.
    """
    if not can_mount():
        pytest.skip("this machine lets nobody mount a file system")
    mount = f'mount -t tmpfs -o size={size} none "$0" && exec "$@"'
    return ["unshare", "-Urm", "sh", "-c", mount, str(folder), *map(os.fspath, command)]


@functools.cache
def can_mount() -> bool:
    attempt = ["unshare", "-Urm", "mount", "-t", "tmpfs", "none", "/mnt"]
    return subprocess.run(attempt, capture_output=True).returncode == 0
