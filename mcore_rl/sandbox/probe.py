"""Which tier works on this machine: each is tried with a program that tries to get out."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import secrets
import socket
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mcore_rl.config.schema import SandboxSettings
from mcore_rl.sandbox.call import SandboxError, call
from mcore_rl.sandbox.tiers import Tier, candidates

_LIMITS = SandboxSettings(wall_s=60.0, cpu_s=30.0)  # of a program that takes none of it
# Tells what it could do; reads where to try it from stdin.
_ESCAPE = """
import json, os, signal, socket, sys

place = json.loads(sys.stdin.read())
done = []

def attempt(what, action):
    try:
        action()
        done.append(what)
    except Exception:
        pass

def connect():
    socket.create_connection(("127.0.0.1", place["port"]), timeout=5).close()

open("scratch", "w").write("mine")
attempt("connect to a port of the machine", connect)
attempt("read a file outside", lambda: open(place["file"]).read())
attempt("write a file outside", lambda: open(place["file"] + ".new", "x"))
attempt("read the environment of its caller", lambda: open(place["environ"]).read())
print(json.dumps(done), flush=True)
os.kill(place["pid"], signal.SIGKILL)  # of another process; where pids are its own, maybe itself
"""


def working_tier(setting: str) -> Tier:
    """The best tier that contains a program here, of those that `tier` of the settings allows.

    Raises:
        SandboxError: there is none.
    """
    found = probed(setting)
    if isinstance(found, Tier):
        return found
    raise SandboxError(
        f"no sandbox works here: {'; '.join(found)}. Install bubblewrap (the Debian package "
        "bubblewrap) where namespaces are allowed, or use Linux 6.2 with Landlock; tier=unsafe "
        "runs programs of the model without any containment"
    )


@functools.cache
def probed(setting: str) -> Tier | tuple[str, ...]:
    """The best tier that works, or why each does not."""
    reasons = []
    for tier in candidates(setting):
        reason = "" if tier.name == "unsafe" else why_not(tier)
        if not reason:
            return tier
        reasons.append(f"{tier}: {reason}")
    return tuple(reasons)


def why_not(tier: Tier) -> str:
    """Why a tier cannot be used; empty when it can. Takes a few tenths of a second."""
    with (
        tempfile.TemporaryDirectory(prefix="mcore-rl-probe-") as folder,
        socket.create_server(("127.0.0.1", 0)) as server,
        subprocess.Popen(["sleep", "600"], env={"SECRET": secrets.token_hex()}) as other,
        ThreadPoolExecutor(1) as thread,  # the caller may have an event loop
    ):
        file = Path(folder, "file")
        file.write_text("secret")
        os.chmod(folder, 0o755)  # so that it is not the rights of a user that protect it
        place = {
            "port": server.getsockname()[1],
            "file": str(file),
            "pid": other.pid,
            "environ": f"/proc/{other.pid}/environ",
        }
        try:
            running = call(tier, _LIMITS, _ESCAPE, json.dumps(place), {})
            result = thread.submit(asyncio.run, running).result()
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
