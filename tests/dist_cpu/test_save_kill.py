"""Saves that are killed at any moment: the newest whole checkpoint loads, with what was saved."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest
import tiny_models

from mcore_rl.checkpoint.run_checkpoints import steps_in
from tests.nightly import nightly

pytestmark = pytest.mark.ranks


class Saves:
    """Runs that save; see save_server.py."""

    def __init__(self) -> None:
        command = [sys.executable, Path(__file__).with_name("save_server.py")]
        streams: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._server = subprocess.Popen(command, text=True, **streams)
        self._stdin: IO[str] = self._server.stdin
        self._stdout: IO[str] = self._server.stdout
        self._session = 0  # of the last run
        assert self._stdout.readline() == "ready\n"

    def start(self, *order: object) -> list[int] | None:
        print(json.dumps(order), file=self._stdin, flush=True)
        found: list[int] | None = json.loads(self._stdout.readline())
        self._session = found[0] if found else 0
        return found

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self._session:
                os.killpg(self._session, signal.SIGKILL)

    def close(self) -> None:
        self.kill()
        self._stdin.close()
        self._server.wait()


@pytest.fixture(scope="module")
def saves() -> Iterator[Saves]:
    made = Saves()
    yield made
    made.close()


@pytest.mark.parametrize(
    ("num_ranks", "in_background", "num_kills"),
    [(1, False, 20), (1, True, 20), nightly((1, True, 100)), nightly((2, False, 50)),
     nightly((2, True, 50))],
)  # fmt: skip
def test_after_any_kill_the_newest_whole_checkpoint_loads(
    saves, tmp_path: Path, num_ranks, in_background, num_kills
):
    """Of two ranks one is killed, and the other a moment later."""
    model = tiny_models.save("qwen3_moe", tmp_path)
    folder, moments = tmp_path / "checkpoints", random.Random(num_kills + num_ranks)
    before, cut = 0, 0
    for kill in range(num_kills):
        run = saves.start(str(model), str(folder), num_ranks, in_background)
        assert run is not None, f"kill {kill}: the newest of {steps_in(folder)} does not load"
        _, step, *processes = run
        assert step >= before  # nothing that was whole is lost
        before = step
        time.sleep(moments.uniform(0, 1.5))
        if num_ranks > 1:
            os.kill(moments.choice(processes), signal.SIGKILL)
            time.sleep(0.05)
        saves.kill()
        cut += any(folder.glob(".step_*.partial"))
    assert before >= num_kills / 4
    assert cut >= num_kills / 4  # in the middle of a save
