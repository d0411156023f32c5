"""The doctor on the nodes of a real SLURM and of a real Ray, and what it measures of a network."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import Cluster

from tests.nightly import all_but
from tests.planted import FAULTS, NICENESS, NODE, NODES, ROOT, World, is_fault, plant
from tests.slurm_cluster import SlurmCluster

PROGRAM = str(Path(sys.executable).with_name("mcore-rl"))
SMALL = ("--min-disk", "0.01")
STATUS = "warn" if NICENESS > 0 else "ok"  # of a node without a fault


def read_report(done: subprocess.CompletedProcess[str], status: int) -> dict[str, Any]:
    assert done.returncode == status, done.stdout + done.stderr
    return json.loads(done.stdout)


def faults(report: dict[str, Any]) -> list[dict[str, str]]:
    return [f for f in report["findings"] if is_fault(f["check"], f["status"], f["value"])]


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    (tmp_path / "out").mkdir()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    paths = ["--output-dir", str(tmp_path / "out"), "--model-path", str(tmp_path / "model")]
    return [PROGRAM, "doctor", "--json", *SMALL, *paths]


def test_all_is_well_on_a_slurm_of_two_nodes(slurm: SlurmCluster, tmp_path, arguments):
    world = plant(tmp_path, World())
    report = read_report(slurm.run("salloc", "-N2", *arguments, "--bandwidth", **world), 0)
    assert (report["status"], report["nodes"]) == (STATUS, [*NODES])
    assert faults(report) == []
    assert {finding["node"] for finding in report["findings"]} == {*NODES}
    measured = report["bandwidth"]
    assert (measured["num_ranks"], measured["backend"]) == (2, "gloo")
    [[first, second, speed]] = measured["between"]
    assert (first, second) == ("n1:0", "n2:0")
    assert measured["all_reduce"] > 1e6 and speed > 1e6
    assert list((tmp_path / "out").iterdir()) == []
    quiet = [argument for argument in arguments if argument != "--json"]
    printed = slurm.run("salloc", "-N2", *quiet, "--quiet", **world).stdout
    assert ("niceness" in printed) if NICENESS > 0 else (printed == "")


# tests/unit/tools/test_doctor.py has all of them, on nodes that are processes.
@pytest.mark.parametrize("name", all_but(("version", "wrong model"), FAULTS))
def test_a_fault_of_one_node_is_reported_for_it(slurm: SlurmCluster, tmp_path, arguments, name):
    fault = FAULTS[name]
    done = slurm.run("salloc", "-N2", *arguments, **plant(tmp_path, fault.world))
    status = int(name != "niceness")  # which is a warning
    faults_by_node = [
        f
        for f in faults(read_report(done, status))
        if f["node"] == NODE and f["check"] == fault.check
    ]
    assert len(faults_by_node) == 1, done.stdout
    assert re.search(fault.value, faults_by_node[0]["value"])
    assert re.search(fault.remedy, faults_by_node[0]["remedy"])


def test_a_busy_port_is_reported(slurm: SlurmCluster, arguments):
    # Both nodes are of this machine, so it is busy on both.
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = str(busy.getsockname()[1])
        report = read_report(slurm.run("salloc", "-N2", *arguments, "--ports", port), 1)
    assert {(f["node"], f["value"]) for f in faults(report)} == {
        (node, f"{port}: address already in use") for node in NODES
    }


def test_a_node_that_cannot_start_it_is_named_with_slurms_reason(
    slurm: SlurmCluster, tmp_path, arguments
):
    world = plant(tmp_path, World(command=("sh", "-c", "exit 9")))
    report = read_report(slurm.run("salloc", "-N2", *arguments, "--timeout", "30", **world), 1)
    values = {f["node"]: f["value"] for f in faults(report)}
    assert re.fullmatch(
        r"did not come in \d+ s: srun: error: .*n2: task 1: Exited with exit code 9", values[NODE]
    )
    assert values["n1"] == "n2 did not come in 15 s"


def test_it_runs_once_and_not_as_a_task_on_each_node(slurm: SlurmCluster, arguments):
    done = slurm.run("srun", "-N2", *arguments)
    assert "run it once, without srun, or with --on=this" in done.stderr
    done = slurm.run("srun", "-N2", "--label", *arguments, "--on=this")  # lines of both may mix
    for number, node in enumerate(NODES):
        label = f"{number}: "
        lines = [line.removeprefix(label) for line in done.stdout.splitlines() if label in line[:3]]
        report = json.loads("\n".join(lines))
        assert (report["status"], report["nodes"]) == (STATUS, [node]), done.stderr
        assert faults(report) == []


@pytest.fixture(scope="module")
def ray_of_two_nodes(tmp_path_factory) -> Iterator[str]:
    """Start a Ray of two nodes, with another version of a package on the second."""
    folder = tmp_path_factory.mktemp("ray")
    world = plant(folder, FAULTS["version"].world)
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    Path("/tmp/ray").mkdir(exist_ok=True)  # where Cluster writes its address, if it is there
    common = {"num_cpus": 1, "object_store_memory": 100 << 20, "include_dashboard": False}
    with tempfile.TemporaryDirectory(dir="/tmp") as scratch:  # sockets need short paths
        head = {**common, "node_name": NODES[0], "temp_dir": scratch}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        environment = {**world, "SLURMD_NODENAME": NODE}
        cluster.add_node(**common, node_name=NODE, env_vars=environment)
        yield cluster.address
        cluster.shutdown()


@pytest.mark.nightly  # tests/unit/tools/test_doctor.py has faults, test_ray_nodes.py nodes of Ray
def test_a_fault_of_a_node_of_ray_is_reported_for_it(ray_of_two_nodes, arguments):
    environment = os.environ | {"RAY_ADDRESS": ray_of_two_nodes}
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=120)
    report = read_report(done, 1)
    assert report["nodes"] == [*NODES]
    node_faults = [(f["node"], f["check"], f["value"]) for f in faults(report)]
    # A Ray of the user's own, whose workers have Ray's default.
    niceness = {(node, "niceness", str(min(19, NICENESS + 15))) for node in NODES}
    assert len(node_faults) == 3 and {*node_faults} == niceness | {(NODE, "ray", "2.59.0")}


# A network of its own, in which what goes to an address of the third of four nodes is slow. gloo's
# ranks listen on the address of the interface that is theirs, and the higher rank connects to the
# lower: so n3 and n4 are a slow pair, and no other.
NETWORK = """\
set -e
ip link set lo up
for i in 1 2 3 4; do
    ip link add name d$i type veth peer name e$i
    ip addr add 10.9.0.$i/32 dev d$i
    ip link set d$i up
    ip link set e$i up
