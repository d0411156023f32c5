"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): config and rules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mcore_rl.config.errors import ConfigError
from mcore_rl.models.base import HFConfig, check_values, get_field, read_rope
from mcore_rl.models.parts import Layer
from mcore_rl.models.rope import read_scaling
from mcore_rl.models.vllm_parts import build_vllm_weight
from mcore_rl.reshard.rules import Concat, Replicated, Split, Weight

# Of fields that config.json leaves out; a null q_lora_rank means queries without a latent.
DEEPSEEK_DEFAULTS = {
    "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4, "q_lora_rank": 1536,
}  # fmt: skip


def map_latent_config(config: HFConfig) -> dict[str, Any]:
    """Return MLATransformerConfig arguments of the attention.

    The norms of the latents use rms_norm_eps, as in vLLM; transformers always uses 1e-6 there.
    """
    heads = get_field(config, "num_attention_heads")
    check_values(
        config, {"attention_bias": False, "rope_interleave": True, "num_key_value_heads": heads}
    )
    return {
        "q_lora_rank": config.get("q_lora_rank"),
        "kv_lora_rank": get_field(config, "kv_lora_rank"),
        "qk_head_dim": get_field(config, "qk_nope_head_dim"),
        "qk_pos_emb_head_dim": get_field(config, "qk_rope_head_dim"),
        "v_head_dim": get_field(config, "v_head_dim"),
        "qk_layernorm": True,
    }


def map_latent_rope_config(config: HFConfig) -> dict[str, Any]:
    """Return MLATransformerConfig arguments of rotary embeddings, plain or scaled by YaRN.

    YaRN: arXiv:2309.00071. Cosine and sine are scaled by mscale / mscale_all_dim, attention scores
    by mscale_all_dim. If neither is set, cosine and sine by the factor of mscale=1; if one is,
    transformers and vLLM differ. vLLM takes any other scaling of latent attention for YaRN
    (model_executor/models/deepseek_v2.py:1115).
    """
    rope = read_rope(config)
    check_values(rope, {"partial_rotary_factor": 1.0})
    base = float(rope["rope_theta"])
    if rope["rope_type"] == "default":
        return {"rope_type": "rope", "rotary_base": base, "rotary_scaling_factor": 1.0}
    scaling = read_scaling(config, rope, kinds=("yarn",))
    mscale, all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    allowed: dict[str, Any] = {"attention_factor": None, "truncate": True}
    if all_dim and not mscale:
        allowed["mscale_all_dim"] = 0
    if mscale and not all_dim:
        allowed["mscale"] = 1.0
    check_values({**scaling, "architectures": config.get("architectures")}, allowed)
    return {
        "rope_type": "yarn",
        "rotary_base": base,
        "rotary_scaling_factor": float(scaling["factor"]),
        "original_max_position_embeddings": scaling["original_max_position_embeddings"],
        "beta_fast": scaling.get("beta_fast") or 32,
        "beta_slow": scaling.get("beta_slow") or 1,
        "mscale": mscale or 1.0,
        "mscale_all_dim": all_dim or 0.0,
    }


def check_dense_layers(config: HFConfig, default: int | None = None) -> None:
    """Check that transformers and vLLM have the same layers without experts.

    They are those of mlp_layer_types in transformers, and of first_k_dense_replace in vLLM and in
    published configs.

    Args:
        default: First layers that are dense in transformers without mlp_layer_types. None: as in
            vLLM.

    Raises:
        ConfigError: The two name other layers.
    """
    num_layers, dense = (
        get_field(config, name) for name in ("num_hidden_layers", "first_k_dense_replace")
    )
    kinds = config.get("mlp_layer_types")
    given = "" if kinds else f" (absent: the first {default} dense)"
    first = dense if default is None else default
    kinds = kinds or ["dense"] * first + ["sparse"] * (num_layers - first)
    if kinds != ["dense"] * dense + ["sparse"] * (num_layers - dense):
        raise ConfigError(
            f"config.json: first_k_dense_replace={dense} and mlp_layer_types{given} name other "
            f"dense layers; allowed: first_k_dense_replace={kinds.count('dense')}, and dense "
            "layers before all others"
        )


