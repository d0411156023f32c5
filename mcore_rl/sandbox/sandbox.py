"""Sandbox for programs of a model: no network, a scratch folder, limits on time and memory."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import warnings
from asyncio.subprocess import PIPE, Process
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from mcore_rl.config.checks import check_path
from mcore_rl.config.event_loop import run_coroutine
from mcore_rl.config.schema import SandboxSettings
from mcore_rl.sandbox.tiers import Tier, build_request, list_candidates

_MAIN = "main.py"  # file of a program given as source
_EXTRA_S = 30.0  # beyond wall_s, to start and to clean up on a busy machine
_SUPERVISOR = [
    getattr(sys, "_base_executable", sys.executable),
    *("-I", "-S", str(Path(__file__).with_name("supervisor.py"))),
]
_PROBE_SETTINGS = SandboxSettings(wall_s=60.0, cpu_s=30.0)
# Reads paths and ids from stdin, tries to escape, and prints the attempts that succeeded.
_ESCAPE = """
import json, os, signal, socket, sys

place = json.loads(sys.stdin.read())
done = []

def attempt(what, action):
    try:
        action()
        done.append(what)
    except Exception:  # denied, as it must be
        pass

def connect():
    socket.create_connection(("127.0.0.1", place["port"]), timeout=5).close()

