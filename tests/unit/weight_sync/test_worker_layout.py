"""What a worker has of parameters, against the rules of a family."""

from dataclasses import replace

import pytest

import mcore_rl.models  # noqa: F401  (fills the registry of families)
from mcore_rl.config.errors import ConfigError
from mcore_rl.reshard.layout import GenerationLayout
from mcore_rl.weight_sync.spec import generation_side
from mcore_rl.weight_sync.worker_layout import WorkerLayout, check_layout, expected

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


def workers_of(layout):
    ranks, (_, weights) = generation_side(CONFIG, layout)
    found = [expected(ranks, weights, rank, "bfloat16") for rank in range(layout.world_size)]
    workers = [WorkerLayout(*one) for one in found]
    return workers, lambda worker, rank: check_layout(worker, ranks, weights, rank, "bfloat16")


def test_shapes_are_those_of_a_ranks_shard():
    """By hand: 100 tokens are padded to 128; 5 experts are dealt 3 and 2, each of them whole."""
    workers, check = workers_of(GenerationLayout(tp=2, ep=2))
    for rank, (worker, experts) in enumerate(zip(workers, [(0, 1, 2), (3, 4)], strict=True)):
        check(worker, rank)
        assert worker.parameters["model.embed_tokens.weight"] == ((64, 64), "bfloat16")
        assert worker.parameters[W13] == ((len(experts), 80, 64), "bfloat16")
        assert worker.experts[W13] == experts
        bias = "model.layers.1.mlp.gate.e_score_correction_bias"
        assert worker.parameters[bias] == ((5,), "float32")
    split, _ = workers_of(GenerationLayout(tp=2))
    assert split[1].parameters[W13] == ((5, 40, 64), "bfloat16")


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
    workers, check = workers_of(GenerationLayout(tp=2))
    parameters = {**workers[1].parameters, **change}
    found = {name: value for name, value in parameters.items() if value is not None}
    with pytest.raises(ConfigError, match=f"vLLM worker 1: shape and dtype of {message}"):
        check(replace(workers[1], parameters=found), 1)


def test_experts_that_are_dealt_in_another_way_are_named():
    workers, check = workers_of(GenerationLayout(tp=2, ep=2))
    turned = replace(workers[0], experts={**workers[0].experts, W13: (0, 2, 4)})
    with pytest.raises(ConfigError, match=rf"experts of {W13} are \(0, 2, 4\), .* \(0, 1, 2\)"):
        check(turned, 0)
