"""Entries of a folder that are no files to read: opening or reading them waits, or never ends."""

from __future__ import annotations

import os
import socket
from pathlib import Path

ODD_KINDS = ("pipe", "socket", "folder", "device", "pipe behind a link")


def make_odd_file(path: Path, kind: str) -> None:
    """Put something else in the place of a file; "huge" is one without blocks on the disk."""
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "pipe behind a link":
        target = path.with_name(f"{path.name}.pipe")
        os.mkfifo(target)
        path.symlink_to(target)
    elif kind == "socket":
        folder = os.open(path.parent, os.O_PATH)
        with socket.socket(socket.AF_UNIX) as server:  # a path may have 107 bytes
            server.bind(f"/proc/self/fd/{folder}/{path.name}")
        os.close(folder)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        with path.open("wb") as file:
            file.truncate(3 << 30)
