"""Inputs of a transfer plan, and a worker's parameters compared with the rules of a family."""

import itertools
import json
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import Layout, WeightSyncConfig
from mcore_rl.reshard.layout import FullRanks, GenerationLayout
from mcore_rl.reshard.planner import Devices, Plan, TransferRequirements
from mcore_rl.reshard.rules import (
    Block,
    Box,
    LogicalTensor,
    Replicated,
    Shard,
    Weight,
    slice_rows,
)
from mcore_rl.weight_sync.spec import (
    ListedParameter,
    MemoryDomains,
    TransferSpec,
    WorkerLayout,
    build_generation_side,
    build_listed_side,
    build_training_side,
    check_worker_layout,
    compute_expected_layout,
    group_memory_domains,
    is_checked,
    plan_transfer,
)
from tests.operations import growth


def test_a_node_has_the_training_ranks_of_its_host():
    """Place four training ranks on two hosts; generation ranks do not count."""
    domains = [("s0", "h0"), ("s0", "h0"), ("s1", "h1"), ("s1", "h1"), ("s1", "h1"), ("s0", "h0")]
    assert group_memory_domains(domains, 4) == MemoryDomains(
        ("s0", "s0", "s1", "s1"), ("s1", "s0"), ranks_per_node=2
    )
    assert group_memory_domains(domains[:3], 1) == MemoryDomains(
        ("s0",), ("s0", "s1"), ranks_per_node=1
    )


def config_of(num_layers: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 64,
        "hidden_size": 16, "intermediate_size": 16, "moe_intermediate_size": 16,
        "num_hidden_layers": num_layers, "num_attention_heads": 2, "num_key_value_heads": 2,
        "head_dim": 8, "num_experts": 8, "num_experts_per_tok": 2, "decoder_sparse_step": 1,
        "norm_topk_prob": True, "mlp_only_layers": [], "rms_norm_eps": 1e-6, "rope_theta": 1e4,
        "tie_word_embeddings": False, "max_position_embeddings": 64, "attention_bias": False,
        "hidden_act": "silu",
    }  # fmt: skip


