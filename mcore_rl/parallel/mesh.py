"""Device mesh of a layout: coordinates of ranks, and the layers of each pipeline stage.

The order is Megatron-core's "tp-cp-ep-dp-pp": the first axis varies fastest. Dense weights are laid
out as tp, cp, dp, pp; expert weights as etp, ep, edp, pp over the same ranks. Plain data: no torch,
no process group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.rules_engine import count_chunk_layers
from mcore_rl.config.schema import Layout

DENSE_AXES = ("tp", "cp", "dp", "pp")  # fastest first
EXPERT_AXES = ("etp", "ep", "edp", "pp")
AXES = ("tp", "cp", "dp", "pp", "etp", "ep", "edp")


@dataclass(frozen=True, slots=True)
class Coordinate:
    """Index of a rank on every axis. pp_rank is the same on the dense and the expert mesh."""

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
    >>> mesh.get_coordinate(3)
    Coordinate(tp_rank=1, cp_rank=0, dp_rank=1, pp_rank=0, etp_rank=0, ep_rank=1, edp_rank=1)
    >>> mesh.get_ranks(dp_rank=0), mesh.get_groups("dp")
    ([0, 1], [[0, 2], [1, 3]])
    """

    def __init__(self, layout: Layout) -> None:
        """Raise ConfigError if a size is below 1 or the expert mesh does not divide the ranks."""
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

    def get_coordinate(self, world_rank: int) -> Coordinate:
        """Return the coordinate of a world rank."""
        if not 0 <= world_rank < self.world_size:
            raise IndexError(f"world rank {world_rank} is outside of 0..{self.world_size - 1}")
        return self._coordinates[world_rank]

    def get_ranks(self, **coords: int) -> list[int]:
        """Return the world ranks at coordinates, ascending: get_ranks(dp_rank=0, tp_rank=1)."""
        for name, value in coords.items():
            size = self.sizes.get(name.removesuffix("_rank")) if name.endswith("_rank") else None
            if size is None:
                raise TypeError(
                    f"no coordinate is called {name!r}; there are {_name_indices(AXES)}"
                )
            if not 0 <= value < size:
                raise IndexError(f"{name} {value} is outside of 0..{size - 1}")
        return [
            rank
            for rank, coordinate in enumerate(self._coordinates)
            if all(getattr(coordinate, name) == value for name, value in coords.items())
        ]

    def get_groups(self, *axes: str) -> list[list[int]]:
        """Return groups of ranks that differ only on these axes: get_groups("tp", "dp").

        They are Megatron's. The axes must be in one mesh. Groups and the ranks in them are in
        ascending order.
        """
        fixed = _name_indices([axis for axis in _find_mesh(axes) if axis not in axes])
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank, coordinate in enumerate(self._coordinates):
            groups.setdefault(tuple(getattr(coordinate, n) for n in fixed), []).append(rank)
        return list(groups.values())

    def get_group(self, world_rank: int, *axes: str) -> list[int]:
        """Return the group of these axes that contains the rank."""
        mesh, stride = _find_mesh(axes), 1
        self.get_coordinate(world_rank)
        first, ranks = world_rank, [0]
        for axis in mesh:  # fastest first, so ranks stay in ascending order
            size = self.sizes[axis]
            if axis in axes:
                first -= world_rank // stride % size * stride
                ranks = [index * stride + rank for index in range(size) for rank in ranks]
            stride *= size
        return [first + rank for rank in ranks]

    def _locate(self, rank: int) -> Coordinate:
        dense = self._compute_indices(rank, DENSE_AXES)
        expert = self._compute_indices(rank, EXPERT_AXES)
        return Coordinate(**{f"{axis}_rank": index for axis, index in (expert | dense).items()})

    def _compute_indices(self, rank: int, axes: Sequence[str]) -> dict[str, int]:
        """Return the index of a rank on each axis of a mesh, the fastest first."""
        sizes = [self.sizes[axis] for axis in axes]
        return {axis: rank // prod(sizes[:i]) % sizes[i] for i, axis in enumerate(axes)}


def _find_mesh(axes: Sequence[str]) -> tuple[str, ...]:
    """Return the axes of the mesh, dense or expert, that has all of these."""
    for mesh in (DENSE_AXES, EXPERT_AXES):
        if axes and set(axes) <= set(mesh):
            return mesh
    raise TypeError(f"axes {axes} are not all in one of {DENSE_AXES} and {EXPERT_AXES}")


def _name_indices(axes: Sequence[str]) -> list[str]:
    """Return the fields of Coordinate for these axes."""
    return [f"{axis}_rank" for axis in axes]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Model chunk: consecutive decoder layers on one pipeline rank, and the parts around them."""

    pp_rank: int
    vpp_rank: int
    layers: range  # numbered over the whole model
    has_embedding: bool
    has_head: bool
    has_final_norm: bool
    num_mtp_layers: int

    @property
    def contents(self) -> list[str]:
        """Parts in the notation of Megatron's pipeline_model_parallel_layout."""
        parts = ["embedding"] * self.has_embedding + ["decoder"] * len(self.layers)
        return parts + ["mtp"] * self.num_mtp_layers + ["loss"] * self.has_head


def split_into_chunks(layout: Layout, num_layers: int, num_mtp_layers: int = 0) -> list[Chunk]:
    """Split a model into pp * vpp chunks, in the order of its layers.

    Chunk i is on pipeline rank i % pp. Multi-token prediction is on the stage of the output head.

    >>> [list(c.layers) for c in split_into_chunks(Layout(pp=2, first_stage_layers=1), 4)]
    [[0], [1, 2, 3]]

    Raises:
        ConfigError: The layers do not divide over the chunks.
    """
    counts = count_chunk_layers("layout", layout, num_layers)
    last = len(counts) - 1
    chunks, start = [], 0
    for index, count in enumerate(counts):
        layers = range(start, start + count)
        start += count
        has_last_layer = count > 0 and layers.stop == num_layers
        chunks.append(
            Chunk(
                pp_rank=index % layout.pp,
                vpp_rank=index // layout.pp,
                layers=layers,
                has_embedding=index == 0,
                has_head=index == last,
                # Megatron moves the norm to the last decoder layer when the model has MTP layers
                # (transformer/transformer_block.py:387).
                has_final_norm=has_last_layer if num_mtp_layers else index == last,
                num_mtp_layers=num_mtp_layers if index == last else 0,
            )
        )
    return chunks
