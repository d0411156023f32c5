"""Tiny checkpoints of the causal language models that transformers has, built from config classes.

Sizes are set by the names of a config's fields, so that a family of a newer transformers is built,
too; `_CHANGES` has what a family needs besides.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny_models
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

WINDOW = 8  # shorter than the samples
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embedding_dim", "emb_dim"), 48),
    **dict.fromkeys(("word_embed_proj_dim", "lru_width", "attention_hidden_size"), 48),
    **dict.fromkeys(("hidden_size_per_layer_input", "embedding_size"), 16),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "n_inner", "dff"), 72),
    **dict.fromkeys(("encoder_ffn_dim", "ffn_hidden_size", "d_inner", "intermediate_size_mlp"), 72),
    **dict.fromkeys(("shared_intermediate_size", "dense_intermediate_size", "dim_ff"), 72),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks"), 4),
    **dict.fromkeys(("decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads", "attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "num_query_groups"), 2),
    **dict.fromkeys(("swa_num_attention_heads", "num_attention_heads_per_layer"), 4),
    "swa_num_key_value_heads": 2,
    **dict.fromkeys(("head_dim", "kv_channels", "swa_head_dim", "attention_head_dim"), 12),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size"), 24),
    **dict.fromkeys(("shared_expert_intermediate_size",), 24),
    **dict.fromkeys(("moe_shared_expert_intermediate_size",), 24),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts"), 8),
    **dict.fromkeys(("moe_num_experts",), 8),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token"), 2),
    **dict.fromkeys(("n_group", "num_expert_group"), 2),
    "topk_group": 1,
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim"), 8),
    "qk_head_dim": 16,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "moe_layer_start_index": 1,
    **dict.fromkeys(("linear_num_value_heads",), 4),
    **dict.fromkeys(("linear_num_key_heads",), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 12),
    "linear_num_heads": 4,
    **dict.fromkeys(("index_head_dim",), 16),
    **dict.fromkeys(("index_n_heads",), 2),
    **dict.fromkeys(("index_topk",), 4),
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_headdim"), 12),
    **dict.fromkeys(("mamba_n_groups", "mamba_ngroups", "n_groups"), 2),
    **dict.fromkeys(("mamba_dt_rank", "time_step_rank"), 8),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size", "block_size"), WINDOW),
    "attention_chunk_size": WINDOW,
    **dict.fromkeys(("sliding_window", "sliding_window_size", "window_size"), WINDOW),
    **dict.fromkeys(("local_attention", "attention_window_size"), WINDOW),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 512),
    **dict.fromkeys(("model_max_length", "context_length"), 512),
    **dict.fromkeys(("rotary_dim",), 8),
    "use_sliding_window": True,
    "max_window_layers": 2,
    "vocab_size_per_layer_input": tiny_models.VOCAB,
    "vocab_size": tiny_models.VOCAB,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 0,
}  # fmt: skip
_MLA = {"num_key_value_heads": 4, "head_dim": 8}
_ZAMBA = {
    "layers_block_type": ["mamba", "hybrid"] * 2, "attention_hidden_size": 96,
    "attention_head_dim": 24, "num_key_value_heads": 4,
}  # fmt: skip
_CHANGES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        (
            "axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite",
            "glm_moe_dsa", "longcat_flash", "minicpm3", "youtu",
        ),
        _MLA,
    ),
    "bamba": {"attn_layer_indices": [1, 3], "num_key_value_heads": 2},
    "cwm": {"bos_token_id": 2, "layer_types": None},
    "dots1": {"n_shared_experts": 1},
    "falcon_h1": {"mamba_d_ssm": 96},
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": None, "laurel_rank": 8,
    },
    "gpt_neo": {
        "attention_types": [[["global", "local"], 2]], "attention_layers": ["global", "local"] * 2,
    },
    "laguna": {"num_attention_heads_per_layer": None},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8},
    "modernbert-decoder": {"bos_token_id": 2},
    "nemotron_h": {"layers_block_type": ["mamba", "attention", "mlp", "moe"]},
    "qwen4_exp_text": {
        "layer_types": ["linear_attention", "full_attention"] * 2, "indexer_n_heads": 2,
        "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 4,
        "indexer_compress_ratio": 2, "ngram_vocab_size_base": 131, "ple_embed_dim": 16,
    },
    "reformer": {
        "is_decoder": True, "axial_pos_embds_dim": [16, 32], "axial_pos_shape": [16, 32],
        "attention_head_size": 12, "num_buckets": 4,
    },
    "rwkv": {"rescale_every": 0},  # otherwise its first pass scales weights in place
    "stablelm": {"partial_rotary_factor": 0.5, "head_dim": None},
    "zamba": _ZAMBA,
    "zamba2": _ZAMBA,
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 8, "moe_top_k": 2},
    },
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip


# Wrappers of a text model that is here and of towers of their own sizes, and models whose forward
# pass needs more than token ids.
_NOT_TINY = {
    "blt", "cohere_compass_text", "emu3", "gemma3", "gemma3n", "gemma4", "gemma4_assistant",
    "gemma4_unified", "gemma4_unified_assistant", "git", "got_ocr2", "llama4", "mllama",
    "musicgen", "musicgen_melody", "phi4_multimodal", "qwen3_5", "qwen3_5_moe", "qwen4_exp",
    "roc_bert", "xmod",
}  # fmt: skip


def list_families() -> list[str]:
    """Return the model types of transformers' causal language models that are built tiny."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - _NOT_TINY)


def build_config(kind: str, **changes: Any) -> Any:
    """Return a tiny config of a family."""
    config_class = CONFIG_MAPPING[kind]
    names = set(config_class().to_dict()) | set(getattr(config_class, "attribute_map", {}))
    sizes = {name: value for name, value in _SIZES.items() if name in names}
    mapped = {v for k, v in getattr(config_class, "attribute_map", {}).items() if v in sizes}
    sizes = {
        name: value
        for name, value in sizes.items()
        if config_class.attribute_map.get(name) not in mapped
    }
    for name in ("layer_types", "mlp_layer_types", "attention_layers"):
        if name in names and name not in config_class.attribute_map:
            sizes[name] = None
    return config_class(**{**sizes, **_CHANGES.get(kind, {}), **changes})


def save(kind: str, folder: Path, **changes: Any) -> Path:
    """Write a tiny model with random weights."""
    config = build_config(kind, **changes)
    model = tiny_models.build_from(config)
    model.save_pretrained(folder)
    return folder
