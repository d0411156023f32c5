"""Latent attention to the keys that an indexer picks: DeepSeek-V3.2 and GLM-5.

DeepSeek sparse attention (DeepSeek-V3.2-Exp report, section 2.1): an indexer of small heads scores
each pair of a query and a key before it, and the query attends to its `index_topk` best keys. The
rest of a layer is that of DeepSeek-V3. The indexer of DeepSeek-V3.2 rotates the two halves of its
rotary dims, that of GLM-5 neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from mcore_rl.config.errors import ConfigError
from mcore_rl.models.base import Family, HFConfig, check_values, get_field, register
from mcore_rl.models.latent import (
    DEEPSEEK_DEFAULTS,
    check_dense_layers,
    map_latent_attention,
    map_latent_config,
    map_latent_rope_config,
    map_vllm_latent_attention,
)
from mcore_rl.models.parts import (
    Layer,
    count_mtp_layers,
    map_common_config,
    map_decoder_weights,
    map_shared_expert_config,
    map_shared_expert_mlp_weights,
)
from mcore_rl.models.vllm_parts import (
    build_vllm_weight,
    map_vllm_decoder,
    map_vllm_norms,
    map_vllm_shared_expert_mlp,
)
from mcore_rl.reshard.rules import Concat, LogicalTensor, Replicated, Weight

_KEY_NORM_EPSILON = 1e-6  # a constant of transformers and vLLM


def _map_indexer_config(config: HFConfig, *, is_interleaved: bool) -> dict[str, Any]:
    """Return TransformerConfig arguments of the sparse attention.

    The Hadamard rotation of DeepSeek's own code is left out, as in transformers: it is orthogonal,
    so that no score changes, and serves float8.

    Args:
        is_interleaved: Rotation of the family in transformers. vLLM reads it from the config.
    """
    head_dim, rotary = get_field(config, "index_head_dim"), get_field(config, "qk_rope_head_dim")
    if head_dim < rotary:
        raise ConfigError(
            f"config.json: index_head_dim={head_dim} is below qk_rope_head_dim={rotary}, the dims "
            f"that the indexer rotates; allowed: at least {rotary}"
        )
    check_values(
        {"indexer_rope_interleave": False} | config, {"indexer_rope_interleave": is_interleaved}
    )
    _refuse_shared_indices(config)
    return {
        "experimental_attention_variant": "dsa",
        "dsa_indexer_n_heads": get_field(config, "index_n_heads"),
        "dsa_indexer_head_dim": head_dim,
        "dsa_indexer_topk": get_field(config, "index_topk"),
        "dsa_indexer_rope_interleaved": is_interleaved,
        "dsa_indexer_rotate_activation": False,
        "dsa_indexer_k_norm_epsilon": _KEY_NORM_EPSILON,
    }


def _refuse_shared_indices(config: HFConfig) -> None:
    """Refuse layers that take the keys of an earlier layer (IndexCache, arXiv:2603.12201)."""
    for name, is_full in (
        ("indexer_types", lambda kinds: set(kinds) == {"full"}),
        ("index_topk_pattern", lambda kinds: set(kinds) <= {"F", "full"}),
        ("index_topk_freq", lambda freq: freq == 1),
    ):
        if config.get(name) is not None and not is_full(config[name]):
            raise ConfigError(
                f"config.json: {name}={config[name]!r} is not supported for "
                f"{config.get('architectures')}: its layers share the keys that an indexer picks; "
                "allowed: an indexer in each layer"
            )


def _map_config(config: HFConfig, *, is_interleaved: bool) -> dict[str, Any]:
    get_field(config, "q_lora_rank")  # the indexer reads the latent of queries
    check_dense_layers(config)
    check_values(config, {"mlp_bias": False})
    return {
        **map_common_config(config, ("indexed_attention",)),
        **map_latent_config(config),
        **map_latent_rope_config(config),
        **map_shared_expert_config(config),
        **_map_indexer_config(config, is_interleaved=is_interleaved),
    }


def map_config(config: HFConfig) -> dict[str, Any]:
    return _map_config(config, is_interleaved=False)


def _map_glm_config(config: HFConfig) -> dict[str, Any]:
    return _map_config(config, is_interleaved=True)


def get_layer_spec(config: Any, vp_stage: int | None) -> Any:
    """Return Megatron's spec of layers with sparse attention."""
    from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
        get_transformer_block_with_experimental_attention_variant_spec,
    )

    return get_transformer_block_with_experimental_attention_variant_spec(config, vp_stage)


