"""Saves that are killed at any moment: the newest whole checkpoint loads, with what was saved."""

from __future__ import annotations

import contextlib
import functools
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

from mcore_rl.checkpoint.run_checkpoints import list_steps
from tests.nightly import all_but
from tests.waiting import wait_until

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
        answer: list[int] | None = json.loads(self._stdout.readline())
        self._session = answer[0] if answer else 0
        return answer

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


def time_to_save(saves: Saves, order: list[object], folder: Path) -> float:
    """Seconds until the first checkpoint of a run, which is killed then."""
    assert saves.start(*order) is not None
    started = time.monotonic()
    wait_until(functools.partial(is_saved, folder, 1))
    saves.kill()
    return time.monotonic() - started


def is_saved(folder: Path, step: int) -> bool:
    return max(list_steps(folder), default=0) >= step


def is_saving(folder: Path, since: float) -> bool:
    with contextlib.suppress(FileNotFoundError):  # it has just become whole
        return any(path.stat().st_mtime > since for path in folder.glob(".step_*.partial"))
    return False


@pytest.mark.parametrize(
    ("num_ranks", "in_background", "num_kills"),
    all_but(
        [(1, True, 10)],
        [(1, False, 20), (1, True, 10), (1, True, 40), (1, True, 110), (2, False, 25),
         (2, True, 25)],
    ),
)  # fmt: skip
def test_after_any_kill_the_newest_whole_checkpoint_loads(
    saves, tmp_path: Path, num_ranks, in_background, num_kills
):
    """Every second kill waits for a save to begin. Of two ranks one is killed, then the other."""
    model = tiny_models.save("qwen3_moe", tmp_path)
    folder, moments = tmp_path / "checkpoints", random.Random(num_kills + num_ranks)
    before, cut = 0, 0
    span_s = time_to_save(saves, [str(model), str(folder), num_ranks, in_background], folder)
    for kill in range(num_kills):
        run = saves.start(str(model), str(folder), num_ranks, in_background)
        assert run is not None, f"kill {kill}: the newest of {list_steps(folder)} does not load"
        _, step, *processes = run
        assert step >= before  # nothing that was whole is lost
        before = step
        if kill % 2:
            wait_until(functools.partial(is_saving, folder, since=time.time()))
            time.sleep(moments.uniform(0, 0.05))  # a save takes longer
        else:
            wait_until(functools.partial(is_saved, folder, step + 1))
            time.sleep(moments.uniform(0, span_s))
        if num_ranks > 1:
            os.kill(moments.choice(processes), signal.SIGKILL)
            time.sleep(0.05)
        saves.kill()
        cut += any(folder.glob(".step_*.partial"))
    assert before >= num_kills / 4
    assert cut >= num_kills / 4  # in the middle of a save
