"""One call of a sandbox, through a supervisor of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import warnings
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from mcore_rl.config.schema import SandboxSettings
from mcore_rl.sandbox.tiers import Tier, request

_MAIN = "main.py"  # the file that Python source is run from
_EXTRA_S = 30.0  # to start and to clean up on a busy machine, beyond the limit on wall time
_SUPERVISOR = [
    getattr(sys, "_base_executable", sys.executable),
    *("-I", "-S", str(Path(__file__).with_name("supervisor.py"))),
]


class SandboxError(RuntimeError):
    """There is no sandbox, or it failed; the program has not run."""


@dataclass(frozen=True, slots=True)
class SandboxResult:
    """What a program did.

    status: ok, error (an exit code above 0), or what ended it: timeout (wall or CPU time), memory,
    output, processes, disk, or killed (a signal). memory is also an uncaught MemoryError of Python.
    exit_code: 128 + n for a signal n, as in a shell.
    stdout, stderr: as UTF-8, with what is not replaced; cut off at the limit on both together.
    wall_s, cpu_s: of the call, with the start of the sandbox.
    """

    status: str
    exit_code: int
    stdout: str
    stderr: str
    wall_s: float
    cpu_s: float


async def call(
    tier: Tier,
    settings: SandboxSettings,
    program: Sequence[str] | str,
    stdin: str,
    files: Mapping[str, str],
) -> SandboxResult:
    """One call in a tier, whether or not that works here. Raises as Sandbox.run."""
    if isinstance(program, str):
        files, program = {**files, _MAIN: program}, [sys.executable, _MAIN]
    for name in files:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.name:
            raise ValueError(f"files[{name!r}]; allowed: a relative path without '..'")
    try:
        asked = json.dumps(request(tier, settings, program, stdin, files)).encode() + b"\n"
    except OSError as error:
        raise SandboxError(f"the sandbox {tier} cannot be made: {error}") from error
    process = await asyncio.create_subprocess_exec(
        *_SUPERVISOR, stdin=PIPE, stdout=PIPE, start_new_session=True
    )
    limit_s = settings.wall_s + _EXTRA_S
    try:
        async with asyncio.timeout(limit_s):
            answer = await _answer(process, asked)
    except TimeoutError:
        raise SandboxError(f"the sandbox did not answer in {limit_s:g} s") from None
    finally:
        await asyncio.shield(_ended(process))
    if "error" in answer:
        raise SandboxError(f"the sandbox {tier} cannot be made: {answer['error']}")
    if survivors := answer.pop("survivors"):
        warnings.warn(f"{survivors} processes of a sandbox outlive SIGKILL", stacklevel=2)
    return SandboxResult(**answer)


async def _answer(process: Process, asked: bytes) -> dict[str, Any]:
    assert process.stdin is not None and process.stdout is not None  # they are pipes
    with contextlib.suppress(ConnectionError):  # it has died, and has no answer either
        process.stdin.write(asked)
        await process.stdin.drain()
    told = await process.stdout.read()
    answer: dict[str, Any] = json.loads(told or '{"error": "its supervisor has died"}')
    return answer


async def _ended(process: Process) -> None:
    """Tells the supervisor to end the call, which it does in a moment; or ends it."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        async with asyncio.timeout(_EXTRA_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