def _list_indexer_tensors(config: HFConfig, layer: Layer) -> dict[str, LogicalTensor]:
    """Return the tensors of a layer's indexer by Megatron's names of its parameters."""
    hidden, heads = get_field(config, "hidden_size"), get_field(config, "index_n_heads")
    dim, latent = get_field(config, "index_head_dim"), get_field(config, "q_lora_rank")
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {
        "linear_wq_b.weight": ("wq_b.weight", (heads * dim, latent)),
        "linear_wk.weight": ("wk.weight", (dim, hidden)),
        "k_norm.weight": ("k_norm.weight", (dim,)),
        "k_norm.bias": ("k_norm.bias", (dim,)),
        "linear_weights_proj.weight": ("weights_proj.weight", (heads, hidden)),
    }
    return {
        mcore: layer.build_tensor(f"self_attn.indexer.{hf}", *shape)
        for mcore, (hf, shape) in shapes.items()
    }


def _map_layer(config: HFConfig, layer: Layer) -> Iterator[Weight]:
    yield from map_latent_attention(config, layer, fused_norms=False)
    for name, tensor in _list_indexer_tensors(config, layer).items():
        name = f"self_attention.core_attention.indexer.{name}"
        yield layer.build_weight(name, Replicated(tensor))
    yield from map_shared_expert_mlp_weights(config, layer)


def map_weights(config: HFConfig, padded_vocab: int) -> tuple[Weight, ...]:
    return map_decoder_weights(config, padded_vocab, _map_layer, count_mtp_layers(config))


def _map_vllm_layer(config: HFConfig, layer: Layer) -> Iterator[Weight]:
    """Map a layer: the indexer is replicated, its key projection and head weights are joined.

    The norm of its keys is float32.
    """
    yield from map_vllm_norms(config, layer)
    yield from map_vllm_latent_attention(config, layer)
    tensors = _list_indexer_tensors(config, layer)
    joined = Concat((tensors["linear_wk.weight"], tensors["linear_weights_proj.weight"]))
    indexer = "self_attn.indexer."
    wq = Replicated(tensors["linear_wq_b.weight"])
    yield build_vllm_weight(layer, indexer + "wq_b.weight", wq)
    yield build_vllm_weight(layer, indexer + "wk_weights_proj.weight", joined)
    for name in ("k_norm.weight", "k_norm.bias"):
        norm = Replicated(tensors[name])
        yield build_vllm_weight(layer, indexer + name, norm, float32=True)
    yield from map_vllm_shared_expert_mlp(config, layer, "shared_tp")


def map_vllm_weights(config: HFConfig) -> tuple[Weight, ...]:
    return map_vllm_decoder(config, _map_vllm_layer)


FAMILY = register(
    Family(
        "deepseek_v32",
        "DeepseekV32ForCausalLM",
        map_config,
        get_layer_spec,
        map_weights,
        map_vllm_weights,
        count_mtp_layers,
        defaults=DEEPSEEK_DEFAULTS,
    )
)
GLM = register(
    replace(
        FAMILY,
        name="glm_moe_dsa",
        architecture="GlmMoeDsaForCausalLM",
        config_map=_map_glm_config,
        defaults={"first_k_dense_replace": 3, "q_lora_rank": 2048},
    )
)
