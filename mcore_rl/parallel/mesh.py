"""Rank coordinates: world rank <-> coordinate on the dense and on the expert mesh.

The order is Megatron-core's "tp-cp-ep-dp-pp": the first axis varies fastest. Dense weights are laid
out as tp, cp, dp, pp; expert weights as etp, ep, edp, pp over the same ranks. Pure: no torch, no
process group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import Layout

DENSE_AXES = ("tp", "cp", "dp", "pp")  # fastest first
EXPERT_AXES = ("etp", "ep", "edp", "pp")
AXES = ("tp", "cp", "dp", "pp", "etp", "ep", "edp")


@dataclass(frozen=True, slots=True)
class Coordinate:
    """The index of one rank on every axis. pp_rank is the same on both meshes."""

    tp_rank: int
    cp_rank: int
    dp_rank: int
    pp_rank: int
    etp_rank: int
    ep_rank: int
    edp_rank: int


class Mesh:
    """All ranks of a layout.

    >>> mesh = Mesh(Layout(tp=2, dp=2, ep=2))
    >>> mesh.coordinate(3)
    Coordinate(tp_rank=1, cp_rank=0, dp_rank=1, pp_rank=0, etp_rank=0, ep_rank=1, edp_rank=1)
    >>> mesh.ranks(dp_rank=0), mesh.groups("dp")
    ([0, 1], [[0, 2], [1, 3]])
    """

    def __init__(self, layout: Layout) -> None:
        """Raises ConfigError when a size is below 1 or the expert mesh does not fit the ranks."""
        sizes = {axis: getattr(layout, axis) for axis in ("tp", "cp", "dp", "pp", "etp", "ep")}
        for axis, size in sizes.items():
            if not isinstance(size, int) or size < 1:
                raise ConfigError(f"layout.{axis} is {size!r}; it must be a whole number from 1 up")
        self.world_size = layout.world_size
        expert_ranks = layout.etp * layout.ep * layout.pp
        if self.world_size % expert_ranks:
            raise ConfigError(
                f"layout.etp * layout.ep * layout.pp is {layout.etp} * {layout.ep} * {layout.pp} = "
                f"{expert_ranks}; it must divide the world size tp * pp * cp * dp = "
                f"{self.world_size}"
            )
        self.sizes = {**sizes, "edp": self.world_size // expert_ranks}
        self._coordinates = [self._locate(rank) for rank in range(self.world_size)]

    def coordinate(self, world_rank: int) -> Coordinate:
        if not 0 <= world_rank < self.world_size:
            raise IndexError(f"world rank {world_rank} is outside of 0..{self.world_size - 1}")
        return self._coordinates[world_rank]

    def ranks(self, **coords: int) -> list[int]:
        """Ascending world ranks at these coordinates: ranks(dp_rank=0, tp_rank=1)."""
        for name, value in coords.items():
            size = self.sizes.get(name.removesuffix("_rank")) if name.endswith("_rank") else None
            if size is None:
                raise TypeError(f"no coordinate is called {name!r}; there are {_names(AXES)}")
            if not 0 <= value < size:
                raise IndexError(f"{name} {value} is outside of 0..{size - 1}")
        wanted = coords.items()
        return [
            rank
            for rank, found in enumerate(self._coordinates)
            if all(getattr(found, name) == value for name, value in wanted)
        ]

    def groups(self, *axes: str) -> list[list[int]]:
        """Ranks that differ only on these axes, as Megatron groups them: groups("tp", "dp").

        The axes must be in one mesh; pp alone is the same on both. Groups and the ranks in
        them are in ascending order.
        """
        fixed = _names([axis for axis in _mesh_of(axes) if axis not in axes])
        found: dict[tuple[int, ...], list[int]] = {}
        for rank, coordinate in enumerate(self._coordinates):
            found.setdefault(tuple(getattr(coordinate, n) for n in fixed), []).append(rank)
        return list(found.values())

    def group_of(self, world_rank: int, *axes: str) -> list[int]:
        """The group of these axes that the rank is in."""
        mesh, stride = _mesh_of(axes), 1
        self.coordinate(world_rank)
        first, ranks = world_rank, [0]
        for axis in mesh:  # fastest first, so ranks stay in ascending order
            size = self.sizes[axis]
            if axis in axes:
                first -= world_rank // stride % size * stride
                ranks = [index * stride + rank for index in range(size) for rank in ranks]
            stride *= size
        return [first + rank for rank in ranks]

    def _locate(self, rank: int) -> Coordinate:
        dense = self._digits(rank, DENSE_AXES)
        expert = self._digits(rank, EXPERT_AXES)
        return Coordinate(**{f"{axis}_rank": index for axis, index in (expert | dense).items()})

    def _digits(self, rank: int, axes: Sequence[str]) -> dict[str, int]:
        sizes = [self.sizes[axis] for axis in axes]
        return {axis: rank // prod(sizes[:place]) % sizes[place] for place, axis in enumerate(axes)}


def _mesh_of(axes: Sequence[str]) -> tuple[str, ...]:
    for mesh in (DENSE_AXES, EXPERT_AXES):
        if axes and set(axes) <= set(mesh):
            return mesh
    raise TypeError(f"axes {axes} are not all in one of {DENSE_AXES} and {EXPERT_AXES}")


def _names(axes: Sequence[str]) -> list[str]:
    return [f"{axis}_rank" for axis in axes]
