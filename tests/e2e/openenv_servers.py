"""A server of the real package openenv, run by the Python of an environment that has it.

python openenv_servers.py text|tools PORT
"""

import sys

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State


class TextAction(Action):
    message: str


class Heard(Observation):
    echoed: str


class Echo(Environment):
    """Echoes; three characters or more are worth 1, "end" is the end, "fail" raises."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **kwargs):
        return Heard(echoed=f"seed {seed}")

    def step(self, action, timeout_s=None, **kwargs):
        if action.message == "fail":
            raise RuntimeError("it fails as it was asked to")
        text = action.message
        return Heard(echoed=text, reward=float(len(text) >= 3), done=text == "end")

    @property
    def state(self):
        return State()


class Adding(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        mcp = FastMCP("adding")

        @mcp.tool
        def add(a: int, b: int) -> int:
            """Add two numbers."""
            return a + b

        super().__init__(mcp)

    def reset(self, seed=None, episode_id=None, **kwargs):
        return Observation(metadata={"status": "ready"})

    def _step_impl(self, action, timeout_s=None, **kwargs):
        raise RuntimeError("calls only")

    @property
    def state(self):
        return State()


if __name__ == "__main__":
    made = {
        "text": (Echo, TextAction, Heard),
        "tools": (Adding, CallToolAction, CallToolObservation),
    }[sys.argv[1]]
    app = create_fastapi_app(*made, max_concurrent_envs=2)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), log_level="warning")
