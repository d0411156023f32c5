"""Run a coroutine from synchronous code, as callers of the library may have an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


def run_coroutine(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine, run to its end in an event loop of its own.

    A notebook runs its cells in an event loop, in whose thread asyncio.run raises: there the
    coroutine has a thread of its own, and the caller waits for it.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:  # none runs here
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()
