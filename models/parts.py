"""Rules that families share: embeddings, attention, MLPs, routers, experts, shared experts.

Parameter names are those of Megatron-core's Transformer Engine layer spec, on CPUs and GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from mcore_rl.config.errors import ConfigError
from mcore_rl.models.base import (
    DEFAULT_ROPE_THETA,
    HFConfig,
    check_values,
    get_field,
    get_head_dim,
)
from mcore_rl.models.rope import map_rope_config
from mcore_rl.reshard.rules import (
    Axis,
    GateUp,
    InterleavedQKV,
    LogicalTensor,
    Replicated,
    Rule,
    Split,
    Weight,
)

GATED_NAMES = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Layer:
    """A decoder layer: its names in the checkpoint and in Megatron's model.

    A layer for multi-token prediction comes after the decoder layers in the checkpoint and is on
    the stage of the output head in Megatron.
    """

    index: int  # in the checkpoint
    mtp_index: int | None = None  # among the layers for multi-token prediction
    prefix: str = "model.layers."  # of its tensors in the checkpoint

    def build_tensor(self, name: str, *shape: int) -> LogicalTensor:
        """Return a tensor of this layer in the checkpoint."""
        return LogicalTensor(f"{self.prefix}{self.index}.{name}", shape)

    def build_weight(
        self,
        name: str,
        rule: Rule,
        axis: Axis | None = None,
        *,
        expert: int | None = None,
        float32: bool = False,
    ) -> Weight:
        """Return a parameter of this layer in Megatron's model."""
        if self.mtp_index is None:
            name = "decoder.layers.{layer}." + name
            return Weight(name, rule, axis, layer=self.index, expert=expert, float32=float32)
        name = f"mtp.layers.{self.mtp_index}.mtp_model_layer.{name}"
        return Weight(name, rule, axis, expert=expert, stage="mtp", float32=float32)


def map_common_config(
    config: HFConfig, layer_types: tuple[str, ...] = ("full_attention",)
) -> dict[str, Any]:
    """Return TransformerConfig arguments of a pre-norm, gated decoder, without its attention.

    `layer_types`: those that the family has.
    """
    if config.get("use_sliding_window"):
        raise ConfigError("config.json: use_sliding_window=true is not supported; allowed: false")
    kinds = sorted(set(config.get("layer_types") or []) - set(layer_types))
    if kinds:
        raise ConfigError(
            f"config.json: layer_types with {kinds[0]!r} is not supported; allowed: "
            f"{', '.join(map(repr, layer_types))}"
        )
    check_values(config, {"hidden_act": "silu", "is_causal": True})
    return {
        "num_layers": get_field(config, "num_hidden_layers"),
        "hidden_size": get_field(config, "hidden_size"),
        "num_attention_heads": get_field(config, "num_attention_heads"),
        "ffn_hidden_size": get_field(config, "intermediate_size"),
        "layernorm_epsilon": get_field(config, "rms_norm_eps"),
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation": get_field(config, "hidden_act"),
        "add_bias_linear": False,
    }


def map_gqa_config(config: HFConfig) -> dict[str, Any]:
    """Return TransformerConfig arguments of grouped-query attention."""
    return {
        "num_query_groups": get_field(config, "num_key_value_heads"),
        "kv_channels": get_head_dim(config),
    }


def map_decoder_config(
    config: HFConfig, default_theta: float = DEFAULT_ROPE_THETA
) -> dict[str, Any]:
    """Return arguments of a decoder with grouped queries and a rotary embedding."""
    rope = map_rope_config(config, default_theta)
    return {**map_common_config(config), **map_gqa_config(config), **rope}


