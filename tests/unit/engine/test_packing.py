"""Packs hold every sample once, and each response token points at the hidden state before it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core import parallel_state
from megatron.core.transformer import MLATransformerConfig, TransformerConfig

from mcore_rl.data.batch import Batch, Jagged
from mcore_rl.engine.megatron.packing import estimate_model_cost, read_pack_split
from mcore_rl.engine.packing import (
    PackSplit,
    compute_pack_sizes,
    get_zigzag_rows,
    pack_samples,
)

pytestmark = pytest.mark.filterwarnings("ignore:full scope is deprecated:UserWarning")

CPU = torch.device("cpu")


def batch(prompts=((5, 6), (7,), (8, 9, 10)), responses=((1, 2, 3), (4,), (11, 12))):
    return Batch(
        {
            "prompt_ids": Jagged.pack(prompts, np.int64),
            "response_ids": Jagged.pack(responses, np.int64),
            "advantages": Jagged.pack([[t / 10 for t in r] for r in responses], np.float32),
            "rewards": np.zeros(len(prompts), np.float32),
        }
    )


def test_one_pack_lays_the_samples_end_to_end_the_longest_first():
    [micro] = pack_samples(batch(), [[0, 1, 2]], PackSplit(tp=4), CPU)
    assert micro.rows == [0, 2, 1]
    assert micro.input_ids.tolist() == [[5, 6, 1, 2, 3, 8, 9, 10, 11, 12, 7, 4]]
    assert micro.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]]
    assert micro.starts.tolist() == [0, 5, 10, 12]
    assert micro.lengths == (5, 5, 2)
    assert micro.targets.tolist() == [1, 2, 3, 11, 12, 4]
    assert micro.input_ids[0, micro.hidden_rows].tolist() == [6, 1, 2, 10, 11, 7]
    assert micro.columns["advantages"].tolist() == pytest.approx([0.1, 0.2, 0.3, 1.1, 1.2, 0.4])
    assert micro.response_indices.tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("cp", [1, 2])
def test_tokens_further_ahead_are_predicted_from_their_own_sequence(cp):
    """Depth 1 from the token before the last one, depth 2 from the one before that.

    The samples are 5 6 1 2 3, then 8 9 10 11 12, then 7 4: nothing of 7 4 has a token so far back.
    """
    weights = {"loss_weights": batch().jagged("advantages")}
    micros = [
        pack_samples(
            batch().with_columns(**weights),
            [[0, 1, 2]],
            PackSplit(cp=cp, cp_rank=rank),
            CPU,
            num_mtp_layers=2,
        )[0]
        for rank in range(cp)
    ]
    for depth, pairs in enumerate(
        ([(5, 1), (6, 2), (1, 3), (9, 11), (10, 12)], [(5, 2), (6, 3), (8, 11), (9, 12)])
    ):
        actual = []
        for micro in micros:
            ahead = micro.mtp_targets[depth]
            states = micro.input_ids[0, ahead.hidden_rows].tolist()
            actual += zip(states, ahead.targets.tolist(), strict=True)
            assert ahead.loss_weights.tolist() == pytest.approx(ahead.targets / 10)
        assert sorted(actual) == sorted(pairs)


def test_the_tail_is_padded_behind_the_last_sequence():
    [micro] = pack_samples(batch(), [[0, 1, 2]], PackSplit(tp=8), CPU)
    assert micro.input_ids.shape == (1, 16)
    assert micro.starts.tolist() == [0, 5, 10, 16]
    assert micro.num_tokens == 12


def test_each_context_parallel_rank_holds_two_chunks_of_each_sequence():
    first, second = (
        pack_samples(batch(), [[0, 1, 2]], PackSplit(cp=2, cp_rank=r), CPU)[0] for r in range(2)
    )
    # 5, 5 and 2 tokens are padded to 8, 8 and 4: chunks of 2, 2 and 1.
    assert first.input_ids.tolist() == [[5, 6, 0, 0, 8, 9, 0, 0, 7, 0]]
    assert second.input_ids.tolist() == [[1, 2, 3, 0, 10, 11, 12, 0, 4, 0]]
    assert first.position_ids.tolist() == [[0, 1, 6, 7, 0, 1, 6, 7, 0, 3]]
    assert second.position_ids.tolist() == [[2, 3, 4, 5, 2, 3, 4, 5, 1, 2]]
    assert (first.num_tokens, second.num_tokens) == (5, 7)
    for micro in (first, second):
        assert micro.starts.tolist() == [0, 8, 16, 20]
        assert micro.lengths == (8, 8, 4)
        assert micro.num_response_tokens == 6
    assert first.response_indices.tolist() == [0, 5] and first.targets.tolist() == [1, 4]
    assert second.response_indices.tolist() == [1, 2, 3, 4] and second.targets.tolist() == [
        2,
        3,
        11,
        12,
    ]
    assert second.columns["advantages"].tolist() == pytest.approx([0.2, 0.3, 1.1, 1.2])


LENGTHS = st.lists(st.tuples(st.integers(1, 20), st.integers(0, 20)), max_size=8)


@given(LENGTHS, st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 2, 3, 4]))
def test_the_ranks_of_any_split_hold_each_token_and_score_each_response_once(lengths, tp, cp):
    ids = iter(range(1, 1000))
    prompts = [[next(ids) for _ in range(p)] for p, _ in lengths]
    responses = [[next(ids) for _ in range(r)] for _, r in lengths]
    rows = list(range(len(lengths)))
    micros = [
        pack_samples(batch(prompts, responses), [rows], PackSplit(tp, cp, rank), CPU)[0]
        for rank in range(cp)
    ]
    held = torch.cat([micro.input_ids[0] for micro in micros])
    assert sorted(held[held > 0].tolist()) == list(range(1, sum(map(sum, lengths)) + 1))
    assert sum(micro.num_tokens for micro in micros) == sum(map(sum, lengths))
    expected = [token for row in micros[0].rows for token in responses[row]]
    before = {t: u for p, r in zip(prompts, responses, strict=True) for u, t in pairwise([*p, *r])}
    places = []
    for micro in micros:
        assert micro.input_ids.shape[1] % tp == 0
        assert micro.starts[-1] == micro.input_ids.shape[1] * cp
        assert micro.starts.diff().tolist() == list(micro.lengths)
        assert all(n % (2 * cp) == 0 for n in micro.lengths if cp > 1)
        assert micro.targets.tolist() == [
            expected[place] for place in micro.response_indices.tolist()
        ]
        scoring = micro.input_ids[0, micro.hidden_rows].tolist()
        assert scoring == [before[target] for target in micro.targets.tolist()]
        places += micro.response_indices.tolist()
    assert sorted(places) == list(range(len(expected)))


@pytest.mark.parametrize("split", [PackSplit(tp=2), PackSplit(tp=2, cp=2), PackSplit(tp=4, cp=3)])
def test_a_pack_within_the_budget_stays_within_it_on_each_rank_when_padded(split):
    """The budget is filled to the last token by samples of one token, and by one sample."""
    for max_tokens in (24, 25, 31):
        budget = split.compute_budget(max_tokens)
        assert max_tokens * split.cp - split.pack_multiple < budget
        for sizes in ([1] * (budget // split.sequence_multiple), [budget]):
            assert sum(split.pad_length(size) for size in sizes) <= budget
            samples = batch([[1] * size for size in sizes], [[]] * len(sizes))
            [micro] = pack_samples(samples, [list(range(len(sizes)))], split, CPU)
            assert micro.input_ids.shape[1] <= max_tokens


@pytest.mark.parametrize("split", [PackSplit(), PackSplit(tp=2), PackSplit(cp=2, cp_rank=1)])
def test_float8_packs_have_a_multiple_of_its_blocks_on_each_rank(split):
    split = replace(split, rank_multiple=32)
    [micro] = pack_samples(batch(), [[0, 1, 2]], split, CPU)
    assert micro.input_ids.shape[1] == 32 * split.tp
    assert micro.num_tokens == (micro.token_indices >= 0).sum() > 0
    assert (
        split.compute_budget(1000) == 1000 * split.cp // split.pack_multiple * split.pack_multiple
    )


@pytest.mark.parametrize(
    ("recipe", "tp", "expected"),
    [(None, 2, 1), ("tensorwise", 2, 32), ("mxfp8", 2, 32), ("blockwise", 1, 32),
     ("blockwise", 2, 128)],
)  # fmt: skip
def test_packs_are_padded_to_the_blocks_of_a_float8_recipe(recipe, tp, expected, monkeypatch):
    for name, value in (
        ("get_tensor_model_parallel_world_size", tp),
        ("get_context_parallel_world_size", 1),
        ("get_context_parallel_rank", 0),
    ):
        monkeypatch.setattr(parallel_state, name, lambda value=value: value)
    config: Any = SimpleNamespace(fp8=recipe and "e4m3", fp8_recipe=recipe or "delayed")
    assert read_pack_split(config) == PackSplit(tp=tp, rank_multiple=expected)


def test_a_part_without_rows_is_a_pack_of_padding():
    empty, full = pack_samples(batch(), [[], [0, 1, 2]], PackSplit(tp=2, cp=2, cp_rank=1), CPU)
    assert full.rows == [0, 2, 1]
    assert (empty.rows, empty.num_tokens, empty.num_response_tokens) == ([], 0, 0)
    assert empty.input_ids.shape == (1, 2)
    assert empty.starts.tolist() == [0, 4]
    assert (
        len(empty.targets) == len(empty.response_indices) == len(empty.columns["advantages"]) == 0
    )


def test_zigzag_rows_cover_a_pack():
    rows = np.concatenate([get_zigzag_rows([6, 12], cp=3, cp_rank=rank) for rank in range(3)])
    assert sorted(rows.tolist()) == list(range(18))


def test_a_column_that_does_not_run_along_the_responses_is_named():
    bad = batch().with_columns(advantages=Jagged.pack([[0.1], [0.2], [0.3]], np.float32))
    with pytest.raises(ValueError, match="'advantages' does not run along the response tokens"):
        pack_samples(bad, [[0, 1, 2]], PackSplit(), CPU)


def test_experts_of_any_stage_run_along_prompts_too_and_are_in_no_pack():
    lengths = batch().num_tokens
    ids = Jagged.pack([np.zeros((length, 2, 2)) for length in lengths], np.uint8)
    samples = batch().with_columns(**{"stage_routed_experts": ids, "stage_routed_experts/1,2": ids})
    [micro] = pack_samples(samples, [[0, 1, 2]], PackSplit(), CPU)
    assert "advantages" in micro.columns
    assert not [name for name in micro.columns if "experts" in name]


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="empty prompt"):
        pack_samples(batch([[1], []], [[2], [3]]), [[0, 1]], PackSplit(), CPU)


@pytest.mark.parametrize(
    "split", [PackSplit(), PackSplit(tp=4), PackSplit(cp=2, cp_rank=1)], ids=str
)
def test_a_pack_can_be_padded_further_and_knows_its_tokens(split):
    samples, parts = batch(), [[2, 0], [1], []]
    sizes = compute_pack_sizes(samples, parts, split)
    plain = pack_samples(samples, parts, split, CPU)
    wider = pack_samples(samples, parts, split, CPU, [size + split.pack_multiple for size in sizes])
    tokens = np.concatenate([np.concatenate(pair) for pair in zip(*rows_of(samples), strict=True)])
    for size, short, long in zip(sizes, plain, wider, strict=True):
        assert short.input_ids.shape[1] * split.cp == size
        assert (long.input_ids.shape[1] - short.input_ids.shape[1]) * split.cp == (
            split.pack_multiple
        )
        for micro in (short, long):
            real = micro.token_indices >= 0
            assert int(real.sum()) == micro.num_tokens
            assert (
                micro.input_ids[0, real].tolist()
                == tokens[micro.token_indices[real].numpy()].tolist()
            )


def rows_of(samples):
    return samples.jagged("prompt_ids"), samples.jagged("response_ids")


# Cost of a sequence: multiplications of the matrices and of attention.
SIZES = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 160}
EXPERTS = {"num_moe_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 40}
PROJECTIONS = 64 * 96 + 96 * 64 + 2 * 64 * 48  # queries, output, keys and values
HEAD = 64 * 100


def transformer_config(**settings):
    return TransformerConfig(**SIZES, num_query_groups=2, kv_channels=24, **settings)


def test_a_dense_model():
    cost = estimate_model_cost(transformer_config(), vocab_size=100)
    assert cost.per_token == 4 * (PROJECTIONS + 3 * 64 * 160) + HEAD
    assert cost.per_token_pair == 4 * 2 * 96


def test_experts_cost_what_a_token_uses_of_them():
    cost = estimate_model_cost(transformer_config(**EXPERTS), vocab_size=100)
    assert cost.per_token == 4 * (PROJECTIONS + 3 * 64 * 2 * 40) + HEAD
    shared = estimate_model_cost(
        transformer_config(**EXPERTS, moe_shared_expert_intermediate_size=24), vocab_size=100
    )
    assert shared.per_token - cost.per_token == 4 * 3 * 64 * 24


@pytest.mark.parametrize(("every", "num_moe"), [([0, 1, 1, 1], 3), (2, 2)])
def test_dense_layers_among_experts(every, num_moe):
    cost = estimate_model_cost(transformer_config(**EXPERTS, moe_layer_freq=every), vocab_size=100)
    mlps = num_moe * 3 * 64 * 2 * 40 + (4 - num_moe) * 3 * 64 * 160
    assert cost.per_token == 4 * PROJECTIONS + mlps + HEAD


def test_latent_attention_counts_its_own_head_sizes():
    latent = MLATransformerConfig(
        **SIZES, qk_head_dim=16, qk_pos_emb_head_dim=8, v_head_dim=20, kv_lora_rank=32
    )
    assert estimate_model_cost(latent, vocab_size=100).per_token_pair == 4 * 4 * (16 + 8 + 20)
