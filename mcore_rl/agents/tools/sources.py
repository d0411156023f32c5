"""Load the tools that a run's settings name, as sources of a ToolSet."""

from __future__ import annotations

import asyncio
import inspect
import shlex
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator, SchemaError

from mcore_rl.agents.tools.base import Tool, ToolError, ToolSet, close_or_report
from mcore_rl.agents.tools.built_in import PythonTool, SearchTool, calculator
from mcore_rl.agents.tools.mcp_tools import McpServer, McpTools
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.import_path import is_import_path, load_function
from mcore_rl.config.limits import build_settings
from mcore_rl.config.regular_file import read_regular
from mcore_rl.config.schema import AgentConfig, SandboxSettings
from mcore_rl.sandbox.sandbox import Sandbox, SandboxError

BUILT_IN = ("calculator", "python", "search")
_FILE_ENDINGS = (".yaml", ".yml", ".json")


def load_tool_sources(config: AgentConfig) -> list[object]:
    """Load the tools of agent.tools and agent.mcp_servers.

    Raises:
        ConfigError: One is unknown or cannot be used here.
    """
    sources: list[object] = []
    for name in config.tools:
        if name.endswith(_FILE_ENDINGS):
            sources += load_tool_file(name)
        else:
            sources.append(_load_source(name, config))
    return sources + _list_mcp_sources(config)


def _list_mcp_sources(config: AgentConfig) -> list[object]:
    """Return sources of agent.mcp_servers.

    A URL gets a connection per trajectory, a command one process for all.

    Raises:
        ConfigError: A command cannot be split into words.
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


async def shut_down_sources(sources: Iterable[object]) -> None:
    """End the MCP servers that trajectories share."""
    servers = [source for source in sources if isinstance(source, McpServer)]
    ends = (close_or_report(str(server), server.shutdown) for server in servers)
    await asyncio.gather(*ends)


async def try_mcp_servers(config: AgentConfig) -> None:
    """Start or connect to the servers of agent.mcp_servers, list their tools, and end them.

    Raises:
        ConfigError: That fails, or two tools of the run have one name.
    """
    if not config.mcp_servers:
        return
    # Classes are set up by trajectories only: that may cost a service something.
    sources = [source for source in load_tool_sources(config) if not isinstance(source, type)]
    try:
        async with ToolSet(sources):
            pass
    except ToolError as error:
        raise ConfigError(f"agent.mcp_servers: {error}") from error
    finally:
        await shut_down_sources(sources)


def _load_source(name: str, config: AgentConfig) -> object:
    if is_import_path(name):
        return load_function("agent.tools", name)
    if name == "calculator":
        return calculator
    if name == "search":
        if not config.search_file:
            raise ConfigError("agent.search_file='': the tool search needs a JSONL file of texts")
        return SearchTool(config.search_file)
    if name == "python":
        return PythonTool(_make_sandbox(config))
    raise ConfigError(
        f"agent.tools has {name!r}; allowed: {', '.join(BUILT_IN)}, an import path, or a file of "
        f"function schemas ({', '.join(_FILE_ENDINGS)})"
    )


def _make_sandbox(config: AgentConfig) -> Sandbox:
    try:
        return Sandbox(build_settings("agent.sandbox", SandboxSettings, config.sandbox))
    except SandboxError as error:
        raise ConfigError(f"agent.tools has 'python', and {error}") from error


_MAX_BYTES = 1 << 20
_FUNCTION_KEYS = {"name", "description", "parameters", "strict"}


def load_tool_file(path: str | Path) -> list[Tool]:
    """Load tools from a file of OpenAI's function schemas, bound to Python functions.

    A list in YAML or JSON; `python` is the import path of the function:

        - type: function
          function:
            name: weather
            description: The weather in a city.
            parameters: {type: object, properties: {city: {type: string}}, required: [city]}
          python: path/to/file.py:weather

    Raises:
        ConfigError: It cannot be read, an entry is no schema, or its function does not take the
            parameters of the schema.
    """
    try:
        entries = yaml.safe_load(read_regular(path, _MAX_BYTES))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{path}: allowed: a list of tools, not empty")
    return [_parse_tool(f"{path}[{number}]", entry) for number, entry in enumerate(entries)]


def _parse_tool(where: str, entry: object) -> Tool:
    if not isinstance(entry, Mapping) or set(entry) != {"type", "function", "python"}:
        raise ConfigError(f"{where}: allowed: an object with the keys type, function and python")
    function: Any = entry["function"]
    if entry["type"] != "function" or not isinstance(function, Mapping):
        raise ConfigError(f"{where}: allowed: type: function, and an object as function")
    if unknown := set(function) - _FUNCTION_KEYS:
        raise ConfigError(
            f"{where}.function: {', '.join(sorted(map(str, unknown)))}; allowed: "
            f"{', '.join(sorted(_FUNCTION_KEYS))}"
        )
    for key in ("name", "description"):
        if not isinstance(function.get(key), str):
            raise ConfigError(f"{where}.function.{key}={function.get(key)!r}; allowed: text")
    parameters = function.get("parameters", {"type": "object", "properties": {}})
    try:
        Draft202012Validator.check_schema(parameters)
    except SchemaError as error:
        raise ConfigError(f"{where}.function.parameters: {error.message}") from error
    if not isinstance(parameters, Mapping) or parameters.get("type") != "object":
        raise ConfigError(f"{where}.function.parameters: allowed: a schema of type object")
    python = load_function(f"{where}.python", str(entry["python"]))
    _check_signature(f"{where}.python={entry['python']!r}", python, parameters)
    return Tool(function["name"], function["description"], parameters, python)


def _check_signature(where: str, function: Any, parameters: Mapping[str, Any]) -> None:
    signature = inspect.signature(function)
    properties, required = parameters.get("properties", {}), parameters.get("required", [])
    for names in (properties, required):
        try:
            signature.bind(**dict.fromkeys(names))
        except TypeError as error:
            raise ConfigError(
                f"{where} takes {signature}; the schema has {', '.join(names)}: {error}"
            ) from None