def map_latent_attention(
    config: HFConfig, layer: Layer, *, fused_norms: bool = True
) -> Iterator[Weight]:
    """Map latent attention: down-projections are replicated, up-projections split by head.

    Args:
        fused_norms: Megatron has the norm of a latent in the up-projection that follows it. Sparse
            attention has norms of their own: the indexer reads the normalised latent of queries.
    """
    hidden, heads = get_field(config, "hidden_size"), get_field(config, "num_attention_heads")
    rank, rotary = get_field(config, "kv_lora_rank"), get_field(config, "qk_rope_head_dim")
    nope, value = get_field(config, "qk_nope_head_dim"), get_field(config, "v_head_dim")
    q_rank, q_size, mcore = config.get("q_lora_rank"), heads * (nope + rotary), "self_attention."

    def replicate(name: str, hf: str, *shape: int) -> Weight:
        return layer.build_weight(name, Replicated(layer.build_tensor(f"{hf}.weight", *shape)))

    def split_heads(name: str, hf: str, rows: int, columns: int, dim: int = 0) -> Weight:
        rule = Split(layer.build_tensor(f"self_attn.{hf}.weight", rows, columns), dim)
        return layer.build_weight(f"{mcore}{name}.weight", rule, "tp")

    def map_up_projection(latent: str, hf: str, rows: int, columns: int) -> Iterator[Weight]:
        name = f"linear_{latent}_up_proj"
        norm = f"{name}.layer_norm_weight" if fused_norms else f"{latent}_layernorm.weight"
        yield replicate(mcore + norm, f"self_attn.{latent}_a_layernorm", columns)
        yield split_heads(name, hf, rows, columns)

    yield replicate("input_layernorm.weight", "input_layernorm", hidden)
    if q_rank is None:
        yield split_heads("linear_q_proj", "q_proj", q_size, hidden)
    else:
        yield replicate(mcore + "linear_q_down_proj.weight", "self_attn.q_a_proj", q_rank, hidden)
        yield from map_up_projection("q", "q_b_proj", q_size, q_rank)
    down = "self_attn.kv_a_proj_with_mqa"
    yield replicate(mcore + "linear_kv_down_proj.weight", down, rank + rotary, hidden)
    yield from map_up_projection("kv", "kv_b_proj", heads * (nope + value), rank)
    yield split_heads("linear_proj", "o_proj", hidden, heads * value, dim=1)


def map_vllm_latent_attention(config: HFConfig, layer: Layer) -> Iterator[Weight]:
    """Map latent attention: both down-projections in one replicated parameter."""
    hidden, heads = get_field(config, "hidden_size"), get_field(config, "num_attention_heads")
    rank, rotary = get_field(config, "kv_lora_rank"), get_field(config, "qk_rope_head_dim")
    nope, value = get_field(config, "qk_nope_head_dim"), get_field(config, "v_head_dim")
    q_rank, q_size = config.get("q_lora_rank"), heads * (nope + rotary)

    def replicate(name: str, *shape: int) -> Weight:
        return build_vllm_weight(
            layer,
            f"self_attn.{name}.weight",
            Replicated(layer.build_tensor(f"self_attn.{name}.weight", *shape)),
        )

    def split_heads(name: str, rows: int, columns: int, dim: int = 0) -> Weight:
        name = f"self_attn.{name}.weight"
        return build_vllm_weight(
            layer, name, Split(layer.build_tensor(name, rows, columns), dim), "tp"
        )

    kv_a = "self_attn.kv_a_proj_with_mqa.weight"
    if q_rank is None:
        yield replicate("kv_a_proj_with_mqa", rank + rotary, hidden)
        yield split_heads("q_proj", q_size, hidden)
    else:
        q_a = layer.build_tensor("self_attn.q_a_proj.weight", q_rank, hidden)
        both = Concat((q_a, layer.build_tensor(kv_a, rank + rotary, hidden)))
        yield build_vllm_weight(layer, "self_attn.fused_qkv_a_proj.weight", both)
        yield replicate("q_a_layernorm", q_rank)
        yield split_heads("q_b_proj", q_size, q_rank)
    yield replicate("kv_a_layernorm", rank)
    yield split_heads("kv_b_proj", heads * (nope + value), rank)
    yield split_heads("o_proj", hidden, heads * value, dim=1)