def get_layer_spec(config: Any, vp_stage: int | None) -> Any:
    """Return Megatron's Transformer Engine layer spec, with dense or expert layers by the config.

    Without Transformer Engine, engine/megatron/layers.py provides its modules.
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)


LayerRules = Callable[[HFConfig, Layer], Iterator[Weight]]


def map_decoder_weights(
    config: HFConfig, padded_vocab: int, map_layer: LayerRules, num_mtp_layers: int = 0
) -> tuple[Weight, ...]:
    """Return the rules of a model; `map_layer` gives those of a layer.

    Prediction layers follow on the decoder layers, as DeepSeek-V3 has them.
    """
    num_layers = get_field(config, "num_hidden_layers")
    mtp_layers = [Layer(num_layers + index, index) for index in range(num_mtp_layers)]
    layers = [Layer(index) for index in range(num_layers)]
    return (
        *map_embedding_weights(config, padded_vocab, mtp_layers),
        *(weight for layer in layers for weight in map_layer(config, layer)),
        *map_head_weights(config, padded_vocab, mtp_layers),
        *(weight for layer in mtp_layers for weight in map_mtp_weights(config, layer)),
        *(weight for layer in mtp_layers for weight in map_layer(config, layer)),
    )


def map_embedding_weights(
    config: HFConfig, padded_vocab: int, mtp_layers: list[Layer]
) -> Iterator[Weight]:
    """Map the embedding, and its copy on the stage of the multi-token prediction layers.

    A checkpoint repeats the embedding, and the head, in each of those layers.
    """
    repeats = ["embed_tokens", *(["shared_head.head"] if _is_tied(config) else [])]
    embed = _build_vocab_tensor(config, "model.embed_tokens.weight", repeats, mtp_layers)
    name, rule = "embedding.word_embeddings.weight", Split(embed, 0, padded_vocab)
    yield Weight(name, rule, axis="tp", stage="embedding")
    if mtp_layers:
        yield Weight(name, rule, axis="tp", stage="mtp", replica=True)


def map_head_weights(
    config: HFConfig, padded_vocab: int, mtp_layers: list[Layer]
) -> Iterator[Weight]:
    """Map the final norm and the output head; of a tied model, the head is an embedding copy."""
    norm = LogicalTensor("model.norm.weight", (get_field(config, "hidden_size"),))
    yield Weight("decoder.final_layernorm.weight", Replicated(norm), stage="final_norm")
    is_tied = _is_tied(config)
    name = "model.embed_tokens.weight" if is_tied else "lm_head.weight"
    head = _build_vocab_tensor(config, name, ["shared_head.head"], mtp_layers)
    rule = Split(head, 0, padded_vocab)
    yield Weight("output_layer.weight", rule, axis="tp", stage="head", replica=is_tied)


def _is_tied(config: HFConfig) -> bool:
    return bool(config.get("tie_word_embeddings", False))


def _build_vocab_tensor(
    config: HFConfig, name: str, repeats: list[str], mtp_layers: list[Layer]
) -> LogicalTensor:
    """Return a tensor of [vocabulary, hidden] that each prediction layer repeats as `repeats`."""
    shape = (get_field(config, "vocab_size"), get_field(config, "hidden_size"))
    aliases = tuple(
        layer.build_tensor(f"{repeat}.weight").name for layer in mtp_layers for repeat in repeats
    )
    return LogicalTensor(name, shape, aliases)


def map_mtp_weights(config: HFConfig, layer: Layer) -> Iterator[Weight]:
    """Map the norms and the projection around the decoder layer of multi-token prediction.

    Both Megatron and the checkpoint project [embedding; hidden state], in this order
    (transformer/multi_token_prediction.py:1175, transformers/modeling_layers.py:344).
    """
    hidden = get_field(config, "hidden_size")
    name = f"mtp.layers.{layer.mtp_index}."
    norms = {"enorm": "enorm", "hnorm": "hnorm", "final_layernorm": "shared_head.norm"}
    for mcore, hf in norms.items():
        norm = layer.build_tensor(f"{hf}.weight", hidden)
        yield Weight(f"{name}{mcore}.weight", Replicated(norm), stage="mtp")
    projection = Split(layer.build_tensor("eh_proj.weight", hidden, 2 * hidden), 0)
    yield Weight(f"{name}eh_proj.weight", projection, axis="tp", stage="mtp")


def map_attention_weights(
    config: HFConfig,
    layer: Layer,
    *,
    qk_norm: bool = False,
    qkv_bias: bool = False,
    gated: bool = False,
    out_bias: bool = False,
    sinks: bool = False,
) -> Iterator[Weight]:
    """Map input norm, q/k/v and output projections of grouped-query attention.

    Args:
        gated: q_proj has a gate of the output after the query of each head.
        sinks: A logit of each head beside those of the keys, Megatron's learnable softmax offset.
    """
    hidden, dim = get_field(config, "hidden_size"), get_head_dim(config)
    heads = get_field(config, "num_attention_heads")
    groups = get_field(config, "num_key_value_heads")

    def build_qkv(kind: str, *columns: int) -> InterleavedQKV:
        return InterleavedQKV(
            layer.build_tensor(f"self_attn.q_proj.{kind}", (1 + gated) * heads * dim, *columns),
            layer.build_tensor(f"self_attn.k_proj.{kind}", groups * dim, *columns),
            layer.build_tensor(f"self_attn.v_proj.{kind}", groups * dim, *columns),
            groups,
            gated,
        )

    norm = Replicated(layer.build_tensor("input_layernorm.weight", hidden))
    yield layer.build_weight("self_attention.linear_qkv.layer_norm_weight", norm)
    yield layer.build_weight("self_attention.linear_qkv.weight", build_qkv("weight", hidden), "tp")
    if qkv_bias:
        yield layer.build_weight("self_attention.linear_qkv.bias", build_qkv("bias"), "tp")
    if qk_norm:
        for name in ("q", "k"):
            norm = Replicated(layer.build_tensor(f"self_attn.{name}_norm.weight", dim))
            yield layer.build_weight(f"self_attention.{name}_layernorm.weight", norm)
    out = Split(layer.build_tensor("self_attn.o_proj.weight", hidden, heads * dim), 1)
    yield layer.build_weight("self_attention.linear_proj.weight", out, "tp")
    if out_bias:
        bias = Replicated(layer.build_tensor("self_attn.o_proj.bias", hidden))
        yield layer.build_weight("self_attention.linear_proj.bias", bias)
    if sinks:
        offset = Split(layer.build_tensor("self_attn.sinks", heads), 0)
        yield layer.build_weight("self_attention.core_attention.softmax_offset", offset, "tp")


def build_gated_mlp_rules(
    config: HFConfig, layer: Layer, hf: str, ffn: int, names: tuple[str, str, str] = GATED_NAMES
) -> tuple[GateUp, Split]:
    """Return the rules of linear_fc1 and linear_fc2 of a gated MLP.

    Args:
        hf: Name of the module in the checkpoint's layer.
        ffn: Intermediate size.
        names: Names of gate, up and down in the checkpoint.
    """
    hidden, (gate, up, down) = get_field(config, "hidden_size"), names
    fc1 = GateUp(
        layer.build_tensor(f"{hf}.{gate}.weight", ffn, hidden),
        layer.build_tensor(f"{hf}.{up}.weight", ffn, hidden),
    )
    return fc1, Split(layer.build_tensor(f"{hf}.{down}.weight", hidden, ffn), 1)


def map_dense_mlp_weights(config: HFConfig, layer: Layer) -> Iterator[Weight]:
    """Map post-attention norm and gated MLP of a dense layer."""
    norm = Replicated(
        layer.build_tensor("post_attention_layernorm.weight", get_field(config, "hidden_size"))
    )
    fc1, fc2 = build_gated_mlp_rules(config, layer, "mlp", get_field(config, "intermediate_size"))
    yield layer.build_weight("mlp.linear_fc1.layer_norm_weight", norm)
    yield layer.build_weight("mlp.linear_fc1.weight", fc1, "tp")
    yield layer.build_weight("mlp.linear_fc2.weight", fc2, "tp")


def map_softmax_router_config(config: HFConfig, *, renormalised: bool) -> dict[str, Any]:
    """Return TransformerConfig arguments of a softmax, top-k router.

    `renormalised`: whether the weights of the top k are normalized to sum to 1.
    """
    topk = get_field(config, "num_experts_per_tok")
    if renormalised and topk == 1:
        raise ConfigError(
            "config.json: num_experts_per_tok=1 with renormalised weights makes each weight 1 and "
            "teaches the router nothing; allowed: at least 2"
        )
    return {
        "moe_router_topk": topk,
        # Softmax over the top k equals softmax over all experts, top k, and renormalisation.
        "moe_router_pre_softmax": not renormalised,
    }


def map_sigmoid_router_config(config: HFConfig) -> dict[str, Any]:
    """Return TransformerConfig arguments of DeepSeek-V3's router.

    arXiv:2412.19437, equations 12 to 16: sigmoid scores; a bias that is learned without the loss
    and used only to select experts; selection from the best groups of experts; weights that are
    renormalised and scaled.
    """
    topk = get_field(config, "num_experts_per_tok")
    check_values(
        {"norm_topk_prob": True} | config,
        {
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            # Megatron renormalises if k > 1 and never for k = 1
            # (transformer/moe/moe_utils.py:798).
            "norm_topk_prob": topk > 1,
            "moe_layer_freq": 1,
        },
    )
    return {
        "moe_router_topk": topk,
        "moe_router_score_function": "sigmoid",
        "moe_router_pre_softmax": True,
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": get_field(config, "routed_scaling_factor"),
        **_map_expert_groups(config, topk),
    }


def _map_expert_groups(config: HFConfig, topk: int) -> dict[str, Any]:
    """Return arguments of group-limited routing, if both definitions of it agree.

    Megatron ranks a group by its best topk // topk_group scores (transformer/moe/moe_utils.py:656),
    DeepSeek by its best 2 (modeling_deepseek_v3.py, DeepseekV3TopkRouter).
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


