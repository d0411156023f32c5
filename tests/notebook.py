"""Calls as from a cell of a notebook, which runs in an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def run_in_cell(call: Callable[[], T]) -> T:
    """Return the result of a call in a thread whose event loop runs."""

    async def cell() -> T:
        return call()

    return asyncio.run(cell())
