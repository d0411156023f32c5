"""Refusals of backend=fsdp before a rank starts, and the rows of its ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import (
    EngineConfig,
    FSDPConfig,
    Layout,
    LoRAConfig,
    MoEConfig,
    OptimizerConfig,
    RecomputeConfig,
)
from mcore_rl.engine.base import check_engine_settings, load_backend
from mcore_rl.engine.fsdp import lora
from mcore_rl.engine.fsdp.attention import ATTENTION, MaskRule, describe_mask, register_functions
from mcore_rl.engine.fsdp.model import ShardedPolicy, allocate
from mcore_rl.engine.steps import ScoreSettings
from mcore_rl.models.base import get_family, get_model_sizes, use_family
from mcore_rl.models.transformers_model import build_empty_model, map_sharded_weights
from mcore_rl.reshard.layout import ShardedRanks
from mcore_rl.reshard.rules import Shard, check_cover

_SHAPE = {
    "vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "pad_token_id": 0,
}  # fmt: skip
MOE = transformers.Qwen3MoeConfig(
    **_SHAPE, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=8,
    architectures=["Qwen3MoeForCausalLM"],
).to_dict()  # fmt: skip
SPARSE = transformers.DeepseekV32Config(architectures=["DeepseekV32ForCausalLM"]).to_dict()
GEMMA = transformers.AutoConfig.for_model(
    "gemma3_text", **_SHAPE, architectures=["Gemma3ForCausalLM"]
).to_dict()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layout": Layout(tp=2)}, r"actor.layout.tp=2: fsdp does not read it; allowed: 1"),
        ({"moe": MoEConfig(aux_loss_coef=0.1)}, r"actor.moe.aux_loss_coef=0.1: fsdp does not"),
        (
            {"optimizer": OptimizerConfig(cpu_offload=True)},
            "actor.optimizer.cpu_offload=True: fsdp",
        ),
        ({"recompute": RecomputeConfig(granularity="selective")}, "fsdp recomputes whole layers"),
        (
            {"recompute": RecomputeConfig(granularity="some")},
            r"actor.recompute.granularity='some': .*allowed: 'full', 'none'",
        ),
        (
            {"lora": LoRAConfig(rank=4, targets=[])},
            r"actor.lora.targets=\[\] with actor.lora",
        ),
        (
            {"layout": Layout(dp=4, ep=2), "fsdp": FSDPConfig(num_replicas=3)},
            r"actor.fsdp.num_replicas=3 with actor.layout.ep=2; allowed: .* the 4 ranks",
        ),
    ],
)
def test_a_setting_that_it_cannot_follow_is_refused_by_name(settings, message):
    engine = EngineConfig(backend="fsdp", **settings)
    with pytest.raises(ConfigError, match=message):
        check_engine_settings("actor", engine, "language_model", "cpu")


@pytest.mark.parametrize(
    ("layout", "config", "message"),
    [
        (Layout(cp=3), MOE, r"actor.layout.cp=3 .*attention heads"),
        (Layout(dp=4, ep=4), MOE, r"actor.layout.ep=4 .*experts"),
        (Layout(), SPARSE, "actor.backend='fsdp': the indexer of Deep.* allowed: 'megatron'"),
        (Layout(dp=2, ep=2), GEMMA, r"actor.layout.ep=2: the model has no experts; allowed: 1"),
    ],
)
def test_a_layout_that_does_not_divide_the_model_is_refused(layout, config, message):
    use_family("transformers")
    try:
        engine = EngineConfig(backend="fsdp", layout=layout)
        with pytest.raises(ConfigError, match=message):
            load_backend(engine).check_model("actor", engine, config)
    finally:
        use_family("")


def test_an_architecture_without_rules_here_has_its_sizes_and_no_layers_of_megatron():
    with pytest.raises(ConfigError, match=r"\['Gemma3ForCausalLM'\] is not supported"):
        get_family(GEMMA)
    use_family("transformers")
    try:
        family = get_family(GEMMA)
        assert (family.name, family.vllm_weights) == ("gemma3_text", None)
        sizes = get_model_sizes(GEMMA)
        assert (sizes.num_layers, sizes.num_attention_heads, sizes.num_experts) == (2, 4, 0)
        with pytest.raises(
            ConfigError, match="no layers of Megatron here; allowed: backend='fsdp'"
        ):
            family.layer_spec(None, None)
    finally:
        use_family("")


@pytest.mark.parametrize("ep", [1, 2, 3])
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_the_ranks_of_a_replica_have_each_element_once(ep, num_replicas):
    weights, ranks = map_sharded_weights(MOE, ep), ShardedRanks(6 * num_replicas, num_replicas, ep)
    check_cover(weights, 6)
    for weight in weights:
        holders = ranks.get_holders(weight)
        shapes = [weight.rule.get_local_shape(Shard(i, len(holders))) for i in range(len(holders))]
        assert sum(shape[0] for shape in shapes) == sum(t.shape[0] for t in weight.rule.tensors)
        assert all(len(members) == num_replicas for members in holders)
    placed = [r for w in weights if w.expert is not None for h in ranks.get_holders(w) for r in h]
    stacks = {w.name for w in weights if w.expert is not None}
    assert sorted(placed) == sorted([*range(6 * num_replicas)] * len(stacks))


class _Model(torch.nn.Module):
    """A model of text with states of its own, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.base_model = torch.nn.Identity()
        self.head = torch.nn.Linear(4, 9, bias=False)
        self.states = torch.randn(1, 3, 4)
        self.base_model.forward = lambda **_: SimpleNamespace(last_hidden_state=self.states)

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.head

    def forward(self, logits_to_keep: torch.Tensor, **inputs: Any) -> Any:
        states = self.base_model(**inputs).last_hidden_state[:, logits_to_keep]
        return SimpleNamespace(logits=self.head(states))


