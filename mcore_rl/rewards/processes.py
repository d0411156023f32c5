"""Processes that call one reward, each killed and replaced when a call takes too long.

math-verify's own limit is a signal, which only a main thread gets, and which code that does not
return to the interpreter never sees. A process that is killed has no such gaps.

A process gets a line of JSON for each call and answers with one: see reward_process.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

START_S = 120.0  # for a process to start and to import what it needs
_LONGEST = 1 << 28  # characters of an answer


class TooLateError(RuntimeError):
    """A call took longer than its limit."""


class ProcessDiedError(RuntimeError):
    """The process of a call ended."""

    def __init__(self, status: int) -> None:
        super().__init__(f"ended its process with status {status}")
        self.is_killed = status < 0  # by a signal, perhaps from outside


class NotLoadedError(RuntimeError):
    """A process cannot import what it is to call; the message says why."""


async def within(timeout_s: float, work: Awaitable[T]) -> T:
    """Its result; TooLateError after timeout_s, which a TimeoutError of its own is not."""
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            return await work
    except TimeoutError:
        if limit.expired():
            raise TooLateError(f"took longer than {timeout_s:g} s") from None
        raise


class RewardProcesses:
    """Up to `limit` processes, started as calls need them. All calls are of one event loop."""

    def __init__(self, reward: Mapping[str, Any], limit: int) -> None:
        """`reward`: the name, settings and modules, as reward_process.py reads them."""
        self._reward = reward
        self._idle: list[Process] = []
        self._places = asyncio.Semaphore(limit)

    async def call(
        self, given: Sequence[Any], optional: Mapping[str, Any], timeout_s: float
    ) -> dict[str, Any]:
        """What reward_process.py answers to one call, with arguments by place and by name.

        Time spent waiting for a process does not count. A call whose process was killed, as the
        kernel does when memory is short, is made once more.

        Raises:
            TooLateError: after timeout_s; the process has been killed.
            ProcessDiedError: the call ended its process.
            NotLoadedError: a process has started, but cannot import the reward.
            RuntimeError: none could be started.
        """
        asked = {"given": given, "optional": optional, "timeout_s": timeout_s}
        async with self._places:
            try:
                return await self._call(asked, timeout_s)
            except ProcessDiedError as error:
                if not error.is_killed:
                    raise
                return await self._call(asked, timeout_s)

    async def _call(self, asked: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        process = await self._process()
        try:
            found = await within(timeout_s, _answer(process, asked))
        except BaseException:  # also where the call is cancelled: it would go on
            await _end(process)
            raise
        self._idle.append(process)
        return found

    async def close(self) -> None:
        while self._idle:
            await _end(self._idle.pop())

    async def _process(self) -> Process:
        while self._idle:
            if (process := self._idle.pop()).returncode is None:
                return process
        program = [sys.executable, "-m", "mcore_rl.rewards.reward_process"]
        process = await asyncio.create_subprocess_exec(
            *program, stdin=PIPE, stdout=PIPE, limit=_LONGEST
        )
        try:
            found = await within(START_S, _answer(process, {**self._reward, "path": sys.path}))
            if "error" in found:
                raise NotLoadedError(
                    f"cannot be imported by a process of its own: {found['error']}. In the server, "
                    "which could, a function with @in_thread of mcore_rl.rewards.base is called"
                )
        except BaseException as error:
            await _end(process)
            if isinstance(error, TooLateError | ProcessDiedError):
                raise RuntimeError(f"the start of its process {error}; see the log") from error
            raise
        return process


async def _answer(process: Process, asked: Mapping[str, Any]) -> dict[str, Any]:
    assert process.stdin is not None and process.stdout is not None  # they are pipes
    with contextlib.suppress(ConnectionError):  # the process has died; it has no answer either
        process.stdin.write(json.dumps(asked, default=str).encode() + b"\n")
        await process.stdin.drain()
    line = await process.stdout.readline()
    if not line.endswith(b"\n"):
        raise ProcessDiedError(await process.wait())
    found: dict[str, Any] = json.loads(line)
    return found


async def _end(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()
