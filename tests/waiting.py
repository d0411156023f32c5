"""Waits of tests for what another process or thread does."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(happened: Callable[[], object], seconds: float = 120.0) -> None:
    """Return when `happened` returns something true; fail after that time."""
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, f"nothing in {seconds:g} s"
        time.sleep(0.01)
