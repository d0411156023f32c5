"""Rules that several families share: embeddings, grouped-query attention, dense and expert MLPs.

Parameter names are those of Megatron-core's Transformer Engine layer spec, on both lanes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mcore_rl.config.errors import ConfigError
from mcore_rl.models.base import HFConfig, field, head_dim, rope_theta
from mcore_rl.reshard.boxes import LogicalTensor
from mcore_rl.reshard.rules import GateUp, InterleavedQKV, Split, Weight, Whole

LAYER = "decoder.layers.{layer}."


def decoder_config(config: HFConfig) -> dict[str, Any]:
    """TransformerConfig arguments of a pre-norm, gated, rotary decoder with grouped queries."""
    if config.get("use_sliding_window"):
        raise ConfigError("config.json: use_sliding_window=true is not supported; allowed: false")
    activation = field(config, "hidden_act")
    if activation != "silu":
        raise ConfigError(
            f"config.json: hidden_act={activation!r} is not supported; allowed: 'silu'"
        )
    return {
        "num_layers": field(config, "num_hidden_layers"),
        "hidden_size": field(config, "hidden_size"),
        "num_attention_heads": field(config, "num_attention_heads"),
        "num_query_groups": field(config, "num_key_value_heads"),
        "kv_channels": head_dim(config),
        "ffn_hidden_size": field(config, "intermediate_size"),
        "layernorm_epsilon": field(config, "rms_norm_eps"),
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation": activation,
        "add_bias_linear": False,
        "rotary_base": rope_theta(config),
    }


def decoder_layers(config: Any, vp_stage: int | None) -> Any:
    """Megatron's layer spec of a decoder, dense or expert layers as the config says.

    Transformer Engine's on both lanes: the CPU lane answers it with modules of its own.
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)


def embedding_weights(config: HFConfig, padded_vocab: int) -> Iterator[Weight]:
    shape = (field(config, "vocab_size"), field(config, "hidden_size"))
    embed = LogicalTensor("model.embed_tokens.weight", shape)
    yield Weight(
        "embedding.word_embeddings.weight",
        Split(embed, 0, padded_vocab),
        axis="tp",
        stage="embedding",
    )


def head_weights(config: HFConfig, padded_vocab: int) -> Iterator[Weight]:
    hidden = field(config, "hidden_size")
    norm = LogicalTensor("model.norm.weight", (hidden,))
    yield Weight("decoder.final_layernorm.weight", Whole(norm), stage="final_norm")
    tied = bool(config.get("tie_word_embeddings", False))
    name = "model.embed_tokens.weight" if tied else "lm_head.weight"
    head = LogicalTensor(name, (field(config, "vocab_size"), hidden))
    yield Weight(
        "output_layer.weight", Split(head, 0, padded_vocab), axis="tp", stage="head", replica=tied
    )


def attention_weights(config: HFConfig, layer: int, *, qk_norm: bool) -> Iterator[Weight]:
    """Input norm, q/k/v and output projections of one layer."""
    hidden, dim = field(config, "hidden_size"), head_dim(config)
    heads, groups = field(config, "num_attention_heads"), field(config, "num_key_value_heads")
    hf, mcore = f"model.layers.{layer}.", LAYER + "self_attention."

    def tensor(name: str, *shape: int) -> LogicalTensor:
        return LogicalTensor(f"{hf}{name}.weight", shape)

    yield Weight(
        mcore + "linear_qkv.layer_norm_weight",
        Whole(tensor("input_layernorm", hidden)),
        layer=layer,
    )
    qkv = InterleavedQKV(
        tensor("self_attn.q_proj", heads * dim, hidden),
        tensor("self_attn.k_proj", groups * dim, hidden),
        tensor("self_attn.v_proj", groups * dim, hidden),
        groups,
    )
    yield Weight(mcore + "linear_qkv.weight", qkv, axis="tp", layer=layer)
    if qk_norm:
        for name in ("q", "k"):
            norm = tensor(f"self_attn.{name}_norm", dim)
            yield Weight(f"{mcore}{name}_layernorm.weight", Whole(norm), layer=layer)
    out = Split(tensor("self_attn.o_proj", hidden, heads * dim), 1)
    yield Weight(mcore + "linear_proj.weight", out, axis="tp", layer=layer)


def dense_mlp_weights(config: HFConfig, layer: int) -> Iterator[Weight]:
    """Post-attention norm and gated MLP of one dense layer."""
    hidden, ffn = field(config, "hidden_size"), field(config, "intermediate_size")
    hf, mcore = f"model.layers.{layer}.", LAYER + "mlp."
    norm = LogicalTensor(f"{hf}post_attention_layernorm.weight", (hidden,))
    yield Weight(mcore + "linear_fc1.layer_norm_weight", Whole(norm), layer=layer)
    gate, up = (LogicalTensor(f"{hf}mlp.{n}_proj.weight", (ffn, hidden)) for n in ("gate", "up"))
    down = LogicalTensor(f"{hf}mlp.down_proj.weight", (hidden, ffn))
    yield Weight(mcore + "linear_fc1.weight", GateUp(gate, up), axis="tp", layer=layer)
    yield Weight(mcore + "linear_fc2.weight", Split(down, 1), axis="tp", layer=layer)


def expert_mlp_weights(
    config: HFConfig, layer: int, *, num_experts: int, ffn: int
) -> Iterator[Weight]:
    """Post-attention norm, router and experts of one mixture-of-experts layer."""
    hidden = field(config, "hidden_size")
    hf, mcore = f"model.layers.{layer}.", LAYER
    norm = LogicalTensor(f"{hf}post_attention_layernorm.weight", (hidden,))
    yield Weight(mcore + "pre_mlp_layernorm.weight", Whole(norm), layer=layer)
    router = LogicalTensor(f"{hf}mlp.gate.weight", (num_experts, hidden))
    yield Weight(mcore + "mlp.router.weight", Whole(router), layer=layer)
    for expert in range(num_experts):
        name = f"{hf}mlp.experts.{expert}."
        gate, up = (LogicalTensor(f"{name}{n}_proj.weight", (ffn, hidden)) for n in ("gate", "up"))
        down = LogicalTensor(f"{name}down_proj.weight", (hidden, ffn))
        experts = mcore + "mlp.experts."
        yield Weight(
            experts + "linear_fc1.weight{expert}",
            GateUp(gate, up),
            "etp",
            layer=layer,
            expert=expert,
        )
        yield Weight(
            experts + "linear_fc2.weight{expert}", Split(down, 1), "etp", layer=layer, expert=expert
        )