def find_training_holders(num_ranks: int) -> None:
    layout = Layout(pp=num_ranks // 8, dp=8, ep=8)
    ranks, weights = build_training_side(config_of(layout.pp), layout, 0)
    assert len({ranks.get_holders(weight) for weight in weights}) >= num_ranks


def find_generation_holders(num_ranks: int) -> None:
    layout = GenerationLayout(pp=num_ranks // 8, tp=1, dp=8, ep=8)
    ranks, (_, weights) = build_generation_side(config_of(layout.pp), layout)
    assert len({ranks.get_holders(weight) for weight in weights}) >= num_ranks


@pytest.mark.parametrize("find", [find_training_holders, find_generation_holders])
def test_who_holds_which_weight_takes_work_linear_in_the_ranks(find):
    assert growth(find, 32, 256) < 1.3


CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"], "vocab_size": 100, "hidden_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "intermediate_size": 96, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 5, "n_shared_experts": 1,
    "moe_intermediate_size": 40, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1,
    "rope_interleave": True,
    "rms_norm_eps": 1e-6, "rope_theta": 1e4, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
W13 = "model.layers.1.mlp.experts.routed_experts.w13_weight"


def build_workers(layout):
    ranks, (_, weights) = build_generation_side(CONFIG, layout)
    workers = [
        WorkerLayout(*compute_expected_layout(ranks, weights, rank, "bfloat16"))
        for rank in range(layout.world_size)
    ]
    return workers, lambda worker, rank: check_worker_layout(
        worker, ranks, weights, rank, "bfloat16"
    )


def test_shapes_are_those_of_a_ranks_shard():
    """Compute by hand: 100 tokens are padded to 128; 5 unsplit experts are assigned 3 and 2."""
    workers, check = build_workers(GenerationLayout(tp=2, ep=2))
    for rank, (worker, experts) in enumerate(zip(workers, [(0, 1, 2), (3, 4)], strict=True)):
        check(worker, rank)
        assert worker.parameters["model.embed_tokens.weight"] == ((64, 64), "bfloat16")
        assert worker.parameters[W13] == ((len(experts), 80, 64), "bfloat16")
        assert worker.experts[W13] == experts
        bias = "model.layers.1.mlp.gate.e_score_correction_bias"
        assert worker.parameters[bias] == ((5,), "float32")
    split, _ = build_workers(GenerationLayout(tp=2))
    assert split[1].parameters[W13] == ((5, 40, 64), "bfloat16")


def test_data_parallel_ranks_repeat_what_is_not_an_expert():
    """Compute by hand: 5 experts over dp * tp = 4 ranks are 2, 1, 1, 1; tp splits the rest."""
    workers, check = build_workers(GenerationLayout(tp=2, dp=2, ep=4))
    for rank, experts in enumerate([(0, 1), (2,), (3,), (4,)]):
        check(workers[rank], rank)
        assert workers[rank].experts[W13] == experts
        shapes = {name: shape for name, (shape, _) in workers[rank].parameters.items()}
        assert shapes["model.layers.0.mlp.gate_up_proj.weight"] == (96, 64)
        assert shapes["model.layers.1.mlp.shared_experts.gate_up_proj.weight"] == (80, 64)
        assert shapes["model.layers.1.self_attn.o_proj.weight"] == (64, 32)
    for layout in (GenerationLayout(tp=2, ep=2), GenerationLayout(tp=2, dp=2)):
        parameters = build_workers(layout)[0][0].parameters
        assert parameters["model.layers.1.mlp.shared_experts.gate_up_proj.weight"][0] == (40, 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.norm.weight": ((65,), "bfloat16")}, "model.norm.weight are .*65.* rules .*64"),
        ({"model.norm.weight": ((64,), "float32")}, "model.norm.weight are .*float32"),
        ({"model.extra": ((64,), "bfloat16")}, "model.extra are .* say that it does not exist"),
        ({"model.norm.weight": None}, "model.norm.weight are missing"),
    ],
)
def test_a_difference_is_named(change, message):
    workers, check = build_workers(GenerationLayout(tp=2))
    parameters = {**workers[1].parameters, **change}
    present = {name: value for name, value in parameters.items() if value is not None}
    with pytest.raises(ConfigError, match=f"vLLM worker 1: shape and dtype of {message}"):
        check(replace(workers[1], parameters=present), 1)


def test_experts_that_are_dealt_in_another_way_are_named():
    workers, check = build_workers(GenerationLayout(tp=2, ep=2))
    turned = replace(workers[0], experts={**workers[0].experts, W13: (0, 2, 4)})
    with pytest.raises(ConfigError, match=rf"experts of {W13} are \(0, 2, 4\), .* \(0, 1, 2\)"):
        check(turned, 0)


def test_quantised_parameters_are_expected_as_codes_and_their_scales_as_float32():
    """Compute by hand: two experts of 128 rows each for gate and up; a scale per 128 x 128."""
    config = config_of(1) | {"hidden_size": 256, "moe_intermediate_size": 128, "num_experts": 2}
    ranks, (_, weights) = build_generation_side(
        config, GenerationLayout(), quantization="fp8_block"
    )
    parameters, _ = compute_expected_layout(ranks, weights, 0, "bfloat16")
    experts = "model.layers.0.mlp.experts.routed_experts"
    expected = {
        f"{experts}.w13_weight": ((2, 256, 256), "float8_e4m3fn"),
        f"{experts}.w13_weight_scale_inv": ((2, 2, 2), "float32"),
        f"{experts}.w2_weight": ((2, 256, 128), "float8_e4m3fn"),
        f"{experts}.w2_weight_scale_inv": ((2, 2, 1), "float32"),
        "model.layers.0.input_layernorm.weight": ((256,), "bfloat16"),
        "lm_head.weight": ((64, 256), "bfloat16"),
    }
    assert {name: parameters[name] for name in expected} == expected


def test_a_server_of_whole_tensors_has_a_models_layers_by_stage_and_no_prediction_layer():
    """Two decoder layers over two stages; the prediction layer would be the third, layer 2."""
    config = CONFIG | {"num_nextn_predict_layers": 1}
    ranks, (_, weights) = build_generation_side(config, GenerationLayout(pp=2), "huggingface")
    names = [{w.name for w in weights if stage in ranks.get_holders(w)[0]} for stage in range(2)]
    prefixes = [{".".join(name.split(".")[:3]) for name in stage} for stage in names]
    assert prefixes == [
        {"model.embed_tokens.weight", "model.layers.0"},
        {"model.layers.1", "model.norm.weight", "lm_head.weight"},
    ]
    assert not names[0] & names[1] and len(weights) == sum(map(len, names))
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert {weight.name for weight in weights if weight.float32} == {bias}


def test_a_tied_head_is_listed_once_and_not_by_its_own_name():
    config = config_of(1) | {"tie_word_embeddings": True}
    _, (_, weights) = build_generation_side(config, GenerationLayout(), "huggingface")
    names = [weight.name for weight in weights]
    assert len(names) == len(set(names)) and "lm_head.weight" not in names


@pytest.mark.parametrize("pp", [1, 2])
def test_a_tied_head_of_a_worker_is_compared_where_it_has_a_copy(pp):
    """vLLM lists it in any case; on the stage of the embedding it is the embedding itself."""
    config, layout = config_of(2) | {"tie_word_embeddings": True}, GenerationLayout(pp=pp)
    ranks, (_, weights) = build_generation_side(config, layout)
    parameters, experts = compute_expected_layout(ranks, weights, pp - 1, "bfloat16")
    assert ("lm_head.weight" in parameters) == (pp == 2)
    wrong_head = {**parameters, "lm_head.weight": ((3, 3), "bfloat16")}

    def check() -> None:
        check_worker_layout(WorkerLayout(wrong_head, experts), ranks, weights, pp - 1, "bfloat16")

    if pp == 1:
        check()
    else:
        with pytest.raises(ConfigError, match=r"lm_head.weight are \(\(3, 3\)"):
            check()


def test_experts_are_compared_of_parameters_with_rules_and_if_vllm_lists_them():
    """Buffers beside the parameters have rows of experts, too; a server without EP lists none."""
    workers, check = build_workers(GenerationLayout(tp=2, ep=2))
    buffer = "model.layers.1.mlp.experts.routed_experts.buffer"
    check(replace(workers[1], experts={**workers[1].experts, buffer: (0, 1, 2)}), 1)
    check(replace(workers[1], experts={}), 1)
    without = {name: rows for name, rows in workers[1].experts.items() if name != W13}
    with pytest.raises(ConfigError, match=rf"experts of {W13} are missing"):
        check(replace(workers[1], experts=without), 1)


@pytest.mark.parametrize("domains", [None, MemoryDomains(("a", "b"), ("b", "a"), 2)])
@pytest.mark.parametrize("generation", [GenerationLayout(tp=2), GenerationLayout(tp=2, ep=2)])
def test_ranks_with_full_tensors_share_what_they_send(generation, domains):
    config, settings = config_of(2), WeightSyncConfig()
    parsed = TransferSpec.parse(
        TransferSpec(
            Layout(dp=2), 0, generation, "float32", settings, shard_format="full"
        ).to_dict()
    )
    full, family = (
        plan_transfer(replace(parsed, shard_format=shard_format), config, 4, domains)
        for shard_format in ("full", "megatron")
    )
    for rank in range(2):
        copies = [(c.target, c.target_offset, c.box.sizes) for c in full.list_received(rank)]
        assert len(set(copies)) == len(copies)
        received = [sum(c.num_bytes for c in plan.list_received(rank)) for plan in (full, family)]
        assert received[0] == received[1]
    totals = full.compute_totals()
    if domains is None:  # each rank sends half of it
        assert max(totals.sent) <= 1.1 * min(totals.sent)
    else:  # each server's worker is on the device of a rank, which has all
        assert totals.received == (0, 0)


def list_parameter(name: str, *blocks: Block, rows: int = 4, dtype: str = "float32") -> list[Any]:
    return ListedParameter(name, dtype, (rows, 2), blocks).to_list()


def list_layer(number: int, rank: int, *, swapped: bool = False) -> list[list[Any]]:
    """Return a worker's parameters of a layer: halves of two tensors fused, and a norm."""
    q, k = (LogicalTensor(f"layers.{number}.{name}", (4, 2)) for name in "qk")
    norm = LogicalTensor(f"layers.{number}.norm", (4, 2))
    first, second = (k, q) if swapped else (q, k)
    blocks = slice_rows(first, rank * 2, 2, 0), slice_rows(second, rank * 2, 2, 2)
    return [
        list_parameter(f"{number}.qk", *blocks),
        list_parameter(f"{number}.norm", slice_rows(norm, 0, 4, 0)),
    ]


def plan_lists(lists: list[list[list[Any]]], layout: GenerationLayout) -> Plan:
    tensors = {
        block.tensor: None
        for values in itertools.chain(*lists)
        for block in ListedParameter.parse(values).blocks
    }
    training = FullRanks(2), [Weight(f"t.{t.name}", Replicated(t)) for t in tensors]
    requirements = TransferRequirements(training, build_listed_side(layout, lists), 2)
    return requirements.plan(Devices.disaggregated(2, layout.world_size, 8))


def test_parameters_of_equal_lists_are_one_weight_of_all_ranks():
    lists = [list_layer(0, rank) for rank in range(2)]
    ranks, weights = build_listed_side(GenerationLayout(tp=2, dp=2), lists)
    assert [(w.name, ranks.get_holders(w)) for w in weights] == [
        ("0.qk", ((0, 2),)),
        ("0.norm", ((0, 1, 2, 3),)),
        ("0.qk", ((1, 3),)),
    ]


def test_a_tensor_that_no_worker_takes_is_refused_by_name():
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 16,
        "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "head_dim": 4,
        "num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": False,
    }  # fmt: skip
    _, weights = build_training_side(config, Layout(), 0, "rows")
    tensors = [tensor for weight in weights for tensor in weight.rule.tensors]

    def plan(*names: str) -> Plan:
        zeros = {t.name: (0,) * len(t.shape) for t in tensors}
        lists = [
            ListedParameter(
                t.name, "float32", t.shape, (Block(t, Box(zeros[t.name], t.shape), zeros[t.name]),)
            ).to_list()
            for t in tensors
            if t.name not in names
        ]
        spec = TransferSpec(
            Layout(), 0, GenerationLayout(), "float32", WeightSyncConfig(), shard_format="rows",
            worker_lists=[lists],
        )  # fmt: skip
        return plan_transfer(spec, config, 4)

    assert plan().compute_totals()
    with pytest.raises(ConfigError, match=r"tensor lm_head.weight: vLLM's loader leaves it out"):
        plan("lm_head.weight")


