"""The process that runs an environment of verifiers, in an interpreter of its own.

The pins of verifiers and of this package conflict. bridge/mcore_rl_bridge.py is the program, and
says which requests it answers.
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

from mcore_rl.agents.program import build_child_environment, parse_variable_names
from mcore_rl.config.checks import check_at_least, check_positive
from mcore_rl.config.errors import ConfigError

_PROGRAM = Path(__file__).parent / "bridge" / "mcore_rl_bridge.py"
_VERSION = "0.4."
_MAX_LINE_BYTES = 1 << 28
_CLOSE_S = 20.0  # for the process to end; it ends by itself after 15
_STACKS_S = 1.0  # for a process that hangs to print its stacks
_MAX_SHOWN = 3000  # characters of the end of its stderr, in errors


@dataclass(frozen=True)
class VerifiersSettings:
    """Settings of agent.loop=verifiers."""

    environment: str  # as verifiers names it: an installed package, or one in `folders`
    args: str = ""  # its settings in verifiers: a JSON object, or a .toml file with a table [env]
    interpreter: str = ".venv-verifiers/bin/python"  # launch/setup_env.sh verifiers makes it
    folders: str = ""  # with packages that are not installed; several have a : between them
    variables: str = ""  # more environment variables that it gets; commas between names
    start_timeout_s: float = 180.0  # for the process to load the environment
    answer_timeout_s: float = 120.0  # for its event loop to answer a ping
    max_restarts: int = 3  # per server, of a process that has ended or hangs

    def __post_init__(self) -> None:
        if not self.environment:
            raise ConfigError("environment=''; allowed: a package with an environment")
        self.parse_args()
        parse_variable_names(self.variables)
        if not os.access(self.interpreter_path, os.X_OK):
            raise ConfigError(
                f"interpreter={self.interpreter!r} is no program; "
                "`bash launch/setup_env.sh verifiers` makes .venv-verifiers/bin/python"
            )
        for folder in filter(None, self.folders.split(":")):
            if not Path(folder).is_dir():
                raise ConfigError(f"folders={self.folders!r}: there is no folder {folder!r}")
        for name in ("start_timeout_s", "answer_timeout_s"):
            check_positive(name, getattr(self, name))
        check_at_least("max_restarts", self.max_restarts, 0)

    def parse_args(self) -> dict[str, Any]:
        """Read `args`; raise ConfigError if they cannot be read."""
        allowed = "allowed: a JSON object, or a .toml file with a table [env]"
        try:
            if self.args.endswith(".toml"):
                args = tomllib.loads(Path(self.args).read_text(encoding="utf-8")).get("env")
            else:
                args = json.loads(self.args or "{}")
        except (OSError, ValueError) as error:
            raise ConfigError(f"args={self.args!r} cannot be read: {error}; {allowed}") from error
        if not isinstance(args, dict):
            raise ConfigError(f"args={self.args!r}; {allowed}")
        return args

    @property
    def interpreter_path(self) -> str:
        """The absolute path of the interpreter; links stay, which virtual environments need."""
        return str(Path(self.interpreter).absolute())

    @property
    def python_path(self) -> str:
        """The folders as absolute paths, for PYTHONPATH."""
        folders = filter(None, self.folders.split(":"))
        return ":".join(str(Path(folder).absolute()) for folder in folders)


class BridgeError(RuntimeError):
    """The process of an environment ended, hangs, or cannot be started."""


class BridgeProcess:
    """The process of an environment. The first `start` or `ask` starts it, once.

    All calls are of one event loop.
    """

    def __init__(self, settings: VerifiersSettings, max_turns: int) -> None:
        self._settings, self._max_turns = settings, max_turns
        self._starting: asyncio.Task[dict[str, Any]] | None = None
        self._process: Process | None = None
        self._failure: BridgeError | None = None
        self._ids = count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._work: list[asyncio.Task[None]] = []
        self._stderr = ""  # its end

    @property
    def has_loaded(self) -> bool:
        """True if it has loaded its environment."""
        starting = self._starting
        if starting is None or not starting.done() or starting.cancelled():
            return False
        return starting.exception() is None

    async def start(self) -> dict[str, Any]:
        """Start the process, unless that is done; return its first answer.

        Raises:
            BridgeError: It cannot be started, or the environment cannot be loaded.
        """
        if self._starting is None:
            self._starting = asyncio.create_task(self._start_or_kill())
        # Shielded: other rollouts wait for it, too.
        ready: dict[str, Any] = await asyncio.shield(self._starting)
        return ready

    async def ask(self, op: str, **arguments: object) -> dict[str, Any]:
        """Send a request and return its answer. Cancelling the call cancels a rollout.

        Raises:
            BridgeError: The process has ended or hangs; every later call raises it, too.
        """
        await self.start()
        if self._failure is not None:
            raise self._failure
        number = next(self._ids)
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            await self._send({"id": number, "op": op, **arguments})
            return await answer
        except asyncio.CancelledError:
            if op == "run" and self._failure is None:
                self._write({"id": next(self._ids), "op": "cancel", "run": number})
            raise
        finally:
            del self._waiting[number]

    async def close(self) -> None:
        """End the process, and all that it has started."""
        if self._starting is not None and not self._starting.done():
            self._starting.cancel()
        self._failure = self._failure or BridgeError("the process of the environment was closed")
        process = self._process
        if process is not None and process.stdin is not None:
            process.stdin.close()
            with suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_S):
                    await _wait_for_exit(process)
        await self._kill()

    async def _start_or_kill(self) -> dict[str, Any]:
        try:
            return await self._start()
        except BaseException:
            await self._kill()
            raise

    async def _start(self) -> dict[str, Any]:
        settings = self._settings
        try:
            self._process = process = await asyncio.create_subprocess_exec(
                settings.interpreter_path,
                str(_PROGRAM),
                stdin=PIPE,
                stdout=PIPE,
                stderr=PIPE,
                env=build_child_environment(settings.variables)
                | {"PYTHONPATH": settings.python_path},
                start_new_session=True,
                limit=_MAX_LINE_BYTES,
            )
        except OSError as error:
            raise self._build_error(f"cannot be started: {error}") from error
        self._work.append(asyncio.create_task(self._read_stderr(process)))
        first = {
            "environment": settings.environment,
            "args": settings.parse_args(),
            "max_turns": self._max_turns,
        }
        await self._send(first)
        assert process.stdout is not None  # a pipe
        try:
            async with asyncio.timeout(settings.start_timeout_s):
                line = await process.stdout.readline()
        except TimeoutError:
            limit = f"{settings.start_timeout_s:g} s (agent.settings.start_timeout_s)"
            raise self._build_error(f"has not loaded its environment in {limit}") from None
        if not line:
            raise await self._build_end_error(process)
        ready: dict[str, Any] = json.loads(line)
        if "error" in ready:
            raise self._build_error(f"cannot load its environment: {ready['error']}")
        if not ready["version"].startswith(_VERSION):
            raise self._build_error(f"has verifiers {ready['version']}; allowed: {_VERSION}x")
        self._work += [
            asyncio.create_task(self._read_answers(process)),
            asyncio.create_task(self._watch(process)),
        ]
        return ready

    async def _send(self, request: dict[str, Any]) -> None:
        self._write(request)
        assert self._process is not None and self._process.stdin is not None
        with suppress(ConnectionError):  # it has ended, which _read_answers reports
            await self._process.stdin.drain()

    def _write(self, request: dict[str, Any]) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")

    async def _read_stderr(self, process: Process) -> None:
        assert process.stderr is not None
        while data := await process.stderr.read(1 << 16):
            self._stderr = (self._stderr + data.decode(errors="replace"))[-_MAX_SHOWN:]

    async def _read_answers(self, process: Process) -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            answer = json.loads(line)
            if (waiting := self._waiting.get(answer["id"])) and not waiting.done():
                waiting.set_result(answer)
        self._fail(await self._build_end_error(process))

    async def _watch(self, process: Process) -> None:
        """Ping the process while requests wait; kill it, with its stacks, if it does not answer.

        A rollout that blocks the event loop blocks all rollouts.
        """
        limit_s = self._settings.answer_timeout_s
        while True:
            await asyncio.sleep(limit_s / 4)
            if not self._waiting:
                continue
            try:
                async with asyncio.timeout(limit_s):
                    await self.ask("ping")
            except TimeoutError:
                process.send_signal(signal.SIGUSR2)
                await asyncio.sleep(_STACKS_S)
                limit = f"{limit_s:g} s (agent.settings.answer_timeout_s)"
                self._fail(self._build_error(f"hangs: it has not answered a ping in {limit}"))
                await self._kill()
                return
            except BridgeError:
                return

    def _fail(self, error: BridgeError) -> None:
        self._failure = self._failure or error
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(self._failure)

    async def _build_end_error(self, process: Process) -> BridgeError:
        await _wait_for_exit(process)
        await asyncio.wait(self._work[:1], timeout=_STACKS_S)  # the rest of its stderr
        return self._build_error(f"ended with status {process.returncode}")

    def _build_error(self, reason: str) -> BridgeError:
        stderr = f"; it said: {self._stderr.strip()}" if self._stderr.strip() else ""
        name = self._settings.environment
        return BridgeError(f"the process of the verifiers environment {name!r} {reason}{stderr}")

    async def _kill(self) -> None:
        if self._process is None:
            return
        with suppress(ProcessLookupError):  # children that it may have left behind
            os.killpg(self._process.pid, signal.SIGKILL)
        await _wait_for_exit(self._process)
        work = [task for task in self._work if task is not asyncio.current_task()]
        if work:
            await asyncio.wait(work, timeout=_STACKS_S)
        for task in work:
            task.cancel()


async def _wait_for_exit(process: Process) -> None:
    """Wait for the process only: Process.wait waits for children with its stdout, too."""
    while process.returncode is None:
        await asyncio.sleep(0.02)
