"""Scores and optimizer steps of a model by transformers and torch alone, one sample at a time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.core_model_loading import revert_weight_conversion

from mcore_rl.config.schema import OptimizerConfig
from mcore_rl.data.batch import Batch

# A large epsilon of Adam: else the rounding of gradients near 0 decides the sign of a step.
EPSILON = 1e-3


def load(path: Path) -> Any:
    """Load a model whose experts take rows of any size."""
    config = json.loads((path / "config.json").read_text())
    kind = "ImageTextToText" if "vision_config" in config else "CausalLM"
    # The library's default attention drops the soft cap of the logits.
    attention = "eager" if config.get("attn_logit_softcapping") else None
    model = getattr(transformers, f"AutoModelFor{kind}").from_pretrained(
        path, attn_implementation=attention
    )
    model.set_experts_implementation("eager")
    return model


def score(
    model: Any, batch: Batch, temperature: float, pixels: Mapping[str, Any] | None = None
) -> dict[str, list[torch.Tensor]]:
    """Score one sample at a time with transformers.

    Args:
        pixels: Pixel values and grid of each image, by its name in the column `images`.
    """
    scores: dict[str, list[torch.Tensor]] = {"log_probs": [], "entropy": []}
    names = batch.array("images").tolist() if "images" in batch else [""] * len(batch)
    for prompt, response, images in zip(
        batch["prompt_ids"], batch["response_ids"], names, strict=True
    ):
        ids = torch.tensor([[*prompt, *response]])
        targets, options = torch.from_numpy(response.copy())[:, None], {}
        ids[0, -1] = 0  # it is scored, and read by nothing: it may stand for an image
        if pixels and images:
            values, grids = zip(*(pixels[name] for name in images.split()), strict=True)
            kinds = (ids == model.config.image_token_id).int()
            options = {"pixel_values": torch.cat(values), "image_grid_thw": torch.stack(grids)}
            grid = options["image_grid_thw"]
            options["position_ids"] = model.model.get_rope_index(
                ids, mm_token_type_ids=kinds, image_grid_thw=grid
            )[0]
        logits = model(ids, use_cache=False, **options).logits[0, len(prompt) - 1 : -1]
        logits = logits / temperature
        log_probs = logits.log_softmax(-1)
        scores["log_probs"].append(log_probs.gather(1, targets)[:, 0])
        scores["entropy"].append(-(log_probs.exp() * log_probs).sum(-1))
    return scores


def decays(name: str, parameter: torch.Tensor) -> bool:
    return parameter.dim() > 1 and not name.endswith("bias")


def train(
    path: Path,
    batch: Batch,
    settings: OptimizerConfig,
    num_steps: int,
    pixels: Mapping[str, Any] | None = None,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Take steps of ranks.LOSS with torch alone; return gradient norms and weights."""
    model = load(path)
    groups = [
        {"params": [p for name, p in model.named_parameters() if decays(name, p)]},
        {
            "params": [p for name, p in model.named_parameters() if not decays(name, p)],
            "weight_decay": 0,
        },
    ]
    optimizer = torch.optim.AdamW(
        groups,
        betas=(settings.beta1, settings.beta2),
        eps=EPSILON,
        weight_decay=settings.weight_decay,
    )
    norms = []
    for step in range(1, num_steps + 1):
        optimizer.zero_grad()
        log_probs = score(model, batch, 1.0, pixels)["log_probs"]
        flat = torch.cat(log_probs)
        old, reference, advantages, weights, kl_weights = (
            torch.from_numpy(batch.jagged(name).values.copy())
            for name in (
                "log_probs", "reference_log_probs", "advantages", "loss_weights", "kl_weights"
            )
        )  # fmt: skip
        ratio = (flat - old).exp()
        policy = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        kl = (reference - flat).exp() - 1 - (reference - flat)
        (policy * weights + kl * kl_weights).sum().backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * min(1, step / settings.warmup_steps)
        optimizer.step()
    return norms, revert_weight_conversion(model, model.state_dict())
