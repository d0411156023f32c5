"""Experts of a sample for each pipeline rank, worked out by hand; no Ray."""

from __future__ import annotations

import numpy as np
import pytest

from mcore_rl.config.errors import ConfigError
from mcore_rl.data.batch import Batch
from mcore_rl.data.routed_experts import (
    ExpertLayers,
    add_experts,
    divide_experts,
    list_expert_columns,
    select_stage_experts,
    split_by_stage,
)
from mcore_rl.data.sample import RoutedExperts, Sample

# Four decoder layers, the first without experts, over two pipeline ranks of two chunks each.
LAYERS = ExpertLayers(stages=((2,), (1, 3)), topk=2)
PROMPT, RESPONSE = [5, 6, 7], [8, 9]


def recorded(start: int, num_tokens: int) -> RoutedExperts:
    """Token t has the experts [t, 100 + layer] in the layers that have any."""
    ids = np.zeros((num_tokens, 4, 2), np.uint8)
    for layer in (1, 2, 3):
        ids[:, layer, 0] = start + np.arange(num_tokens)
        ids[:, layer, 1] = 100 + layer
    return RoutedExperts(start, ids)


def sample(*parts: RoutedExperts, mask: tuple[int, ...] = (1, 1)) -> Sample:
    return Sample(
        PROMPT, RESPONSE, [*mask], [-0.1, -0.2], [0, 0], "stop", 8, trajectory=1, segment=2,
        routed_experts=parts,
    )  # fmt: skip


def made(*samples: Sample) -> Batch:
    return add_experts(Batch.collate(samples), samples, LAYERS)


@pytest.mark.parametrize("parts", [[(0, 4)], [(0, 2), (2, 2)]], ids=["one turn", "two turns"])
def test_a_pipeline_rank_gets_the_layers_of_its_own(parts):
    first, last = split_by_stage(sample(*(recorded(*part) for part in parts)), LAYERS)
    # The last token never ran; it has the experts of the one before.
    assert first.tolist() == [[[token, 102]] for token in (0, 1, 2, 3, 3)]
    assert last.tolist() == [[[token, 101], [token, 103]] for token in (0, 1, 2, 3, 3)]


def test_an_id_takes_a_byte():
    batch = made(sample(recorded(0, 4)), sample(recorded(0, 4)))
    columns = [batch.jagged(name).values for name in list_expert_columns(batch)]
    assert sum(values.nbytes for values in columns) == batch.num_tokens.sum() * 3 * 2


def test_tokens_after_the_last_one_that_was_chosen_need_no_experts():
    cut = sample(recorded(0, 3), mask=(1, 0))  # the first response token, chosen by token 2
    assert split_by_stage(cut, LAYERS)[0][:, 0, 0].tolist() == [0, 1, 2, 2, 2]


def test_a_turn_that_ended_before_its_first_token_needs_none():
    empty = Sample(PROMPT, [], [], [], [], "abort", 8)
    assert split_by_stage(empty, LAYERS)[1].tolist() == [[[0, 1], [0, 1]]] * len(PROMPT)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([], "of 0 tokens of the sample of group 8, trajectory 1, segment 2; it needs those of 4"),
        ([recorded(0, 3)], "of 3 tokens .* needs those of 4, and has 5 tokens"),
        ([recorded(0, 6)], "of 6 tokens .* needs those of 4, and has 5 tokens"),
        ([recorded(1, 3)], "segment 2 has 0 tokens with 2 experts; the server goes on at token 1"),
        ([recorded(0, 2), recorded(3, 1)], "has 2 tokens with 2 experts; .* goes on at token 3"),
    ],
    ids=["none", "too few", "too many", "late", "gap"],
)
def test_experts_that_are_not_those_of_the_tokens_are_refused(parts, message):
    with pytest.raises(RuntimeError, match=f"router replay: .*{message}"):
        split_by_stage(sample(*parts), LAYERS)


@pytest.mark.parametrize("layer", [1, 3])
def test_a_layer_that_the_server_did_not_record_is_an_error(layer):
    full = recorded(0, 4)
    full.ids[:, layer] = 0
    with pytest.raises(RuntimeError, match=f"no experts of layer {layer} for the sample of group"):
        split_by_stage(sample(full), LAYERS)