def test_equal_layers_of_listed_parameters_are_planned_as_one():
    layout = GenerationLayout(tp=2)
    plans = [
        plan_lists([[p for n in range(count) for p in list_layer(n, r)] for r in range(2)], layout)
        for count in (2, 30)
    ]
    assert len(plans[0].groups) == len(plans[1].groups)
    for rank in range(2):
        copies = {copy.tensor: copy for copy in plans[1].list_received(rank)}
        assert len(copies) == 90
        for number in range(30):
            for name, local in (("q", 0), ("k", 2)):
                copy = copies[f"layers.{number}.{name}"]
                assert (copy.target, copy.target_offset) == (f"{number}.qk", (local, 0))
                assert copy.box.offsets == (rank * 2, 0)


def test_tensors_of_one_shape_keep_their_places_in_listed_parameters():
    a, b, c, d = (LogicalTensor(name, (2, 2)) for name in "abcd")
    e, f = LogicalTensor("e", (2, 2)), LogicalTensor("f", (2, 2))
    parameters = {
        "one": (slice_rows(a, 0, 2, 0), slice_rows(b, 0, 2, 2)),
        "same": (slice_rows(c, 0, 2, 0), slice_rows(d, 0, 2, 2)),
        "swapped": (slice_rows(e, 0, 2, 2), slice_rows(f, 0, 2, 0)),
        "repeated": (slice_rows(LogicalTensor("g", (2, 2)), 0, 2, 0),) * 2,
    }
    first, _ = parameters["repeated"]
    parameters["repeated"] = (first, replace(first, local_offset=(2, 0)))
    lists = [[list_parameter(name, *blocks) for name, blocks in parameters.items()]]
    copies = plan_lists(lists, GenerationLayout()).list_received(0)
    assert sorted((c.tensor, c.target, c.target_offset[0]) for c in copies) == [
        ("a", "one", 0), ("b", "one", 2), ("c", "same", 0), ("d", "same", 2),
        ("e", "swapped", 2), ("f", "swapped", 0), ("g", "repeated", 0), ("g", "repeated", 2),
    ]  # fmt: skip


