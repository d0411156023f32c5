"""Which part of a model each pipeline rank holds."""

from __future__ import annotations

import pytest

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import Layout
from mcore_rl.parallel.stages import split_into_chunks


def contents(layout, num_layers, num_mtp_layers=0):
    return [
        (c.pp_rank, c.vpp_rank, list(c.layers), c.contents.count("mtp"))
        for c in split_into_chunks(layout, num_layers, num_mtp_layers)
    ]


def test_one_rank_holds_everything():
    [chunk] = split_into_chunks(Layout(), 3)
    assert chunk.contents == ["embedding", "decoder", "decoder", "decoder", "loss"]
    assert chunk.has_final_norm


def test_interleaved_chunks_go_round_the_ranks():
    assert contents(Layout(pp=2, vpp=2), 4) == [
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