class _CountAdditions(TorchDispatchMode):
    num = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num += func.overloadpacket is torch.ops.aten.add
        return func(*args, **(kwargs or {}))


def test_a_pass_without_images_copies_no_logits():
    rows = torch.arange(3)
    micro = SimpleNamespace(
        input_ids=rows[None], position_ids=rows[None], hidden_rows=rows, model_inputs={}
    )
    with _CountAdditions() as additions:
        assert ShardedPolicy(_Model())(micro, None, None)
    assert additions.num == 0


def test_rows_of_logits_are_those_of_the_response_if_a_family_returns_all():
    class AllRows(_Model):
        def forward(self, logits_to_keep: torch.Tensor, **inputs: Any) -> Any:
            return SimpleNamespace(logits=self.head(self.base_model(**inputs).last_hidden_state))

    root, rows = ShardedPolicy(AllRows()), torch.tensor([1, 2])
    root.has_plain_head = False
    ids = torch.arange(3)[None]
    micro = SimpleNamespace(
        input_ids=ids, position_ids=ids, hidden_rows=rows, model_inputs={}, columns={},
        targets=torch.tensor([3, 5]),
    )  # fmt: skip
    settings = SimpleNamespace(temperature=1.0, with_entropy=False, with_squares=False, num_top=0)
    log_probs = root.model.head(root.model.states[0]).log_softmax(-1)
    scores = root(micro, None, settings)["log_probs"]
    torch.testing.assert_close(scores, log_probs[[1, 2], [3, 5]])
    root.model.states = torch.randn(1, 7, 4)
    with pytest.raises(ValueError, match="7 rows for 3 tokens"):
        root(micro, None, settings)


@pytest.mark.parametrize("has_plain_head", [True, False])
def test_every_score_is_that_of_the_softmax_of_the_logits(has_plain_head):
    """A head that caps its logits, as Gemma 2's, has the scores of a plain one."""

    class Capped(_Model):
        def forward(self, logits_to_keep: torch.Tensor, **inputs: Any) -> Any:
            logits = super().forward(logits_to_keep, **inputs).logits
            return SimpleNamespace(logits=(logits / 0.5).tanh() * 0.5)

    torch.manual_seed(0)
    root = ShardedPolicy(_Model() if has_plain_head else Capped())
    root.has_plain_head = has_plain_head
    ids, rows, targets = torch.arange(3)[None], torch.tensor([0, 2]), torch.tensor([3, 5])
    teacher_ids = torch.tensor([[8, 0], [1, 5]])
    micro = SimpleNamespace(
        input_ids=ids, position_ids=ids, hidden_rows=rows, model_inputs={}, targets=targets,
        columns={"teacher_ids": teacher_ids},
    )  # fmt: skip
    settings = ScoreSettings(
        temperature=0.7, chunk_bytes=0, with_entropy=True, with_squares=True, num_top=3
    )
    logits = (root.model.states[0, rows] @ root.model.head.weight.t()).double()
    logits = logits if has_plain_head else (logits / 0.5).tanh() * 0.5
    policy = torch.distributions.Categorical(logits=logits / 0.7)
    top = policy.logits.topk(3)
    expected = {
        "log_probs": policy.log_prob(targets),
        "chosen_log_probs": policy.logits.gather(1, teacher_ids),
        "entropy": policy.entropy(),
        "sum_pi_squared": policy.probs.square().sum(1),
        "top_log_probs": top.values,
        "top_ids": top.indices,
    }
    scores = root(micro, None, settings)
    assert scores.keys() == expected.keys()
    for name, values in expected.items():
        torch.testing.assert_close(scores[name], values.to(scores[name].dtype), msg=name)
    no_gradient = ("sum_pi_squared", "top_log_probs", "top_ids")
    assert not any(scores[name].requires_grad for name in no_gradient)


