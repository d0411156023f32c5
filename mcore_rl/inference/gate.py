"""Requests wait while the weights of the server are replaced or asleep."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class Gate:
    """Open unless it is held, for one reason or several. All calls are of one event loop."""

    def __init__(self) -> None:
        self._reasons: set[str] = set()
        self._opened = asyncio.Event()
        self._opened.set()

    @property
    def is_open(self) -> bool:
        return self._opened.is_set()

    def is_held(self, reason: str) -> bool:
        return reason in self._reasons

    def hold(self, reason: str) -> None:
        self._reasons.add(reason)
        self._opened.clear()

    def release(self, reason: str) -> None:
        self._reasons.discard(reason)
        if not self._reasons:
            self._opened.set()

    @contextmanager
    def held(self, reason: str) -> Iterator[None]:
        self.hold(reason)
        try:
            yield
        finally:
            self.release(reason)

    async def passed(self) -> None:
        """Returns when it is open. The caller has a limit: that of its trajectory."""
        while not self.is_open:  # it may have been closed again since
            await self._opened.wait()
