"""The environment `code`: programs that have to pass tests, with a word on the first that fails."""

from __future__ import annotations

import functools
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcore_rl.agents.codec import ChatMessage, ParsedTurn, ToolSpec
from mcore_rl.agents.environment import EnvironmentStep, Tries, try_again
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import SandboxSettings
from mcore_rl.rewards.rules_code import RUN_ASSERTS, last_program, output_lines, read_tests
from mcore_rl.sandbox.call import SandboxError
from mcore_rl.sandbox.sandbox import Sandbox

_SHOWN = 400  # characters of a test, of its output or of an error that the policy is told


@dataclass(frozen=True)
class CodingSettings(SandboxSettings):
    """Limits are of one test with outputs, or of all asserts."""

    cpu_s: float = 5.0
    wall_s: float = 10.0
    try_penalty: float = 0.1  # taken off the reward for each try before the right one
    shows_tests: bool = True  # tell the test that fails; false: only that one does


class Coding:
    """The field `answer` has the tests, as the reward `code` reads them.

    A try is the last ```python block of a turn. One that passes all tests earns
    1 - try_penalty * (tries before it), at least 0.
    """

    tools: Sequence[ToolSpec] = ()

    def __init__(self, fields: Mapping[str, Any], settings: CodingSettings) -> None:
        """Raises ConfigError for tests that cannot be read."""
        self._settings, self._tries = settings, Tries(settings.try_penalty)
        try:
            self._tests = read_tests(fields.get("answer"))
        except ValueError as error:
            raise ConfigError(f"agent.environment='code': {error}") from error
        self._sandbox = _sandbox(settings)

    @staticmethod
    def check(settings: CodingSettings) -> None:
        """Raises ConfigError where there is no sandbox."""
        try:
            _sandbox(settings)
        except SandboxError as error:
            raise ConfigError(f"agent.environment='code': {error}") from error

    async def reset(self) -> Sequence[ChatMessage]:
        return []

    async def step(self, turn: ParsedTurn) -> EnvironmentStep:
        program = last_program(turn.content)
        problem = "There is no ```python block in your answer."
        if program is not None:
            problem = await self._problem(program)
        return self._tries.step(try_again(problem))

    async def close(self) -> None:
        pass

    async def _problem(self, program: str) -> str:
        """What the first test that fails shows; empty if all pass."""
        if "asserts" in self._tests:
            told = await self._failed_assert(program)
        else:
            told = await self._wrong_output(program)
        return "A test fails." if told and not self._settings.shows_tests else told

    async def _failed_assert(self, program: str) -> str:
        tests = self._tests["asserts"]
        keys = [secrets.token_hex(16) for _ in tests]
        asked = json.dumps({"code": program, "tests": tests, "keys": keys})
        result = await self._sandbox.run_async(RUN_ASSERTS, stdin=asked)
        passed = set(result.stdout.split())
        failed = next((number for number, key in enumerate(keys) if key not in passed), None)
        if failed is None:
            return ""
        lines = [line for line in result.stderr.splitlines() if line.strip()]
        own = [line for line in lines if line.startswith(f"test {failed}: ")]
        why = (own or lines[-1:] or [result.status])[0].removeprefix(f"test {failed}: ")
        return told_assert(tests[failed], why)

    async def _wrong_output(self, program: str) -> str:
        pairs = zip(self._tests["inputs"], self._tests["outputs"], strict=True)
        for given, wanted in pairs:
            result = await self._sandbox.run_async(program, stdin=given)
            found = output_lines(result.stdout)
            if result.status == "ok" and found == output_lines(wanted):
                continue
            said = f"it prints {_short(result.stdout)}"
            if result.status != "ok":
                said = f"it ends with {_short(result.stderr.strip()[-_SHOWN:] or result.status)}"
            return f"For the input {_short(given)} {said}, not {_short(wanted)}."
        return ""


def told_assert(test: str, why: str) -> str:
    """What the policy is told of an assert that fails."""
    return f"The test {_short(test)} fails: {_short(why)}."


@functools.cache
def _sandbox(settings: CodingSettings) -> Sandbox:
    return Sandbox(settings)


def _short(text: str) -> str:
    text = text.strip()
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]} ...")
