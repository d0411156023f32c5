"""Functions that run once on each node of a Ray cluster; checksums of large files by all nodes."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mcore_rl.checkpoint.files import Checksum, ComputeChecksums, compute_checksums
from mcore_rl.config.errors import ConfigError
from mcore_rl.controller.pending_call import Timeout, WorkerError
from mcore_rl.controller.ray_session import ray_session

MIN_CLUSTER_BYTES = 16 << 30  # in all files: one node reads fewer in half a minute


class RayNodes[A, R]:
    """Calls function(argument, number) on all nodes that are alive, at once."""

    def __init__(self, function: Callable[[A, int], R], address: str = "") -> None:
        """`address` is one of this machine; empty: the one that Ray uses."""
        nodes = sorted((n for n in ray.nodes() if n["Alive"]), key=lambda n: n["NodeName"])
        if not nodes:
            raise ConfigError("the Ray cluster has no node that is alive")
        self.nodes = _choose_names(nodes)
        self.address = address or ray.util.get_node_ip_address()
        self._ids = [node["NodeID"] for node in nodes]
        self._function = function
        self._calls: list[ray.ObjectRef] = []

    def start(self, argument: A) -> None:
        """Call the function on each node."""
        remote = ray.remote(num_cpus=0, max_retries=0)(self._function)
        for number, node_id in enumerate(self._ids):
            strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
            self._calls.append(
                remote.options(scheduling_strategy=strategy).remote(argument, number)
            )

    def has_ended(self) -> bool:
        """Return whether all calls have ended."""
        done, _ = ray.wait(self._calls, num_returns=len(self._calls), timeout=0)
        return len(done) == len(self._calls)

    def get_error(self, name: str) -> str:
        """Return the error of a node's call; empty if there is none."""
        call = self._calls[self.nodes.index(name)]
        done, _ = ray.wait([call], timeout=0)
        if not done:
            return ""
        try:
            ray.get(call)
        except Exception as error:  # noqa: BLE001 (any that the function raises there, or Ray)
            return str(error).strip().splitlines()[-1]
        return ""

    def get_result(self, name: str, timeout_s: float) -> R:
        """Wait for the result of a node's call. Raises as `ray.get`."""
        result: R = ray.get(self._calls[self.nodes.index(name)], timeout=timeout_s)
        return result

    def stop(self) -> None:
        """Do nothing: the end of the Ray session ends the calls.

        `ray.cancel(force=True)` of a call that has just ended ends this process, too (Ray 2.60,
        a failed check in task_manager.cc).
        """


def _choose_names(nodes: list[dict[str, Any]]) -> list[str]:
    """Return names as by `ray start --node-name`, or host names; with ids where they are equal."""
    names = [
        node[
            "NodeManagerHostname" if node["NodeName"] == node["NodeManagerAddress"] else "NodeName"
        ]
        for node in nodes
    ]
    return [
        name if names.count(name) == 1 else f"{name} ({node['NodeID'][:6]})"
        for name, node in zip(names, nodes, strict=True)
    ]


def create_checksum_reader(timeout: Timeout) -> ComputeChecksums:
    """Return a function that computes checksums of files, each on one node of the cluster.

    It joins the cluster of RAY_ADDRESS for that. Without one, and for small files, it reads all
    files in this process.

    Its errors are:
        OSError: this machine cannot read a file.
        WorkerError: a node cannot, has died, or has not read its share within the timeout.
    """

    def compute_sums(files: Sequence[Path]) -> list[Checksum]:
        sizes = [file.stat().st_size for file in files]
        if not os.environ.get("RAY_ADDRESS") or sum(sizes) < MIN_CLUSTER_BYTES:
            return compute_checksums(files)
        with ray_session(log_to_driver=False):
            return _read_on_nodes(files, sizes, timeout)

    return compute_sums


def _deal_files(sizes: Sequence[int], num_nodes: int) -> list[list[int]]:
    """Return the files that each node reads, dealt out from the largest to the smallest.

    >>> _deal_files([5, 9, 7], 2)
    [[1, 0], [2]]
    """
    order = sorted(range(len(sizes)), key=lambda index: -sizes[index])
    return [order[number::num_nodes] for number in range(num_nodes)]


def _read_on_nodes(files: Sequence[Path], sizes: Sequence[int], timeout: Timeout) -> list[Checksum]:
    nodes, sums = RayNodes(_read_share), dict[int, Checksum]()
    shares = _deal_files(sizes, len(nodes.nodes))
    nodes.start([[files[index] for index in share] for share in shares])
    deadline = time.monotonic() + timeout.seconds
    for name, share in zip(nodes.nodes, shares, strict=True):
        num_bytes = sum(sizes[index] for index in share)
        label = f"{name}: {len(share)} files, {num_bytes / 1e9:.1f} GB"
        with _convert_errors(files[0].parent, label, timeout):
            results = nodes.get_result(name, max(0.0, deadline - time.monotonic()))
        sums |= zip(share, results, strict=True)
    return [sums[index] for index in range(len(files))]


def _read_share(files: Sequence[Sequence[Path]], number: int) -> list[Checksum]:
    """Compute the checksums of the share of the node with this number, on that node."""
    return compute_checksums(files[number])


@contextlib.contextmanager
def _convert_errors(folder: Path, share: str, timeout: Timeout) -> Iterator[None]:
    """Raise WorkerError for errors of a node that reads a share of the files of a folder."""
    try:
        yield
    except GetTimeoutError as error:
        raise WorkerError(f"{folder} was not read within {timeout} by {share}") from error
    except RayTaskError as error:
        raise WorkerError(
            f"{folder} cannot be read by {share}: {error.cause or error}; a checkpoint has to be "
            "on a file system that all nodes share"
        ) from error
    except RayError as error:
        raise WorkerError(f"{folder} cannot be read by {share}: it died ({error})") from error
