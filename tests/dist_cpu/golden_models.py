"""The models of the golden matrix, which tests of experts run as well."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import tiny_models
import torch
import transformers

_SHAPE: dict[str, Any] = {
    "vocab_size": tiny_models.VOCAB, "hidden_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 4, "intermediate_size": 96, "max_position_embeddings": 256,
    "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0, "dtype": "float32",
}  # fmt: skip


def config_of(model: str, num_layers: int) -> transformers.PretrainedConfig:
    shape = {**_SHAPE, "num_hidden_layers": num_layers}
    experts = {"num_experts_per_tok": 2, "moe_intermediate_size": 40}
    latent = {
        "q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
        "v_head_dim": 16, "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 4,
        "topk_group": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5,
        "norm_topk_prob": True, "num_nextn_predict_layers": 0,
    }  # fmt: skip
    if model == "deepseek":
        return transformers.DeepseekV3Config(
            **shape, **experts, **latent, rope_interleave=True, tie_word_embeddings=False
        )
    if model == "sparse":
        indexer = {"index_n_heads": 24, "index_head_dim": 12, "index_topk": 10}
        return transformers.DeepseekV32Config(**shape, **experts, **latent, **indexer)
    grouped = {**shape, "head_dim": 16}
    if model == "gpt_oss":
        window = {"sliding_window": 8, "num_local_experts": 8, "num_experts_per_tok": 2}
        return transformers.GptOssConfig(**grouped, **window)
    if model == "minimax":
        routing = {"num_local_experts": 8, "num_experts_per_tok": 2, "rotary_dim": 8}
        return transformers.MiniMaxM2Config(**grouped, **routing)
    if model == "hybrid":
        return transformers.Qwen3NextConfig(
            **grouped, **experts, num_experts=8, shared_expert_intermediate_size=40,
            linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=16,
            linear_value_head_dim=8, num_nextn_predict_layers=0,
            layer_types=["linear_attention", "full_attention"] * (num_layers // 2),
        )  # fmt: skip
    if model == "dense":
        return transformers.Qwen3Config(**grouped, tie_word_embeddings=True)
    return transformers.Qwen3MoeConfig(
        **grouped, **experts, num_experts=8, norm_topk_prob=True, tie_word_embeddings=False
    )


def save(name: str, folder: Path, num_layers: int = 4) -> Path:
    """A checkpoint whose weights numpy draws, so that every machine makes the same."""
    model = transformers.AutoModelForCausalLM.from_config(config_of(name, num_layers)).float()
    rng = np.random.default_rng(0)
    with torch.no_grad():
        for key, parameter in model.state_dict().items():
            low, high = (0.7, 1.3) if "norm" in key else (-0.14, 0.14)
            if name == "hybrid" and "norm" in key and "linear_attn" not in key:
                low, high = -0.3, 0.3  # scaled by 1 + weight
            drawn = rng.uniform(low, high, tuple(parameter.shape))
            parameter.copy_(torch.from_numpy(drawn).to(parameter.dtype))
    path = folder / f"{name}-{num_layers}"
    model.save_pretrained(path)
    return path
