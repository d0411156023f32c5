"""Which nodes of a Ray cluster live: Ray itself takes seconds to notice that one has died."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import Any

import ray

_ANSWER_S = 2.0  # for a node to take a connection
_NOTICE_S = 30.0  # for Ray to notice a death
_LOOK_S = 0.2
_unreachable: set[str] = set()  # nodes that live, as Ray says, and are not asked any more


def living_nodes() -> dict[str, bool]:
    """By node id, as Ray has them. A node that does not answer has to be dead for Ray, too.

    Where there are several nodes, all are asked for a connection to their raylet. Where one does
    not give it, waits until Ray knows of its death, or it answers again. A node for which that
    takes too long is not asked again.
    """
    deadline = time.monotonic() + _NOTICE_S
    while True:
        nodes = ray.nodes()
        alive = [node for node in nodes if node["Alive"] and node["NodeID"] not in _unreachable]
        silent = asyncio.run(_silent(alive)) if len(nodes) > 1 else []
        if not silent:
            return {node["NodeID"]: node["Alive"] for node in nodes}
        if time.monotonic() > deadline:
            _give_up(silent)
        time.sleep(_LOOK_S)


def _give_up(nodes: Sequence[dict[str, Any]]) -> None:
    names = ", ".join(f"{n['NodeName']} (port {n['NodeManagerPort']})" for n in nodes)
    print(
        f"no connection from the driver to Ray on {names}, which Ray says live: samples on a node "
        "that dies there are missed once Ray notices"
    )
    _unreachable.update(node["NodeID"] for node in nodes)


async def _silent(nodes: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those that do not answer."""
    answers = (_answers(node["NodeManagerAddress"], node["NodeManagerPort"]) for node in nodes)
    found = await asyncio.gather(*answers)
    return [node for node, answered in zip(nodes, found, strict=True) if not answered]


async def _answers(host: str, port: int) -> bool:
    with contextlib.suppress(OSError):  # TimeoutError is one
        async with asyncio.timeout(_ANSWER_S):
            _, writer = await asyncio.open_connection(host, port)
        writer.close()
        return True
    return False
