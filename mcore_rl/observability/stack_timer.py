"""The stacks of this process, written where something takes too long."""

from __future__ import annotations

import faulthandler
import os
import sys
import tempfile
import threading


class StackTimer:
    """Of one thing at a time."""

    def __init__(self, who: str, after_s: float) -> None:
        """`who` this process is, for the first line."""
        self._who, self._after_s = who, after_s
        self._timer: threading.Timer | None = None

    def begin(self, what: str) -> None:
        """What was begun before has ended, or does not count any more."""
        self.stop()
        self._timer = threading.Timer(self._after_s, self._write, [what])
        self._timer.daemon = True
        self._timer.start()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _write(self, what: str) -> None:
        """All at once, so that it stays in one piece beside those of other processes."""
        with tempfile.TemporaryFile() as file:
            faulthandler.dump_traceback(file, all_threads=True)
            stacks = os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0)
        line = f"{self._who}: {what} takes longer than {self._after_s:g} s; its threads:"
        sys.stderr.write(f"{line}\n{stacks.decode(errors='replace')}\n")
        sys.stderr.flush()
