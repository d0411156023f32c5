"""The reaper: unseen shared memory, and what a killed reaper has left."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from mcore_rl.controller import reaper as module
from mcore_rl.controller.reaper import MAX_CHECKS, Reaper, list_processes

MARKER = f"MCORE_RL_SESSION=reaper-test-{os.getpid()}"  # others run this test, too
MAKER = """
import time
from multiprocessing import shared_memory
memory = shared_memory.SharedMemory(create=True, size=4096)
print(memory.name, flush=True)
time.sleep(300)
"""


def test_clean_up_leaves_unseen_memory_to_the_tracker_of_its_maker(tmp_path: Path) -> None:
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
    reaper = Reaper(gone.pid, MARKER, str(tmp_path / "temp"), [])
    try:
        assert (
            reaper.num_checks[memory.name] == MAX_CHECKS
        )  # it was there before: not claimed any more
        assert len(reaper.list_victims(list_processes())) == 2  # the maker and its tracker
        reaper.clean_up()
        assert reaper.list_victims(list_processes()) == set()
        assert not memory.exists()
    finally:
        maker.kill()
        maker.wait()
        maker.stdout.close()
        memory.unlink(missing_ok=True)


def test_watch_claims_memory_when_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Or what is made just before a SIGKILL stays, when its maker takes its tracker along.
    monkeypatch.setattr(module, "POLL_S", 600)
    reaper = Reaper(os.getppid(), MARKER, str(tmp_path / "temp"), [])
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


def test_watch_new_files_reports_a_folder_that_cannot_be_watched(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with module.watch_new_files(str(tmp_path / "missing")) as events:
        assert events == []
    assert "/missing (No such file or directory;" in capfd.readouterr().err


def create_abandoned(place: Path, files: dict[str, int], marker: str) -> Path:
    temp_dir = place / f"{module.PREFIX}gone"
    temp_dir.mkdir()
    (temp_dir / module.LOCK).touch()
    (temp_dir / module.NOTE).write_text(json.dumps({"marker": marker, "files": files}))
    return temp_dir


def test_remove_abandoned_ends_processes_and_removes_memory(tmp_path):
    memory = Path("/dev/shm", f"test_sweep_{os.getpid()}")
    other = Path("/dev/shm", f"test_other_{os.getpid()}")
    for file in (memory, other):
        file.touch()
    marker = f"MCORE_RL_SESSION=test{os.getpid()}"
    name, value = marker.split("=")
    child = subprocess.Popen(["sleep", "1000"], env={name: value})
    # The second file belongs to another process by now: its name was used again.
    files = {memory.name: memory.stat().st_ino, other.name: other.stat().st_ino + 1}
    try:
        temp_dir = create_abandoned(tmp_path, files, marker)
        assert module.remove_abandoned(str(tmp_path)) == [str(temp_dir)]
        assert child.wait(10) == -9
        assert not memory.exists()
        assert other.exists()
        assert not temp_dir.exists()
    finally:
        child.kill()
        memory.unlink(missing_ok=True)
        other.unlink()


def test_remove_abandoned_leaves_folders_that_are_locked_or_new(tmp_path):
    temp_dir = create_abandoned(tmp_path, {}, "MCORE_RL_SESSION=none")
    with (temp_dir / module.LOCK).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert module.remove_abandoned(str(tmp_path)) == []
    assert temp_dir.exists()
    new = tmp_path / f"{module.PREFIX}new"  # it gets its lock in a moment
    new.mkdir()
    assert module.remove_abandoned(str(tmp_path)) == [str(temp_dir)]
    assert new.exists()


def test_remove_abandoned_cleans_up_after_a_killed_reaper(tmp_path):
    script = tmp_path / "scope.py"
    script.write_text(
        "import multiprocessing.shared_memory as m, time\n"
        "from mcore_rl.controller.process_cleanup import clean_up_on_exit\n"
        "with clean_up_on_exit() as temp_dir:\n"
        "    while not (temp_dir / 'note.json').exists():\n"
        "        time.sleep(0.05)\n"  # earlier files do not belong to the session
        "    memory = m.SharedMemory('test_scope_left', create=True, size=8)\n"
        "    print(temp_dir, flush=True)\n"
        "    time.sleep(1000)\n"
    )
    place = tempfile.mkdtemp(dir="/tmp")  # others sweep /tmp; a socket's path is short
    scope = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE, text=True, env=os.environ | {"TMPDIR": place},
    )  # fmt: skip
    assert scope.stdout is not None
    temp_dir = Path(scope.stdout.readline().strip())
    note = temp_dir / module.NOTE
    try:
        wait_until(lambda: note.exists() and "test_scope_left" in note.read_text())
        kill_with_reaper(scope)
        assert Path("/dev/shm/test_scope_left").exists()
        wait_until(
            lambda: str(temp_dir) in module.remove_abandoned(str(temp_dir.parent))
        )  # they die
        assert not Path("/dev/shm/test_scope_left").exists()
    finally:
        Path("/dev/shm/test_scope_left").unlink(missing_ok=True)
        shutil.rmtree(place, ignore_errors=True)


def kill_with_reaper(scope: subprocess.Popen[str]) -> None:
    """Kill a driver and its processes at once."""
    tree = [*psutil.Process(scope.pid).children(recursive=True), psutil.Process(scope.pid)]
    for process in tree:
        process.suspend()
    for process in tree:
        process.kill()
    scope.wait()


SCOPE = """
import multiprocessing.shared_memory as m, sys
from mcore_rl.controller.process_cleanup import clean_up_on_exit
from mcore_rl.jobs.output import lock_run_dir
with lock_run_dir(sys.argv[1], "auto") as run, clean_up_on_exit(run.folder, locks=[run.fd]) as temp:
    made = []
    print(temp, flush=True)
    for name in sys.stdin:
        made.append(m.SharedMemory(name.strip(), create=True, size=8))
        print("made", flush=True)
