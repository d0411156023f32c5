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


@pytest.mark.parametrize(("cp", "rate"), [(2, 1e9), (4, 1e9), (8, 1e8)])
def test_context_parallel_ranks_send_keys_and_values_of_the_others(cp: int, rate: float) -> None:
    """Eight ranks at steps of tp=2 leave the domain; the pairs of a block hide a part."""
    model = build_model(build_work(), layout=Layout(tp=2, cp=cp))
    layer = model.predict_layer(model.work.layers[0], 1000, 1, 1.0)
    pairs_s = 4.0 * HIDDEN * 1000 / 2 / (1e12 * ATTENTION_SHARE)
    expected = (cp - 1) * 1000 * 2 * HIDDEN / 2 * 2 / rate - pairs_s
    assert layer.communication["context_parallel"] == pytest.approx(expected)
    update = model.predict_update(Load(1000 * cp, 1))
    assert update.context_parallel_s == pytest.approx(2 * 4 * expected)


@pytest.mark.parametrize(("layout", "rate"), [(Layout(pp=4), 1e9), (Layout(tp=2, pp=4, dp=4), 1e8)])
def test_a_forward_pass_fills_its_pipeline_and_sends_states(layout: Layout, rate: float) -> None:
    model = build_model(build_work(8), layout=layout)
    load = Load(8000 * layout.dp, 1000)  # eight micro-batches
    layer = model.predict_layer(model.work.layers[0], 1000, 1000, 1.0)
    sent = 1000 * HIDDEN * 2 / layout.tp / rate
    expected = 2 * layer.forward_s * (8 + 3) + 8 * sent
    assert model.predict_forward(load) == pytest.approx(expected, rel=1e-3)
    assert model.predict_update(load).pipeline_s == pytest.approx(2 * 8 * sent)
    # Two chunks a stage halve the filling, and hide the transfers.
    chunked = build_model(build_work(8), layout=replace(layout, vpp=2))
    assert chunked.predict_update(load).pipeline_s == 0
    expected = 2 * layer.forward_s * (8 + 3 / 2)
    assert chunked.predict_forward(load) == pytest.approx(expected, rel=1e-3)


def test_interleaved_micro_batches_are_a_multiple_of_the_stages() -> None:
    load = Load(9000, 1000)
    for vpp, expected in ((1, (9, 1000)), (2, (12, 750))):
        model = build_model(build_work(8), layout=Layout(pp=4, vpp=vpp))
        assert model.count_micro_batches(load) == expected
    # Each rank of dp and cp has its share: 9000 / 2 / 3.
    model = build_model(build_work(), layout=Layout(dp=2, cp=3))
    assert model.count_micro_batches(load) == (2, 750)


def test_the_distributed_optimizer_shards_over_ranks_that_have_the_same_weights() -> None:
    """Eight ranks: dp=2, cp=2 at tp=2; of 8 experts each has two, and so has one other rank."""
    model = build_model(build_work(num_experts=8), layout=Layout(tp=2, dp=2, cp=2, ep=4))
    dense = (4 * HIDDEN * HIDDEN + HIDDEN) / 2
    expert = 4 * 2 * HIDDEN * FFN
    assert model.count_local_parameters() == (dense, expert)
    assert model.count_optimizer_parameters() == dense + expert
    model.engine.optimizer.distributed = True
    assert model.count_optimizer_parameters() == dense / 4 + expert / 2


def test_stages_at_the_ends_have_embedding_and_head() -> None:
    head = Matrix("head", 4000, HIDDEN, True)
    work = replace(build_work(4), head=head, embedding_parameters=3000 * HIDDEN)
    layer = HIDDEN * (HIDDEN + FFN)
    model = build_model(work, layout=Layout(tp=2, pp=2))
    assert model.count_local_parameters() == ((2 * layer + 4000 * HIDDEN) / 2, 0)
    larger = replace(work, embedding_parameters=5000 * HIDDEN)
    model = build_model(larger, layout=Layout(tp=2, pp=2))
    assert model.count_local_parameters() == ((2 * layer + 5000 * HIDDEN) / 2, 0)


