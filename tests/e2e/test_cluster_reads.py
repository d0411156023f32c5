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
from mcore_rl.controller import cluster_reads
from mcore_rl.controller.pending import Limit, WorkerError
from mcore_rl.controller.pool import lean_node

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import a test

LIMIT = Limit(100.0, "timeouts.call_s")


def node_name() -> str:
    here = ray.get_runtime_context().get_node_id()
    return next(node["NodeName"] for node in ray.nodes() if node["NodeID"] == here)


def who_read(files: Sequence[Sequence[Path]], number: int) -> list[Checksum]:
    """The number of the node, and that in the name of the file."""
    return [(int(node_name()[1:]), int(file.name)) for file in files[number]]


def second_is_silent(files: Sequence[Sequence[Path]], number: int) -> list[Checksum]:
    if node_name() == "n2":
        time.sleep(1000)
    return who_read(files, number)


def second_does_not_see(files: Sequence[Sequence[Path]], number: int) -> list[Checksum]:
    if node_name() == "n2":
        raise FileNotFoundError(2, "No such file or directory", str(files[number][0]))
    return who_read(files, number)


def second_dies(files: Sequence[Sequence[Path]], number: int) -> list[Checksum]:
    if node_name() == "n2":
        os._exit(1)
    return who_read(files, number)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """It has room for the processes of its calls, and this process has not joined it."""
    common: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 100 << 20}
    head = common | {"node_name": "n1", "include_dashboard": False}
    with lean_node(), pytest.MonkeyPatch.context() as patch:
        cluster = Cluster(True, head_node_args=head)
        try:
            cluster.add_node(node_name="n2", **common)
            patch.setenv("RAY_ADDRESS", cluster.address)
            patch.setattr(cluster_reads, "LEAST_BYTES", 1)
            yield cluster
        finally:
            cluster.shutdown()


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    found = [tmp_path / str(number) for number in range(5)]
    for file, size in zip(found, (300, 100, 0, 500, 200), strict=True):
        file.write_bytes(os.urandom(size))
    return found


def test_all_nodes_read_and_sums_come_in_the_order_of_the_files(cluster, files, monkeypatch):
    assert cluster_reads.cluster_reads(LIMIT)(files) == compute_checksums(files)
    monkeypatch.setattr(cluster_reads, "_read_share", who_read)
    readers, numbers = zip(*cluster_reads.cluster_reads(LIMIT)(files), strict=True)
    assert numbers == (0, 1, 2, 3, 4)
    # 500, 300, 200, 100 and 0 bytes are dealt out.
    assert readers[3] == readers[4] == readers[2] != readers[0] == readers[1]
    assert not ray.is_initialized()  # for the session of the run


@pytest.mark.parametrize(
    ("reader", "limit_s", "told"),
    [
        (second_is_silent, 5.0, r"was not read within 5 s \(timeouts\.call_s\) by n2: "),
        (second_does_not_see, 100.0, r"by n2: .*No such file.*that all nodes share"),
        (second_dies, 100.0, r"cannot be read by n2: [23] files, 0\.0 GB: it died"),
    ],
)
def test_a_node_that_does_not_read_its_share_is_named(
    cluster, files, monkeypatch, reader, limit_s, told
):
    monkeypatch.setattr(cluster_reads, "_read_share", reader)
    with pytest.raises(WorkerError, match=told):
        cluster_reads.cluster_reads(Limit(limit_s, "timeouts.call_s"))(files)


def test_small_files_are_read_here(cluster, files, monkeypatch):
    monkeypatch.setattr(cluster_reads, "LEAST_BYTES", 1101)
    monkeypatch.setattr(cluster_reads, "ray_session", pytest.fail)
    assert cluster_reads.cluster_reads(LIMIT)(files) == compute_checksums(files)
