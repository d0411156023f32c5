"""Progress of a command: a live bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from mcore_rl.jobs.convert.options import format_bytes
from mcore_rl.observability.console import get_stdout_console, show_line

_INTERVAL_S = 5.0  # between plain lines


class ByteProgress:
    """Counts `total` bytes of work; `done` of them an earlier run has seen to. A context manager.

    >>> with ByteProgress("writing", 100, console=Console(width=80)) as progress:
    ...     progress.add(100)
    """

    def __init__(
        self, title: str, total: int, done: int = 0, console: Console | None = None
    ) -> None:
        self._title, self._total, self._earlier = title, total, done
        self._console = console or get_stdout_console()
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=30),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task(title, total=total, completed=done)
        self._started_s = self._told_s = time.monotonic()
        self._num_bytes = 0  # of this run

    def __str__(self) -> str:
        """What this run has done, how long it took and how fast it was."""
        done = format_bytes(self._num_bytes)
        seconds = time.monotonic() - self._started_s
        return f"{done} in {seconds:.2f} s, {format_bytes(self._num_bytes / max(seconds, 1e-9))}/s"

    def add(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        self._bar.update(self._task, advance=num_bytes)
        if self._bar.disable and time.monotonic() - self._told_s > _INTERVAL_S:
            self._told_s = time.monotonic()
            done = format_bytes(self._earlier + self._num_bytes)
            left = self._total - self._earlier - self._num_bytes
            left_s = left * (self._told_s - self._started_s) / max(self._num_bytes, 1)
            line = f"{self._title} {done} of {format_bytes(self._total)}, {left_s:.0f} s left"
            show_line(line, self._console)

    def __enter__(self) -> ByteProgress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
