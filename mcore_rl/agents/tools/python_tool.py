"""The tool `python`: runs code of a model in the sandbox."""

from __future__ import annotations

import math

from mcore_rl.agents.tools.base import tool
from mcore_rl.sandbox.sandbox import Sandbox

_ENDED = {
    "timeout": "it took too long",
    "memory": "it needed too much memory",
    "output": "it wrote too much",
    "processes": "it started too many processes",
    "disk": "it filled its folder",
    "killed": "a signal ended it",
}


class PythonTool:
    """Each call is a program of its own: nothing is kept between calls."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    @tool(timeout_s=math.inf)  # the sandbox has limits; waiting for a place in it has none
    async def python(self, code: str) -> str:
        """Runs a Python program and returns what it prints. Nothing is kept between calls.

        Args:
            code: the whole program
        """
        result = await self._sandbox.run_async(code)
        parts = [result.stdout, result.stderr]
        if result.status in _ENDED:
            parts.append(f"The program was ended: {_ENDED[result.status]}.")
        elif not any(parts):
            parts.append(f"It printed nothing and ended with status {result.exit_code}.")
        return "\n".join(part.rstrip("\n") for part in parts if part)