def get_shared_expert_size(config: HFConfig) -> int:
    """Return the intermediate size of all shared experts, which form one gated MLP."""
    return int(get_field(config, "moe_intermediate_size") * get_field(config, "n_shared_experts"))


def map_router_weights(
    config: HFConfig, layer: Layer, num_experts: int, hf: str
) -> Iterator[Weight]:
    """Map post-attention norm and router; `hf`: name of the MoE module in the checkpoint."""
    hidden = get_field(config, "hidden_size")
    norm = Replicated(layer.build_tensor("post_attention_layernorm.weight", hidden))
    yield layer.build_weight("pre_mlp_layernorm.weight", norm)
    yield layer.build_weight(
        "mlp.router.weight",
        Replicated(layer.build_tensor(f"{hf}.gate.weight", num_experts, hidden)),
    )


def map_expert_weights(
    config: HFConfig,
    layer: Layer,
    num_experts: int,
    ffn: int,
    hf: str = "mlp",
    names: tuple[str, str, str] = GATED_NAMES,
) -> Iterator[Weight]:
    """Map the experts of a layer; `hf`, `names`: as in build_gated_mlp_rules."""
    for expert in range(num_experts):
        fc1, fc2 = build_gated_mlp_rules(config, layer, f"{hf}.experts.{expert}", ffn, names)
        yield layer.build_weight("mlp.experts.linear_fc1.weight{expert}", fc1, "etp", expert=expert)
        yield layer.build_weight("mlp.experts.linear_fc2.weight{expert}", fc2, "etp", expert=expert)


