"""Settings of how responses come about: the loop between policy, tools and environments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mcore_rl.config.checks import at_least, one_of, positive
from mcore_rl.config.errors import ConfigError

CODECS = ("auto", "renderers", "template")


@dataclass
class AgentConfig:
    # single_turn: one response to a prompt; tools: turns with calls of `tools`, until one has none;
    # environment: turns with `environment`; user: a conversation with a user whom one of `models`
    # plays; program: what a client of OpenAI's API asks (docs/endpoint.md); verifiers: rollouts of
    # an environment of that package; or the import path of a class (docs/agents.md).
    loop: str = "single_turn"
    settings: dict[str, Any] = field(default_factory=dict)  # of that loop
    # Tools by name (calculator, python, search), as the import path of a function or class with
    # @tool, or as a file.yaml of function schemas.
    tools: list[str] = field(default_factory=list)
    search_file: str = ""  # JSONL with a column text, for the tool search
    # Servers whose tools are offered, too: URLs, or commands, started once by each worker.
    mcp_servers: list[str] = field(default_factory=list)
    sandbox: dict[str, Any] = field(default_factory=dict)  # of the tool python: docs/sandbox.md
    # Of loop=environment: code, countdown, guessing, openenv, or the import path of a class.
    environment: str = ""
    environment_settings: dict[str, Any] = field(default_factory=dict)  # of that environment
    codec: str = "auto"  # what writes turns as tokens: renderers, template, or auto
    max_turns: int = 8  # of the policy in a trajectory
    max_turn_tokens: int = 0  # that a turn may have; 0: all that is left of max_response_tokens
    timeout_s: float = 600.0  # of a trajectory; one that takes longer ends as it is
    tool_timeout_s: float = 30.0  # of a call of a tool without a limit of its own


def resolve_agent(config: AgentConfig, stops: Mapping[str, Sequence[str]]) -> None:
    """Checks the settings that need nothing else; `stops`: texts that end a response, by setting.

    Raises:
        ConfigError: one cannot work.
    """
    one_of("agent.codec", config.codec, CODECS)
    at_least("agent.max_turns", config.max_turns, 1)
    at_least("agent.max_turn_tokens", config.max_turn_tokens, 0)
    positive("agent.timeout_s", config.timeout_s)
    positive("agent.tool_timeout_s", config.tool_timeout_s)
    for setting, stop in stops.items():
        if config.loop != "single_turn" and stop:
            raise ConfigError(
                f"{setting}={stop}: turns of agent.loop={config.loop!r} end with a token; "
                "allowed: []"
            )
    if config.loop == "tools" and not (config.tools or config.mcp_servers):
        raise ConfigError("agent.loop='tools' needs agent.tools or agent.mcp_servers")
    if config.loop == "environment" and not config.environment:
        raise ConfigError("agent.loop='environment' needs agent.environment")
    for name in ("tools", "mcp_servers", "environment"):
        if getattr(config, name) and config.loop == "single_turn":
            raise ConfigError(
                f"agent.{name} has no part in agent.loop='single_turn'; allowed: another loop"
            )