open("scratch", "w").write("mine")
attempt("connect to a port of the machine", connect)
attempt("read a file outside", lambda: open(place["file"]).read())
attempt("write a file outside", lambda: open(place["file"] + ".new", "x"))
attempt("read the environment of its caller", lambda: open(place["environ"]).read())
print(json.dumps(done), flush=True)
os.kill(place["pid"], signal.SIGKILL)  # another process, or in a pid namespace maybe itself
"""


class SandboxError(RuntimeError):
    """No sandbox works, or it failed; the program did not run."""


@dataclass(frozen=True, slots=True)
class SandboxResult:
    """Result of a program.

    status: ok, error (an exit code above 0), or the reason of its end: timeout (wall or CPU time),
        memory (also an uncaught MemoryError of Python), output, processes, disk, or killed (a
        signal).
    exit_code: 128 + n for a signal n, as in a shell.
    stdout, stderr: UTF-8 with invalid bytes replaced, truncated at the limit on both together.
    wall_s, cpu_s: of the call, with the start of the sandbox.
    """

    status: str
    exit_code: int
    stdout: str
    stderr: str
    wall_s: float
    cpu_s: float


class Sandbox:
    """Runs a program per call.

    When a call returns, raises or is cancelled, or its caller dies, all processes of the program
    are dead and its scratch folder is gone. docs/sandbox.md says what each tier contains.
    """

    def __init__(self, settings: SandboxSettings | None = None, max_parallel: int = 4) -> None:
        """Find the tier that works here; the result is cached in the process.

        Args:
            settings: Tier and limits; None: the defaults.
            max_parallel: Limit of concurrent calls of `run_async`.

        Raises:
            SandboxError: no tier works, with the reasons.
        """
        self._settings = settings or SandboxSettings()
        self.tier: Tier = find_working_tier(self._settings.tier)
        self._slots = asyncio.Semaphore(max_parallel)

    def run(
        self,
        program: Sequence[str] | str,
        *,
        stdin: str = "",
        files: Mapping[str, str] | None = None,
    ) -> SandboxResult:
        """Run a command, or Python source with the packages of this environment.

        It blocks the event loop of its thread, if there is one; see `run_async`.

        Args:
            program: Command and arguments, or the source of a Python program.
            stdin: Text on its stdin.
            files: Texts by relative path, to write in its working directory, the scratch folder.

        Raises:
            SandboxError: the sandbox could not be made.
            ValueError: a path in `files` leads out of the scratch folder.
        """
        return run_coroutine(run_in_tier(self.tier, self._settings, program, stdin, files or {}))

    async def run_async(self, program: Sequence[str] | str, *, stdin: str = "") -> SandboxResult:
        """Run as `run` does, without blocking the event loop. Waiting for a slot is not limited."""
        async with self._slots:
            return await run_in_tier(self.tier, self._settings, program, stdin, {})


def find_working_tier(setting: str) -> Tier:
    """Return the best tier that works here among those that the setting `tier` allows.

    Raises:
        SandboxError: there is none.
    """
    result = probe_tiers(setting)
    if isinstance(result, Tier):
        return result
    raise SandboxError(
        f"no sandbox works here: {'; '.join(result)}. Install bubblewrap (the Debian package "
        "bubblewrap) where namespaces are allowed, or use Linux 6.2 with Landlock; tier=unsafe "
        "runs programs of the model without any containment"
    )


@functools.cache
def probe_tiers(setting: str) -> Tier | tuple[str, ...]:
    """Return the best tier that works, or why each does not."""
    reasons = []
    for tier in list_candidates(setting):
        reason = "" if tier.name == "unsafe" else check_tier(tier)
        if not reason:
            return tier
        reasons.append(f"{tier}: {reason}")
    return tuple(reasons)


def check_tier(tier: Tier) -> str:
    """Run a program that tries to escape; return why the tier cannot be used, "" if it can.

    Takes a few tenths of a second.
    """
    with (
        tempfile.TemporaryDirectory(prefix="mcore-rl-probe-") as folder,
        socket.create_server(("127.0.0.1", 0)) as server,
        subprocess.Popen(["sleep", "600"], env={"SECRET": secrets.token_hex()}) as other,
    ):
        file = Path(folder, "file")
        file.write_text("secret")
        os.chmod(folder, 0o755)  # so that file permissions do not protect it
        place = {
            "port": server.getsockname()[1],
            "file": str(file),
            "pid": other.pid,
            "environ": f"/proc/{other.pid}/environ",
        }
        try:
            running = run_in_tier(tier, _PROBE_SETTINGS, _ESCAPE, json.dumps(place), {})
            result = run_coroutine(running)
            is_alive = other.poll() is None
        except SandboxError as error:
            return str(error)
        finally:
            other.kill()
    try:
        escapes = json.loads(result.stdout) + ([] if is_alive else ["end another process"])
    except ValueError:
        return f"a program ended with status {result.exit_code}: {result.stderr.strip()[-300:]}"
    return f"a program in it could {', '.join(escapes)}" if escapes else ""


async def run_in_tier(
    tier: Tier,
    settings: SandboxSettings,
    program: Sequence[str] | str,
    stdin: str,
    files: Mapping[str, str],
) -> SandboxResult:
    """Run a program in a tier, without checking that the tier works. Raises as Sandbox.run."""
    if isinstance(program, str):
        files, program = {**files, _MAIN: program}, [sys.executable, _MAIN]
    _check_names(files)
    try:
        request = json.dumps(build_request(tier, settings, program, stdin, files)).encode() + b"\n"
    except OSError as error:
        raise SandboxError(f"the sandbox {tier} cannot be made: {error}") from error
    process = await asyncio.create_subprocess_exec(
        *_SUPERVISOR, stdin=PIPE, stdout=PIPE, start_new_session=True
    )
    limit_s = settings.wall_s + _EXTRA_S
    try:
        async with asyncio.timeout(limit_s):
            answer = await _exchange(process, request)
    except TimeoutError:
        raise SandboxError(f"the sandbox did not answer in {limit_s:g} s") from None
    finally:
        await asyncio.shield(_stop(process))
    if "error" in answer:
        raise SandboxError(f"the sandbox {tier} cannot be made: {answer['error']}")
    if survivors := answer.pop("survivors"):
        warnings.warn(f"{survivors} processes of a sandbox outlive SIGKILL", stacklevel=2)
    return SandboxResult(**answer)


def _check_names(names: Collection[str]) -> None:
    """Raise ValueError for a name that no file in the scratch folder can have."""
    for name in names:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or str(path) != name or not path.name:
            raise ValueError(
                f"files[{name!r}]; allowed: a relative path without '..', '.' or '/' at its end"
            )
        if "\0" in name:
            raise ValueError(f"files[{name!r}]; allowed: text without NUL characters")
        check_path("a name of files", name)
        if folder := next((str(part) for part in path.parents if str(part) in names), ""):
            raise ValueError(
                f"files[{name!r}] is in files[{folder!r}]; allowed: a file or a folder"
            )


async def _exchange(process: Process, request: bytes) -> dict[str, Any]:
    """Send the request to the supervisor and return its answer."""
    assert process.stdin is not None and process.stdout is not None  # they are pipes
    with contextlib.suppress(ConnectionError):  # it has died; no answer follows
        process.stdin.write(request)
        await process.stdin.drain()
    output = await process.stdout.read()
    answer: dict[str, Any] = json.loads(output or '{"error": "its supervisor has died"}')
    return answer


async def _stop(process: Process) -> None:
    """Tell the supervisor to end the call; kill it if it does not."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        async with asyncio.timeout(_EXTRA_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