@pytest.mark.parametrize(("world_size", "num_replicas"), [(4, 1), (4, 2), (4, 4), (32, 2)])
def test_rows_are_sent_by_ranks_that_have_them_as_torch_chunks_them(world_size, num_replicas):
    """The final norm has 16 rows: with 32 ranks in one replica half of them would have none."""
    spec = TransferSpec(
        Layout(dp=world_size), 0, GenerationLayout(tp=2), "float32", WeightSyncConfig(),
        shard_format="rows", num_replicas=num_replicas,
    )  # fmt: skip
    plan = plan_transfer(TransferSpec.parse(spec.to_dict()), config_of(1) | {"vocab_size": 61}, 4)
    num_shards, rows_sent = world_size // num_replicas, dict[str, list[int]]()
    for rank in range(world_size):
        for copy in plan.list_sent(rank):
            if (
                num_rows := {"lm_head.weight": 61, "model.norm.weight": 16}.get(copy.source)
            ) is None:
                continue
            chunks = torch.arange(num_rows).chunk(num_shards)
            start = int(chunks[rank % num_shards][0])  # IndexError: the rank has no row
            first, count = copy.box.offsets[0], copy.box.sizes[0]
            assert copy.source_offset[0] == first - start >= 0
            assert first + count - start <= len(chunks[rank % num_shards])
            rows_sent.setdefault(copy.source, []).extend(range(first, first + count))
    assert sorted(rows_sent["lm_head.weight"]) == [*range(61)]  # split over both workers
    assert sorted(rows_sent["model.norm.weight"]) == sorted([*range(16)] * 2)


