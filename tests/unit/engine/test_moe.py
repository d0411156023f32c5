"""Router replay without ranks: the column, and a router's slot under Megatron's own routing."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

from mcore_rl.data.batch import Batch, Jagged
from mcore_rl.engine.megatron import moe
from mcore_rl.engine.megatron.moe import StrictRouterReplay, list_moe_layers, needs_equal_packs
from mcore_rl.engine.megatron.router_replay import choose_expert_dtype, validate_experts

RECORD, FORWARD, BACKWARD = (
    RouterReplayAction.RECORD,
    RouterReplayAction.REPLAY_FORWARD,
    RouterReplayAction.REPLAY_BACKWARD,
)


def slot() -> StrictRouterReplay:
    made = StrictRouterReplay(RouterReplay())
    made.layer = 7
    return made


def routed(logits: torch.Tensor, replay: RouterReplay | None) -> tuple[torch.Tensor, torch.Tensor]:
    return topk_routing_with_score_function(logits, 2, router_replay=replay)


def logits(num_tokens: int = 5, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_tokens, 8, generator=torch.Generator().manual_seed(seed))


def test_what_a_router_chose_is_taken_by_another():
    replay, (first, second) = slot(), (logits(seed=0), logits(seed=1))
    replay.set_router_replay_action(RECORD)
    _, chosen = routed(first, replay)
    recorded = replay.recorded_topk_idx
    replay.clear()
    replay.target_topk_idx = recorded
    replay.set_router_replay_action(FORWARD)
    probs, taken = routed(second, replay)
    assert torch.equal(taken, chosen)
    assert not torch.equal(taken, routed(second, None)[1])
    expected = torch.zeros_like(second).scatter(1, recorded, second.gather(1, recorded).softmax(-1))
    assert torch.equal(probs, expected)


def test_recomputed_layers_take_their_targets_in_the_order_of_the_forward_passes():
    replay, targets = slot(), [torch.tensor([[0, 1]]), torch.tensor([[2, 3]])]
    for target in targets:
        replay.set_target_indices(target)
        replay.set_router_replay_action(FORWARD)
        assert routed(logits(1), replay)[1].nonzero()[:, 1].tolist() == target[0].tolist()
    replay.set_router_replay_action(BACKWARD)
    for target in targets:
        assert routed(logits(1), replay)[1].nonzero()[:, 1].tolist() == target[0].tolist()
    with pytest.raises(RuntimeError, match="layer 7 routes more often than it has targets"):
        routed(logits(1), replay)


def test_a_target_is_taken_once():
    replay = slot()
    replay.target_topk_idx = torch.tensor([[0, 1]])
    replay.set_router_replay_action(FORWARD)
    routed(logits(1), replay)
    with pytest.raises(RuntimeError, match="layer 7 routes more often than it has targets"):
        routed(logits(1), replay)


def test_a_recording_is_made_once():
    replay = slot()
    replay.set_router_replay_action(RECORD)
    routed(logits(), replay)
    with pytest.raises(RuntimeError, match="layer 7 routed twice"):
        routed(logits(), replay)


def test_targets_of_other_tokens_are_refused():
    replay = slot()
    replay.target_topk_idx = torch.tensor([[0, 1]])
    replay.set_router_replay_action(FORWARD)
    with pytest.raises(RuntimeError, match=r"routes .* \(5, 2\), its targets are \(1, 2\)"):
        routed(logits(5), replay)


def test_no_router_stays_in_the_list_of_all_that_were_built():
    before = list(RouterReplay.global_router_replay_instances)
    slot()
    assert RouterReplay.global_router_replay_instances == before


LAYERS = [2, 3, 5]


def column(values: np.ndarray, lengths: tuple[int, ...] = (3, 2)) -> Batch:
    """Two samples of a prompt token each, with 2 and 1 response tokens, and the column."""
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return Batch(
        {
            "prompt_ids": Jagged.pack([[1], [1]], np.int64),
            "response_ids": Jagged.pack([[2, 3], [4]], np.int64),
            "routed_experts": Jagged(values, offsets),
        }
    )


def valid() -> np.ndarray:
    """[5 tokens, 3 layers, 2 experts a token] out of 8."""
    return np.broadcast_to(np.array([0, 7], np.int16), (5, 3, 2)).copy()


def test_a_column_that_fits_is_taken_as_it_is():
    assert np.array_equal(validate_experts(column(valid()), LAYERS, 8, 2), valid())


def test_a_rank_without_samples_has_an_empty_column():
    empty = column(valid()).take([])
    assert validate_experts(empty, LAYERS, 8, 2).shape == (0, 3, 2)


@pytest.mark.parametrize(
    ("values", "lengths", "message"),
    [
        (valid()[:, :2], (3, 2), r"int16 \(2, 2\) per token; the model needs .* = \(3, 2\)"),
        (valid()[..., 0], (3, 2), r"int16 \(3,\) per token"),
        (valid().astype(np.float32), (3, 2), "float32"),
        (valid() + 1, (3, 2), "has experts 1 to 8; allowed: 0 to 7"),
        (valid() - 1, (3, 2), "has experts -1 to 6; allowed: 0 to 7"),
        (np.zeros((5, 3, 2), np.int16), (3, 2), "names an expert of a token twice: in layer 2"),
        (valid()[:3], (2, 1), "does not run along prompt and response tokens"),
    ],
    ids=["layers", "topk", "dtype", "too_large", "negative", "repeated", "lengths"],
)
def test_a_column_that_does_not_fit_is_refused(values, lengths, message):
    with pytest.raises(RuntimeError, match=f"column 'routed_experts'.*{message}"):
        validate_experts(column(values, lengths), LAYERS, 8, 2)


def test_an_expert_named_twice_is_reported_by_layer_token_and_row():
    values = valid()
    values[4, 1] = 6
    with pytest.raises(RuntimeError, match=r"twice: in layer 3, token 1 of row 1 of the batch"):
        validate_experts(column(values), LAYERS, 8, 2)


def test_the_experts_of_a_pipeline_rank_go_before_those_of_the_model():
    batch = column(valid())
    local = Jagged(valid()[:, :1].astype(np.uint8), batch.jagged("routed_experts").offsets)
    batch = batch.with_columns(stage_routed_experts=local)
    assert np.array_equal(validate_experts(batch, [5], 8, 2), local.values)
    with pytest.raises(RuntimeError, match=r"'stage_routed_experts' has uint8 \(1, 2\) per token"):
        validate_experts(batch, LAYERS, 8, 2)


def test_ids_take_the_smallest_type_that_has_them_all():
    assert [choose_expert_dtype(num) for num in (8, 256, 257)] == [np.uint8, np.uint8, np.int16]


def test_a_missing_column_says_where_it_comes_from():
    bare = column(valid()).select("prompt_ids", "response_ids")
    with pytest.raises(RuntimeError, match=r"no column 'routed_experts'.*infer_batch.*rollout"):
        validate_experts(bare, LAYERS, 8, 2)


def config(**fields) -> TransformerConfig:
    return TransformerConfig(num_layers=6, hidden_size=8, num_attention_heads=2, **fields)


def test_layers_with_experts_are_those_of_megatrons_pattern():
    assert list_moe_layers(config()) == []
    assert list_moe_layers(config(num_moe_experts=4)) == [0, 1, 2, 3, 4, 5]
    assert list_moe_layers(config(num_moe_experts=4, moe_layer_freq=2)) == [0, 2, 4]
    assert list_moe_layers(config(num_moe_experts=4, moe_layer_freq=[0, 1, 1, 0, 0, 1])) == [
        1,
        2,
        5,
    ]


@pytest.mark.parametrize(
    ("dispatcher", "ep", "etp", "gathers"),
    [("alltoall", 2, 1, False), ("allgather", 1, 1, False), ("allgather", 2, 1, True)],
)
def test_only_the_allgather_dispatcher_needs_packs_of_equal_size(dispatcher, ep, etp, gathers):
    made = config(
        num_moe_experts=4,
        moe_token_dispatcher_type=dispatcher,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
    )
    assert needs_equal_packs(made) is gathers


def test_the_load_of_few_tokens_is_over_its_mean_and_that_of_none_is_0(monkeypatch):
    """One token to one of eight experts, in two layers: eight times the mean."""
    loads = torch.zeros(2, 8, dtype=torch.float64)
    loads[0, 3] = 1
    monkeypatch.setattr(moe, "_reduce_loads", lambda chunks: (loads, torch.zeros(2)))
    monkeypatch.setattr(moe, "list_moe_layers", lambda config: [1, 3])
    config = SimpleNamespace(num_moe_experts=8, moe_router_load_balancing_type="none")
    actual, _ = moe.measure_balance([SimpleNamespace(config=config)])
    assert actual == {
        "moe/max_expert_load": 8.0, "moe/min_expert_load": 0.0, "moe/dead_experts": 15.0,
        "moe/max_expert_load/layer_1": 8.0, "moe/max_expert_load/layer_3": 0.0,
    }  # fmt: skip


def test_the_bias_of_a_router_is_added_in_float32_and_not_by_transformer_engine(monkeypatch):
    """cuBLASLt reads a bfloat16 bias as float32 where the result is float32."""

    def multiply(weight, states, dtype, layout, bias=None):
        assert layout == "TN" and bias is None
        return [states.to(dtype) @ weight.to(dtype).t()]

    monkeypatch.setattr(moe_utils, "te_general_gemm", multiply)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    generator = torch.Generator().manual_seed(0)
    weight, bias, states = (
        torch.randn(*shape, generator=generator).bfloat16() for shape in ((8, 64), (8,), (5, 1, 64))
    )
    router = moe.PackedRouter.__new__(moe.PackedRouter)
    torch.nn.Module.__init__(router)
    router.config = SimpleNamespace(moe_router_dtype="fp32")
    router.weight, router.bias = map(torch.nn.Parameter, (weight, bias))
    expected = torch.nn.functional.linear(states.float(), weight.float(), bias.float())
    torch.testing.assert_close(router.gating(states), expected)
    assert torch.equal(router.bias, bias)
