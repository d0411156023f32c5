"""The files of a checkpoint, read by the two nodes of a Ray cluster."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from mcore_rl.checkpoint.files import Checksum, compute_checksums
from mcore_rl.controller import ray_nodes
from mcore_rl.controller.pending_call import Timeout, WorkerError
from mcore_rl.controller.ray_patches import skip_node_services

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import a test

LIMIT = Timeout(100.0, "timeouts.call_s")


def get_node_name() -> str:
    node_id = ray.get_runtime_context().get_node_id()
    return next(node["NodeName"] for node in ray.nodes() if node["NodeID"] == node_id)


def get_reader(files: Sequence[Sequence[Path]], number: int) -> list[Checksum]:
    """Return the number of the node and the number in the name of each file."""
    return [(int(get_node_name()[1:]), int(file.name)) for file in files[number]]


def hang_on_second(files: Sequence[Sequence[Path]], number: int) -> list[Checksum]:
    if get_node_name() == "n2":
        time.sleep(1000)
    return get_reader(files, number)


def fail_on_second(files: Sequence[Sequence[Path]], number: int) -> list[Checksum]:
    if get_node_name() == "n2":
        raise FileNotFoundError(2, "No such file or directory", str(files[number][0]))
    return get_reader(files, number)


def die_on_second(files: Sequence[Sequence[Path]], number: int) -> list[Checksum]:
    if get_node_name() == "n2":
        os._exit(1)
    return get_reader(files, number)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Start a cluster with CPUs for its calls, which this process has not joined."""
    common: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 100 << 20}
    head = common | {"node_name": "n1", "include_dashboard": False}
    with skip_node_services(), pytest.MonkeyPatch.context() as patch:
        cluster = Cluster(True, head_node_args=head)
        try:
            cluster.add_node(node_name="n2", **common)
            patch.setenv("RAY_ADDRESS", cluster.address)
            patch.setattr(ray_nodes, "MIN_CLUSTER_BYTES", 1)
            yield cluster
        finally:
            cluster.shutdown()


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / str(number) for number in range(5)]
    for file, size in zip(paths, (300, 100, 0, 500, 200), strict=True):
        file.write_bytes(os.urandom(size))
    return paths


def test_all_nodes_read_and_sums_come_in_the_order_of_the_files(cluster, files, monkeypatch):
    assert ray_nodes.create_checksum_reader(LIMIT)(files) == compute_checksums(files)
    monkeypatch.setattr(ray_nodes, "_read_share", get_reader)
    readers, numbers = zip(*ray_nodes.create_checksum_reader(LIMIT)(files), strict=True)
    assert numbers == (0, 1, 2, 3, 4)
    # 500, 300, 200, 100 and 0 bytes are dealt out.
    assert readers[3] == readers[4] == readers[2] != readers[0] == readers[1]
    assert not ray.is_initialized()  # for the session of the run


class NodesAfterFirst(ray_nodes.RayNodes):
    """Begins to wait when the first node has answered, for however long the machine takes."""

    def start(self, argument: Any) -> None:
        super().start(argument)
        self.get_result(self.nodes[0], 100.0)


@pytest.mark.parametrize(
    ("reader", "limit_s", "message"),
    [
        (hang_on_second, 1.0, r"was not read within 1 s \(timeouts\.call_s\) by n2: "),
        (fail_on_second, 100.0, r"by n2: .*No such file.*that all nodes share"),
        (die_on_second, 100.0, r"cannot be read by n2: [23] files, 0\.0 GB: it died"),
    ],
)
def test_a_node_that_does_not_read_its_share_is_named(
    cluster, files, monkeypatch, reader, limit_s, message
):
    monkeypatch.setattr(ray_nodes, "_read_share", reader)
    monkeypatch.setattr(ray_nodes, "RayNodes", NodesAfterFirst)
    with pytest.raises(WorkerError, match=message):
        ray_nodes.create_checksum_reader(Timeout(limit_s, "timeouts.call_s"))(files)


def test_small_files_are_read_here(cluster, files, monkeypatch):
    monkeypatch.setattr(ray_nodes, "MIN_CLUSTER_BYTES", 1101)
    monkeypatch.setattr(ray_nodes, "ray_session", pytest.fail)
    assert ray_nodes.create_checksum_reader(LIMIT)(files) == compute_checksums(files)