def test_adam_reads_a_gradient_and_its_state_and_writes_state_and_weight() -> None:
    slow = replace(DEVICE, memory_bandwidth=1e9, host_bandwidth=1e8, host_share=0.5)
    parameters = 4 * HIDDEN * (HIDDEN + FFN) + HIDDEN
    load = Load(1000, 1000)
    model = build_model(build_work(), slow)
    update = model.predict_update(load)
    assert update.optimizer_s == pytest.approx(parameters * (4 + 12 + 12 + 2) / 1e9)
    model.engine.optimizer.cpu_offload = True  # gradient and weight cross the link beside
    update = model.predict_update(load)
    assert update.optimizer_s == pytest.approx(parameters * (4 + 12 + 12 + 2 + 4 + 2) / 5e7)
    engine = EngineConfig(layout=Layout(), max_tokens_per_micro_batch=1000)
    update = TrainingModel(build_work(), engine, slow, "float32").predict_update(load)
    # Without a main weight the weight is read and written.
    assert update.optimizer_s == pytest.approx(parameters * (4 + 8 + 8 + 4 + 4) / 1e9)


def test_data_parallel_ranks_of_several_nodes_share_the_ports_of_a_node() -> None:
    """A ring of 16 ranks on two nodes has eight ports of 1e7, and 2 log2(16) latencies."""
    device = replace(DEVICE, network_bandwidth=1e7, network_latency_s=1e-3)
    model = build_model(build_work(), device, layout=Layout(dp=16))
    parameters = 4 * HIDDEN * (HIDDEN + FFN) + HIDDEN
    load = Load(16000, 1000)
    update = model.predict_update(load)
    expected = parameters * (4 + 4) * 15 / 16 / 8e7 + 8e-3
    assert update.data_parallel_s == pytest.approx(expected)
    model.engine.optimizer.overlap = True  # behind forward and backward pass
    hidden = update.compute_s + update.recompute_s
    overlapped = model.predict_update(load).data_parallel_s
    assert overlapped == pytest.approx(expected - hidden, rel=1e-3)


def test_allgather_dispatcher_brings_every_token_to_every_rank() -> None:
    work = build_work(num_experts=32)
    for ranks, expected in (
        (8, 2 * 1000 * 8 * HIDDEN * 2 * 7 / 8 / 1e9),
        (32, 2 * 1000 * 24 * HIDDEN * 2 / 1e8),  # of the 24 ranks on other nodes
    ):
        model = build_model(work, layout=Layout(dp=ranks, ep=ranks))
        model.engine.moe.dispatcher = "allgather"
        layer = model.predict_layer(work.layers[0], 1000, 1000, 1.0)
        assert layer.communication["expert_parallel"] == pytest.approx(expected)


def test_overlapped_exchange_of_experts_is_what_products_do_not_hide() -> None:
    work = build_work(num_experts=8)
    device = replace(DEVICE, peak_flops={"float32": 1e12, "bfloat16": 1e13})
    model = build_model(work, device, layout=Layout(dp=8, ep=8))
    exposed = model.predict_layer(work.layers[0], 1000, 1000, 1.0)
    products = sum(exposed.compute.values())
    model = build_model(work, device, layout=Layout(dp=8, ep=8))
    model.engine.moe.overlap = True
    layer = model.predict_layer(work.layers[0], 1000, 1000, 1.0)
    expected = 2 * 1000 * 2 * HIDDEN * 2 * 7 / 8 / 1e9 - products
    assert layer.communication["expert_parallel"] == pytest.approx(expected) and expected > 0


def test_memory_traffic_of_a_layer_beside_its_products() -> None:
    slow = replace(DEVICE, memory_bandwidth=1e9)
    model = build_model(build_work(num_experts=4), slow, layout=Layout(tp=2))
    layer = model.predict_layer(model.work.layers[0], 1000, 1000, 1.0)
    shard = 1000 * 2 / 2  # bytes of an element of all tokens of a sequence shard
    # Two norms read and write; two sums read two and write one, rotary reads and writes heads.
    assert layer.compute["layernorm"] == pytest.approx(4 * HIDDEN * shard / 1e9)
    elements = 6 * HIDDEN + 2 * 3 * HIDDEN
    assert layer.compute["elementwise"] == pytest.approx(elements * shard / 1e9)
    # A token is read and its two copies written, before and after the exchange, and back.
    assert layer.compute["permute"] == pytest.approx(4 * (1 + 2) * HIDDEN * shard / 1e9)
    assert layer.compute["moe_act"] == pytest.approx(3 * FFN * shard / 1e9)


