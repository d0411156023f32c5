"""Which device each rank runs on, and which generation rank goes to which training rank. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import lap
import numpy as np
from numpy.typing import NDArray

from mcore_rl.config.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Devices:
    """Where the ranks of both sides run. A device hosts one rank of each side, or of one."""

    training: tuple[int, ...]  # device of each training rank
    generation: tuple[int, ...]  # device of each generation rank
    per_node: int

    @classmethod
    def disaggregated(cls, num_training: int, num_generation: int, per_node: int) -> Devices:
        """The generation ranks behind the training ranks."""
        devices = range(num_training + num_generation)
        return cls(tuple(devices[:num_training]), tuple(devices[num_training:]), per_node)

    @classmethod
    def colocated(cls, generation: tuple[int, ...], num_training: int, per_node: int) -> Devices:
        """`generation` are the training ranks whose devices the generation ranks share."""
        return cls(tuple(range(num_training)), generation, per_node)

    def node(self, device: int) -> int:
        return device // self.per_node


def most_overlap(
    overlap: NDArray[np.int64], group_size: int = 1, allowed: NDArray[np.bool_] | None = None
) -> tuple[int, ...]:
    """For each generation rank the training rank to share a device with, so that most bytes stay.

    `overlap` is [generation ranks, training ranks] in bytes: TransferRequirements.overlap. The
    maximum-weight assignment. With a `group_size`, as many generation ranks in a row (a
    tensor-parallel group) go to as many devices in a row, in the best order: set it to keep groups
    inside nodes. `allowed`, [generation ranks, training ranks], leaves pairs out.

    Raises:
        ConfigError: there are fewer training ranks, or the groups do not divide the ranks, or there
            is no assignment of allowed pairs.
    """
    num_generation, num_training = overlap.shape
    if num_generation > num_training:
        raise ConfigError(
            f"{num_generation} generation ranks on the devices of {num_training} training ranks; "
            "allowed: at most as many"
        )
    if allowed is not None:
        overlap = np.where(allowed, overlap, -1 - overlap.sum())
    for count in (num_generation, num_training):
        if count % group_size:
            raise ConfigError(f"groups of {group_size} do not divide {count} ranks")
    rows, columns = num_generation // group_size, num_training // group_size
    inner = np.zeros((rows, columns, group_size), np.int64)
    gain = overlap
    if group_size > 1:
        blocks = overlap.reshape(rows, group_size, columns, group_size).swapaxes(1, 2)
        gain = np.empty((rows, columns), np.int64)
        for row, column in np.ndindex(rows, columns):
            block = blocks[row, column]
            inner[row, column] = _assignment(block)
            gain[row, column] = block[np.arange(group_size), inner[row, column]].sum()
    found = (
        int(column) * group_size + int(inner[row, column, place])
        for row, column in enumerate(_assignment(gain))
        for place in range(group_size)
    )
    hosts = tuple(found)
    for rank, host in enumerate(hosts):
        if allowed is not None and not allowed[rank, host]:
            raise ConfigError(
                f"generation rank {rank} runs where there are fewer training ranks than generation "
                "ranks; allowed: a training rank for each"
            )
    return hosts


def _assignment(gain: NDArray[np.int64]) -> NDArray[np.int64]:
    """[rows]: a distinct column for each, so that the sum of their gains is maximal.

    Not by scipy: where it is installed, transformers and vLLM import much of it, a tenth of what a
    server's processes import.
    """
    _, columns, _ = lap.lapjv(-gain.astype(np.float64), extend_cost=True)
    found: NDArray[np.int64] = columns.astype(np.int64)
    return found
