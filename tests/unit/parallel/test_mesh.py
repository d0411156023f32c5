"""The pure mesh against Megatron-core's own rank generator, over many layouts."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.parallel_state import RankGenerator

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import Layout
from mcore_rl.parallel.mesh import DENSE_AXES, EXPERT_AXES, Mesh
from tests.operations import growth

ORDER = "tp-cp-ep-dp-pp"
SIZES = (1, 2, 3, 4)


def layouts() -> list[Layout]:
    """Every layout of sizes 1, 2 and 4 up to 64 ranks, some with 3, that divides."""
    found = []
    for tp, pp, cp, dp in product(SIZES, repeat=4):
        world = tp * pp * cp * dp
        found += [
            Layout(tp=tp, pp=pp, cp=cp, dp=dp, ep=ep, etp=etp)
            for ep, etp in product((1, 2, 4), (1, 2))
            if world <= 64 and world % (ep * etp * pp) == 0
        ]
    return found


def generators(layout: Layout) -> tuple[RankGenerator, RankGenerator]:
    edp = layout.world_size // (layout.etp * layout.ep * layout.pp)
    dense = RankGenerator(layout.tp, 1, layout.dp, layout.pp, layout.cp, ORDER)
    expert = RankGenerator(layout.etp, layout.ep, edp, layout.pp, 1, ORDER)
    return dense, expert


def test_groups_of_every_axis_are_megatrons_on_every_layout():
    assert len(layouts()) > 300
    megatron_name = {"etp": "tp", "edp": "dp"}
    for layout in layouts():
        mesh = Mesh(layout)
        for generator, axes in zip(generators(layout), (DENSE_AXES, EXPERT_AXES), strict=True):
            for axis in axes:
                expected = generator.get_ranks(megatron_name.get(axis, axis))
                assert mesh.groups(axis) == expected, (layout, axis)


def test_combined_groups_are_megatrons():
    for layout in layouts()[::7]:
        dense, expert = generators(layout)
        mesh = Mesh(layout)
        assert mesh.groups("tp", "pp") == dense.get_ranks("tp-pp")
        assert mesh.groups("dp", "cp") == dense.get_ranks("dp-cp")
        assert mesh.groups("tp", "dp", "cp") == dense.get_ranks("tp-dp-cp")
        assert mesh.groups("etp", "ep") == expert.get_ranks("tp-ep")
        assert mesh.groups("etp", "ep", "pp") == expert.get_ranks("tp-ep-pp")


def test_coordinates_are_positions_in_megatrons_groups():
    for layout in layouts()[::11]:
        dense, expert = generators(layout)
        mesh = Mesh(layout)
        for rank in range(mesh.world_size):
            coordinate = mesh.coordinate(rank)
            for generator, token, name in (
                (dense, "tp", "tp_rank"),
                (dense, "cp", "cp_rank"),
                (dense, "dp", "dp_rank"),
                (dense, "pp", "pp_rank"),
                (expert, "tp", "etp_rank"),
                (expert, "ep", "ep_rank"),
                (expert, "dp", "edp_rank"),
                (expert, "pp", "pp_rank"),
            ):
                group = next(g for g in generator.get_ranks(token) if rank in g)
                assert getattr(coordinate, name) == group.index(rank), (layout, rank, name)


@given(st.sampled_from(layouts()), st.data())
def test_a_full_coordinate_names_one_rank(layout: Layout, data: st.DataObject):
    mesh = Mesh(layout)
    rank = data.draw(st.integers(0, mesh.world_size - 1))
    at = mesh.coordinate(rank)
    dense = {f"{axis}_rank": getattr(at, f"{axis}_rank") for axis in DENSE_AXES}
    expert = {f"{axis}_rank": getattr(at, f"{axis}_rank") for axis in EXPERT_AXES}
    assert mesh.ranks(**dense) == [rank] == mesh.ranks(**expert)
    axis = data.draw(st.sampled_from(DENSE_AXES + EXPERT_AXES))
    assert rank in mesh.group_of(rank, axis)
    assert len(mesh.group_of(rank, axis)) == mesh.sizes[axis]


def test_ranks_of_a_partial_coordinate_are_ascending():
    mesh = Mesh(Layout(tp=2, dp=2, pp=2))
    assert mesh.ranks() == list(range(8))
    assert mesh.ranks(dp_rank=0) == [0, 1, 4, 5]
    assert mesh.ranks(dp_rank=1, tp_rank=0) == [2, 6]


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (Layout(tp=0), "layout.tp is 0"),
        (Layout(dp=-2), "layout.dp is -2"),
        (Layout(ep=2.0), "layout.ep is 2.0"),  # type: ignore[arg-type]
        (Layout(tp=2, ep=4), "must divide the world size tp * pp * cp * dp = 2"),
        (Layout(dp=6, ep=2, etp=2), "layout.etp * layout.ep * layout.pp is 2 * 2 * 1 = 4"),
    ],
)
def test_a_layout_that_does_not_divide_is_refused_by_name(layout: Layout, words: str):
    with pytest.raises(ConfigError) as error:
        Mesh(layout)
    assert words in str(error.value)


def test_wrong_axis_coordinate_or_rank_is_refused():
    mesh = Mesh(Layout(tp=2))
    with pytest.raises(TypeError, match="no coordinate is called 'tp'"):
        mesh.ranks(tp=0)
    with pytest.raises(IndexError, match="tp_rank 2"):
        mesh.ranks(tp_rank=2)
    with pytest.raises(IndexError, match="world rank 2"):
        mesh.coordinate(2)
    with pytest.raises(TypeError, match="are not all in one"):
        mesh.groups("tp", "ep")
    with pytest.raises(TypeError, match="are not all in one"):
        mesh.groups()


@pytest.mark.parametrize("axes", [("tp",), ("tp", "pp"), ("ep",), ("etp", "edp", "pp")])
def test_the_group_of_a_rank_is_among_the_groups(axes):
    for layout in layouts()[::7]:
        mesh = Mesh(layout)
        for group in mesh.groups(*axes):
            assert all(mesh.group_of(rank, *axes) == group for rank in group)


@pytest.mark.parametrize("axes", [("tp",), ("pp",), ("cp", "tp"), ("ep",)])
def test_groups_of_all_ranks_take_work_linear_in_the_ranks(axes):
    def find_all(num_ranks: int) -> None:
        mesh = Mesh(Layout(tp=2, cp=2, pp=2, dp=num_ranks // 8, ep=2))
        for rank in range(num_ranks):
            mesh.group_of(rank, *axes)

    assert growth(find_all, 32, 256) < 1.2
