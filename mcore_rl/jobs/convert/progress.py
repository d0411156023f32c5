"""How far a command has come: a live bar on a terminal, a plain line now and then elsewhere."""

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
        self._console = console or Console()
        self._is_live = self._console.is_terminal  # asking looks at the environment each time
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=30),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._task = self._bar.add_task(title, total=total, completed=done)
        self._started_s = self._told_s = time.monotonic()
        self.num_bytes = 0  # of this run

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started_s

    @property
    def rate(self) -> str:
        return f"{format_bytes(self.num_bytes / max(self.seconds, 1e-9))}/s"

    def add(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        if self._is_live:
            self._bar.update(self._task, advance=num_bytes)
        elif time.monotonic() - self._told_s > _INTERVAL_S:
            self._told_s = time.monotonic()
            self._console.print(self._line(), markup=False, highlight=False, soft_wrap=True)

    def _line(self) -> str:
        done = self._earlier + self.num_bytes
        left_s = (self._total - done) * self.seconds / max(self.num_bytes, 1)
        return (
            f"{self._title} {format_bytes(done)} of {format_bytes(self._total)}, {self.rate}, "
            f"{left_s:.0f} s left"
        )

    def __enter__(self) -> ByteProgress:
        if self._is_live:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_live:
            self._bar.stop()
