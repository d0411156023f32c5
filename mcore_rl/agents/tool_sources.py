"""The tools that a run's settings name, as a ToolSet takes them."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from functools import partial

from mcore_rl.agents.tools.base import tools_of
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


def tool_sources(config: AgentConfig) -> list[object]:
    """One for each of agent.tools and agent.mcp_servers.

    Raises:
        ConfigError: one is unknown or cannot be used here; it says why.
    """
    found: list[object] = []
    for name in config.tools:
        found += tools_of_file(name) if name.endswith((".yaml", ".json")) else [_source(name, config)]
    for server in config.mcp_servers:
        at = server if server.startswith(("http://", "https://")) else shlex.split(server)
        found.append(PerTrajectory(partial(McpTools, at, timeout_s=config.tool_timeout_s)))
    return found