def map_expert_mlp_weights(
    config: HFConfig, layer: Layer, *, num_experts: int, ffn: int
) -> Iterator[Weight]:
    """Map post-attention norm, router and experts of a layer, under transformers' usual names."""
    yield from map_router_weights(config, layer, num_experts, "mlp")
    yield from map_expert_weights(config, layer, num_experts, ffn)


def map_shared_expert_mlp_weights(config: HFConfig, layer: Layer) -> Iterator[Weight]:
    """Map the MLP of DeepSeek-V3: dense in the first layers, then routed and shared experts.

    The router has a selection bias.
    """
    if not has_experts(config, layer.index):
        yield from map_dense_mlp_weights(config, layer)
        return
    num_experts = get_field(config, "n_routed_experts")
    ffn = get_field(config, "moe_intermediate_size")
    yield from map_expert_mlp_weights(config, layer, num_experts=num_experts, ffn=ffn)
    bias = Replicated(layer.build_tensor("mlp.gate.e_score_correction_bias", num_experts))
    yield layer.build_weight("mlp.router.expert_bias", bias, float32=True)
    fc1, fc2 = build_gated_mlp_rules(
        config, layer, "mlp.shared_experts", get_shared_expert_size(config)
    )
    yield layer.build_weight("mlp.shared_experts.linear_fc1.weight", fc1, "tp")
    yield layer.build_weight("mlp.shared_experts.linear_fc2.weight", fc2, "tp")


def map_shared_expert_config(config: HFConfig) -> dict[str, Any]:
    """Return TransformerConfig arguments of the MoE of DeepSeek-V3, after some dense layers."""
    num_layers = get_field(config, "num_hidden_layers")
    return {
        "num_moe_experts": get_field(config, "n_routed_experts"),
        "moe_ffn_hidden_size": get_field(config, "moe_intermediate_size"),
        "moe_shared_expert_intermediate_size": get_shared_expert_size(config),
        "moe_layer_freq": [int(has_experts(config, layer)) for layer in range(num_layers)],
        **map_sigmoid_router_config(config),
    }


def is_sparse_layer(config: HFConfig, layer: int) -> bool:
    """Return whether a layer of a Qwen model has experts (decoder_sparse_step, mlp_only_layers)."""
    step = config.get("decoder_sparse_step") or 1
    return layer not in (config.get("mlp_only_layers") or []) and (layer + 1) % step == 0


def count_experts(config: HFConfig) -> int:
    """Return num_local_experts, which transformers 5 writes, or num_experts as published."""
    return int(config.get("num_local_experts") or get_field(config, "num_experts"))


def has_experts(config: HFConfig, layer: int) -> bool:
    """Return whether a layer comes after the dense layers (first_k_dense_replace)."""
    return layer >= int(config.get("first_k_dense_replace") or 0)


def count_mtp_layers(config: HFConfig) -> int:
    """Return num_nextn_predict_layers, or num_mtp_layers of some versions of transformers."""
    return int(config.get("num_nextn_predict_layers", config.get("num_mtp_layers")) or 0)
