"""The mesh compared with Megatron-core's rank generator, and the chunks of pipeline stages."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.parallel_state import RankGenerator

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import Layout
from mcore_rl.parallel.mesh import DENSE_AXES, EXPERT_AXES, Mesh, split_into_chunks
from tests.operations import growth

ORDER = "tp-cp-ep-dp-pp"
SIZES = (1, 2, 3, 4)


def list_layouts() -> list[Layout]:
    """Return the layouts of sizes 1, 2 and 4 up to 64 ranks, some with 3, that divide."""
    layouts = []
    for tp, pp, cp, dp in product(SIZES, repeat=4):
        world = tp * pp * cp * dp
        layouts += [
            Layout(tp=tp, pp=pp, cp=cp, dp=dp, ep=ep, etp=etp)
            for ep, etp in product((1, 2, 4), (1, 2))
            if world <= 64 and world % (ep * etp * pp) == 0
        ]
    return layouts


def create_generators(layout: Layout) -> tuple[RankGenerator, RankGenerator]:
    edp = layout.world_size // (layout.etp * layout.ep * layout.pp)
    dense = RankGenerator(layout.tp, 1, layout.dp, layout.pp, layout.cp, ORDER)
    expert = RankGenerator(layout.etp, layout.ep, edp, layout.pp, 1, ORDER)
    return dense, expert


def test_groups_of_every_axis_are_megatrons_on_every_layout():
    assert len(list_layouts()) > 300
    megatron_name = {"etp": "tp", "edp": "dp"}
    for layout in list_layouts():
        mesh = Mesh(layout)
        for generator, axes in zip(
            create_generators(layout), (DENSE_AXES, EXPERT_AXES), strict=True
        ):
            for axis in axes:
                expected = generator.get_ranks(megatron_name.get(axis, axis))
                assert mesh.get_groups(axis) == expected, (layout, axis)


def test_combined_groups_are_megatrons():
    for layout in list_layouts()[::7]:
        dense, expert = create_generators(layout)
        mesh = Mesh(layout)
        assert mesh.get_groups("tp", "pp") == dense.get_ranks("tp-pp")
        assert mesh.get_groups("dp", "cp") == dense.get_ranks("dp-cp")
        assert mesh.get_groups("tp", "dp", "cp") == dense.get_ranks("tp-dp-cp")
        assert mesh.get_groups("etp", "ep") == expert.get_ranks("tp-ep")
        assert mesh.get_groups("etp", "ep", "pp") == expert.get_ranks("tp-ep-pp")


@pytest.mark.job
def test_coordinates_are_positions_in_megatrons_groups():
    for layout in list_layouts()[::11]:
        dense, expert = create_generators(layout)
        mesh = Mesh(layout)
        for rank in range(mesh.world_size):
            coordinate = mesh.get_coordinate(rank)
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


@given(st.sampled_from(list_layouts()), st.data())
def test_a_full_coordinate_names_one_rank(layout: Layout, data: st.DataObject):
    mesh = Mesh(layout)
    rank = data.draw(st.integers(0, mesh.world_size - 1))
    coordinate = mesh.get_coordinate(rank)
    dense = {f"{axis}_rank": getattr(coordinate, f"{axis}_rank") for axis in DENSE_AXES}
    expert = {f"{axis}_rank": getattr(coordinate, f"{axis}_rank") for axis in EXPERT_AXES}
    assert mesh.get_ranks(**dense) == [rank] == mesh.get_ranks(**expert)
    axis = data.draw(st.sampled_from(DENSE_AXES + EXPERT_AXES))
    assert rank in mesh.get_group(rank, axis)
    assert len(mesh.get_group(rank, axis)) == mesh.sizes[axis]


def test_ranks_of_a_partial_coordinate_are_ascending():
    mesh = Mesh(Layout(tp=2, dp=2, pp=2))
    assert mesh.get_ranks() == list(range(8))
    assert mesh.get_ranks(dp_rank=0) == [0, 1, 4, 5]
    assert mesh.get_ranks(dp_rank=1, tp_rank=0) == [2, 6]


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
        mesh.get_ranks(tp=0)
    with pytest.raises(IndexError, match="tp_rank 2"):
        mesh.get_ranks(tp_rank=2)
    with pytest.raises(IndexError, match="world rank 2"):
        mesh.get_coordinate(2)
    with pytest.raises(TypeError, match="are not all in one"):
        mesh.get_groups("tp", "ep")
    with pytest.raises(TypeError, match="are not all in one"):
        mesh.get_groups()


@pytest.mark.parametrize("axes", [("tp",), ("tp", "pp"), ("ep",), ("etp", "edp", "pp")])
def test_the_group_of_a_rank_is_among_the_groups(axes):
    for layout in list_layouts()[::7]:
        mesh = Mesh(layout)
        for group in mesh.get_groups(*axes):
            assert all(mesh.get_group(rank, *axes) == group for rank in group)


@pytest.mark.parametrize("axes", [("tp",), ("pp",), ("cp", "tp"), ("ep",)])
def test_groups_of_all_ranks_take_work_linear_in_the_ranks(axes):
    def find_all(num_ranks: int) -> None:
        mesh = Mesh(Layout(tp=2, cp=2, pp=2, dp=num_ranks // 8, ep=2))
        for rank in range(num_ranks):
            mesh.get_group(rank, *axes)

    assert growth(find_all, 32, 256) < 1.2


def summarize_chunks(layout, num_layers, num_mtp_layers=0):
    return [
        (c.pp_rank, c.vpp_rank, list(c.layers), c.contents.count("mtp"))
        for c in split_into_chunks(layout, num_layers, num_mtp_layers)
    ]


def test_one_rank_holds_everything():
    [chunk] = split_into_chunks(Layout(), 3)
    assert chunk.contents == ["embedding", "decoder", "decoder", "decoder", "loss"]
    assert chunk.has_final_norm


def test_interleaved_chunks_go_round_the_ranks():
    assert summarize_chunks(Layout(pp=2, vpp=2), 4) == [
        (0, 0, [0], 0),
        (1, 0, [1], 0),
        (0, 1, [2], 0),
        (1, 1, [3], 0),
    ]


def test_uneven_ends():
    layout = Layout(pp=4, first_stage_layers=1, last_stage_layers=2)
    assert [c.layers for c in split_into_chunks(layout, 7)] == [
        range(0, 1),
        range(1, 3),
        range(3, 5),
        range(5, 7),
    ]


def test_the_embedding_and_the_head_can_stand_alone():
    chunks = split_into_chunks(Layout(pp=3, first_stage_layers=0, last_stage_layers=0), 4)
    assert [c.contents for c in chunks] == [["embedding"], ["decoder"] * 4, ["loss"]]
    assert [c.has_final_norm for c in chunks] == [False, False, True]


def test_with_prediction_layers_the_final_norm_goes_to_the_last_decoder_layer():
    chunks = split_into_chunks(Layout(pp=2, last_stage_layers=0), 4, num_mtp_layers=1)
    assert [c.contents for c in chunks] == [["embedding"] + ["decoder"] * 4, ["mtp", "loss"]]
    assert [c.has_final_norm for c in chunks] == [True, False]


def test_layers_that_do_not_divide_are_refused():
    with pytest.raises(ConfigError, match="leave 5 of the model's 5 layers for 2 equal chunks"):
        split_into_chunks(Layout(pp=2), 5)
