"""The loop `program`: the policy answers any client of OpenAI's API."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import re
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

from mcore_rl.agents.loops import Agent, ApiSession, Task
from mcore_rl.config.checks import check_at_least
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.import_path import load_function
from mcore_rl.data.sample import Sample, TrajectoryStatus

TASK_FILE = "MCORE_RL_TASK"  # the variable with the path of the row
# A server has keys and tokens in its environment, and a program may run what a policy has written:
# a child process inherits these variables only, and those that a setting names.
INHERITED = (
    "CUDA_VISIBLE_DEVICES", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "LOGNAME", "PATH", "SHELL",
    "TERM", "TMPDIR", "TZ", "USER",
)  # fmt: skip
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LOOPBACK = "127.0.0.1,localhost"
_KILL_S = 10.0  # for a killed program to be gone
_MAX_SHOWN = 2000  # characters of the end of a program's output, in errors


@dataclass(frozen=True)
class ProgramSettings:
    """Settings of `agent.loop=program`: either `command` or `function`."""

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
        parse_variable_names(self.variables)
        if self.command and not self.split_command():
            raise ConfigError(f"command={self.command!r} names no program")
        if self.command and shutil.which(program := self.split_command()[0]) is None:
            raise ConfigError(f"command={self.command!r}: there is no program {program!r}")

    def split_command(self) -> list[str]:
        """Return the program and its arguments; raise ConfigError if a quote is not closed."""
        try:
            return shlex.split(self.command)
        except ValueError as error:
            raise ConfigError(f"command={self.command!r}: {error}") from error


class ProgramLoop:
    """Runs a program or a function for each trajectory, with the URL and key of a session.

    The reward is the one that the program posted, or that of config.reward for the content of the
    last answer. If the program fails after a limit has ended its session, the trajectory is
    truncated; any other failure fails the trajectory.
    """

    def __init__(self, agent: Agent, settings: ProgramSettings) -> None:
        self._agent, self._settings = agent, settings
        self._slots = asyncio.Semaphore(settings.at_once)
        self._run: Callable[[Task, ApiSession], Awaitable[None]] = self._run_command
        if settings.function:
            self._function = load_function("agent.settings.function", settings.function)
            self._run = self._call_function

    async def run(self, task: Task) -> list[Sample]:
        """Return the samples of one trajectory, and of the roles that the program opened."""
        async with self._agent.open_api_session(task) as main:
            try:
                await self._run(task, main)
            except Exception:  # of the user's program: raised again, unless a limit caused it
                if not any(session.is_cut_off for session in (main, *main.roles)):
                    raise
        samples: list[Sample] = []
        # A program may speak in roles only.
        used = [session for session in (main, *main.roles) if session.session.turns]
        for session in used or [main]:
            samples += await self._build_samples(task, session)
        return samples

    async def _build_samples(self, task: Task, api: ApiSession) -> list[Sample]:
        status: TrajectoryStatus = api.status or ("truncated" if api.is_cut_off else "finished")
        if api.reward is None and status == "aborted":
            return self._agent.build_samples(task, api.session, status, 0.0)
        if api.reward is None:
            return await self._agent.score_samples(task, api.session, status, api.text)
        return self._agent.build_samples(
            task, api.session, status, api.reward, api.turn_rewards, api.token_rewards
        )

    async def _call_function(self, task: Task, api: ApiSession) -> None:
        await self._function(task, api.base_url, api.api_key)

    async def _run_command(self, task: Task, api: ApiSession) -> None:
        """Run the program; raise RuntimeError unless it exits with status 0."""
        async with self._slots:
            with tempfile.TemporaryDirectory(prefix="program_") as folder:
                await self._run_in(Path(folder), task, api)

    async def _run_in(self, folder: Path, task: Task, api: ApiSession) -> None:
        row, output = folder / "task.json", folder / "output"
        row.write_text(json.dumps(describe_task(task)), encoding="utf-8")
        environment = build_child_environment(self._settings.variables) | {
            "OPENAI_BASE_URL": api.base_url,
            "OPENAI_API_KEY": api.api_key,
            TASK_FILE: str(row),
        }
        with output.open("wb") as file:
            process = await asyncio.create_subprocess_exec(
                *self._settings.split_command(),
                env=environment,
                stdin=DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        try:
            status = await process.wait()
        finally:
            with suppress(ProcessLookupError):  # children that it may have left behind
                os.killpg(process.pid, signal.SIGKILL)
            async with asyncio.timeout(_KILL_S):
                await process.wait()
        if status != 0:
            end = output.read_text(encoding="utf-8", errors="replace")[-_MAX_SHOWN:].strip()
            raise RuntimeError(f"{self._settings.command!r} exited with {status}: {end}")


def describe_task(task: Task) -> dict[str, Any]:
    """Return the JSON that a program reads about its trajectory."""
    return {
        "messages": [message.to_dict() for message in task.messages],
        "fields": dict(task.fields),
        "row": task.row,
        "group_id": task.group_id,
        "trajectory": task.trajectory,
        "max_tokens": task.max_tokens,
    }


def parse_variable_names(variables: str) -> list[str]:
    """Return the names in the setting `variables`, which has commas between them.

    Raises:
        ConfigError: One is no name, or of a variable that is not set.
    """
    names = [name.strip() for name in variables.split(",")] if variables else []
    for name in names:
        if not _VARIABLE.fullmatch(name) or name not in os.environ:
            raise ConfigError(
                f"variables={variables!r}: {name!r} is not set; allowed: names of environment "
                "variables of this process, with commas between them"
            )
    return names


def build_child_environment(variables: str) -> dict[str, str]:
    """Return the INHERITED variables that are set, and those that `variables` names.

    No proxy stands between the program and its server.

    Raises:
        ConfigError: As `parse_variable_names`.
    """
    names = (*INHERITED, *parse_variable_names(variables))
    environment = {name: os.environ[name] for name in names if name in os.environ}
    for name in ("NO_PROXY", "no_proxy"):
        environment[name] = ",".join(filter(None, (os.environ.get(name, ""), _LOOPBACK)))
    return environment
