"""Ray on a node: what is refused before it starts, and missing nodes."""

from __future__ import annotations

import argparse
import contextlib
import json
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray._private.parameter import RayParams

from mcore_rl.config.errors import ConfigError
from mcore_rl.controller import node


@contextlib.contextmanager
def listen_after_three_free_ports() -> Iterator[int]:
    """Listen on a port below those that the kernel hands out to other programs meanwhile."""
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
    with listen_after_three_free_ports() as port:
        message = rf"n7: port 127\.0\.0\.1:{port} cannot be had .*MCORE_RL_FIRST_PORT"
        with pytest.raises(ConfigError, match=message):
            node.check_ports("127.0.0.1", port - 3, is_head=True)
        with pytest.raises(ConfigError, match=message):
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
    assert node.get_node_address("lo") == "127.0.0.1"
    with pytest.raises(ConfigError, match=r"'ib9' has no IPv4 .*allowed: .*lo.*MCORE_RL_INT"):
        node.get_node_address("ib9")


def test_a_folder_that_is_not_shared_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv(node.NODE, "n7")
    options = argparse.Namespace(logs=str(tmp_path / "logs"), head="127.0.0.1:9", interface="lo")
    with pytest.raises(ConfigError, match=r"n7 does not see .*/logs.*output_dir must be on a file"):
        node.hold(options)


@pytest.mark.parametrize(
    ("alive", "failed"), [("", {"n1"}), ("n1 n2", {"n3"}), ("n1", {"n1"}), ("n1 n3", {"n2"})]
)
def test_wait_names_missing_nodes_and_marks_them_as_failed(tmp_path, monkeypatch, alive, failed):
    # Where most do not come, the one with the head is left out.
    monkeypatch.setattr(node, "_list_alive_nodes", lambda head: {*alive.split()})
    names = ["n1", "n2", "n3"]
    missing = ", ".join(name for name in names if name not in alive)
    message = rf"{missing} did not join .* in 0\.2 s; alive: {', '.join(alive.split()) or 'none'}"
    with pytest.raises(ConfigError, match=message):
        node.wait_for_nodes("127.0.0.1:9", names, 0.2, str(tmp_path))
    assert {file.stem for file in tmp_path.glob("*.failed")} == failed


def test_wait_ends_with_the_reason_of_a_failed_node(tmp_path):
    (tmp_path / "n2.failed").write_text("n2: port 1.2.3.4:5 cannot be had\n")
    with pytest.raises(ConfigError, match=r"^n2: port 1\.2\.3\.4:5 cannot be had$"):
        node.wait_for_nodes("127.0.0.1:9", ["n1", "n2"], 600, str(tmp_path))


def test_ports_of_a_node_are_distinct_and_below_those_of_the_next():
    firsts = [node.get_first_port("h:10000", number) for number in range(node.NODES_APART)]
    assert firsts == [10000, 10064, 10128, 10192]
    options = argparse.Namespace(ranks=2, cpus=1, object_store_bytes=1 << 20, head="h:10000")
    command = node.build_ray_command(options, "n1", "h", 10064, Path("/tmp/x"), is_head=False)
    ports = [int(word.rpartition("=")[2]) for word in command if "port=" in word]
    assert len(set(ports)) == len(ports) == 10
    assert all(10064 < port < 10128 for port in ports)


@pytest.mark.parametrize("first", [10000, 9984, 8265, 8232])
def test_ray_accepts_ports_around_its_defaults(first):
    options = argparse.Namespace(ranks=2, cpus=1, object_store_bytes=1 << 20, head=f"h:{first}")
    command = node.build_ray_command(options, "n1", "h", first, Path("/tmp/x"), is_head=True)
    given = dict(word[2:].split("=") for word in command if "port=" in word)
    ports = {name.replace("-", "_"): int(port) for name, port in given.items()}
    names = {"port": "redis_port", "dashboard_agent_grpc_port": "metrics_agent_port"}
    # Defaults of `ray start`.
    defaults = {"ray_client_server_port": 10001, "dashboard_port": 8265}
    params = RayParams(**defaults | {names.get(name, name): port for name, port in ports.items()})
    params.update_pre_selected_port()


def test_workers_of_every_node_that_launch_starts_have_its_niceness():
    # A node that is not the head reads the settings of the head.
    options = argparse.Namespace(ranks=2, cpus=1, object_store_bytes=1 << 20, head="h:10000")
    for is_head in (True, False):
        command = node.build_ray_command(options, "n1", "h", 10064, Path("/x"), is_head=is_head)
        settings = [word.partition("=")[2] for word in command if word.startswith("--system-conf")]
        assert [json.loads(given)["worker_niceness"] for given in settings] == [0] * is_head


@pytest.mark.job
def test_preload_imports_what_rays_agent_imports():
    def list_imports(program: str) -> set[str]:
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
    needed = list_imports(agent)
    assert {"aiohttp", "ray.dashboard.agent"} <= needed
    assert needed <= list_imports(
        "from mcore_rl.controller.node import _preload_agent; _preload_agent()"
    )


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
    limits_set: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: limits_set.append(limits))
    node._raise_file_limit()
    assert limits_set == ([] if raised is None else [(raised, hard)])