def test_factors_of_each_layer_start_from_other_numbers_at_any_number_of_ranks():
    model = build_empty_model(GEMMA)
    lora.attach_adapters(model, LoRAConfig(rank=3))
    weights = lora.map_factors(model)

    def initialize(num_ranks: int, seed: int) -> dict[str, torch.Tensor]:
        parts: dict[str, list[torch.Tensor]] = {weight.name: [] for weight in weights}
        for rank in range(num_ranks):
            shards = [(weight, Shard(rank, num_ranks)) for weight in weights]
            local = [
                (weight, shard, torch.full(weight.rule.get_local_shape(shard), torch.nan))
                for weight, shard in shards
            ]
            lora.initialize_factors(local, seed)
            for weight, _, rows in local:
                parts[weight.name].append(rows)
        return {name: torch.cat(rows) for name, rows in parts.items()}

    single_rank = initialize(1, seed=0)
    a = {name: value for name, value in single_rank.items() if name.endswith("lora_A")}
    assert 2 * len(a) == len(single_rank) and len(a) == 2 * 7  # linear layers of two decoder layers
    assert not any(value.any() for name, value in single_rank.items() if name not in a)
    starts = [value[0, :4] for value in (*a.values(), *initialize(1, seed=1).values())]
    starts = [start for start in starts if start.any()]
    assert len(torch.stack(starts).unique(dim=0)) == len(starts) == 2 * len(a)
    for name, value in a.items():  # kaiming_uniform_ with a = sqrt(5), as in PEFT
        assert value.abs().max() <= value.shape[1] ** -0.5 < 1.2 * value.abs().max(), name
    for num_ranks in (2, 3, 5):  # some have no row
        parts = initialize(num_ranks, seed=0)
        assert all(torch.equal(parts[name], value) for name, value in single_rank.items())


@pytest.mark.parametrize(
    ("model_class", "trained_head"),
    [
        (transformers.Gemma3ForCausalLM, set()),
        (transformers.Qwen3ForTokenClassification, {"score.weight", "score.bias"}),
    ],
)
def test_with_adapters_only_factors_and_a_value_head_are_trained(model_class, trained_head):
    with torch.device("meta"):
        model = model_class(model_class.config_class(**_SHAPE, tie_word_embeddings=False))
    lora.attach_adapters(model, LoRAConfig(rank=3))
    trained = {name for name, value in model.named_parameters() if value.requires_grad}
    factors = {weight.name for weight in lora.map_factors(model)}
    assert factors and trained == factors | trained_head


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("falcon_h1", {"mamba_d_ssm": 32, "mamba_n_heads": 8, "mamba_d_head": 4}),
        ("gemma3_text", {}),
        ("deepseek_v3", {"qk_rope_head_dim": 8, "n_routed_experts": 8, "first_k_dense_replace": 1}),
        ("llama4_text", {"num_local_experts": 4}),
    ],
)
def test_buffers_are_those_of_a_model_that_transformers_builds(kind, changes):
    config = transformers.AutoConfig.for_model(kind, **(_SHAPE | changes))
    expected = transformers.AutoModelForCausalLM.from_config(config)
    model = build_empty_model({**config.to_dict(), "architectures": [type(expected).__name__]})
    device = torch.device("cpu")
    allocate(ShardedPolicy(model), device, device)
    buffers = dict(model.named_buffers())
    assert buffers
    for name, buffer in expected.named_buffers():
        assert torch.equal(buffers[name], buffer), name
    assert all(parameter.isnan().all() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("create_mask", "changes", "rule"),
    [
        ("create_causal_mask", {}, None),
        ("create_sliding_window_causal_mask", {"sliding_window": 3}, MaskRule(window=3)),
        ("create_chunked_causal_mask", {"attention_chunk_size": 4}, MaskRule(chunk=4)),
    ],
)
def test_mask_of_transformers_is_described_by_its_window_or_chunk(create_mask, changes, rule):
    register_functions()
    config = transformers.AutoConfig.for_model("llama", **_SHAPE)
    for name, value in changes.items():
        setattr(config, name, value)
    config._attn_implementation = ATTENTION
    positions = torch.tensor([[0, 1, 2, 0, 1]])
    create = getattr(transformers.masking_utils, create_mask)
    assert create(config, torch.zeros(1, 5, 8), None, None, position_ids=positions) == rule


def test_mask_of_another_kind_is_refused():
    union = transformers.masking_utils.or_masks(transformers.masking_utils.causal_mask_function)
    with pytest.raises(ValueError, match="attention has a mask by or_masks"):
        describe_mask(mask_function=union)
