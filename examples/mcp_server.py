"""A server of the Model Context Protocol with two tools, which the policy calls.

    mcore-rl rl ... agent.loop=tools agent.mcp_servers='[.venv/bin/python examples/mcp_server.py]'

Each worker starts one such process, which all of its trajectories share: what a tool remembers, all
of them see. So the tools here are functions of their arguments.
"""

from __future__ import annotations

from typing import Literal

from mcp.server import MCPServer

server = MCPServer("units")
_METRES = {"metre": 1.0, "kilometre": 1000.0, "mile": 1609.344, "foot": 0.3048}
Unit = Literal["metre", "kilometre", "mile", "foot"]


@server.tool()
def convert(value: float, source: Unit, target: Unit) -> float:
    """Convert a length to another unit."""
    return value * _METRES[source] / _METRES[target]


@server.tool()
def units() -> list[str]:
    """List the units that `convert` knows."""
    return list(_METRES)


if __name__ == "__main__":
    server.run("stdio")
