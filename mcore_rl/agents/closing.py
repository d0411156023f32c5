"""The ends of tools and environments, which cost no trajectory that is made."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

CLOSE_S = 10.0  # for each of them to clean up after a trajectory


async def close_or_tell(what: str, close: Callable[[], Awaitable[None]]) -> None:
    """Awaits `close`. Where it raises or takes too long, that is told with the name `what`."""
    limit = asyncio.timeout(CLOSE_S)
    try:
        async with limit:
            await close()
    except Exception as error:  # noqa: BLE001 (of a function that is not ours)
        late = f"has not closed in {CLOSE_S:g} s"
        fault = f"raised {type(error).__name__} when it was closed: {error}"
        print(f"{what} {late if limit.expired() else fault}")
