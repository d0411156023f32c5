"""The checksums of large files, read by all nodes of the Ray cluster that a run joins."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mcore_rl.checkpoint.manifest import ReadSums, Sum, sums_read_here
from mcore_rl.controller.pending import Limit, WorkerError
from mcore_rl.controller.pool import ray_session

LEAST_BYTES = 16 << 30  # in all: fewer take one node half a minute


def cluster_reads(limit: Limit) -> ReadSums:
    """Reads each file on one node of the cluster of RAY_ADDRESS, which it joins for that.

    Small ones, and all where there is no cluster, it reads here.

    Raises:
        OSError: this machine cannot read a file.
        WorkerError: a node cannot, has died, or has not read its share within the limit.
    """

    def read_sums(files: Sequence[Path]) -> list[Sum]:
        sizes = [file.stat().st_size for file in files]
        if not os.environ.get("RAY_ADDRESS") or sum(sizes) < LEAST_BYTES:
            return sums_read_here(files)
        with ray_session(log_to_driver=False):
            return _read_by_nodes(files, sizes, limit)

    return read_sums


def shares(sizes: Sequence[int], num: int) -> list[list[int]]:
    """Which files each of `num` nodes reads: they are dealt out, the largest first.

    >>> shares([5, 9, 7], 2)
    [[1, 0], [2]]
    """
    order = sorted(range(len(sizes)), key=lambda index: -sizes[index])
    return [order[number::num] for number in range(num)]


@dataclass(frozen=True, slots=True)
class _Share:
    """What a node reads."""

    node: str
    indices: list[int]
    num_bytes: int
    call: Any  # Ray's reference to the sums

    def __str__(self) -> str:
        return f"{self.node}: {len(self.indices)} files, {self.num_bytes / 1e9:.1f} GB"


def _read_by_nodes(files: Sequence[Path], sizes: Sequence[int], limit: Limit) -> list[Sum]:
    read = ray.remote(num_cpus=0, max_retries=0)(sums_read_here)
    nodes = [node for node in ray.nodes() if node["Alive"]]
    sent, found = list[_Share](), dict[int, Sum]()
    for node, its in zip(nodes, shares(sizes, len(nodes)), strict=True):
        there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        call = read.options(scheduling_strategy=there).remote([files[index] for index in its])
        num_bytes = sum(sizes[index] for index in its)
        sent.append(_Share(node["NodeName"], its, num_bytes, call))
    deadline = time.monotonic() + limit.seconds
    try:
        for share in sent:
            sums = _sums_of(share, deadline, limit, files[0].parent)
            found |= zip(share.indices, sums, strict=True)
    finally:
        for share in sent:
            ray.cancel(share.call, force=True)
    return [found[index] for index in range(len(files))]


def _sums_of(share: _Share, deadline: float, limit: Limit, folder: Path) -> list[Sum]:
    try:
        sums: list[Sum] = ray.get(share.call, timeout=max(0.0, deadline - time.monotonic()))
    except GetTimeoutError as error:
        raise WorkerError(f"{folder} was not read within {limit} by {share}") from error
    except RayTaskError as error:
        raise WorkerError(
            f"{folder} cannot be read by {share}: {error.cause or error}; a checkpoint has to be "
            "on a file system that all nodes share"
        ) from error
    except RayError as error:
        raise WorkerError(f"{folder} cannot be read by {share}: it died ({error})") from error
    return sums
