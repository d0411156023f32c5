"""Plans over random models, training layouts and generation layouts, executed on arrays."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pytest

import mcore_rl.models  # noqa: F401  (fills the registry of families)
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.rules_engine import validate_layout, validate_model_layout
from mcore_rl.config.schema import Layout
from mcore_rl.models.base import get_family, get_model_sizes, pad_vocab_size
from mcore_rl.parallel.mesh import Mesh, split_into_chunks
from mcore_rl.reshard.layout import (
    GenerationLayout,
    GenerationRanks,
    Holders,
    Ranks,
    TrainingRanks,
)
from mcore_rl.reshard.planner import Devices, Plan, TransferRequirements, assign_hosts
from mcore_rl.reshard.rules import LogicalTensor, Replicated, Shard, Weight
from mcore_rl.weight_sync.spec import build_training_side
from tests.nightly import all_but

NUM_TRIPLES = 560
ITEMSIZE = 2
COMMON = {
    "vocab_size": 67, "hidden_size": 8, "num_attention_heads": 8, "num_key_value_heads": 8,
    "intermediate_size": 16, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "hidden_act": "silu",
}  # fmt: skip
EXPERTS = {
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
    "first_k_dense_replace": 1, "n_shared_experts": 2, "routed_scaling_factor": 2.5,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 6, "kv_lora_rank": 4, "qk_nope_head_dim": 2, "qk_rope_head_dim": 2,
    "v_head_dim": 3,
}  # fmt: skip
MODELS = {
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 2, "tie_word_embeddings": True}),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
    ),
    "llama": ("LlamaForCausalLM", {}),
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", {**EXPERTS, **LATENT, "num_nextn_predict_layers": 1}),
    "deepseek_v3_plain": ("DeepseekV3ForCausalLM", {**EXPERTS, **LATENT, "q_lora_rank": None}),
    "glm4_moe": ("Glm4MoeForCausalLM", {**EXPERTS, "attention_bias": True, "use_qk_norm": True}),
    "gpt_oss": (
        "GptOssForCausalLM",
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": 4,
            "rms_norm_eps": 1e-5,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 2.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
}


@dataclass
class Case:
    model: str
    layout: Layout
    generation: GenerationLayout
    devices: Devices
    sides: tuple[tuple[Ranks, tuple[Weight, ...]], tuple[Ranks, tuple[Weight, ...]]]

    @property
    def rules(self) -> tuple[Weight, ...]:
        return self.sides[1][1]

    def planned(self) -> Plan:
        return TransferRequirements(*self.sides, ITEMSIZE).plan(self.devices)

    @cached_property
    def plan(self) -> Plan:
        return self.planned()


def draw(rng: random.Random) -> Case | None:
    """Draw a random triple, or None if the layout does not fit the model."""
    model = rng.choice(list(MODELS))
    architecture, fields = MODELS[model]
    config = COMMON | fields | {"architectures": [architecture]}
    config["num_hidden_layers"] = rng.choice([2, 3, 4, 5])
    if "kv_lora_rank" not in fields:
        config["num_key_value_heads"] = rng.choice([1, 2, 4, 8])

    def size(*choices: int) -> int:
        return rng.choice(choices)

    layout = Layout(
        tp=size(1, 2, 4), pp=size(1, 2, 3), vpp=size(1, 1, 2), cp=size(1, 1, 2), dp=size(1, 2),
        ep=size(1, 2, 4), etp=size(1, 1, 2),
    )  # fmt: skip
    if layout.pp > 1:
        layout.first_stage_layers = rng.choice([None, None, 0, 1, 2])
        layout.last_stage_layers = rng.choice([None, None, 0, 1])
    sizes = get_model_sizes(config)
    try:
        validate_layout("train", layout)
        validate_model_layout("train", layout, sizes)
        generation = GenerationLayout(
            tp=size(1, 2, 4, 8), pp=size(1, 1, 2), dp=size(1, 2), ep=size(1, 1, 2, 4, 8)
        )
    except ConfigError:
        return None
    if generation.ep > 1 and not sizes.num_experts:
        return None
    mtp = sizes.num_mtp_layers if layout.last_stage_layers != 0 else 0
    chunks = split_into_chunks(layout, sizes.num_layers, rng.choice([0, mtp]))
    training = TrainingRanks(Mesh(layout), chunks, sizes.num_experts)
    served = GenerationRanks(generation, sizes.num_layers, sizes.num_experts)
    family = get_family(config)
    rules = family.weights(config, pad_vocab_size(config, layout.tp))
    per_node = size(1, 2, 3, 8)
    worlds = training.world_size, served.world_size
    devices = Devices.disaggregated(*worlds, per_node)
    if worlds[1] <= worlds[0] and rng.random() < 0.6:
        hosts = rng.sample(range(worlds[0]), worlds[1])
        devices = Devices.colocated(tuple(hosts), worlds[0], per_node)
    sides = (training, rules), (served, family.vllm_weights(config))
    return Case(model, layout, generation, devices, sides)


@functools.cache
def triples() -> list[Case]:
    rng = random.Random(20)
    drawn = (draw(rng) for _ in itertools.count())
    return list(itertools.islice((case for case in drawn if case is not None), NUM_TRIPLES))


def number_elements(weights: tuple[Weight, ...]) -> dict[str, np.ndarray]:
    """Build the logical tensors of rules, each element with a different number."""
    tensors, start = {}, 1
    for tensor in (t for w in weights for t in w.rule.tensors):
        if tensor.name not in tensors:
            count = int(np.prod(tensor.shape))
            tensors[tensor.name] = np.arange(start, start + count).reshape(tensor.shape)
            start += count
    return tensors


def compute_parameters(ranks: Ranks, weights: tuple[Weight, ...], tensors: dict[str, np.ndarray]):
    """Return the parameters of each rank, filled by the rules; 0 is padding."""
    parameters: list[dict[str, np.ndarray]] = [{} for _ in range(ranks.world_size)]
    for weight in weights:
        holders = ranks.get_holders(weight)
        for index, members in enumerate(holders):
            shard = Shard(index, len(holders))
            local = np.zeros(weight.rule.get_local_shape(shard), np.int64)
            for block in weight.rule.get_blocks(shard):
                local[block.local_slices] = tensors[block.tensor.name][block.box.slices]
            for rank in members:
                assert ranks.get_local_name(weight) not in parameters[rank], (
                    "two parameters of one name"
                )
                parameters[rank][ranks.get_local_name(weight)] = local
    return parameters


def build_slices(offset, box) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(offset, box.sizes, strict=True))


def mark_elements(arrays: Iterable[np.ndarray], count: int) -> np.ndarray:
    """Return, by number up to `count`, whether an element is in one of the arrays; 0 is padding."""
    is_present = np.zeros(count + 1, bool)
    for array in arrays:
        is_present[array] = True
    is_present[0] = False
    return is_present


def test_the_triples_cover_every_axis_and_both_modes():
    cases = triples()
    assert len(cases) >= 500
    assert {case.model for case in cases} == set(MODELS)
    for axis in ("tp", "pp", "vpp", "cp", "dp", "ep", "etp"):
        assert sum(getattr(case.layout, axis) > 1 for case in cases) > 20, axis
    for axis in ("tp", "pp", "dp", "ep"):
        assert sum(getattr(case.generation, axis) > 1 for case in cases) > 20, axis
    assert sum(case.layout.first_stage_layers is not None for case in cases) > 20
    shared = [case for case in cases if set(case.devices.training) & set(case.devices.generation)]
    assert 100 < len(shared) < len(cases) - 100


@pytest.mark.parametrize("start", all_but((0, 280), range(0, NUM_TRIPLES, 40)))
def test_a_plan_writes_each_element_once_and_receives_what_is_missing_and_no_more(start):
    for case in triples()[start : start + 40]:
        check_plan(case)


@pytest.mark.parametrize(
    ("model", "layout", "num_replicas", "generation"),
    [
        ("qwen3", Layout(dp=3), 1, GenerationLayout(tp=2)),
        ("llama", Layout(dp=2, cp=2), 2, GenerationLayout(tp=4)),
        ("qwen3_moe", Layout(dp=4, ep=2), 1, GenerationLayout(tp=2, ep=2)),
        ("deepseek_v3", Layout(dp=4, ep=2), 2, GenerationLayout(tp=2, dp=2)),
    ],
)
@pytest.mark.parametrize("is_shared", [False, True])
def test_rows_of_fsdp_are_received_where_they_are_missing_and_no_more(
    model, layout, num_replicas, generation, is_shared
):
    architecture, fields = MODELS[model]
    config = COMMON | fields | {
        "architectures": [architecture], "model_type": model, "num_hidden_layers": 3,
    }  # fmt: skip
    training, rules = build_training_side(config, layout, 0, "rows", num_replicas)
    sizes, vllm_weights = get_model_sizes(config), get_family(config).vllm_weights
    assert vllm_weights is not None
    served = GenerationRanks(generation, sizes.num_layers, sizes.num_experts)
    worlds = training.world_size, served.world_size
    devices = Devices.disaggregated(*worlds, 8)
    if is_shared:
        devices = Devices.colocated(tuple(range(worlds[1])), worlds[0], 8)
    sides = (training, tuple(rules)), (served, vllm_weights(config))
    check_plan(Case(model, layout, generation, devices, sides))


def check_plan(case: Case) -> None:
    """Check that each element is written once, and that a rank receives what it does not hold."""
    (training, rules), (served, vllm_rules) = case.sides
    tensors = number_elements((*rules, *vllm_rules))
    sources = compute_parameters(training, rules, tensors)
    needed = compute_parameters(served, vllm_rules, tensors)
    bounds = compute_lower_bounds(case, tensors, sources, needed)
    plan = case.plan
    totals = plan.compute_totals()
    sent = [0] * training.world_size
    for rank, parameters in enumerate(needed):
        filled = {name: np.zeros_like(array) for name, array in parameters.items()}
        received = 0
        for copy in plan.list_received(rank):
            part = sources[copy.source_rank][copy.source][
                build_slices(copy.source_offset, copy.box)
            ]
            target = filled[copy.target][build_slices(copy.target_offset, copy.box)]
            assert not target.any(), "written twice"
            target[...] = part
            assert (part == tensors[copy.tensor][copy.box.slices]).all()
            if case.devices.training[copy.source_rank] != case.devices.generation[rank]:
                received += copy.num_bytes
                sent[copy.source_rank] += copy.num_bytes
        for name, array in parameters.items():
            assert np.array_equal(filled[name], array), name
        assert received == totals.received[rank] == bounds[rank]
    assert tuple(sent) == totals.sent


def compute_lower_bounds(case: Case, tensors, sources, expected) -> list[int]:
    """Count |needed| - |needed AND present| per rank, in bytes, element by element."""
    count = max(int(array.max()) for array in tensors.values())
    # Router biases travel in float32.
    wide = mark_elements((tensors[w.rule.tensors[0].name] for w in case.rules if w.float32), count)
    bounds = []
    for parameters, device in zip(expected, case.devices.generation, strict=True):
        needed = mark_elements(parameters.values(), count)
        if device in case.devices.training:
            held_here = sources[case.devices.training.index(device)]
            needed &= ~mark_elements(held_here.values(), count)
        bounds.append(int(ITEMSIZE * needed.sum() + (4 - ITEMSIZE) * (needed & wide).sum()))
    return bounds


@pytest.mark.parametrize("start", all_but((0,), range(0, NUM_TRIPLES, 140)))
def test_what_a_rank_sends_is_what_others_receive_from_it_and_every_rank_plans_alike(start):
    for case in triples()[start : start + 140]:
        plan = case.plan
        assert plan == case.planned()
        received = [c for r in range(len(case.devices.generation)) for c in plan.list_received(r)]
        sent = [c for r in range(len(case.devices.training)) for c in plan.list_sent(r)]
        assert len(set(sent)) == len(sent)
        assert set(sent) == set(received)


def test_parameters_are_received_one_after_the_other():
    for case in triples()[:60]:
        plan = case.plan
        for rank in range(len(case.devices.generation)):
            names = [copy.target.split("[")[0] for copy in plan.list_received(rank)]
            layers = [name.split(".")[2] for name in names if ".layers." in name]
            assert layers == sorted(layers, key=int)


class HeldBy:
    """Ranks that have each parameter whole, by its name."""

    def __init__(self, world_size: int, **ranks: tuple[int, ...]):
        self.world_size, self._ranks = world_size, ranks

    def get_holders(self, weight: Weight) -> Holders:
        return (self._ranks[weight.name],)

    def get_local_name(self, weight: Weight) -> str:
        return weight.name


def build_weights(*shapes: tuple[int, ...]) -> list[Weight]:
    """Build parameters a, b, c and so on."""
    named = zip("abc", shapes, strict=False)
    return [Weight(name, Replicated(LogicalTensor(name, shape))) for name, shape in named]


def plan_sent_bytes(
    training: HeldBy, generation: HeldBy, weights: list[Weight], devices: Devices
) -> object:
    sides = (training, weights), (generation, weights)
    return TransferRequirements(*sides, itemsize=1).plan(devices).compute_totals().sent


def test_those_who_have_the_same_send_as_much_and_the_largest_is_given_out_first():
    """Plan parameters of 1, 1 and 2 bytes: in another order one rank would send three bytes."""
    weights = build_weights((1,), (1, 1), (2,))
    both = HeldBy(2, a=(0, 1), b=(0, 1), c=(0, 1))
    devices = Devices.disaggregated(2, 1, per_node=3)
    assert plan_sent_bytes(both, HeldBy(1, a=(0,), b=(0,), c=(0,)), weights, devices) == (2, 2)


def test_what_stays_on_a_device_is_no_load_of_its_rank():
    """Rank 0 alone has a, for the generation rank of its own device; b and c are of both."""
    weights = build_weights((4,), (1,), (1, 1))
    training = HeldBy(3, a=(0,), b=(0, 1), c=(0, 1))
    devices = Devices.colocated((0, 2), 3, per_node=3)
    assert plan_sent_bytes(training, HeldBy(2, a=(0,), b=(1,), c=(1,)), weights, devices) == (
        1,
        1,
        0,
    )


@pytest.mark.parametrize(
    ("num_layers", "pp", "stages"),
    [(5, 2, [0, 0, 0, 1, 1]), (7, 3, [0, 0, 1, 1, 1, 2, 2]), (5, 3, [0, 0, 1, 1, 2])],
)
def test_layers_that_remain_go_to_the_stages_before_the_last(num_layers, pp, stages):
    """Compare with vLLM: distributed/utils.py, get_pp_indices."""
    ranks = GenerationRanks(GenerationLayout(pp=pp), num_layers, 0)
    layers = [Weight("w", Replicated(LogicalTensor("w", (1,))), layer=n) for n in range(num_layers)]
    assert [ranks.find_stage(layer) for layer in layers] == stages


OVERLAP = np.array([[0, 9, 5], [0, 8, 1]])  # [generation ranks, training ranks]


def test_all_pairs_are_allowed_by_default():
    assert assign_hosts(OVERLAP) == (2, 1)  # 5 + 8 is more than 9 + 1


def test_ranks_stay_where_they_may_even_if_nothing_overlaps():
    """Allow only training rank 0 for the second generation rank."""
    allowed = np.array([[False, True, True], [True, False, False]])
    assert assign_hosts(OVERLAP, allowed=allowed) == (1, 0)


def test_a_place_with_too_few_training_ranks_is_an_error_that_names_the_rank():
    allowed = np.array([[True, False, False], [True, False, False]])
    with pytest.raises(ConfigError, match=r"generation rank [01] runs where there are fewer"):
        assign_hosts(OVERLAP, allowed=allowed)


def test_no_overlap_is_worth_a_pair_that_is_not_allowed():
    overlap = np.array([[9, 0], [2, 1]])
    allowed = np.array([[True, True], [True, False]])
    assert assign_hosts(overlap, allowed=allowed) == (1, 0)
