"""The Ray of a node: what is refused before it starts, and who is missing."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from ray._private.parameter import RayParams

from mcore_rl.config.errors import ConfigError
from mcore_rl.controller import node, pending_call, reaper
from mcore_rl.controller.pool import by_node
from mcore_rl.controller.rank_actor import WorkerInfo
from mcore_rl.controller.worker_group import WorkerGroup


@contextlib.contextmanager
def taken_after_three_free() -> Iterator[int]:
    """A port below those that the kernel hands out to others meanwhile."""
    for first in range(20000, 32000, 64):
        with contextlib.ExitStack() as sockets, contextlib.suppress(OSError):
            for port in range(first, first + 4):
                sockets.enter_context(socket.socket()).bind(("127.0.0.1", port))
            break
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first + 3))
        taken.listen()
        yield first + 3


def test_a_busy_port_is_named_with_its_node_and_the_remedy(monkeypatch):
    monkeypatch.setenv(node.NODE, "n7")
    with taken_after_three_free() as port:
        told = rf"n7: port 127\.0\.0\.1:{port} cannot be had .*MCORE_RL_FIRST_PORT"
        with pytest.raises(ConfigError, match=told):
            node.check_ports("127.0.0.1", port - 3, is_head=True)
        with pytest.raises(ConfigError, match=told):
            node.check_ports("127.0.0.1", port, is_head=True)


@pytest.mark.parametrize("taken", ["127.0.0.1", "::1"])
def test_a_port_that_is_busy_at_another_address_is_refused_since_ray_listens_at_all(taken):
    family = socket.AF_INET6 if ":" in taken else socket.AF_INET
    with socket.socket(family) as other:
        try:
            other.bind((taken, 0))
        except OSError:
            pytest.skip(f"this machine has no {taken}")
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port 127\.0\.0\.2:{port} cannot be had"):
            node.check_ports("127.0.0.2", port, is_head=True)


def test_an_interface_without_an_address_is_refused_with_those_that_have_one():
    assert node.own_address("lo") == "127.0.0.1"
    with pytest.raises(ConfigError, match=r"'ib9' has no IPv4 .*allowed: .*lo.*MCORE_RL_INT"):
        node.own_address("ib9")


def test_a_folder_that_is_not_shared_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv(node.NODE, "n7")
    options = argparse.Namespace(logs=str(tmp_path / "logs"), head="127.0.0.1:9", interface="lo")
    with pytest.raises(ConfigError, match=r"n7 does not see .*/logs.*output_dir must be on a file"):
        node.hold(options)


@pytest.mark.parametrize(
    ("alive", "failed"), [("", {"n1"}), ("n1 n2", {"n3"}), ("n1", {"n1"}), ("n1 n3", {"n2"})]
)
def test_nodes_that_do_not_come_are_named_and_left_out_the_next_time(
    tmp_path, monkeypatch, alive, failed
):
    """Where most do not come, the one with the head is."""
    monkeypatch.setattr(node, "_alive", lambda head: {*alive.split()})
    names = ["n1", "n2", "n3"]
    missing = ", ".join(name for name in names if name not in alive)
    told = rf"{missing} did not join .* in 0\.2 s; alive: {', '.join(alive.split()) or 'none'}"
    with pytest.raises(ConfigError, match=told):
        node.wait_for_nodes("127.0.0.1:9", names, 0.2, str(tmp_path))
    assert {file.stem for file in tmp_path.glob("*.failed")} == failed


def test_a_node_that_failed_ends_the_wait_with_its_reason(tmp_path):
    (tmp_path / "n2.failed").write_text("n2: port 1.2.3.4:5 cannot be had\n")
    with pytest.raises(ConfigError, match=r"^n2: port 1\.2\.3\.4:5 cannot be had$"):
        node.wait_for_nodes("127.0.0.1:9", ["n1", "n2"], 600, str(tmp_path))


def test_ports_of_a_node_are_its_own_and_below_the_next_ones():
    firsts = [node.first_port("h:10000", number) for number in range(node.NODES_APART)]
    assert firsts == [10000, 10064, 10128, 10192]
    options = argparse.Namespace(ranks=2, cpus=1, object_store_bytes=1 << 20, head="h:10000")
    command = node.ray_command(options, "n1", "h", 10064, Path("/tmp/x"), is_head=False)
    ports = [int(word.rpartition("=")[2]) for word in command if "port=" in word]
    assert len(set(ports)) == len(ports) == 10
    assert all(10064 < port < 10128 for port in ports)


@pytest.mark.parametrize("first", [10000, 9984, 8265, 8232])
def test_ray_agrees_to_ports_around_those_that_it_takes_by_itself(first):
    options = argparse.Namespace(ranks=2, cpus=1, object_store_bytes=1 << 20, head=f"h:{first}")
    command = node.ray_command(options, "n1", "h", first, Path("/tmp/x"), is_head=True)
    given = dict(word[2:].split("=") for word in command if "port=" in word)
    ports = {name.replace("-", "_"): int(port) for name, port in given.items()}
    names = {"port": "redis_port", "dashboard_agent_grpc_port": "metrics_agent_port"}
    # Of `ray start`, when it is not told others.
    own = {"ray_client_server_port": 10001, "dashboard_port": 8265}
    params = RayParams(**own | {names.get(name, name): port for name, port in ports.items()})
    params.update_pre_selected_port()


def test_workers_of_every_node_that_launch_starts_have_its_niceness():
    """A node that is not the head reads the settings of the head."""
    options = argparse.Namespace(ranks=2, cpus=1, object_store_bytes=1 << 20, head="h:10000")
    for is_head in (True, False):
        command = node.ray_command(options, "n1", "h", 10064, Path("/x"), is_head=is_head)
        settings = [word.partition("=")[2] for word in command if word.startswith("--system-conf")]
        assert [json.loads(given)["worker_niceness"] for given in settings] == [0] * is_head


def test_what_rays_agent_imports_is_read_before_its_15_s_begin():
    def imported(program: str) -> set[str]:
        names = (
            "import sys; print(*[n for n in sys.modules if n.split('.')[0] in ('ray', 'aiohttp')])"
        )
        done = subprocess.run(
            [sys.executable, "-c", f"{program}\n{names}"],
            capture_output=True, text=True, check=True, timeout=100,
        )  # fmt: skip
        assert not done.stderr
        return set(done.stdout.splitlines()[-1].split())

    agent = "from ray.dashboard.agent import *\nutils.get_all_modules(utils.DashboardAgentModule)"
    agent = f"import logging; logging.disable()\nfrom ray.dashboard import utils\n{agent}"
    needed = imported(agent)
    assert {"aiohttp", "ray.dashboard.agent"} <= needed
    assert needed <= imported("from mcore_rl.controller.node import _read_agent; _read_agent()")


def test_bundles_are_ordered_by_node_whatever_ray_gives():
    assert by_node(["b", "a", "b", "a"]) == [1, 3, 0, 2]
    assert by_node(["n10", "n9", "n10", "n9"]) == [1, 3, 0, 2]  # by number
    assert by_node(["a", "b", "b", "b", "a", "b"]) == [1, 2, 3, 5, 0, 4]  # most bundles first


def test_a_server_whose_devices_are_on_two_nodes_is_refused_with_their_names():
    group = SimpleNamespace(name="rollout", _first_bundle=0, _bundles_per_rank=2)
    pool = SimpleNamespace(node=lambda rank: "n1" if rank < 3 else "n2", bundles=[0, 1, 2, 3])
    told = r"rank 1 needs 2 devices of one node; .* on n1, n2\. Allowed: nodes with a multiple"
    with pytest.raises(ConfigError, match=told):
        WorkerGroup._on(group, pool, 1)


def test_where_ranks_are_on_several_nodes_a_lost_one_has_time_to_be_missed():
    infos = [WorkerInfo("h", node_id, 1, "") for node_id in ("a", "b")]
    call = SimpleNamespace(_group=SimpleNamespace(worker_infos=dict(enumerate(infos))))
    assert pending_call._get_grace_s([call]) == pending_call.NODE_GRACE_S
    call._group.worker_infos.pop(1)
    assert pending_call._get_grace_s([call]) == pending_call.GRACE_S


def _abandoned(place: Path, files: dict[str, int], marker: str) -> Path:
    scratch = place / f"{reaper.PREFIX}gone"
    scratch.mkdir()
    (scratch / reaper.LOCK).touch()
    (scratch / reaper.NOTE).write_text(json.dumps({"marker": marker, "files": files}))
    return scratch


def test_what_a_killed_scope_and_its_killed_reaper_have_left_is_swept(tmp_path):
    memory = Path("/dev/shm", f"test_sweep_{os.getpid()}")
    other = Path("/dev/shm", f"test_other_{os.getpid()}")
    for file in (memory, other):
        file.touch()
    marker = f"MCORE_RL_SESSION=test{os.getpid()}"
    name, value = marker.split("=")
    child = subprocess.Popen(["sleep", "1000"], env={name: value})
    # The second file is another's by now: its name was given again.
    files = {memory.name: memory.stat().st_ino, other.name: other.stat().st_ino + 1}
    try:
        scratch = _abandoned(tmp_path, files, marker)
        assert reaper.sweep_abandoned(str(tmp_path)) == [str(scratch)]
        assert child.wait(10) == -9
        assert not memory.exists()
        assert other.exists()
        assert not scratch.exists()
    finally:
        child.kill()
        memory.unlink(missing_ok=True)
        other.unlink()


def test_a_scope_that_lives_is_not_swept(tmp_path):
    scratch = _abandoned(tmp_path, {}, "MCORE_RL_SESSION=none")
    with (scratch / reaper.LOCK).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert reaper.sweep_abandoned(str(tmp_path)) == []
    assert scratch.exists()
    new = tmp_path / f"{reaper.PREFIX}new"  # it gets its lock in a moment
    new.mkdir()
    assert reaper.sweep_abandoned(str(tmp_path)) == [str(scratch)]
    assert new.exists()


def test_a_scope_whose_reaper_was_killed_with_it_is_swept_by_the_next(tmp_path):
    script = tmp_path / "scope.py"
    script.write_text(
        "import multiprocessing.shared_memory as m, time\n"
        "from mcore_rl.controller.run_scope import run_scope\n"
        "with run_scope() as scratch:\n"
        "    while not (scratch / 'note.json').exists():\n"
        "        time.sleep(0.05)\n"  # what is there before the reaper looks is not the scope's
        "    memory = m.SharedMemory('test_scope_left', create=True, size=8)\n"
        "    print(scratch, flush=True)\n"
        "    time.sleep(1000)\n"
    )
    place = tempfile.mkdtemp(dir="/tmp")  # others sweep /tmp; a socket's path is short
    scope = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE, text=True, env=os.environ | {"TMPDIR": place},
    )  # fmt: skip
    assert scope.stdout is not None
    scratch = Path(scope.stdout.readline().strip())
    note = scratch / reaper.NOTE
    try:
        _wait(lambda: note.exists() and "test_scope_left" in note.read_text())
        tree = [*psutil.Process(scope.pid).children(recursive=True), psutil.Process(scope.pid)]
        for process in tree:
            process.suspend()
        for process in tree:
            process.kill()
        scope.wait()
        assert Path("/dev/shm/test_scope_left").exists()
        _wait(lambda: str(scratch) in reaper.sweep_abandoned(str(scratch.parent)))  # they die
        assert not Path("/dev/shm/test_scope_left").exists()
    finally:
        Path("/dev/shm/test_scope_left").unlink(missing_ok=True)
        shutil.rmtree(place, ignore_errors=True)


def _wait(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("soft", "hard", "raised"),
    [
        (1024, 4096, 4096),
        (1024, 1 << 20, 65536),
        (1024, resource.RLIM_INFINITY, 65536),
        (1 << 17, 1 << 20, None),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, None),
    ],
)
def test_ray_may_have_as_many_files_open_as_the_system_allows(monkeypatch, soft, hard, raised):
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: told.append(limits))
    node._raise_file_limit()
    assert told == ([] if raised is None else [(raised, hard)])
