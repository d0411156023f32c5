"""Processes of vLLM servers in tests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock


@contextmanager
def hosting() -> Iterator[None]:
    """Undo what a server changes in the environment of its process."""
    with mock.patch.dict(os.environ):
        yield


def run_module(name: str, folder: Path) -> str:
    """Run a module of tests as a program on `folder`, and return what it prints.

    A server's workers are forks. One of a process that has joined ranks or run threads may wait
    for ever for what a fork does not copy.
    """
    done = subprocess.run(
        [sys.executable, "-m", name, str(folder)],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout
