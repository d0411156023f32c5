"""Calls of rewards with a time limit, in separate processes or in threads.

A process calls one reward, and is killed and replaced when a call takes too long. (math-verify's
own limit is a signal, which only a main thread gets, and never while code does not return to the
interpreter.) A process runs this module, and reads and writes a line of JSON per message:

{"name": ..., "settings": {...}, "modules": [...], "memory_mb": ..., "objects": {...},
"path": [...]}                          the first message; the answer is {}, or {"error": ...}
{"given": [...], "optional": {...}, "timeout_s": ...}
                                        a call; the answer is {"error": ...} or
{"result": ..., "errors": {...}}        with the `errors` of items of a batched result
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import importlib
import json
import os
import resource
import signal
import sys
import threading
from asyncio.subprocess import PIPE, Process
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import psutil

from mcore_rl.config.python_objects import export_objects, import_objects
from mcore_rl.rewards.registry import describe_exception, get_reward, shorten_repr

T = TypeVar("T")

START_S = 120.0  # for a process to start and import its modules
_MAX_ANSWER = 1 << 28  # characters


class CallTimeoutError(RuntimeError):
    """A call took longer than its limit."""


class ProcessStoppedError(CallTimeoutError):
    """A call took longer than its limit, in a process that a signal had stopped."""


class ProcessDiedError(RuntimeError):
    """The process of a call ended."""

    def __init__(self, status: int) -> None:
        super().__init__(f"ended its process with status {status}")
        self.is_killed = status < 0  # by a signal, possibly from outside


class NotLoadedError(RuntimeError):
    """A process cannot import its reward; the message says why."""


class CallError(RuntimeError):
    """A function raised; the message says what."""


async def wait_within(timeout_s: float, work: Awaitable[T]) -> T:
    """Return the result of `work`; CallTimeoutError after timeout_s.

    A TimeoutError that `work` raises is passed on.
    """
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            return await work
    except TimeoutError:
        if limit.expired():
            raise CallTimeoutError(f"took longer than {timeout_s:g} s") from None
        raise


async def call_in_thread(call: Callable[[], T]) -> T:
    """Call a blocking function in a new thread. If the wait is cancelled, the thread goes on.

    Raises:
        CallError: the function raised, also SystemExit.
    """
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # so that a time limit cannot cancel it

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 (SystemExit must not end the worker)
            future.set_exception(CallError(describe_exception(error)))

    threading.Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(future)


class RewardProcessPool:
    """Up to `limit` processes of a reward, started on demand. All calls are of one event loop."""

    def __init__(self, reward: Mapping[str, Any], limit: int) -> None:
        """Take the first message of the processes: name, settings, modules, memory_mb, objects."""
        self._reward = reward
        self._idle: list[Process] = []
        self._slots = asyncio.Semaphore(limit)

    async def call(
        self, given: Sequence[Any], optional: Mapping[str, Any], timeout_s: float
    ) -> dict[str, Any]:
        """Call the reward with arguments by position and by name; return the answer.

        Waiting for a process does not count. A call whose process is killed or stopped by a signal,
        as by the kernel when memory is short, is made once more.

        Raises:
            CallTimeoutError: after timeout_s; the process has been killed.
            ProcessDiedError: the call ended its process.
            NotLoadedError: a process has started, but cannot import the reward.
            RuntimeError: no process could be started.
        """
        message = {"given": given, "optional": optional, "timeout_s": timeout_s}
        async with self._slots:
            try:
                return await self._call(message, timeout_s)
            except (ProcessDiedError, ProcessStoppedError) as error:
                if isinstance(error, ProcessDiedError) and not error.is_killed:
                    raise
                return await self._call(message, timeout_s)

    async def _call(self, message: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        process = await self._get_process()
        try:
            answer = await wait_within(timeout_s, _exchange(process, message))
        except CallTimeoutError as error:
            is_stopped = _is_stopped(process.pid)
            await _kill(process)
            if is_stopped:
                raise ProcessStoppedError(f"{error}, stopped by a signal") from None
            raise
        except BaseException:  # also if the call is cancelled: the process would go on
            await _kill(process)
            raise
        self._idle.append(process)
        return answer

    async def close(self) -> None:
        """Kill all processes."""
        while self._idle:
            await _kill(self._idle.pop())

    async def _get_process(self) -> Process:
        """Return an idle process, or start one and let it import the reward."""
        while self._idle:
            if (process := self._idle.pop()).returncode is None:
                return process
        program = [sys.executable, "-m", "mcore_rl.rewards.processes"]
        process = await asyncio.create_subprocess_exec(
            *program, stdin=PIPE, stdout=PIPE, limit=_MAX_ANSWER
        )
        try:
            first_message = {**self._reward, "path": sys.path}
            answer = await wait_within(START_S, _exchange(process, first_message))
            if "error" in answer:
                raise NotLoadedError(
                    f"cannot be imported by a process of its own: {answer['error']}. The server, "
                    "which could import it, calls a function with @run_in_thread of "
                    "mcore_rl.rewards.registry itself"
                )
        except BaseException as error:
            await _kill(process)
            if isinstance(error, CallTimeoutError | ProcessDiedError):
                raise RuntimeError(f"the start of its process {error}; see the log") from error
            raise
        return process


async def _exchange(process: Process, message: Mapping[str, Any]) -> dict[str, Any]:
    """Send a message to a process and return its answer; ProcessDiedError if it ends."""
    assert process.stdin is not None and process.stdout is not None  # they are pipes
    with contextlib.suppress(ConnectionError):  # the process has died; no answer follows
        process.stdin.write(json.dumps(message, default=str).encode() + b"\n")
        await process.stdin.drain()
    line = await process.stdout.readline()
    if not line.endswith(b"\n"):
        raise ProcessDiedError(await process.wait())
    answer: dict[str, Any] = json.loads(line)
    return answer


def _is_stopped(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False


async def _kill(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()


def main() -> None:
    """Run a process: load a reward, then answer calls until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # prints of a reward go to stderr
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the rollout worker ends this process
    message = json.loads(sys.stdin.readline())
    try:
        reward = _load_reward(message)
    except Exception as error:  # noqa: BLE001 (reported to the rollout worker)
        reason = f"{type(error).__name__}: {error}"
        print(json.dumps({"error": reason}), file=answers, flush=True)
        return
    if message["memory_mb"] is not None:
        resource.setrlimit(resource.RLIMIT_AS, (message["memory_mb"] << 20,) * 2)
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        message = json.loads(line)
        # If the rollout worker is killed, it cannot kill this process; then the alarm ends it.
        signal.setitimer(signal.ITIMER_REAL, message["timeout_s"] + 5)
        try:
            answer = _encode(reward(*message["given"], **message["optional"]))
        except MemoryError:
            raise  # ends this process, as a time limit does
        except Exception as error:  # noqa: BLE001 (reported to the rollout worker)
            answer = json.dumps({"error": describe_exception(error)})
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(answer, file=answers, flush=True)


def encode_objects(name: str) -> dict[str, str]:
    """Return the function of a Python session, if `name` is that of one, as text for JSON."""
    pickles = export_objects(name)
    return {name: base64.b64encode(data).decode() for name, data in pickles.items()}


def _load_reward(message: Mapping[str, Any]) -> Callable[..., Any]:
    sys.path += [folder for folder in message["path"] if folder not in sys.path]
    import_objects({n: base64.b64decode(data) for n, data in message["objects"].items()})
    for module in message["modules"]:
        importlib.import_module(module)
    return get_reward(message["name"], message["settings"])


def _encode(result: object) -> str:
    """Encode the answer to a call; exceptions among the items of a batched result are errors."""
    errors: dict[int, str] = {}
    if isinstance(result, list | tuple):
        errors = {
            number: describe_exception(item)
            for number, item in enumerate(result)
            if isinstance(item, Exception)
        }
        result = [None if number in errors else item for number, item in enumerate(result)]
    return json.dumps({"result": result, "errors": errors}, default=_encode_value)


def _encode_value(value: Any) -> float | str:
    """Return a value that JSON lacks as a number, if it is one, as of numpy, or as its repr."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return shorten_repr(value)


if __name__ == "__main__":
    main()
