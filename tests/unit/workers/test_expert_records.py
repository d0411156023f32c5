"""What each pipeline rank gets of a sample's experts, worked out by hand; no Ray."""

from __future__ import annotations

import numpy as np
import pytest

from mcore_rl.data.sample import RoutedExperts, Sample
from mcore_rl.workers.expert_records import ExpertLayers, by_stage

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


@pytest.mark.parametrize("parts", [[(0, 4)], [(0, 2), (2, 2)]], ids=["one turn", "two turns"])
def test_a_pipeline_rank_gets_the_layers_of_its_own(parts):
    first, last = by_stage(sample(*(recorded(*part) for part in parts)), LAYERS)
    assert (first.layers, last.layers) == ((2,), (1, 3))
    # The last token never ran; it has the experts of the one before.
    assert first.ids.tolist() == [[[token, 102]] for token in (0, 1, 2, 3, 3)]
    assert last.ids.tolist() == [[[token, 101], [token, 103]] for token in (0, 1, 2, 3, 3)]


def test_an_id_takes_a_byte():
    stages = by_stage(sample(recorded(0, 4)), LAYERS)
    num_tokens = len(PROMPT) + len(RESPONSE)
    assert sum(stage.ids.nbytes for stage in stages) == num_tokens * 3 * 2
    assert LAYERS.bytes_per_token == 3 * 2


def test_tokens_after_the_last_one_that_was_chosen_need_no_experts():
    cut = sample(recorded(0, 3), mask=(1, 0))  # the first response token, chosen by token 2
    assert by_stage(cut, LAYERS)[0].ids[:, 0, 0].tolist() == [0, 1, 2, 2, 2]


def test_a_turn_that_ended_before_its_first_token_needs_none():
    empty = Sample(PROMPT, [], [], [], [], "abort", 8)
    assert by_stage(empty, LAYERS)[1].ids.tolist() == [[[0, 1], [0, 1]]] * len(PROMPT)


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ([], "of 0 tokens of the sample of group 8, trajectory 1, segment 2; it needs those of 4"),
        ([recorded(0, 3)], "of 3 tokens .* needs those of 4, and has 5 tokens"),
        ([recorded(0, 6)], "of 6 tokens .* needs those of 4, and has 5 tokens"),
        ([recorded(1, 3)], "segment 2 has 0 tokens with 2 experts; the server goes on at token 1"),
        ([recorded(0, 2), recorded(3, 1)], "has 2 tokens with 2 experts; .* goes on at token 3"),
    ],
    ids=["none", "too few", "too many", "late", "gap"],
)
def test_experts_that_are_not_those_of_the_tokens_are_refused(parts, told):
    with pytest.raises(RuntimeError, match=f"router replay: .*{told}"):
        by_stage(sample(*parts), LAYERS)


@pytest.mark.parametrize("layer", [1, 3])
def test_a_layer_that_the_server_did_not_record_is_told(layer):
    whole = recorded(0, 4)
    whole.ids[:, layer] = 0
    with pytest.raises(RuntimeError, match=f"no experts of layer {layer} for the sample of group"):
        by_stage(sample(whole), LAYERS)


def test_a_layer_that_the_server_does_not_have_is_told():
    whole = recorded(0, 4)
    with pytest.raises(RuntimeError, match="no experts of layer 3 for the sample of group 8"):
        by_stage(sample(RoutedExperts(0, whole.ids[:, :3])), LAYERS)