def test_float8_products_quantise_their_inputs() -> None:
    """An input of two bytes is read, codes and their transpose written."""
    slow = replace(DEVICE, memory_bandwidth=1e9)
    engine = EngineConfig(layout=Layout(tp=2), max_tokens_per_micro_batch=1000)
    wide, narrow = (
        TrainingModel(build_work(), engine, slow, dtype)
        for dtype in ("bfloat16", "float8")  # one rate: the device has no float8 products
    )
    seconds = [m.predict_layer(m.work.layers[0], 1000, 1, 1.0).compute for m in (wide, narrow)]
    more = seconds[1]["attention"] - seconds[0]["attention"]
    assert more == pytest.approx(1000 * HIDDEN * 4 / 1e9)


def test_the_head_has_float32_logits_three_times_in_each_pass() -> None:
    head = Matrix("head", 32000, HIDDEN, True)
    work, load = replace(build_work(), head=head), Load(1000, 1000)
    slow = replace(DEVICE, memory_bandwidth=1e10)
    small = build_model(replace(build_work(), head=Matrix("head", 1, HIDDEN, True)), slow)
    model = build_model(work, slow)
    product_s = 2 * 1000 * 32000 * HIDDEN / (1e12 * SUSTAINED_SHARE)
    loss_s = 3 * 4 * 1000 * 32000 / 1e10
    more = model.predict_forward(load) - small.predict_forward(load)
    assert more == pytest.approx(product_s + loss_s, rel=0.01)
    more = model.predict_update(load).compute_s - small.predict_update(load).compute_s
    assert more == pytest.approx(3 * (product_s + loss_s), rel=0.01)


@pytest.mark.parametrize("module", ["mlp", "layernorm", "core_attn"])
def test_selective_recompute_runs_its_modules_again(module: str) -> None:
    model = build_model(build_work(), replace(DEVICE, memory_bandwidth=1e9))
    model.engine.recompute.granularity, model.engine.recompute.modules = "selective", [module]
    layer = model.predict_layer(model.work.layers[0], 1000, 1000, 1.0)
    seconds = layer.attention_s if module == "core_attn" else layer.compute[module]
    assert seconds > 0
    expected = 4 * 4 * seconds  # micro-batches, layers
    assert model.predict_update(Load(4000, 1000)).recompute_s == pytest.approx(expected)


def test_recompute_of_experts_permutes_and_exchanges_their_tokens_again() -> None:
    model = build_model(build_work(num_experts=8), layout=Layout(dp=8, ep=8))
    model.engine.recompute.granularity, model.engine.recompute.modules = "selective", ["moe"]
    layer = model.predict_layer(model.work.layers[0], 1000, 1000, 1.0)
    parts = sum(layer.compute[part] for part in ("experts", "moe_act", "permute"))
    expected = 4 * (parts + layer.communication["expert_parallel"])
    assert model.predict_update(Load(8000, 1000)).recompute_s == pytest.approx(expected, rel=1e-9)


def test_the_fullest_rank_of_experts_multiplies_its_tokens() -> None:
    model = build_model(build_work(num_experts=8), layout=Layout(dp=8, ep=8))
    layer = model.predict_layer(model.work.layers[0], 1000, 1000, 1.5)
    flops = 2 * 1000 * 2 * 1.5 * HIDDEN * FFN
    assert layer.compute["experts"] == pytest.approx(flops / (1e12 * SUSTAINED_SHARE))


@pytest.mark.job
@pytest.mark.parametrize(
    "run",
    RUNS["training"],
    ids=[f"{r['name']}-{r['hardware']}-{r['source']}" for r in RUNS["training"]],
)
def test_published_runs_are_predicted_within_a_quarter_or_explained(run: dict[str, Any]) -> None:
    ratio = predict_tokens_per_s(run) / run["tokens_per_s"]
    is_close = 1 / 1.25 <= ratio <= 1.25
    assert is_close == ("explanation" not in run), f"predicted / published = {ratio:.2f}"
