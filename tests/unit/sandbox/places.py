"""Places to run programs in tests: tiers, as several users, in containers."""

import functools
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.sandbox.sandbox import SandboxResult
from mcore_rl.sandbox.tiers import Tier

SCRIPT = Path(__file__).with_name("place.py")
SYSTEM_PYTHON = "/usr/bin/python3"  # which any user can run; the one of tests may be in /root
NOBODY = 65534
CONTAINER = "landlock in a container"
SECRET = "of the parent"
LIMITS = {"cpu_s": 5.0, "wall_s": 20.0, "memory_mb": 256, "scratch_mb": 8, "processes": 16}


@dataclass(frozen=True)
class Place:
    name: str
    tier: Tier
    python: str = sys.executable
    uid: int | None = None
    is_container: bool = False
    counts_processes: bool = True  # by the kernel; else by the supervisor, or there is only one

    def __str__(self) -> str:
        return self.name

    def run(
        self,
        program: str | Sequence[str],
        stdin: str = "",
        files: Mapping[str, str] | None = None,
        **limits: float,
    ) -> SandboxResult:
        request = {"settings": {**LIMITS, **limits}, "program": program, "stdin": stdin}
        answer = self.ask({**request, "tier": asdict(self.tier), "files": files or {}})
        assert "error" not in answer, answer
        return SandboxResult(**answer)

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        process = _process(self)
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    def start(self) -> subprocess.Popen[str]:
        place = json.dumps({"uid": self.uid, "is_container": self.is_container})
        command = [self.python, str(SCRIPT), place]
        environment = {"PATH": os.environ["PATH"], "SECRET": SECRET}
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)


@functools.cache
def _process(place: Place) -> subprocess.Popen[str]:
    """One for all calls in a place; ends with this one, whose pipe it reads."""
    return place.start()


BWRAP = Tier("bwrap", in_user_namespace=True)
PLACES = [
    Place("bwrap", BWRAP, counts_processes=os.geteuid() != 0),
    Place("bwrap as root", Tier("bwrap", own_uid=True)),
    Place("bwrap as nobody", BWRAP, SYSTEM_PYTHON, NOBODY),
    Place("bwrap in a cgroup", Tier("bwrap", own_uid=True, in_cgroup=True)),
    Place("bwrap without proc", Tier("bwrap", False, True), counts_processes=os.geteuid() != 0),
    Place("landlock", Tier("landlock")),
    Place("landlock in a cgroup", Tier("landlock", in_cgroup=True)),
    Place("landlock as root", Tier("landlock", own_uid=True), SYSTEM_PYTHON),
    Place(CONTAINER, Tier("landlock"), is_container=True),
    Place("landlock in a container as nobody", Tier("landlock"), SYSTEM_PYTHON, NOBODY, True),
]


@functools.cache
def explain_missing(place: Place) -> str:
    """Return why this machine does not have a place; "" if it has."""
    needs_root = place.uid is not None or place.tier.own_uid
    if needs_root and os.geteuid() != 0:
        return "only root can become another user"
    if place.python == SYSTEM_PYTHON:
        version = [place.python, "-c", "import sys; print(sys.version_info >= (3, 11))"]
        result = subprocess.run(version, capture_output=True, text=True, check=False)
        if result.stdout.strip() != "True":
            return f"{place.python} is not Python 3.11 or later"
    return str(place.ask({"tier": asdict(place.tier)})["why_not"])


def require(place: Place) -> Place:
    """Return the place; skip the test if this machine does not have it."""
    if reason := explain_missing(place):
        pytest.skip(f"{place}: {reason} (bubblewrap is the Debian package bubblewrap)")
    return place
