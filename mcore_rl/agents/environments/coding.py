"""The environment `code`: programs that have to pass tests, with feedback on the first failure."""

from __future__ import annotations

import functools
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcore_rl.agents.chat_template.codec import ChatMessage, ParsedTurn, ToolSpec
from mcore_rl.agents.environments.base import Attempts, EnvironmentStep, format_feedback
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.limits import PositiveFloat
from mcore_rl.config.schema import SandboxSettings
from mcore_rl.data.thoughts import find_answer
from mcore_rl.rewards.code import (
    RUN_ASSERTS,
    find_last_program,
    import_typing,
    read_tests,
    split_output,
)
from mcore_rl.sandbox.sandbox import Sandbox, SandboxError

_MAX_SHOWN = 400  # characters of a test, its output or an error, in feedback


@dataclass(frozen=True)
class CodingSettings(SandboxSettings):
    """Settings of agent.environment=code. Limits are per test with outputs, or for all asserts."""

    cpu_s: PositiveFloat = 5.0
    wall_s: PositiveFloat = 10.0
    try_penalty: float = 0.1  # subtracted from the reward for each attempt before the right one
    shows_tests: bool = True  # show the test that fails; false: only say that one does


class Coding:
    """Tests the programs of the policy.

    The field `answer` has the tests, as the reward `code` reads them. An attempt is the last
    ```python block of a turn. If it passes all tests it earns
    1 - try_penalty * (attempts before it), at least 0.
    """

    tools: Sequence[ToolSpec] = ()

    def __init__(self, fields: Mapping[str, Any], settings: CodingSettings) -> None:
        """Read the tests; raise ConfigError if they cannot be read."""
        self._settings, self._attempts = settings, Attempts(settings.try_penalty)
        try:
            self._tests = read_tests(fields.get("answer"))
        except ValueError as error:
            raise ConfigError(f"agent.environment='code': {error}") from error
        self._sandbox = _make_sandbox(settings)

    @staticmethod
    def check(settings: CodingSettings) -> None:
        """Raise ConfigError if the sandbox does not work here."""
        try:
            _make_sandbox(settings)
        except SandboxError as error:
            raise ConfigError(f"agent.environment='code': {error}") from error

    async def reset(self) -> Sequence[ChatMessage]:
        """Return no messages."""
        return []

    async def step(self, turn: ParsedTurn) -> EnvironmentStep:
        """Test the last program of a turn."""
        program = find_last_program(find_answer(turn.content))
        problem = "There is no ```python block in your answer."
        if program is not None:
            problem = await self._find_problem(import_typing(program))
        return self._attempts.record(format_feedback(problem))

    async def close(self) -> None:
        """Do nothing."""

    async def _find_problem(self, program: str) -> str:
        """Describe the first test that fails; return "" if all pass."""
        if "asserts" in self._tests:
            problem = await self._run_asserts(program)
        else:
            problem = await self._compare_outputs(program)
        return "A test fails." if problem and not self._settings.shows_tests else problem

    async def _run_asserts(self, program: str) -> str:
        """Run all asserts in one process; describe the first that fails, "" if all pass."""
        tests = self._tests["asserts"]
        keys = [secrets.token_hex(16) for _ in tests]
        stdin = json.dumps({"code": program, "tests": tests, "keys": keys})
        result = await self._sandbox.run_async(RUN_ASSERTS, stdin=stdin)
        passed = set(result.stdout.split())
        failed = next((number for number, key in enumerate(keys) if key not in passed), None)
        if failed is None:
            return ""
        lines = [line for line in result.stderr.splitlines() if line.strip()]
        prefix = f"test {failed}: "
        reported = [line for line in lines if line.startswith(prefix)]
        error = (reported or lines[-1:] or [result.status])[0].removeprefix(prefix)
        return describe_failed_assert(tests[failed], error)

    async def _compare_outputs(self, program: str) -> str:
        """Run the program on each input; describe the first wrong output, "" if none is."""
        pairs = zip(self._tests["inputs"], self._tests["outputs"], strict=True)
        for given, expected in pairs:
            result = await self._sandbox.run_async(program, stdin=given)
            printed = split_output(result.stdout)
            if result.status == "ok" and printed == split_output(expected):
                continue
            outcome = f"it prints {_quote(result.stdout)}"
            if result.status != "ok":
                error = result.stderr.strip()[-_MAX_SHOWN:] or result.status
                outcome = f"it ends with {_quote(error)}"
            return f"For the input {_quote(given)} {outcome}, not {_quote(expected)}."
        return ""


def describe_failed_assert(test: str, error: str) -> str:
    """Return the feedback on an assert that fails."""
    return f"The test {_quote(test)} fails: {_quote(error)}."


@functools.cache
def _make_sandbox(settings: CodingSettings) -> Sandbox:
    return Sandbox(settings)


def _quote(text: str) -> str:
    text = text.strip()
    return repr(text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]} ...")