done
tc qdisc add dev lo root handle 1: htb
tc class add dev lo parent 1: classid 1:3 htb rate {mbit}mbit quantum 65536
tc filter add dev lo protocol ip parent 1:0 u32 match ip dst 10.9.0.3/32 flowid 1:3
exec "$@"
"""
NODES_OF_THE_NETWORK = """\
import json, sys
from mcore_rl.tools.doctor.report import DoctorRequest
from mcore_rl.tools.doctor.run import examine_nodes
from tests.planted import ProcessNodes

nodes = ProcessNodes({}, [f"n{i}" for i in range(1, 5)])
nodes.by_node = {f"n{i}": {"GLOO_SOCKET_IFNAME": f"d{i}"} for i in range(1, 5)}
request = DoctorRequest(sys.argv[1], "run", min_disk_gb=0.01, bandwidth=True, timeout_s=300.0)
print(json.dumps(examine_nodes(request, nodes).to_json()))
"""


@pytest.mark.nightly
def test_a_slow_pair_is_named_and_its_speed_is_that_of_the_network(tmp_path):
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing or subprocess.run(["unshare", "-Urn", "true"]).returncode:
        pytest.skip(f"a network of one's own is not allowed here, or there is no {missing}")
    mbit = 80
    done = subprocess.run(
        [
            "unshare", "-Urn", "sh", "-c", NETWORK.format(mbit=mbit), "sh",
            sys.executable, "-c", NODES_OF_THE_NETWORK, str(tmp_path),
        ],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )  # fmt: skip
    report = read_report(done, 0)
    named = {f["node"]: f["value"] for f in faults(report) if f["check"] == "bandwidth"}
    assert named["n3, n4"].startswith("n3:0 and n4:0: ")
    speeds = {(a, b): speed for a, b, speed in report["bandwidth"]["between"]}
    assert len(speeds) == 6 and min(speeds, key=speeds.__getitem__) == ("n3:0", "n4:0")
    limit = mbit * 1e6 / 8 / 2  # both directions go through it
    assert 0.5 * limit < speeds["n3:0", "n4:0"] < 1.2 * limit
