"""Which nodes of a Ray cluster live: Ray itself takes seconds to notice that one has died."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import ray

_ANSWER_S = 2.0  # for a node to take a connection
_NOTICE_S = 30.0  # for Ray to notice a death
_LOOK_S = 0.2


def living_nodes() -> dict[str, bool]:
    """By node id, as Ray has them. A node that does not answer has to be dead for Ray, too.

    The raylet of each node is asked for a connection, by all at once, where there are several
    nodes. Where one does not give it, waits until Ray knows of its death, or it answers again.
    """
    deadline = time.monotonic() + _NOTICE_S
    while True:
        nodes = ray.nodes()
        alive = [node for node in nodes if node["Alive"]]
        if len(nodes) < 2 or asyncio.run(_all_answer(alive)) or time.monotonic() > deadline:
            return {node["NodeID"]: node["Alive"] for node in nodes}
        time.sleep(_LOOK_S)


async def _all_answer(nodes: list[dict[str, Any]]) -> bool:
    places = [(node["NodeManagerAddress"], node["NodeManagerPort"]) for node in nodes]
    return all(await asyncio.gather(*(_answers(*place) for place in places)))


async def _answers(host: str, port: int) -> bool:
    with contextlib.suppress(OSError):  # TimeoutError is one
        async with asyncio.timeout(_ANSWER_S):
            _, writer = await asyncio.open_connection(host, port)
        writer.close()
        return True
    return False
