"""Which module of a model is the first at which two engines part."""

from __future__ import annotations

from collections.abc import Mapping

import torch

Trace = Mapping[str, torch.Tensor]  # by Hugging Face's name of a module, [tokens, dim] float32

_IN_A_LAYER = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp.gate", "mlp")

# Relative difference from which on a module counts as different, by dtype. Measured on tiny models
# of all families: rounding gives below 1e-6 in float32; in bfloat16 below 2e-2 in dense models, but
# up to 3e-1 where it tips a router. Faults of weights and settings give 7e-4 (an epsilon) to 1.
THRESHOLDS = {"float32": 1e-4, "bfloat16": 5e-2}


def module_names(num_layers: int) -> list[str]:
    """What an engine may trace, in the order of the model."""
    layers = [f"model.layers.{n}.{name}" for n in range(num_layers) for name in _IN_A_LAYER]
    return ["model.embed_tokens", *layers, "model.norm", "lm_head"]


def differences(mine: Trace, reference: Trace, num_layers: int) -> dict[str, float]:
    """||mine - reference|| / ||reference|| of every module that both have, in the model's order."""
    names = [name for name in module_names(num_layers) if name in mine and name in reference]
    return {name: _difference(mine[name], reference[name]) for name in names}


def first_different(differences: Mapping[str, float], dtype: str) -> str | None:
    """The first module over the threshold; None where nothing is."""
    limit = THRESHOLDS[dtype]
    return next((name for name, difference in differences.items() if difference > limit), None)


def _difference(mine: torch.Tensor, reference: torch.Tensor) -> float:
    """Infinite for other shapes, and for values that are no numbers."""
    if mine.shape != reference.shape:
        return float("inf")
    norm = reference.double().norm()
    gap = float((mine.double() - reference.double()).norm() / norm.clamp(min=1e-30))
    return gap if gap == gap else float("inf")
