"""Tools of a server of the Model Context Protocol, by stdio or streamable HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

from mcore_rl.agents.tools.base import NAME, Tool, ToolError

_MAX_TOOLS = 128


class McpTools:
    """The tools that one server has, for a ToolSet; one connection a trajectory.

    A server by stdio is started with the trajectory and ends with it.
    """

    def __init__(
        self, server: str | Sequence[str], prefix: str = "", timeout_s: float = 30.0
    ) -> None:
        """`server`: the URL of its endpoint, or the command that starts it.

        prefix: of the names of its tools, where servers have some in common. timeout_s: of the
        start, and of each call.
        """
        self._server, self._prefix, self._timeout_s = server, prefix, timeout_s
        self._stack = AsyncExitStack()
        self._client: Any = None
        self.tools: list[Tool] = []

    async def setup(self) -> None:
        """Connects and asks for the tools.

        Raises:
            ToolError: the server cannot be reached, does not answer in time, or has no tool, or
                more than 128.
        """
        from mcp import Client, StdioServerParameters  # 0.8 s

        target: Any = self._server
        if not isinstance(self._server, str):
            command, *arguments = self._server
            target = StdioServerParameters(command=command, args=arguments)
        client = Client(target, read_timeout_seconds=self._timeout_s)
        try:
            async with asyncio.timeout(self._timeout_s):
                self._client = await self._stack.enter_async_context(client)
                found = await self._listed()
        except Exception as error:
            await self._stack.aclose()
            reason = f"no answer in {self._timeout_s:g} s" if _is_late(error) else _told(error)
            raise ToolError(f"the MCP server {self._server!r}: {reason}") from error
        if not 0 < len(found) <= _MAX_TOOLS:
            await self._stack.aclose()
            raise ToolError(
                f"the MCP server {self._server!r} has {len(found)} tools; allowed: 1 to "
                f"{_MAX_TOOLS}"
            )
        self.tools = [self._tool(one) for one in found]

    async def close(self) -> None:
        await self._stack.aclose()

    async def _listed(self) -> list[Any]:
        found: list[Any] = []
        cursor = None
        while len(found) <= _MAX_TOOLS:
            page = await self._client.list_tools(cursor=cursor)
            found += page.tools
            cursor = page.next_cursor
            if not cursor:
                break
        return found

    def _tool(self, found: Any) -> Tool:
        name = f"{self._prefix}{found.name}"
        if not NAME.fullmatch(name):
            raise ToolError(f"the MCP server {self._server!r} has a tool called {name!r}")

        async def call(**arguments: Any) -> str:
            result = await self._client.call_tool(
                found.name, arguments, read_timeout_seconds=self._timeout_s
            )
            texts = [
                block.text if block.type == "text" else f"[{block.type}]"
                for block in result.content
            ]
            if result.is_error:
                raise ToolError("\n".join(texts))
            return "\n".join(texts)

        return Tool(name, found.description or name, found.input_schema, call, self._timeout_s)


def _is_late(error: Exception) -> bool:
    return isinstance(error, TimeoutError)


def _told(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
