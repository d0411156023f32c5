"""Adapters on plain torch layers: the arithmetic, what is kept, what is saved, what is refused."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch.utils.checkpoint import checkpoint

from mcore_rl.checkpoint.peft import check_targets
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import Layout, LoRAConfig
from mcore_rl.engine.megatron.heads import ValueHead
from mcore_rl.engine.megatron.lora import (
    Adapter,
    FactorShard,
    attach_adapters,
    initialize_factor,
)
from mcore_rl.engine.megatron.weights import WeightPlacement, get_local_tensors, merge_adapter
from mcore_rl.parallel.mesh import Mesh, split_into_chunks
from mcore_rl.reshard.rules import (
    GateUp,
    InterleavedQKV,
    LogicalTensor,
    Replicated,
    Shard,
    Split,
    Weight,
)

FC1 = "decoder.layers.{layer}.mlp.linear_fc1.weight"
FC2 = "decoder.layers.{layer}.mlp.linear_fc2.weight"
UP, DOWN = LogicalTensor("up", (6, 4)), LogicalTensor("down", (4, 6))
WEIGHTS = (
    Weight(FC1, Split(UP, 0), "tp", layer=0),
    Weight(FC2, Split(DOWN, 1), "tp", layer=0),
    Weight("decoder.layers.{layer}.mlp.norm.weight", Replicated(LogicalTensor("n", (4,))), layer=0),
)
CONFIG = LoRAConfig(rank=2, alpha=6.0, targets=["linear_fc1", "linear_fc2"])


class Layers(torch.nn.Module):
    """One layer under Megatron's names, as the last chunk of a pipeline."""

    pre_process = False

    def __init__(self) -> None:
        super().__init__()
        layer = torch.nn.Module()
        layer.mlp = torch.nn.Module()
        layer.mlp.linear_fc1 = torch.nn.Linear(4, 6, bias=False)
        layer.mlp.linear_fc2 = torch.nn.Linear(6, 4, bias=False)
        layer.mlp.linear_fc2.fuse_wgrad_accumulation = True  # as Transformer Engine's
        layer.mlp.norm = torch.nn.LayerNorm(4, bias=False)
        self.decoder = torch.nn.Module()
        self.decoder.layers = torch.nn.ModuleList([layer])

    @property
    def mlp(self) -> Any:
        return self.decoder.layers[0].mlp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp.linear_fc2(self.mlp.linear_fc1(self.mlp.norm(x)).relu())


@pytest.fixture
def model() -> Layers:
    """Layers with adapters whose B is not zero."""
    torch.manual_seed(0)
    model, mesh = Layers(), Mesh(Layout())
    placement = WeightPlacement(mesh, split_into_chunks(Layout(), 1), num_experts=1)
    attach_adapters([model], WEIGHTS, placement, mesh.get_coordinate(0), CONFIG, seed=0)
    with torch.no_grad():
        for adapter in model.lora.values():
            adapter.B.normal_()
    return model


def adapters(model: Layers) -> tuple[Adapter, Adapter]:
    fc1, fc2 = model.lora.values()
    return fc1, fc2


def run_merged(model: Layers, x: torch.Tensor) -> torch.Tensor:
    """The forward pass with alpha / rank = 3 and weights merged in plain torch."""
    fc1, fc2 = adapters(model)
    up = model.mlp.linear_fc1.weight + 3 * fc1.B @ fc1.A
    down = model.mlp.linear_fc2.weight + 3 * fc2.B @ fc2.A
    return (model.mlp.norm(x) @ up.t()).relu() @ down.t()


def gradients(model: Layers, output: torch.Tensor) -> list[torch.Tensor]:
    factors = [p for adapter in adapters(model) for p in adapter.parameters()]
    return list(torch.autograd.grad(output.square().sum(), factors))


