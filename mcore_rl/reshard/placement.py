"""Which device each rank runs on, and which generation rank goes to which training rank. Pure."""

from __future__ import annotations

from dataclasses import dataclass


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