def test_every_field_of_a_spec_survives_the_way_to_a_server():
    spec = TransferSpec(
        Layout(dp=2, tp=2), 3, GenerationLayout(tp=2, dp=2), "float32",
        WeightSyncConfig(method="disaggregated", verify="full"), shard_format="rows",
        num_replicas=2, weight_format="huggingface", family="f", drafts=True,
        worker_lists=[[["a", "float32", [1], []]]], quantization="fp8_block",
    )  # fmt: skip
    default = TransferSpec(Layout(), 0, GenerationLayout(), "bfloat16", WeightSyncConfig())
    assert TransferSpec.parse(json.loads(json.dumps(spec.to_dict()))) == spec
    assert all(getattr(spec, f.name) != getattr(default, f.name) for f in fields(TransferSpec))


def test_only_listed_parameters_in_float32_stay_so_in_an_update():
    dtypes = {"norm": "float32", "up": "bfloat16"}
    blocks = {name: slice_rows(LogicalTensor(name, (4, 2)), 0, 4, 0) for name in dtypes}
    lists = [[list_parameter(name, blocks[name], dtype=dtypes[name]) for name in dtypes]]
    _, weights = build_listed_side(GenerationLayout(), lists)
    assert {weight.name: weight.itemsize for weight in weights} == {"norm": 4, "up": None}


