"""One file per model family; importing this package fills the registry."""

from mcore_rl.models import (
    deepseek_v3,
    deepseek_v32,
    glm4_moe,
    gpt_oss,
    llama,
    minimax_m2,
    mixtral,
    qwen2,
    qwen3,
    qwen3_5,
    qwen3_moe,
    qwen3_next,
    transformers_model,
)

__all__ = [
    "deepseek_v3",
    "deepseek_v32",
    "glm4_moe",
    "gpt_oss",
    "llama",
    "minimax_m2",
    "mixtral",
    "qwen2",
    "qwen3",
    "qwen3_5",
    "qwen3_moe",
    "qwen3_next",
    "transformers_model",
]
