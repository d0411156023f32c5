"""Frequencies of scaled rotary embeddings, in place of those of Megatron's model.

Megatron has Llama 3's scaling with fixed bounds, YaRN of whole heads only, and no other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.transformer.attention import Attention


def compute_frequencies(rope_parameters: Mapping[str, Any], dim: int) -> tuple[torch.Tensor, float]:
    """Return inverse frequencies [dim / 2] in float32, and the factor on cosine and sine.

    They are those of transformers, in its arithmetic; vLLM's is the same.

    Args:
        rope_parameters: Result of read_scaling (models/rope.py).
        dim: Rotated dimensions of a head.
    """
    from transformers import LlamaConfig  # slow to import, and most models have no scaling
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = dict(rope_parameters)
    # These functions read the size of a head only; the positions avoid a warning.
    positions = parameters.get("original_max_position_embeddings", 1) * parameters["factor"]
    config = LlamaConfig(
        hidden_size=dim,
        num_attention_heads=1,
        head_dim=dim,
        max_position_embeddings=round(positions),
        rope_parameters=parameters,
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"))
    return frequencies, float(factor)


def scale_rope(model: Any, rope_parameters: Mapping[str, Any]) -> None:
    """Give a GPTModel the frequencies of a scaled rotary embedding, before its first pass."""
    embedding = model.rotary_pos_emb
    frequencies, factor = compute_frequencies(rope_parameters, 2 * len(embedding.inv_freq))
    embedding.inv_freq = frequencies.to(embedding.inv_freq.device)
    for module in model.modules():
        if isinstance(module, Attention):
            module._yarn_concentration_factor = factor
