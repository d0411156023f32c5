"""Functions that may block, called away from the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from mcore_rl.rewards.base import raised

T = TypeVar("T")


class CallError(RuntimeError):
    """A function raised; the message says what."""


async def called_in_thread(call: Callable[[], T]) -> T:
    """What it returns. One that nobody waits for any more goes on in its thread.

    Raises:
        CallError: it raised something, sys.exit included.
    """
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # else the time limit would cancel it under the thread

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 (sys.exit ends no server, nor StopIteration)
            future.set_exception(CallError(raised(error)))

    threading.Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(future)
