"""DeepSeek-V3 and R1: multi-head latent attention (DeepseekV3ForCausalLM)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mcore_rl.config.errors import ConfigError
from mcore_rl.models.base import Family, HFConfig, field, register, require, rope
from mcore_rl.models.moe_parts import (
    has_experts,
    num_mtp_layers,
    shared_expert_config,
    shared_expert_mlp_weights,
)
from mcore_rl.models.parts import (
    LayerPlace,
    common_config,
    decoder_layers,
    decoder_weights,
    dense_mlp_weights,
)
from mcore_rl.models.vllm_parts import (
    vllm_decoder,
    vllm_norms,
    vllm_shared_expert_mlp,
    vllm_weight,
)
from mcore_rl.reshard.rules import Concat, Split, Weight, Whole


def _latent_config(config: HFConfig) -> dict[str, Any]:
    """MLATransformerConfig arguments of the attention.

    The norms of the latents have rms_norm_eps, as in vLLM; transformers has 1e-6 there, whatever
    the config says.
    """
    heads = field(config, "num_attention_heads")
    require(
        config, {"attention_bias": False, "rope_interleave": True, "num_key_value_heads": heads}
    )
    return {
        "q_lora_rank": config.get("q_lora_rank"),
        "kv_lora_rank": field(config, "kv_lora_rank"),
        "qk_head_dim": field(config, "qk_nope_head_dim"),
        "qk_pos_emb_head_dim": field(config, "qk_rope_head_dim"),
        "v_head_dim": field(config, "v_head_dim"),
        "qk_layernorm": True,
    }


def _rope_config(config: HFConfig) -> dict[str, Any]:
    """MLATransformerConfig arguments of plain rotary embeddings, or scaled by YaRN (2309.00071).

    `mscale` and `mscale_all_dim` act on cosine and sine by their quotient, and the second on the
    attention scores. Where one of them is not set, transformers takes the factor of mscale=1.
    """
    found = rope(config)
    kind, base = found["rope_type"], float(found["rope_theta"])
    if kind == "default":
        return {"rope_type": "rope", "rotary_base": base, "rotary_scaling_factor": 1.0}
    if kind != "yarn":
        raise ConfigError(
            f"config.json: rope_type={kind!r} is not supported for "
            f"{config.get('architectures')}; allowed: 'default', 'yarn'"
        )
    mscale, all_dim = found.get("mscale"), found.get("mscale_all_dim")
    fixed: dict[str, Any] = {"attention_factor": None, "truncate": True}
    if all_dim and not mscale:
        fixed["mscale_all_dim"] = 0
    require(found, fixed)
    return {
        "rope_type": "yarn",
        "rotary_base": base,
        "rotary_scaling_factor": float(field(found, "factor")),
        "original_max_position_embeddings": field(found, "original_max_position_embeddings"),
        "beta_fast": found.get("beta_fast") or 32,
        "beta_slow": found.get("beta_slow") or 1,
        "mscale": mscale if mscale and all_dim else 1.0,
        "mscale_all_dim": all_dim or 0.0,
    }


def config_map(config: HFConfig) -> dict[str, Any]:
    return {
        **common_config(config),
        **_latent_config(config),
        **_rope_config(config),
        **shared_expert_config(config),
    }


def _attention(config: HFConfig, at: LayerPlace) -> Iterator[Weight]:
    """Down-projections to latents on every rank, up-projections by head.

    Megatron has the norms of the latents in the up-projections behind them.
    """
    hidden, heads = field(config, "hidden_size"), field(config, "num_attention_heads")
    rank, rotary = field(config, "kv_lora_rank"), field(config, "qk_rope_head_dim")
    nope, value = field(config, "qk_nope_head_dim"), field(config, "v_head_dim")
    q_rank, q_size, mcore = config.get("q_lora_rank"), heads * (nope + rotary), "self_attention."

    def whole(name: str, hf: str, *shape: int) -> Weight:
        return at.weight(f"{name}", Whole(at.tensor(f"{hf}.weight", *shape)))

    def by_head(name: str, hf: str, rows: int, columns: int, dim: int = 0) -> Weight:
        rule = Split(at.tensor(f"self_attn.{hf}.weight", rows, columns), dim)
        return at.weight(f"{mcore}{name}.weight", rule, "tp")

    def up(name: str, hf: str, norm: str, rows: int, columns: int) -> Iterator[Weight]:
        yield whole(f"{mcore}{name}.layer_norm_weight", f"self_attn.{norm}", columns)
        yield by_head(name, hf, rows, columns)

    yield whole("input_layernorm.weight", "input_layernorm", hidden)
    if q_rank is None:
        yield by_head("linear_q_proj", "q_proj", q_size, hidden)
    else:
        yield whole(mcore + "linear_q_down_proj.weight", "self_attn.q_a_proj", q_rank, hidden)
        yield from up("linear_q_up_proj", "q_b_proj", "q_a_layernorm", q_size, q_rank)
    down = "self_attn.kv_a_proj_with_mqa"
    yield whole(mcore + "linear_kv_down_proj.weight", down, rank + rotary, hidden)
    yield from up("linear_kv_up_proj", "kv_b_proj", "kv_a_layernorm", heads * (nope + value), rank)
    yield by_head("linear_proj", "o_proj", hidden, heads * value, dim=1)


def _layer(config: HFConfig, at: LayerPlace) -> Iterator[Weight]:
    yield from _attention(config, at)
    if has_experts(config, at.layer):
        yield from shared_expert_mlp_weights(config, at)
    else:
        yield from dense_mlp_weights(config, at)


def weights(config: HFConfig, padded_vocab: int) -> tuple[Weight, ...]:
    return decoder_weights(config, padded_vocab, _layer, num_mtp_layers(config))


def _vllm_attention(config: HFConfig, at: LayerPlace) -> Iterator[Weight]:
    """Both down-projections in one parameter, on every rank; up-projections by head."""
    hidden, heads = field(config, "hidden_size"), field(config, "num_attention_heads")
    rank, rotary = field(config, "kv_lora_rank"), field(config, "qk_rope_head_dim")
    nope, value = field(config, "qk_nope_head_dim"), field(config, "v_head_dim")
    q_rank, q_size = config.get("q_lora_rank"), heads * (nope + rotary)

    def whole(name: str, *shape: int) -> Weight:
        return vllm_weight(
            at, f"self_attn.{name}.weight", Whole(at.tensor(f"self_attn.{name}.weight", *shape))
        )

    def by_head(name: str, rows: int, columns: int, dim: int = 0) -> Weight:
        name = f"self_attn.{name}.weight"
        return vllm_weight(at, name, Split(at.tensor(name, rows, columns), dim), "tp")

    kv_a = "self_attn.kv_a_proj_with_mqa.weight"
    if q_rank is None:
        yield whole("kv_a_proj_with_mqa", rank + rotary, hidden)
        yield by_head("q_proj", q_size, hidden)
    else:
        q_a = at.tensor("self_attn.q_a_proj.weight", q_rank, hidden)
        both = Concat((q_a, at.tensor(kv_a, rank + rotary, hidden)))
        yield vllm_weight(at, "self_attn.fused_qkv_a_proj.weight", both)
        yield whole("q_a_layernorm", q_rank)
        yield by_head("q_b_proj", q_size, q_rank)
    yield whole("kv_a_layernorm", rank)
    yield by_head("kv_b_proj", heads * (nope + value), rank)
    yield by_head("o_proj", hidden, heads * value, dim=1)


def _vllm_layer(config: HFConfig, at: LayerPlace) -> Iterator[Weight]:
    yield from vllm_norms(config, at)
    yield from _vllm_attention(config, at)
    yield from vllm_shared_expert_mlp(config, at)


def vllm_weights(config: HFConfig) -> tuple[Weight, ...]:
    return vllm_decoder(config, _vllm_layer)


FAMILY = register(
    Family(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        config_map,
        decoder_layers,
        weights,
        vllm_weights,
        num_mtp_layers,
    )
)
