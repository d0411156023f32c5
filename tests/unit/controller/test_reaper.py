"""What the reaper removes that it has not seen itself."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from mcore_rl.controller import reaper as module
from mcore_rl.controller.reaper import LOOKS, Reaper, processes

MARKER = f"MCORE_RL_SESSION=reaper-test-{os.getpid()}"  # others run this test, too
MAKER = """
import time
from multiprocessing import shared_memory
memory = shared_memory.SharedMemory(create=True, size=4096)
print(memory.name, flush=True)
time.sleep(300)
"""


def test_memory_that_nobody_has_seen_is_left_to_the_tracker_of_its_maker(tmp_path: Path) -> None:
    key, value = MARKER.split("=")
    maker = subprocess.Popen(
        [sys.executable, "-c", MAKER],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {key: value},
    )
    assert maker.stdout is not None
    memory = Path("/dev/shm", maker.stdout.readline().strip())
    gone = subprocess.Popen(["true"])
    gone.wait()
    reaper = Reaper(gone.pid, MARKER, str(tmp_path / "scratch"), [])
    try:
        assert reaper.looks[memory.name] == LOOKS  # it was there before: not claimed any more
        assert len(reaper.victims(processes())) == 2  # the maker and its tracker
        reaper.sweep()
        assert reaper.victims(processes()) == set()
        assert not memory.exists()
    finally:
        maker.kill()
        maker.wait()
        maker.stdout.close()
        memory.unlink(missing_ok=True)


def test_memory_is_claimed_when_it_is_made_and_not_at_the_next_poll(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or what is made just before a SIGKILL stays, when its maker takes its tracker along."""
    monkeypatch.setattr(module, "POLL_S", 600)
    reaper = Reaper(os.getppid(), MARKER, str(tmp_path / "scratch"), [])
    words, driver = os.pipe()
    watching = threading.Thread(target=reaper.watch, args=(words,))
    watching.start()
    maker = subprocess.Popen([sys.executable, "-c", MAKER], stdout=subprocess.PIPE, text=True)
    assert maker.stdout is not None
    try:
        name = maker.stdout.readline().strip()
        deadline = time.monotonic() + 30
        while name not in reaper.files:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        os.write(driver, b"end")
        watching.join()
        for descriptor in (words, driver):
            os.close(descriptor)
        maker.kill()
        maker.wait()
        maker.stdout.close()


def test_a_folder_that_cannot_be_watched_is_said(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with module.made_in(str(tmp_path / "missing")) as made:
        assert made == []
    assert "/missing (No such file or directory;" in capfd.readouterr().err
