"""Programs of a model, run where they can do no harm: no network, own scratch folder, limits."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from mcore_rl.config.schema import SandboxSettings
from mcore_rl.sandbox.call import SandboxResult, call
from mcore_rl.sandbox.probe import working_tier
from mcore_rl.sandbox.tiers import Tier


class Sandbox:
    """Runs one program a call.

    When a call returns, raises or is cancelled, or its caller dies, all that the program started is
    dead and its scratch folder is gone. docs/sandbox.md has what each tier contains.
    """

    def __init__(self, settings: SandboxSettings | None = None, max_parallel: int = 4) -> None:
        """Tries which tier works, once in a process.

        Args:
            settings: tier and limits; their defaults without.
            max_parallel: calls of `run_async` at once; others wait.

        Raises:
            SandboxError: none does; it says why.
        """
        self._settings = settings or SandboxSettings()
        self.tier: Tier = working_tier(self._settings.tier)
        self._places = asyncio.Semaphore(max_parallel)

    def run(
        self,
        program: Sequence[str] | str,
        *,
        stdin: str = "",
        files: Mapping[str, str] | None = None,
    ) -> SandboxResult:
        """Runs a command, or Python source with the packages of this environment.

        Not for threads with an event loop.

        Args:
            program: a command and its arguments, or the source of a Python program.
            stdin: what it reads.
            files: text by relative path, written in its working directory, the scratch folder.

        Raises:
            SandboxError: the sandbox could not be made.
            ValueError: a path in `files` leads out of the scratch folder.
        """
        return asyncio.run(call(self.tier, self._settings, program, stdin, files or {}))

    async def run_async(
        self,
        program: Sequence[str] | str,
        *,
        stdin: str = "",
        files: Mapping[str, str] | None = None,
    ) -> SandboxResult:
        """`run` without blocking the event loop. Waiting for a place counts to no limit."""
        async with self._places:
            return await call(self.tier, self._settings, program, stdin, files or {})
