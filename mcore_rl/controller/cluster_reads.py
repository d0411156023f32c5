"""The checksums of large files, read by all nodes of the Ray cluster that a run joins."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from mcore_rl.checkpoint.files import Checksum, ComputeChecksums, compute_checksums
from mcore_rl.controller.each_node import EachNode
from mcore_rl.controller.pending import Limit, WorkerError
from mcore_rl.controller.pool import ray_session

LEAST_BYTES = 16 << 30  # in all: fewer take one node half a minute


def cluster_reads(limit: Limit) -> ComputeChecksums:
    """Reads each file on one node of the cluster of RAY_ADDRESS, which it joins for that.

    Small ones, and all where there is no cluster, it reads here.

    Raises:
        OSError: this machine cannot read a file.
        WorkerError: a node cannot, has died, or has not read its share within the limit.
    """

    def compute_sums(files: Sequence[Path]) -> list[Checksum]:
        sizes = [file.stat().st_size for file in files]
        if not os.environ.get("RAY_ADDRESS") or sum(sizes) < LEAST_BYTES:
            return compute_checksums(files)
        with ray_session(log_to_driver=False):
            return _read_by_nodes(files, sizes, limit)

    return compute_sums


def shares(sizes: Sequence[int], num: int) -> list[list[int]]:
    """Which files each of `num` nodes reads: they are dealt out, the largest first.

    >>> shares([5, 9, 7], 2)
    [[1, 0], [2]]
    """
    order = sorted(range(len(sizes)), key=lambda index: -sizes[index])
    return [order[number::num] for number in range(num)]


def _read_by_nodes(files: Sequence[Path], sizes: Sequence[int], limit: Limit) -> list[Checksum]:
    nodes, found = EachNode(_read_share), dict[int, Checksum]()
    indices = shares(sizes, len(nodes.nodes))
    nodes.start([[files[index] for index in its] for its in indices])
    deadline = time.monotonic() + limit.seconds
    for name, its in zip(nodes.nodes, indices, strict=True):
        num_bytes = sum(sizes[index] for index in its)
        share = f"{name}: {len(its)} files, {num_bytes / 1e9:.1f} GB"
        with _told(files[0].parent, share, limit):
            sums = nodes.value(name, max(0.0, deadline - time.monotonic()))
        found |= zip(its, sums, strict=True)
    return [found[index] for index in range(len(files))]


def _read_share(files: Sequence[Sequence[Path]], number: int) -> list[Checksum]:
    """On the node of that number."""
    return compute_checksums(files[number])


@contextlib.contextmanager
def _told(folder: Path, share: str, limit: Limit) -> Iterator[None]:
    """Raises WorkerError for what fails inside, which is to read this share of a folder's files."""
    try:
        yield
    except GetTimeoutError as error:
        raise WorkerError(f"{folder} was not read within {limit} by {share}") from error
    except RayTaskError as error:
        raise WorkerError(
            f"{folder} cannot be read by {share}: {error.cause or error}; a checkpoint has to be "
            "on a file system that all nodes share"
        ) from error
    except RayError as error:
        raise WorkerError(f"{folder} cannot be read by {share}: it died ({error})") from error