@pytest.mark.parametrize("drafts", [False, True])
def test_a_draft_model_receives_the_prediction_layer_from_the_stage_that_trains_it(drafts):
    """Decoder layers 0 and 1 are on two stages, the prediction layer, 2, is on the last."""
    config = CONFIG | {"num_nextn_predict_layers": 1}
    spec = TransferSpec(
        Layout(pp=2), 1, GenerationLayout(), "bfloat16", WeightSyncConfig(), drafts=drafts
    )
    copies = plan_transfer(spec, config, 2).list_received(0)
    sources = {
        layer: {c.source_rank for c in copies if c.tensor.startswith(f"model.layers.{layer}.")}
        for layer in range(4)
    }
    assert sources == {0: {0}, 1: {1}, 2: {1} if drafts else set(), 3: set()}
    (_, weights) = build_training_side(config, Layout(pp=2), 1)
    tensors = {t.name for weight in weights for t in weight.rule.tensors}
    served = {copy.tensor for copy in copies}
    assert served == {n for n in tensors if drafts or not n.startswith("model.layers.2.")}


def test_vocabulary_and_experts_of_a_training_rank_are_those_of_its_layout():
    """100 tokens are padded to 102 over tp=3; 8 experts over ep=2 are 0 to 3 and 4 to 7."""
    ranks, weights = build_training_side(CONFIG, Layout(tp=3), 0)
    [embedding] = [w for w in weights if w.stage == "embedding"]
    assert embedding.rule.get_local_shape(Shard(0, len(ranks.get_holders(embedding)))) == (34, 64)
    ranks, weights = build_training_side(config_of(1), Layout(dp=2, ep=2), 0)
    holders = {w.expert: ranks.get_holders(w) for w in weights if w.expert is not None}
    assert holders == {n: (((0,), (1,))[n // 4],) for n in range(8)}


def test_rows_of_experts_are_on_the_ranks_of_their_part_in_every_replica():
    """Two replicas of two ranks: experts 0 to 3 are on ranks 0 and 2, experts 4 to 7 on 1 and 3."""
    ranks, weights = build_training_side(config_of(1), Layout(dp=4, ep=2), 0, "rows", 2)
    holders = {ranks.get_holders(weight) for weight in weights if weight.expert is not None}
    assert holders == {((0, 2),), ((1, 3),)}
    dense = {ranks.get_holders(weight) for weight in weights if weight.name == "lm_head.weight"}
    assert dense == {((0, 2), (1, 3))}


def test_a_server_shares_the_device_of_a_trainer_of_its_memory_domain():
    """Both training ranks have all tensors: by the overlap alone rank 0 would be the first."""
    spec = TransferSpec(
        Layout(dp=2), 0, GenerationLayout(tp=2), "float32", WeightSyncConfig(), shard_format="full"
    )
    plan = plan_transfer(spec, config_of(1), 4, MemoryDomains(("a", "b"), ("b", "a"), 2))
    for rank in range(2):
        assert {copy.source_rank for copy in plan.list_received(rank)} == {1 - rank}


@pytest.mark.parametrize(("domain", "node"), [("a", {0, 1}), ("b", {2, 3})])
def test_what_a_device_lacks_comes_from_its_own_node(domain, node):
    """Ranks 0 and 1 of a node have the two halves of a model, and so have ranks 2 and 3.

    To send alike, all four would send to the only server.
    """
    settings = WeightSyncConfig()
    spec = TransferSpec(Layout(tp=2, dp=2), 0, GenerationLayout(), "float32", settings)
    domains = MemoryDomains(("a", "a", "b", "b"), (domain,), 2)
    copies = plan_transfer(spec, config_of(1), 4, domains).list_received(0)
    assert {copy.source_rank for copy in copies} == node


def test_sampled_checks_are_of_one_parameter_in_sixteen_and_of_all_in_sixteen_versions():
    names = [f"layers.{n}.weight" for n in range(400)]
    checked = {v: {n for n in names if is_checked("sampled", n, v)} for v in range(16)}
    assert sum(map(len, checked.values())) == len(set().union(*checked.values())) == 400
    assert all(10 < len(part) < 45 for part in checked.values())  # 25 on average
    assert all(is_checked("full", name, 1) and not is_checked("off", name, 1) for name in names)
