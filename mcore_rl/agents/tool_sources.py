"""The tools that a run's settings name, as a ToolSet takes them."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Iterable
from functools import partial

from mcore_rl.agents.closing import close_or_tell
from mcore_rl.agents.tools.base import ToolError, ToolSet
from mcore_rl.agents.tools.calculator import calculator
from mcore_rl.agents.tools.mcp_tools import McpServer, McpTools
from mcore_rl.agents.tools.openai_yaml import tools_of_file
from mcore_rl.agents.tools.python_tool import PythonTool
from mcore_rl.agents.tools.search import SearchTool
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.import_path import is_import_path, load_function
from mcore_rl.config.schema import AgentConfig, SandboxSettings
from mcore_rl.sandbox.call import SandboxError
from mcore_rl.sandbox.sandbox import Sandbox

BUILT_IN = ("calculator", "python", "search")
_IS_FILE = (".yaml", ".yml", ".json")


def tool_sources(config: AgentConfig) -> list[object]:
    """Those of agent.tools and agent.mcp_servers.

    Raises:
        ConfigError: one is unknown or cannot be used here; it says why.
    """
    found: list[object] = []
    for name in config.tools:
        found += tools_of_file(name) if name.endswith(_IS_FILE) else [_source(name, config)]
    return found + mcp_sources(config)


def mcp_sources(config: AgentConfig) -> list[object]:
    """Those of agent.mcp_servers: a URL gets a connection a trajectory, a command one process.

    Raises:
        ConfigError: a command cannot be split into words.
    """
    sources: list[object] = []
    for index, server in enumerate(config.mcp_servers):
        if server.startswith(("http://", "https://")):
            sources.append(partial(McpTools, server, timeout_s=config.tool_timeout_s))
            continue
        try:
            command = shlex.split(server)
        except ValueError as error:
            raise ConfigError(f"agent.mcp_servers[{index}]={server!r}: {error}") from error
        if not command:
            raise ConfigError(f"agent.mcp_servers[{index}]={server!r}; allowed: a URL or a command")
        sources.append(McpServer(command, timeout_s=config.tool_timeout_s))
    return sources


async def end_sources(sources: Iterable[object]) -> None:
    """End what trajectories have shared."""
    servers = [source for source in sources if isinstance(source, McpServer)]
    ends = (close_or_tell(str(server), server.shutdown) for server in servers)
    await asyncio.gather(*ends)


async def try_mcp_servers(config: AgentConfig) -> None:
    """Start or reach the servers of agent.mcp_servers, list their tools, and end them.

    Raises:
        ConfigError: that fails, or two tools of the run have one name.
    """
    if not config.mcp_servers:
        return
    # A class is set up by a trajectory, and that may cost its service something.
    sources = [source for source in tool_sources(config) if not isinstance(source, type)]
    try:
        async with ToolSet(sources):
            pass
    except ToolError as error:
        raise ConfigError(f"agent.mcp_servers: {error}") from error
    finally:
        await end_sources(sources)


def _source(name: str, config: AgentConfig) -> object:
    if is_import_path(name):
        return load_function("agent.tools", name)
    if name == "calculator":
        return calculator
    if name == "search":
        if not config.search_file:
            raise ConfigError("agent.search_file='': the tool search needs a JSONL file of texts")
        return SearchTool(config.search_file)
    if name == "python":
        return PythonTool(_sandbox(config))
    raise ConfigError(
        f"agent.tools has {name!r}; allowed: {', '.join(BUILT_IN)}, an import path, or a file of "
        f"function schemas ({', '.join(_IS_FILE)})"
    )


def _sandbox(config: AgentConfig) -> Sandbox:
    try:
        return Sandbox(SandboxSettings(**config.sandbox))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"agent.sandbox: {error}") from error
    except SandboxError as error:
        raise ConfigError(f"agent.tools has 'python', and {error}") from error
