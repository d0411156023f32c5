"""Tools of servers of the Model Context Protocol, by stdio or streamable HTTP."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from mcore_rl.agents.tools.base import NAME, Tool, ToolError

_MAX_TOOLS = 128
_STDERR_CHARS = 2000  # of the end of a server's stderr, in errors
_STDERR_S = 1.0  # to read its rest, after the server has ended


class McpServer:
    """Tools of one server, shared by all trajectories of an event loop.

    The first `setup` starts the server or connects to it. If it has ended, the next `setup` or call
    starts it again. `shutdown` ends it.
    """

    def __init__(
        self, server: str | Sequence[str], prefix: str = "", timeout_s: float = 30.0
    ) -> None:
        """Connect to nothing yet.

        Args:
            server: URL of its endpoint, or the command that starts it.
            prefix: For the names of its tools, if servers have some in common.
            timeout_s: Limit of the start, and of each call.
        """
        self._server, self._prefix, self._timeout_s = server, prefix, timeout_s
        self._client: Any = None  # while it is connected
        self._starting: asyncio.Task[None] | None = None
        self._owner: asyncio.Task[None] | None = None  # which enters and leaves the client
        self._stop = asyncio.Event()
        self._stderr = _Stderr()
        self.tools: list[Tool] = []

    def __str__(self) -> str:
        return f"the MCP server {self._server!r}"

    async def setup(self) -> None:
        """Start or connect to the server, unless that is done, and list its tools.

        Raises:
            ToolError: the server cannot be reached, does not answer in time, or has no tool, or
                more than 128. The message has the end of its stderr.
        """
        if self._client is not None:
            return
        if self._starting is None or self._starting.done():
            self._starting = asyncio.create_task(self._start())
        await asyncio.shield(self._starting)  # other trajectories wait for it, too

    async def shutdown(self) -> None:
        """End the connection, and a server that was started for it."""
        if self._starting is not None and not self._starting.done():
            self._starting.cancel()
            await asyncio.wait([self._starting])
        self._client = None
        self._stop.set()
        if self._owner is not None:
            await asyncio.wait([self._owner])

    async def _start(self) -> None:
        self._stop.set()
        if self._owner is not None:
            await asyncio.wait([self._owner])  # of a server that has ended
        self._stop, self._stderr = asyncio.Event(), _Stderr()
        connected: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._owner = owner = asyncio.create_task(self._run_client(connected))
        try:
            async with asyncio.timeout(self._timeout_s):
                client, listed = await connected
            if not 0 < len(listed) <= _MAX_TOOLS:
                raise ToolError(f"it has {len(listed)} tools; allowed: 1 to {_MAX_TOOLS}")
            self.tools = [self._make_tool(tool) for tool in listed]
            self._client = client
        except BaseException as error:
            owner.cancel()
            await asyncio.wait([owner])
            if not isinstance(error, Exception):
                raise
            is_late = isinstance(error, TimeoutError)
            reason = f"no answer in {self._timeout_s:g} s" if is_late else _describe(error)
            raise ToolError(f"{self}: {reason}{self._format_stderr()}") from error

    async def _run_client(self, connected: asyncio.Future[Any]) -> None:
        """Keep the client open until `_stop`: one task has to enter and leave it."""
        from mcp import Client, StdioServerParameters, stdio_client  # takes 0.8 s

        try:
            async with self._stderr.open() as stderr:
                target: Any = self._server
                if not isinstance(self._server, str):
                    command, *arguments = self._server
                    parameters = StdioServerParameters(command=command, args=arguments)
                    target = stdio_client(parameters, errlog=stderr)
                async with Client(target, read_timeout_seconds=self._timeout_s) as client:
                    connected.set_result((client, await _list_tools(client)))
                    await self._stop.wait()
        except Exception as error:  # noqa: BLE001 (of a user's server)
            if not connected.done():
                connected.set_exception(error)

    def _make_tool(self, listed: Any) -> Tool:
        name = f"{self._prefix}{listed.name}"
        if not NAME.fullmatch(name):
            raise ToolError(f"it has a tool called {name!r}; allowed: {NAME.pattern}")

        async def call(**arguments: Any) -> str:
            await self.setup()
            client = self._client
            try:
                result = await client.call_tool(
                    listed.name, arguments, read_timeout_seconds=self._timeout_s
                )
            except Exception as error:
                if _is_closed(error) and client is self._client:
                    self._client = None
                    print(f"{self} has ended{self._format_stderr()}")
                raise
            texts = [
                block.text if block.type == "text" else f"[{block.type}]"
                for block in result.content
            ]
            if result.is_error:
                raise ToolError("\n".join(texts))
            return "\n".join(texts)

        return Tool(name, listed.description or name, listed.input_schema, call, self._timeout_s)

    def _format_stderr(self) -> str:
        text = " ".join(self._stderr.text.split())
        return f"; its stderr: {text}" if text else ""


class McpTools(McpServer):
    """Tools of one server for a single trajectory, with a connection of its own."""

    async def close(self) -> None:
        """End the connection."""
        await self.shutdown()


class _Stderr(asyncio.Protocol):
    """Collects the end of a server's stderr."""

    def __init__(self) -> None:
        self.text = ""
        self._is_complete = asyncio.Event()

    def data_received(self, data: bytes) -> None:
        self.text = (self.text + data.decode(errors="replace"))[-_STDERR_CHARS:]

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_complete.set()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Any]:
        """Open a file for the stderr of a process; at the end, read the rest of it."""
        reading, writing = os.pipe()
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(lambda: self, os.fdopen(reading, "rb"))
        try:
            with os.fdopen(writing, "w") as file:
                yield file
        finally:
            with suppress(TimeoutError):  # a child that the server left behind keeps it open
                async with asyncio.timeout(_STDERR_S):
                    await self._is_complete.wait()
            transport.close()


async def _list_tools(client: Any) -> list[Any]:
    tools: list[Any] = []
    cursor = None
    while len(tools) <= _MAX_TOOLS:
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        cursor = page.next_cursor
        if not cursor:
            break
    return tools


def _is_closed(error: Exception) -> bool:
    from mcp import MCPError
    from mcp_types import CONNECTION_CLOSED

    return isinstance(error, MCPError) and error.error.code == CONNECTION_CLOSED


def _describe(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    text = " ".join(str(error).split())[:200]
    return text if isinstance(error, ToolError) else f"{type(error).__name__}: {text}"
