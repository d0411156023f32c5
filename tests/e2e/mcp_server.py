"""A small MCP server, started by tests: `python mcp_server.py stdio`, or a port."""

import asyncio
import os
import sys
from pathlib import Path

from mcp.server import MCPServer

server = MCPServer("small")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
async def wait(seconds: float, file: str = "") -> str:
    """Wait; create the file before."""
    if file:
        Path(file).touch()
    await asyncio.sleep(seconds)
    return "waited"


@server.tool()
def fail() -> str:
    """Fail."""
    raise ValueError("it is broken")


@server.tool()
def process() -> int:
    """Return the pid of the process that answers."""
    return os.getpid()


@server.tool()
def end() -> str:
    """End the server."""
    os._exit(3)


if sys.argv[1] == "stdio":
    server.run("stdio")
else:
    server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
