"""A small MCP server, started by tests: `python mcp_server.py stdio`, or a port."""

import asyncio
import os
import sys
from pathlib import Path

from mcp.server import MCPServer

server = MCPServer("small")


@server.tool()
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@server.tool()
async def wait(seconds: float, file: str = "") -> str:
    """Waits; the file is made before."""
    if file:
        Path(file).touch()
    await asyncio.sleep(seconds)
    return "waited"


@server.tool()
def fail() -> str:
    """Fails."""
    raise ValueError("it is broken")


@server.tool()
def process() -> int:
    """The process that answers."""
    return os.getpid()


@server.tool()
def end() -> str:
    """Ends the server."""
    os._exit(3)


if sys.argv[1] == "stdio":
    server.run("stdio")
else:
    server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