def test_a_layer_that_the_server_does_not_have_is_an_error():
    full = recorded(0, 4)
    with pytest.raises(RuntimeError, match="no experts of layer 3 for the sample of group 8"):
        split_by_stage(sample(RoutedExperts(0, full.ids[:, :3])), LAYERS)


def test_a_batch_has_a_column_for_each_pipeline_rank_and_an_engine_reads_its_own():
    empty = Sample(PROMPT, [], [], [], [], "abort", 8)
    batch = made(sample(recorded(0, 4)), empty, sample(recorded(0, 4)))
    assert list_expert_columns(batch) == ["stage_routed_experts/2", "stage_routed_experts/1,3"]
    stage_experts = select_stage_experts(batch, (1, 3)).jagged("stage_routed_experts")
    assert stage_experts.lengths.tolist() == batch.num_tokens.tolist()
    assert stage_experts.values.dtype == np.uint8
    assert (
        stage_experts[0].tolist()
        == stage_experts[2].tolist()
        == split_by_stage(sample(recorded(0, 4)), LAYERS)[1].tolist()
    )
    assert stage_experts[1].tolist() == split_by_stage(empty, LAYERS)[1].tolist()


@pytest.mark.parametrize("stages", [((1, 2, 3),), ((), (1,), (3, 2)), ((2,), (1, 3))])
def test_saved_experts_are_divided_by_the_pipeline_ranks_of_another_run(stages):
    samples = [sample(recorded(0, 4)), sample(recorded(0, 2), recorded(2, 2), mask=(0, 1))]
    layers = ExpertLayers(stages, topk=2)
    loaded = divide_experts(Batch.load_arrays(made(*samples).to_arrays()), layers)
    expected = add_experts(Batch.collate(samples), samples, layers)
    assert list_expert_columns(loaded) == list_expert_columns(expected)
    for name in list_expert_columns(expected):
        assert loaded.jagged(name).values.dtype == np.uint8
        assert loaded.jagged(name).values.tolist() == expected.jagged(name).values.tolist()
        assert loaded.jagged(name).offsets.tolist() == expected.jagged(name).offsets.tolist()


def test_a_run_without_replay_drops_saved_experts_and_one_with_it_needs_all_layers():
    batch = made(sample(recorded(0, 4)))
    assert list_expert_columns(divide_experts(batch, None)) == []
    plain = Batch.collate([sample(recorded(0, 4))])
    for saved, missing in ((batch, "[4]"), (plain, "[1, 4]")):
        with pytest.raises(ConfigError, match=r"have no experts of layers ") as raised:
            divide_experts(saved, ExpertLayers(((1, 4),), topk=2))
        assert f"layers {missing}; allowed" in str(raised.value)


def test_ids_that_do_not_fit_a_byte_take_two_in_the_whole_batch():
    large = recorded(0, 4)
    large = RoutedExperts(0, large.ids.astype(np.int16) + 300)
    batch = made(Sample(PROMPT, [], [], [], [], "abort", 8), sample(large))
    column = batch.jagged("stage_routed_experts/2")
    assert column.values.dtype == np.int16
    assert column[1][:, 0, 1].tolist() == [402] * 5


def test_pipeline_ranks_without_experts_read_a_column_of_no_layers():
    stages = ExpertLayers(stages=((), (), (1, 2, 3)), topk=2)
    batch = add_experts(Batch.collate([sample(recorded(0, 4))]), [sample(recorded(0, 4))], stages)
    assert list_expert_columns(batch) == [
        "stage_routed_experts/none", "stage_routed_experts/1,2,3",
    ]  # fmt: skip
    assert select_stage_experts(batch, ()).jagged("stage_routed_experts").values.shape == (5, 0, 2)


def test_no_samples_have_columns_of_the_shape_that_others_have():
    values = made().jagged("stage_routed_experts/1,3").values
    assert (values.shape, values.dtype) == ((0, 2, 2), np.uint8)


@pytest.mark.parametrize("layers", [(2,), (1,), (1, 2, 3)])
def test_a_batch_without_the_experts_of_a_rank_is_refused(layers):
    # A replay that would replace nothing, and one of other layers.
    batch = made(sample(recorded(0, 4))).drop_columns("stage_routed_experts/2")
    name = ",".join(map(str, layers))
    with pytest.raises(RuntimeError, match=f"no column 'stage_routed_experts/{name}', the experts"):
        select_stage_experts(batch, layers)
