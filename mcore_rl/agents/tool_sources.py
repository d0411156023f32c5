"""The tools that a run's settings name, as a ToolSet takes them."""

from __future__ import annotations

import shlex
from functools import partial

from mcore_rl.agents.tools.calculator import calculator
from mcore_rl.agents.tools.mcp_tools import McpTools
from mcore_rl.agents.tools.openai_yaml import tools_of_file
from mcore_rl.agents.tools.python_tool import PythonTool
from mcore_rl.agents.tools.search import SearchTool
from mcore_rl.config.agent_schema import AgentConfig
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.import_path import is_import_path, load
from mcore_rl.config.sandbox_schema import SandboxSettings
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
    for server in config.mcp_servers:
        at = server if server.startswith(("http://", "https://")) else shlex.split(server)
        found.append(partial(McpTools, at, timeout_s=config.tool_timeout_s))
    return found


def _source(name: str, config: AgentConfig) -> object:
    if is_import_path(name):
        return load("agent.tools", name)
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