"""


@pytest.fixture
def places():
    """Return two folders with short paths, for temporary files."""
    folders = [Path(tempfile.mkdtemp(dir="/tmp")) for _ in range(2)]
    yield folders
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def start_scope(output: Path, place: Path) -> subprocess.Popen[str]:
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    environment = os.environ | {"TMPDIR": str(place)}
    command = [sys.executable, "-c", SCOPE, str(output)]
    return subprocess.Popen(command, text=True, env=environment, **pipes)


def make_memory(scope: subprocess.Popen[str], name: str) -> Path:
    assert scope.stdin is not None and scope.stdout is not None
    scope.stdin.write(f"{name}\n")
    scope.stdin.flush()
    assert scope.stdout.readline() == "made\n"
    return Path("/dev/shm", name)


@pytest.mark.job
def test_a_run_with_another_tmpdir_removes_what_a_dead_one_has_left(tmp_path, places):
    # Its unfinished files, too, unless another run has the folder by now.
    dead = [start_scope(tmp_path / name, places[0]) for name in ("abandoned", "resumed")]
    folders = [Path(scope.stdout.readline().strip()) for scope in dead]
    for name in ("abandoned", "resumed"):
        (tmp_path / name / ".table.partial").touch()
    for scope, folder in zip(dead, folders, strict=True):
        wait_until((folder / module.NOTE).exists)
        kill_with_reaper(scope)
    # At once: any run that starts on this machine removes what dead ones have left.
    with (tmp_path / "resumed" / ".lock.partial").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        scope = start_scope(tmp_path / "new", tmp_path)  # of which the path is too long
        try:
            assert scope.stdout.readline().startswith("/tmp/")
            wait_until(lambda: not any(folder.exists() for folder in folders))
            assert not (tmp_path / "abandoned" / ".table.partial").exists()
            assert not (tmp_path / "abandoned" / ".lock.partial").exists()
            assert (tmp_path / "resumed" / ".table.partial").exists()
            links = os.listdir(module.get_registry())
            assert not {folder.name for folder in folders} & {*links}
        finally:
            scope.communicate(timeout=60)


def test_the_registry_of_another_user_is_not_read(tmp_path, monkeypatch):
    registry = tmp_path / "registry"
    monkeypatch.setattr(module, "get_registry", lambda: str(registry))
    module.register_folder(str(tmp_path / "mcr_one"))
    assert module.list_registered_places() == [str(tmp_path)]
    registry.chmod(0o777)
    assert module.list_registered_places() == []
    module.register_folder(str(tmp_path / "mcr_two"))
    assert os.listdir(registry) == ["mcr_one"]


def test_a_reaper_that_is_started_again_knows_the_memory_of_its_session(tmp_path, places):
    # Of before, and of the moment in which there was no reaper; not what was there earlier.
    foreign = Path("/dev/shm", f"test_foreign_{os.getpid()}")
    foreign.write_bytes(bytes(8))
    scope = start_scope(tmp_path / "out", places[0])
    note = Path(scope.stdout.readline().strip()) / module.NOTE
    names = [f"test_{when}_{os.getpid()}" for when in ("before", "between", "after")]
    memory = []
    try:
        wait_until(note.exists)
        memory.append(make_memory(scope, names[0]))
        wait_until(lambda: names[0] in note.read_text())
        [reaper] = [
            p for p in psutil.Process(scope.pid).children() if "reaper.py" in str(p.cmdline())
        ]
        reaper.kill()
        memory.append(make_memory(scope, names[1]))
        wait_until(lambda: names[1] in note.read_text())
        memory.append(make_memory(scope, names[2]))
        wait_until(lambda: all(name in note.read_text() for name in names))
        for tracker in psutil.Process(scope.pid).children():
            if "resource_tracker" in str(tracker.cmdline()):
                tracker.kill()  # which would unlink them
        scope.kill()
        scope.wait()
        wait_until(lambda: not any(file.exists() for file in memory))
        wait_until(lambda: not note.exists())
        assert foreign.exists()
    finally:
        scope.kill()
        scope.communicate()
        for file in (*memory, foreign):
            file.unlink(missing_ok=True)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)
