"""An event loop in a thread of its own, for an actor whose methods wait in other threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Of an actor with a server."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._events = asyncio.new_event_loop()
        threading.Thread(target=self._events.run_forever, daemon=True).start()

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Raises TimeoutError after `timeout_s`, and then the work is cancelled."""
        future = asyncio.run_coroutine_threadsafe(work, self._events)
        try:
            return future.result(self._timeout_s)
        except TimeoutError as error:
            if not future.cancel():  # it ended, with this error
                raise
            limit = f"{self._timeout_s:g} s"
            raise TimeoutError(f"the server has not answered in {limit}") from error
