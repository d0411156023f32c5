"""Multi-head latent attention: DeepSeek-V3, R1 and V3.1, Kimi K2, Moonlight, GLM-4.7-Flash.

The first four are DeepseekV3ForCausalLM, the last is Glm4MoeLiteForCausalLM: the same tensors and
the same arithmetic, another config. Kimi K2.5 is Kimi K2 inside a model with images.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from mcore_rl.models.base import Family, HFConfig, register
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
    get_layer_spec,
    map_common_config,
    map_decoder_weights,
    map_shared_expert_config,
    map_shared_expert_mlp_weights,
)
from mcore_rl.models.vllm_parts import (
    map_vllm_decoder,
    map_vllm_drafts,
    map_vllm_norms,
    map_vllm_shared_expert_mlp,
)
from mcore_rl.models.wrapper import wrap_family
from mcore_rl.reshard.rules import Axis, Weight


def map_config(config: HFConfig) -> dict[str, Any]:
    return {
        **map_common_config(config),
        **map_latent_config(config),
        **map_latent_rope_config(config),
        **map_shared_expert_config(config),
    }


def _map_lite_config(config: HFConfig) -> dict[str, Any]:
    """Return the arguments of GLM-4.7-Flash, whose first layer is dense by default."""
    check_dense_layers(config, 1)
    return map_config(config)


def _map_layer(config: HFConfig, layer: Layer) -> Iterator[Weight]:
    yield from map_latent_attention(config, layer)
    yield from map_shared_expert_mlp_weights(config, layer)


def map_weights(config: HFConfig, padded_vocab: int) -> tuple[Weight, ...]:
    return map_decoder_weights(config, padded_vocab, _map_layer, count_mtp_layers(config))


def _map_vllm_layer(
    config: HFConfig,
    layer: Layer,
    *,
    shared_axis: Axis = "shared_tp",
    float32_router: bool = False,
) -> Iterator[Weight]:
    yield from map_vllm_norms(config, layer)
    yield from map_vllm_latent_attention(config, layer)
    yield from map_vllm_shared_expert_mlp(config, layer, shared_axis, float32_router=float32_router)


def map_vllm_weights(config: HFConfig) -> tuple[Weight, ...]:
    return map_vllm_decoder(config, _map_vllm_layer)


def map_drafts(config: HFConfig) -> tuple[Weight, ...]:
    return map_vllm_drafts(config, _map_vllm_layer)


# GLM-4.7-Flash has GLM-4.5's experts (vLLM's models/glm4_moe_lite.py:92).
_map_vllm_lite_layer = partial(_map_vllm_layer, shared_axis="tp", float32_router=True)


def _map_vllm_lite_weights(config: HFConfig) -> tuple[Weight, ...]:
    return map_vllm_decoder(config, _map_vllm_lite_layer)


def _map_lite_drafts(config: HFConfig) -> tuple[Weight, ...]:
    return map_vllm_drafts(config, _map_vllm_lite_layer)


FAMILY = register(
    Family(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        map_config,
        get_layer_spec,
        map_weights,
        map_vllm_weights,
        count_mtp_layers,
        map_drafts,
        defaults=DEEPSEEK_DEFAULTS,
    )
)
GLM_LITE = register(
    replace(
        FAMILY,
        name="glm4_moe_lite",
        architecture="Glm4MoeLiteForCausalLM",
        config_map=_map_lite_config,
        vllm_weights=_map_vllm_lite_weights,
        vllm_drafts=_map_lite_drafts,
        defaults={"q_lora_rank": 768},
    )
)
KIMI_K25 = register(
    wrap_family(
        FAMILY,
        "kimi_k25",
        "KimiK25ForConditionalGeneration",
        prefixes={"": "language_model."},
        frozen_prefixes=("vision_tower.", "mm_projector."),
    )
)
