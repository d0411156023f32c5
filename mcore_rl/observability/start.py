"""When the command that runs here began: before its imports, which take seconds.

Not the age of the process: a launch script may have lived in it before.
"""

from __future__ import annotations

import time

_began: float | None = None


def begin() -> None:
    """A command begins now."""
    global _began
    _began = time.monotonic()


def began() -> float:
    """On the clock of time.monotonic; now, where no command has told."""
    return time.monotonic() if _began is None else _began
