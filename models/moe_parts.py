"""Rules that families with experts share: routers, experts, shared experts.

Parameter names are those of Megatron-core's Transformer Engine layer spec, on both lanes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mcore_rl.config.errors import ConfigError
from mcore_rl.models.base import HFConfig, field, require
from mcore_rl.models.parts import GATED_NAMES, LayerPlace, gated_mlp
from mcore_rl.reshard.rules import Weight, Whole


def softmax_router_config(config: HFConfig, *, renormalised: bool) -> dict[str, Any]:
    """TransformerConfig arguments of softmax, then the best experts, then perhaps a new norm."""
    topk = field(config, "num_experts_per_tok")
    if renormalised and topk == 1:
        raise ConfigError(
            "config.json: num_experts_per_tok=1 with renormalised weights makes each weight 1 and "
            "teaches the router nothing; allowed: at least 2"
        )
    return {
        "moe_router_topk": topk,
        # Softmax over the chosen experts only equals softmax, choice and renormalisation.
        "moe_router_pre_softmax": not renormalised,
    }


def sigmoid_router_config(config: HFConfig) -> dict[str, Any]:
    """TransformerConfig arguments of DeepSeek-V3's router (arXiv:2412.19437, equations 12 to 16).

    Sigmoid scores; a bias, learned apart from the loss, in the choice of experts only; the choice
    among the best groups of experts; weights that are renormalised and scaled.
    """
    topk = field(config, "num_experts_per_tok")
    require(
        {"norm_topk_prob": True, **config},
        {
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            # Megatron renormalises more than one weight, and never a single one
            # (transformer/moe/moe_utils.py:673).
            "norm_topk_prob": topk > 1,
            "moe_layer_freq": 1,
        },
    )
    return {
        "moe_router_topk": topk,
        "moe_router_score_function": "sigmoid",
        "moe_router_pre_softmax": True,
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": field(config, "routed_scaling_factor"),
        **_expert_groups(config, topk),
    }


def _expert_groups(config: HFConfig, topk: int) -> dict[str, Any]:
    """A group counts by its best topk // topk_group scores in Megatron, by its best 2 elsewhere.

    (transformer/moe/moe_utils.py:554; modeling_deepseek_v3.py, DeepseekV3TopkRouter.)
    """
    groups, chosen = config.get("n_group") or 1, config.get("topk_group") or 1
    if groups == chosen:  # every group is chosen
        return {}
    if topk // chosen != 2:
        raise ConfigError(
            f"config.json: num_experts_per_tok={topk} with topk_group={chosen} of n_group={groups} "
            f"is not supported; allowed: num_experts_per_tok={2 * chosen}"
        )
    return {"moe_router_num_groups": groups, "moe_router_group_topk": chosen}


def shared_expert_size(config: HFConfig) -> int:
    """Columns of all shared experts together: they make one gated MLP."""
    return int(field(config, "moe_intermediate_size") * field(config, "n_shared_experts"))


def router_weights(config: HFConfig, at: LayerPlace, num_experts: int, hf: str) -> Iterator[Weight]:
    """Post-attention norm and router of an expert layer that the checkpoint has under `hf`."""
    hidden = field(config, "hidden_size")
    norm = Whole(at.tensor("post_attention_layernorm.weight", hidden))
    yield at.weight("pre_mlp_layernorm.weight", norm)
    yield at.weight("mlp.router.weight", Whole(at.tensor(f"{hf}.gate.weight", num_experts, hidden)))


def expert_weights(
    config: HFConfig,
    at: LayerPlace,
    num_experts: int,
    ffn: int,
    hf: str = "mlp",
    names: tuple[str, str, str] = GATED_NAMES,
) -> Iterator[Weight]:
    """The experts of a layer; `names` are the checkpoint's for gate, up and down."""
    for expert in range(num_experts):
        fc1, fc2 = gated_mlp(config, at, f"{hf}.experts.{expert}", ffn, names)
        yield at.weight("mlp.experts.linear_fc1.weight{expert}", fc1, "etp", expert=expert)
        yield at.weight("mlp.experts.linear_fc2.weight{expert}", fc2, "etp", expert=expert)


def expert_mlp_weights(
    config: HFConfig, at: LayerPlace, *, num_experts: int, ffn: int
) -> Iterator[Weight]:
    """Post-attention norm, router and experts of a layer, under transformers' usual names."""
    yield from router_weights(config, at, num_experts, "mlp")
    yield from expert_weights(config, at, num_experts, ffn)


def shared_expert_mlp_weights(config: HFConfig, at: LayerPlace) -> Iterator[Weight]:
    """The layer of DeepSeek-V3: router with a selection bias, experts and shared experts."""
    num_experts, ffn = field(config, "n_routed_experts"), field(config, "moe_intermediate_size")
    yield from expert_mlp_weights(config, at, num_experts=num_experts, ffn=ffn)
    bias = Whole(at.tensor("mlp.gate.e_score_correction_bias", num_experts))
    yield at.weight("mlp.router.expert_bias", bias, float32=True)
    fc1, fc2 = gated_mlp(config, at, "mlp.shared_experts", shared_expert_size(config))
    yield at.weight("mlp.shared_experts.linear_fc1.weight", fc1, "tp")
    yield at.weight("mlp.shared_experts.linear_fc2.weight", fc2, "tp")


def shared_expert_config(config: HFConfig) -> dict[str, Any]:
    """TransformerConfig arguments of dense layers first and then layers like DeepSeek-V3's."""
    num_layers = field(config, "num_hidden_layers")
    return {
        "num_moe_experts": field(config, "n_routed_experts"),
        "moe_ffn_hidden_size": field(config, "moe_intermediate_size"),
        "moe_shared_expert_intermediate_size": shared_expert_size(config),
        "moe_layer_freq": [int(has_experts(config, layer)) for layer in range(num_layers)],
        **sigmoid_router_config(config),
    }


def has_experts(config: HFConfig, layer: int) -> bool:
    """Whether the layer comes after the dense ones."""
    return layer >= int(config.get("first_k_dense_replace") or 0)


def num_mtp_layers(config: HFConfig) -> int:
    """Published configs say num_nextn_predict_layers; some of transformers' say num_mtp_layers."""
    return int(config.get("num_nextn_predict_layers", config.get("num_mtp_layers")) or 0)
