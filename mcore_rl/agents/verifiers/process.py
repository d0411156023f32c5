"""The process that runs an environment of verifiers, in an interpreter of its own.

verifiers' pins and ours conflict. What is said is in bridge/mcore_rl_bridge.py.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import tomllib
from asyncio.subprocess import PIPE, Process
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from mcore_rl.agents.program import process_environment, variable_names
from mcore_rl.config.checks import at_least, positive
from mcore_rl.config.errors import ConfigError

_PROGRAM = Path(__file__).parent / "bridge" / "mcore_rl_bridge.py"
_VERSION = "0.4."
_MAX_LINE_BYTES = 1 << 28
_CLOSE_S = 20.0  # for a process that is asked to end; it ends by itself after 15
_STACKS_S = 1.0  # for a process that hangs to say where
_SHOWN = 3000  # characters of the end of what it said, in errors


class BridgeError(RuntimeError):
    """The process of an environment has ended, hangs, or cannot be started."""


class BridgeProcess:
    """Started by the first who asks, and once. All calls are of one event loop."""

    def __init__(self, settings: VerifiersSettings, max_turns: int) -> None:
        self._settings, self._max_turns = settings, max_turns
        self._starting: asyncio.Task[dict[str, Any]] | None = None
        self._process: Process | None = None
        self._failure: BridgeError | None = None
        self._ids = count(1)
        self._asked: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._work: list[asyncio.Task[None]] = []
        self._said = ""  # the end of its stderr

    @property
    def has_loaded(self) -> bool:
        """Whether its environment was there once."""
        starting = self._starting
        if starting is None or not starting.done() or starting.cancelled():
            return False
        return starting.exception() is None

    async def start(self) -> dict[str, Any]:
        """What the process says of itself.

        Raises:
            BridgeError: it cannot be started, or the environment cannot be loaded.
        """
        if self._starting is None:
            self._starting = asyncio.create_task(self._started())
        ready: dict[str, Any] = await asyncio.shield(self._starting)  # others wait for it, too
        return ready

    async def ask(self, op: str, **what: object) -> dict[str, Any]:
        """The answer. Where the call is cancelled, so is a rollout.

        Raises:
            BridgeError: the process has ended or hangs; so does every later call.
        """
        await self.start()
        if self._failure is not None:
            raise self._failure
        number = next(self._ids)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            await self._send({"id": number, "op": op, **what})
            found: dict[str, Any] = await answer
            return found
        except asyncio.CancelledError:
            if op == "run" and self._failure is None:
                self._write({"id": next(self._ids), "op": "cancel", "run": number})
            raise
        finally:
            del self._asked[number]

    async def close(self) -> None:
        """Ends the process, and all that it has started."""
        if self._starting is not None and not self._starting.done():
            self._starting.cancel()
        self._failure = self._failure or BridgeError("the process of the environment was closed")
        process = self._process
        if process is not None and process.stdin is not None:
            process.stdin.close()
            with suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_S):
                    await _exited(process)
        await self._kill()

    async def _started(self) -> dict[str, Any]:
        try:
            return await self._start()
        except BaseException:
            await self._kill()
            raise

    async def _start(self) -> dict[str, Any]:
        settings = self._settings
        try:
            self._process = process = await asyncio.create_subprocess_exec(
                settings.interpreter_path(),
                str(_PROGRAM),
                stdin=PIPE,
                stdout=PIPE,
                stderr=PIPE,
                env=process_environment(settings.variables)
                | {"PYTHONPATH": settings.python_path()},
                start_new_session=True,
                limit=_MAX_LINE_BYTES,
            )
        except OSError as error:
            raise self._error(f"cannot be started: {error}") from error
        self._work.append(asyncio.create_task(self._listen(process)))
        first = {
            "environment": settings.environment,
            "args": settings.parsed_args(),
            "max_turns": self._max_turns,
        }
        await self._send(first)
        assert process.stdout is not None  # a pipe
        try:
            async with asyncio.timeout(settings.start_timeout_s):
                line = await process.stdout.readline()
        except TimeoutError:
            limit = f"{settings.start_timeout_s:g} s (agent.settings.start_timeout_s)"
            raise self._error(f"has not loaded its environment in {limit}") from None
        if not line:
            raise await self._ended(process)
        ready: dict[str, Any] = json.loads(line)
        if "error" in ready:
            raise self._error(f"cannot load its environment: {ready['error']}")
        if not ready["version"].startswith(_VERSION):
            raise self._error(f"has verifiers {ready['version']}; allowed: {_VERSION}x")
        self._work += [
            asyncio.create_task(self._take_answers(process)),
            asyncio.create_task(self._watch(process)),
        ]
        return ready

    async def _send(self, what: dict[str, Any]) -> None:
        self._write(what)
        assert self._process is not None and self._process.stdin is not None
        with suppress(ConnectionError):  # it has ended, which is told by the one who listens
            await self._process.stdin.drain()

    def _write(self, what: dict[str, Any]) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(json.dumps(what).encode() + b"\n")

    async def _listen(self, process: Process) -> None:
        assert process.stderr is not None
        while said := await process.stderr.read(1 << 16):
            self._said = (self._said + said.decode(errors="replace"))[-_SHOWN:]

    async def _take_answers(self, process: Process) -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            answer = json.loads(line)
            if (waiting := self._asked.get(answer["id"])) and not waiting.done():
                waiting.set_result(answer)
        self._fail(await self._ended(process))

    async def _watch(self, process: Process) -> None:
        """A process whose event loop stands still answers nobody: it says where, and is ended."""
        limit_s = self._settings.answer_timeout_s
        while True:
            await asyncio.sleep(limit_s / 4)
            if not self._asked:
                continue
            try:
                async with asyncio.timeout(limit_s):
                    await self.ask("ping")
            except TimeoutError:
                process.send_signal(signal.SIGUSR2)
                await asyncio.sleep(_STACKS_S)
                limit = f"{limit_s:g} s (agent.settings.answer_timeout_s)"
                self._fail(self._error(f"hangs: it has not answered a ping in {limit}"))
                await self._kill()
                return
            except BridgeError:
                return

    def _fail(self, error: BridgeError) -> None:
        self._failure = self._failure or error
        for waiting in self._asked.values():
            if not waiting.done():
                waiting.set_exception(self._failure)

    async def _ended(self, process: Process) -> BridgeError:
        await _exited(process)
        await asyncio.wait(self._work[:1], timeout=_STACKS_S)  # the rest of what it said
        return self._error(f"ended with status {process.returncode}")

    def _error(self, told: str) -> BridgeError:
        said = f"; it said: {self._said.strip()}" if self._said.strip() else ""
        name = self._settings.environment
        return BridgeError(f"the process of the verifiers environment {name!r} {told}{said}")

    async def _kill(self) -> None:
        if self._process is None:
            return
        with suppress(ProcessLookupError):  # its group, which it may have left behind
            os.killpg(self._process.pid, signal.SIGKILL)
        await _exited(self._process)
        others = [task for task in self._work if task is not asyncio.current_task()]
        if others:
            await asyncio.wait(others, timeout=_STACKS_S)
        for task in others:
            task.cancel()


async def _exited(process: Process) -> None:
    """Process.wait would wait for its children, too, where they have its stdout."""
    while process.returncode is None:
        await asyncio.sleep(0.02)


@dataclass(frozen=True)
class VerifiersSettings:
    environment: str  # as verifiers names it: an installed package, or one in `folders`
    args: str = ""  # verifiers' settings of it: a JSON object, or a .toml file with a table [env]
    interpreter: str = ".venv-verifiers/bin/python"  # launch/setup_env.sh verifiers makes it
    folders: str = ""  # with packages that are not installed; several have a : between them
    variables: str = ""  # more environment variables that it gets; commas between names
    start_timeout_s: float = 180.0  # for the process to load the environment
    answer_timeout_s: float = 120.0  # that its event loop may stand still
    max_restarts: int = 3  # of a process that has ended or hangs, of each server

    def __post_init__(self) -> None:
        if not self.environment:
            raise ConfigError("environment=''; allowed: a package with an environment")
        self.parsed_args()
        variable_names(self.variables)
        if not os.access(self.interpreter_path(), os.X_OK):
            raise ConfigError(
                f"interpreter={self.interpreter!r} is no program; "
                "`bash launch/setup_env.sh verifiers` makes .venv-verifiers/bin/python"
            )
        for folder in filter(None, self.folders.split(":")):
            if not Path(folder).is_dir():
                raise ConfigError(f"folders={self.folders!r}: there is no folder {folder!r}")
        for name in ("start_timeout_s", "answer_timeout_s"):
            positive(name, getattr(self, name))
        at_least("max_restarts", self.max_restarts, 0)

    def parsed_args(self) -> dict[str, Any]:
        """Raises ConfigError where they cannot be read."""
        allowed = "allowed: a JSON object, or a .toml file with a table [env]"
        try:
            if self.args.endswith(".toml"):
                found = tomllib.loads(Path(self.args).read_text(encoding="utf-8")).get("env")
            else:
                found = json.loads(self.args or "{}")
        except (OSError, ValueError) as error:
            raise ConfigError(f"args={self.args!r} cannot be read: {error}; {allowed}") from error
        if not isinstance(found, dict):
            raise ConfigError(f"args={self.args!r}; {allowed}")
        return found

    def interpreter_path(self) -> str:
        return str(Path(self.interpreter).absolute())  # a link of an environment is not followed

    def python_path(self) -> str:
        return ":".join(str(Path(one).absolute()) for one in filter(None, self.folders.split(":")))
