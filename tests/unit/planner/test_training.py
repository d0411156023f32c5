"""Times of training by hand-worked cases, and against published runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mcore_rl.config.schema import EngineConfig, Layout, LoRAConfig
from mcore_rl.planner.flops import LayerWork, Matrix, ModelWork
from mcore_rl.planner.hardware import Hardware, load_hardware
from mcore_rl.planner.training import (
    ATTENTION_SHARE,
    SUSTAINED_SHARE,
    Load,
    TrainingModel,
)
from tests.published_runs import RUNS, predict_tokens_per_s

HIDDEN, FFN = 1024, 4096
# A device whose shares are 1 and whose latencies do not count: 1e12 flops, 1e12 bytes a second.
DEVICE = replace(
    load_hardware("h100"),
    peak_flops={"float32": 1e12, "bfloat16": 1e12},
    matmul_share=1.0,
    memory_bandwidth=1e15,
    memory_share=1.0,
    nvlink_bandwidth=1e9,
    nvlink_share=1.0,
    nvlink_latency_s=1e-12,
    nvlink_domain=8,
    network_bandwidth=1e8,
    network_share=1.0,
    network_latency_s=1e-12,
    kernel_latency_s=1e-12,
)


def build_work(num_layers: int = 4, num_experts: int = 0) -> ModelWork:
    mlp = Matrix("mlp", HIDDEN, FFN, True)
    layer = LayerWork(
        matrices=(
            Matrix("attention", HIDDEN, HIDDEN, True, "linear_qkv"),
            *[mlp] * (not num_experts),
        ),
        experts=(Matrix("experts", HIDDEN, FFN, True),) if num_experts else (),
        num_experts=num_experts,
        topk=2 if num_experts else 0,
        group_topk=0,
        pair_flops=4.0 * HIDDEN,
        state_flops=0.0,
        window=0,
        heads_elements=3 * HIDDEN,
        key_value_elements=2 * HIDDEN,
        act_elements=3 * FFN,
        parameters=HIDDEN * (HIDDEN + FFN * (num_experts or 1)),
        expert_parameters=HIDDEN * FFN * num_experts,
    )
    head = Matrix("head", 1, HIDDEN, True)
    return ModelWork(HIDDEN, (layer,) * num_layers, 0, 0, head, False, 0)


def build_model(work: ModelWork, device: Hardware = DEVICE, **fields: Any) -> TrainingModel:
    layout = fields.pop("layout", Layout())
    engine = EngineConfig(layout=layout, max_tokens_per_micro_batch=1000, **fields)
    return TrainingModel(work, engine, device)


def test_forward_pass_is_flops_over_the_rate() -> None:
    work = build_work()
    flops = 2 * 1000 * (4 * HIDDEN * (HIDDEN + FFN) + HIDDEN)
    pairs = 4 * 4.0 * HIDDEN * 1000 * 500.5
    expected = flops / (1e12 * SUSTAINED_SHARE) + pairs / (1e12 * ATTENTION_SHARE)
    actual = build_model(work).predict_forward(Load(1000, 1000))
    assert actual == pytest.approx(expected, rel=1e-3)


def test_backward_of_frozen_layers_is_one_product_and_that_of_adapters_two() -> None:
    work, rank = build_work(), 64
    matrices = 4 * HIDDEN * (HIDDEN + FFN) + HIDDEN
    adapters = 4 * rank * 2 * HIDDEN  # of attention alone
    flops = 2 * 1000 * (2 * matrices + 3 * adapters)
    pairs = 3.5 * 4 * 4.0 * HIDDEN * 1000 * 500.5
    expected = flops / (1e12 * SUSTAINED_SHARE) + pairs / (1e12 * ATTENTION_SHARE)
    model = build_model(work, lora=LoRAConfig(rank))
    update = model.predict_update(Load(1000, 1000))
    assert update.compute_s == pytest.approx(expected, rel=1e-3)
    assert model.count_trained_parameters() == (adapters, 0)
    assert model.count_training_flops(Load(1000, 1000)) == pytest.approx(
        flops + 3 * 4 * 4.0 * HIDDEN * 1000 * 500.5
    )


def test_prediction_layers_run_in_updates_with_the_output_layer_again() -> None:
    work = replace(build_work(), mtp_layers=build_work(1).layers)
    plain, trained = build_model(work), build_model(work, mtp_loss_coef=0.1)
    load = Load(1000, 1000)
    assert trained.predict_forward(load) == plain.predict_forward(load)
    layer = (HIDDEN + FFN) * HIDDEN + HIDDEN
    expected = 3 * 2 * 1000 * layer / (1e12 * SUSTAINED_SHARE)
    expected += 3.5 * 4.0 * HIDDEN * 1000 * 500.5 / (1e12 * ATTENTION_SHARE)
    more = trained.predict_update(load).compute_s - plain.predict_update(load).compute_s
    assert more == pytest.approx(expected, rel=1e-3)
    dense = HIDDEN * (HIDDEN + FFN)
    assert trained.count_local_parameters() == (5 * dense + HIDDEN, 0)


def test_a_product_of_few_tokens_takes_as_long_as_its_weights_are_read() -> None:
    slow = replace(DEVICE, memory_bandwidth=1e9)
    model = build_model(build_work(), slow)
    layer = model.predict_layer(model.work.layers[0], 1, 1, 1.0)
    expected = 2 * (HIDDEN * FFN + HIDDEN + FFN) / 1e9  # bfloat16 weights, input and output
    act = 2 * 3 * FFN / 1e9  # gate and up are read, the product written
    assert layer.compute["mlp"] == pytest.approx(expected + act)


def test_full_recompute_adds_a_forward_pass() -> None:
    load = Load(4000, 1000)
    plain = build_model(build_work()).predict_update(load)
    engine = build_model(build_work())
    engine.engine.recompute.granularity = "full"
    full = engine.predict_update(load)
    assert plain.recompute_s == 0
    layers_s = 4 * 4 * engine.predict_layer(engine.work.layers[0], 1000, 1000, 1.0).forward_s
    assert full.recompute_s == pytest.approx(layers_s)
    assert full.compute_s == pytest.approx(plain.compute_s)


def test_bubble_is_a_share_of_stages_minus_one_over_micro_batches() -> None:
    """(p - 1) / (v m) of the rest: arXiv:2104.04473, section 2.2."""
    for vpp, expected in ((1, 3 / 8), (2, 3 / 16)):
        layout = Layout(pp=4, vpp=vpp)
        update = build_model(build_work(8), layout=layout).predict_update(Load(8000, 1000))
        # The head is one row here, so that stages are equal.
        assert update.bubble_s / update.compute_s == pytest.approx(expected, rel=1e-3)


def test_tensor_parallel_layers_move_the_hidden_states_four_times_a_pass() -> None:
    """All-gather and reduce-scatter around attention and MLP: arXiv:2205.05198, section 4.2.2."""
    model = build_model(build_work(), layout=Layout(tp=4))
    layer = model.predict_layer(model.work.layers[0], 1000, 1000, 1.0)
    expected = 4 * 1000 * HIDDEN * 2 * 3 / 4 / 1e9
    assert layer.communication["tensor_parallel"] == pytest.approx(expected)


def test_exchange_of_experts_is_bound_by_the_network_beyond_a_domain() -> None:
    work = build_work(num_experts=32)
    inside = build_model(work, layout=Layout(dp=8, ep=8))
    across = build_model(work, layout=Layout(dp=32, ep=32))
    for model, expected in (
        # Dispatch and combine of two copies; one of eight stays, or three quarters leave the node.
        (inside, 2 * 1000 * 2 * HIDDEN * 2 * 7 / 8 / 1e9),
        (across, 2 * 1000 * 2 * HIDDEN * 2 * 3 / 4 / 1e8),
    ):
        layer = model.predict_layer(work.layers[0], 1000, 1000, 1.0)
        assert layer.communication["expert_parallel"] == pytest.approx(expected)


def test_flex_dispatcher_sends_a_token_once_to_a_node() -> None:
    """Expect two random experts on 4 (1 - (3/4)^2) of four nodes, 3/4 of which are remote."""
    work = build_work(num_experts=32)
    model = build_model(work, layout=Layout(dp=32, ep=32))
    model.engine.moe.dispatcher = "flex"
    layer = model.predict_layer(work.layers[0], 1000, 1000, 1.0)
    reached = 4 * (1 - (3 / 4) ** 2) * 3 / 4
    expected = 2 * 1000 * reached * HIDDEN * 2 / 1e8
    assert layer.communication["expert_parallel"] == pytest.approx(expected)


def test_groups_of_experts_limit_the_nodes_that_a_token_reaches() -> None:
    """Two of four groups, each on two of eight nodes: at most four nodes, 7/8 of them remote."""
    work = build_work(num_experts=64)
    layer = replace(work.layers[0], topk=16, group_topk=2, num_groups=4)
    model = build_model(replace(work, layers=(layer,) * 4), layout=Layout(dp=64, ep=64))
    model.engine.moe.dispatcher = "flex"
    time = model.predict_layer(layer, 1000, 1000, 1.0)
    expected = 2 * 1000 * 4 * 7 / 8 * HIDDEN * 2 / 1e8
    assert time.communication["expert_parallel"] == pytest.approx(expected)


def test_ranks_that_share_experts_gather_each_others_tokens() -> None:
    work = build_work(num_experts=32)
    model = build_model(work, layout=Layout(dp=4, etp=4))
    layer = model.predict_layer(work.layers[0], 1000, 1000, 1.0)
    expected = 2 * 1000 * 2 * HIDDEN * 2 * 3 / 1e9
    assert layer.communication["expert_parallel"] == pytest.approx(expected)


@pytest.mark.parametrize(("is_distributed", "num_bytes"), [(True, 4 + 2), (False, 4 + 4)])
def test_gradients_are_reduced_in_float32(is_distributed: bool, num_bytes: int) -> None:
    """Then weights are gathered in bfloat16, or without a distributed optimizer gradients."""
    model = build_model(build_work(), layout=Layout(dp=8))
    model.engine.optimizer.distributed = is_distributed
    update = model.predict_update(Load(8000, 1000))
    parameters = 4 * HIDDEN * (HIDDEN + FFN) + HIDDEN
    assert update.data_parallel_s == pytest.approx(parameters * num_bytes * 7 / 8 / 1e9, rel=1e-3)


@pytest.mark.parametrize(
    "run",
    RUNS["training"],
    ids=[f"{r['name']}-{r['hardware']}-{r['source']}" for r in RUNS["training"]],
)
def test_published_runs_are_predicted_within_a_quarter_or_explained(run: dict[str, Any]) -> None:
    ratio = predict_tokens_per_s(run) / run["tokens_per_s"]
    is_close = 1 / 1.25 <= ratio <= 1.25
    assert is_close == ("explanation" not in run), f"predicted / published = {ratio:.2f}"
