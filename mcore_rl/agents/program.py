"""The loop `program`: any client of OpenAI's API, which the policy answers."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import shlex
import shutil
import signal
import tempfile
from asyncio.subprocess import DEVNULL
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_rl.agents.loops import Agent, Served, Task
from mcore_rl.agents.process_environment import process_environment, variable_names
from mcore_rl.config.checks import check_at_least
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.import_path import load_function
from mcore_rl.data.sample import Sample, TrajectoryStatus

TASK_FILE = "MCORE_RL_TASK"  # the variable with the path of the row
_KILL_S = 10.0  # for a killed program to be gone
_SHOWN = 2000  # characters of the end of a program's output, in errors


@dataclass(frozen=True)
class ProgramSettings:
    """One of both."""

    command: str = ""  # with its arguments, as a shell would read them; no shell runs it
    function: str = ""  # the import path of `async def f(task, base_url, api_key)`
    at_once: int = 64  # commands of a server that run at the same time; the others wait
    variables: str = ""  # more environment variables that a command gets; commas between names

    def __post_init__(self) -> None:
        if bool(self.command) == bool(self.function):
            raise ConfigError(
                f"command={self.command!r} and agent.settings.function={self.function!r}; "
                "allowed: one of them"
            )
        if self.function and not inspect.iscoroutinefunction(
            load_function("function", self.function)
        ):
            raise ConfigError(f"function={self.function!r}; allowed: a function by `async def`")
        check_at_least("at_once", self.at_once, 1)
        variable_names(self.variables)
        if self.command and not self.words():
            raise ConfigError(f"command={self.command!r} names no program")
        if self.command and shutil.which(self.words()[0]) is None:
            raise ConfigError(f"command={self.command!r}: there is no program {self.words()[0]!r}")

    def words(self) -> list[str]:
        try:
            return shlex.split(self.command)
        except ValueError as error:
            raise ConfigError(f"command={self.command!r}: {error}") from error


class ProgramLoop:
    """Runs a program or a function for each trajectory, and gives it the URL and key of a session.

    The reward is what it has posted, or that of config.reward for the content of the last answer.
    One that fails after a limit has ended its session is truncated; else its failure is one of the
    loop.
    """

    def __init__(self, agent: Agent, settings: ProgramSettings) -> None:
        self._agent, self._settings = agent, settings
        self._places = asyncio.Semaphore(settings.at_once)
        self._run: Callable[[Task, Served], Awaitable[None]] = self._command
        if settings.function:
            self._function = load_function("agent.settings.function", settings.function)
            self._run = self._call

    async def run(self, task: Task) -> list[Sample]:
        async with self._agent.served(task) as served:
            try:
                await self._run(task, served)
            except Exception:  # of a program that is not ours: raised again, or a limit's doing
                if not any(one.is_cut_off for one in (served, *served.roles)):
                    raise
        samples: list[Sample] = []
        # A program may speak in roles only.
        asked = [one for one in (served, *served.roles) if one.session.turns]
        for one in asked or [served]:
            samples += await self._samples(task, one)
        return samples

    async def _samples(self, task: Task, served: Served) -> list[Sample]:
        status: TrajectoryStatus = served.status or (
            "truncated" if served.is_cut_off else "finished"
        )
        if served.reward is None and status == "aborted":
            return self._agent.rewarded(task, served.session, status, 0.0)
        if served.reward is None:
            return await self._agent.judged(task, served.session, status, served.text)
        of_parts = served.turn_rewards, served.token_rewards
        return self._agent.rewarded(task, served.session, status, served.reward, *of_parts)

    async def _call(self, task: Task, served: Served) -> None:
        await self._function(task, served.base_url, served.api_key)

    async def _command(self, task: Task, served: Served) -> None:
        """Raises RuntimeError where it exits with another status than 0."""
        async with self._places:
            with tempfile.TemporaryDirectory(prefix="program_") as folder:
                await self._started(task, served, Path(folder))

    async def _started(self, task: Task, served: Served, folder: Path) -> None:
        row, output = folder / "task.json", folder / "output"
        row.write_text(json.dumps(row_of(task)), encoding="utf-8")
        with output.open("wb") as told:
            process = await asyncio.create_subprocess_exec(
                *self._settings.words(),
                env=self._environment(served, row),
                stdin=DEVNULL,
                stdout=told,
                stderr=told,
                start_new_session=True,
            )
        try:
            status = await process.wait()
        finally:
            with suppress(ProcessLookupError):  # its group, which it may have left behind
                os.killpg(process.pid, signal.SIGKILL)
            async with asyncio.timeout(_KILL_S):
                await process.wait()
        if status != 0:
            shown = output.read_text(encoding="utf-8", errors="replace")[-_SHOWN:].strip()
            raise RuntimeError(f"{self._settings.command!r} exited with {status}: {shown}")

    def _environment(self, served: Served, row: Path) -> dict[str, str]:
        return process_environment(self._settings.variables) | {
            "OPENAI_BASE_URL": served.base_url,
            "OPENAI_API_KEY": served.api_key,
            TASK_FILE: str(row),
        }


def row_of(task: Task) -> dict[str, Any]:
    """What a program is told of its trajectory."""
    return {
        "messages": [message.as_dict() for message in task.messages],
        "fields": dict(task.fields),
        "row": task.row,
        "group_id": task.group_id,
        "trajectory": task.trajectory,
        "max_tokens": task.max_tokens,
    }
