"""What servers say about their parameters, against the rules of a family."""

from dataclasses import replace

import pytest

import mcore_rl.models  # noqa: F401  (fills the registry of families)
from mcore_rl.config.errors import ConfigError
from mcore_rl.reshard.layout import GenerationLayout
from mcore_rl.weight_sync.announced import Announced, check_announced, expected
from mcore_rl.weight_sync.shards import generation_side

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


def announced(layout):
    ranks, (_, weights) = generation_side(CONFIG, layout)
    found = [expected(ranks, weights, rank, "bfloat16") for rank in range(layout.world_size)]
    workers = [Announced("here", *one) for one in found]
    return workers, lambda workers: check_announced(workers, ranks, weights, "bfloat16")


def test_shapes_are_those_of_a_ranks_shard():
    """By hand: 100 tokens are padded to 128; 5 experts are dealt 3 and 2, each of them whole."""
    workers, check = announced(GenerationLayout(tp=2, ep=2))
    check(workers)
    for worker, experts in zip(workers, [(0, 1, 2), (3, 4)], strict=True):
        assert worker.parameters["model.embed_tokens.weight"] == ((64, 64), "bfloat16")
        assert worker.parameters[W13] == ((len(experts), 80, 64), "bfloat16")
        assert worker.experts[W13] == experts
        bias = "model.layers.1.mlp.gate.e_score_correction_bias"
        assert worker.parameters[bias] == ((5,), "float32")
    split, _ = announced(GenerationLayout(tp=2))
    assert split[1].parameters[W13] == ((5, 40, 64), "bfloat16")


def test_an_announcement_survives_json():
    workers, _ = announced(GenerationLayout(tp=2, ep=2))
    assert [Announced.from_json(worker.to_json()) for worker in workers] == workers


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.norm.weight": ((65,), "bfloat16")}, "model.norm.weight are .*65.* rules .*64"),
        ({"model.norm.weight": ((64,), "float32")}, "model.norm.weight are .*float32"),
        ({"model.extra": ((64,), "bfloat16")}, "model.extra are .* say that it is not there"),
        ({"model.norm.weight": None}, "model.norm.weight are not there"),
    ],
)
def test_a_difference_is_named(change, message):
    workers, check = announced(GenerationLayout(tp=2))
    parameters = {**workers[1].parameters, **change}
    found = {name: value for name, value in parameters.items() if value is not None}
    with pytest.raises(ConfigError, match=f"vLLM worker 1: shape and dtype of {message}"):
        check([workers[0], replace(workers[1], parameters=found)])


def test_experts_that_are_dealt_in_another_way_are_named():
    workers, check = announced(GenerationLayout(tp=2, ep=2))
    turned = replace(workers[0], experts={**workers[0].experts, W13: (0, 2, 4)})
    with pytest.raises(ConfigError, match=rf"experts of {W13} are \(0, 2, 4\), .* \(0, 1, 2\)"):
        check([turned, workers[1]])
    with pytest.raises(ConfigError, match="1 vLLM workers for 2 generation ranks"):
        check(workers[:1])