def test_forward_and_gradients_are_those_of_merged_weights(model):
    x = torch.randn(5, 4)
    torch.testing.assert_close(model(x), run_merged(model, x))
    expected_gradients = gradients(model, run_merged(model, x))
    for actual, expected in zip(gradients(model, model(x)), expected_gradients, strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_value_head_is_trained_beside_adapters_and_an_output_projection_is_not(has_bias):
    config: Any = SimpleNamespace(hidden_size=4, params_dtype=torch.float32, sequence_parallel=True)
    heads = ValueHead(config, has_bias=has_bias), torch.nn.Linear(4, 9)
    mesh, trained = Mesh(Layout()), []
    placement = WeightPlacement(mesh, split_into_chunks(Layout(), 1), num_experts=1)
    for head in heads:
        model = Layers()
        model.output_layer = head
        attach_adapters([model], WEIGHTS, placement, mesh.get_coordinate(0), CONFIG, seed=0)
        names = {name for name, value in model.named_parameters() if value.requires_grad}
        assert len({name for name in names if name.startswith("lora.")}) == 4
        trained.append({name for name in names if not name.startswith("lora.")})
    biases = {"output_layer.bias"} if has_bias else set()
    assert trained == [{"output_layer.weight"} | biases, set()]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputed_layers_give_the_same_gradients(model, use_reentrant):
    x = torch.randn(5, 4, requires_grad=True)
    expected = gradients(model, model(x))
    model.zero_grad()
    output = checkpoint(model, x, use_reentrant=use_reentrant)
    output.square().sum().backward()
    actual = [p.grad for adapter in adapters(model) for p in adapter.parameters()]
    assert all(map(torch.equal, actual, expected))


def test_only_factors_require_gradients_and_names_stay(model):
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {name.rpartition(".")[2] for name in trained} == {"A", "B"}
    assert get_local_tensors(model).keys() == {name for name, _ in Layers().named_parameters()}


def test_gradients_of_merged_weights_are_not_added_to_a_buffer_that_they_lack(model):
    assert not model.decoder.layers[0].mlp.linear_fc2.fuse_wgrad_accumulation
    assert not hasattr(model.decoder.layers[0].mlp.linear_fc1, "fuse_wgrad_accumulation")


def test_formed_weights_are_not_stored_for_the_backward_pass(model):
    formed: list[Any] = []
    for adapter in adapters(model):
        adapter.register_forward_hook(lambda *call: formed.append(weakref.ref(call[-1])))
    output = model(torch.randn(5, 4))
    gc.collect()
    assert [ref() for ref in formed] == [None, None]
    output.sum().backward()
    assert len(formed) > 2  # formed again


def test_the_parameter_is_back_after_a_call_that_failed(model):
    frozen = model.mlp.linear_fc1.weight
    with pytest.raises(RuntimeError):
        model(torch.randn(5, 3))
    assert model.mlp.linear_fc1.weight is frozen


def test_computed_is_the_merged_weight_and_leaves_the_frozen_one(model):
    name, frozen = FC1.format(layer=0), model.mlp.linear_fc1.weight
    before = frozen.clone()
    fc1, _ = adapters(model)
    torch.testing.assert_close(merge_adapter(model, name, frozen), before + 3 * fc1.B @ fc1.A)
    assert torch.equal(frozen, before)
    norm = model.mlp.norm.weight
    assert torch.equal(merge_adapter(model, "decoder.layers.0.mlp.norm.weight", norm), norm)


def test_bfloat16_is_rounded_once():
    torch.manual_seed(0)
    weight = torch.randn(64, 32).bfloat16()
    place = FactorShard.build(
        Weight(FC1, Split(LogicalTensor("w", (64, 32)), 0), "tp", layer=0),
        Shard(0, 1),
        Mesh(Layout()).get_coordinate(0),
        cp=1,
    )
    adapter = Adapter(weight, place, LoRAConfig(rank=8, alpha=4.0), seed=0)
    with torch.no_grad():
        adapter.B.normal_()
        exact = weight.double() + 0.5 * adapter.B.double() @ adapter.A.double()
        error = (adapter(weight).double() - exact).abs() / exact.abs()
    assert error.max() <= 2**-8  # half a step of the 8-bit mantissa
    assert adapter(weight).dtype is torch.bfloat16


def test_initial_factors_depend_on_name_and_seed_alone():
    a = initialize_factor("layer.weight", 0, 4, 16)
    assert torch.equal(a, initialize_factor("layer.weight", 0, 4, 16))
    assert a.abs().max() <= 0.25 and a.std() == pytest.approx(0.25 / 3**0.5, rel=0.2)
    assert not torch.equal(a, initialize_factor("other.weight", 0, 4, 16))
    assert not torch.equal(a, initialize_factor("layer.weight", 1, 4, 16))


def test_adapters_of_layers_and_experts_and_seeds_start_from_other_numbers():
    """No two are alike: the name on disk has the global numbers of layer and expert."""
    name = "decoder.layers.{layer}.mlp.experts.linear_fc1.weight{expert}"
    coordinate = Mesh(Layout()).get_coordinate(0)
    initial = [
        Adapter(
            torch.zeros(6, 4),
            FactorShard.build(
                Weight(name, Split(UP, 0), "etp", layer=layer, expert=expert),
                Shard(0, 1),
                coordinate,
                cp=1,
            ),
            CONFIG,
            seed,
        ).A
        for layer in (0, 1, 11)
        for expert in (0, 1, 11)
        for seed in (0, 1)
    ]
    values = torch.stack(initial).flatten(1)
    assert len(values.unique(dim=0)) == len(initial)


@pytest.mark.parametrize("seed", [0, 7])
def test_a_layer_starts_from_the_numbers_of_its_place_in_the_whole_model_on_any_stage(seed):
    layout = Layout(pp=2)
    mesh, placement = Mesh(layout), WeightPlacement(Mesh(layout), split_into_chunks(layout, 2), 1)
    weights = [weight._replace(layer=layer) for layer in (0, 1) for weight in WEIGHTS]
    for rank in (0, 1):  # one layer each
        model = Layers()
        attach_adapters([model], weights, placement, mesh.get_coordinate(rank), CONFIG, seed)
        for adapter, name, num_inputs in zip(adapters(model), (FC1, FC2), (4, 6), strict=True):
            expected = initialize_factor(name.format(layer=rank), seed, CONFIG.rank, num_inputs)
            assert torch.equal(adapter.A, expected)
            assert not adapter.B.any()


def test_a_rank_starts_from_its_columns_of_the_whole_factor():
    mesh = Mesh(Layout(tp=2))
    weight = Weight(FC2, Split(DOWN, 1), "tp", layer=0)
    parts = [
        Adapter(
            torch.zeros(4, 3), FactorShard.build(weight, Shard(r, 2), coordinate, 1), CONFIG, seed=0
        ).A
        for r, coordinate in enumerate(mesh.get_coordinate(rank) for rank in (0, 1))
    ]
    full = initialize_factor(FC2.format(layer=0), 0, CONFIG.rank, 6)
    assert torch.equal(torch.cat(parts, dim=1), full)


def test_rows_of_a_factor_are_saved_as_rows_of_hugging_face_tensors():
    q, k, v = (LogicalTensor(n, (rows, 5)) for n, rows in (("q", 8), ("k", 4), ("v", 4)))
    weight = Weight(FC1, InterleavedQKV(q, k, v, num_groups=4), "tp", layer=0)
    place = FactorShard.build(weight, Shard(1, 2), Mesh(Layout(tp=2)).get_coordinate(1), cp=1)
    adapter = Adapter(torch.zeros(8, 5), place, CONFIG, seed=0)
    state = adapter.sharded_state_dict("lora.x.")
    a, b = state["lora.x.A"], state["lora.x.B"]
    assert a.key == "lora.decoder.layers.0.mlp.linear_fc1.weight.A"
    assert a.replica_id == (1, 0) and a.global_shape == (2, 5)  # a copy of tp_rank 0's
    shards: list[ShardedTensor] = b.build()
    actual = [(s.key.rpartition(".")[2], s.global_offset, s.global_shape) for s in shards]
    assert actual == [
        ("q", (4, 0), (8, 2)),
        ("k", (2, 0), (4, 2)),
        ("v", (2, 0), (4, 2)),
        ("q", (6, 0), (8, 2)),
        ("k", (3, 0), (4, 2)),
        ("v", (3, 0), (4, 2)),
    ]
    assert {s.replica_id for s in shards} == {(0, 0)}
    assert torch.equal(b.merge_fn([s.data for s in shards]), adapter.B)


def test_unknown_targets_are_refused_with_what_there_is():
    mtp = "mtp.layers.0.mtp_model_layer.mlp.linear_proj.weight"
    gate = GateUp(LogicalTensor("g", (6, 4)), LogicalTensor("u", (6, 4)))
    weights = (*WEIGHTS, Weight(mtp, gate, "tp", stage="mtp"))
    config = LoRAConfig(rank=2, targets=["linear_fc1", "linear_proj", "norm"])
    with pytest.raises(ConfigError) as error:
        check_targets("actor.lora", weights, config)
    assert str(error.value) == (
        "actor.lora.targets names linear_proj, norm, which this model does not have; allowed: "
        "linear_fc1, linear_fc2"
    )
