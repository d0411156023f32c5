"""Transformers' side, on one device: the GPU where there is one."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import torch

_TOKENS_AT_ONCE = 512  # log-softmax of a whole vocabulary, in float32
_TRACED = re.compile(
    r"model\.(embed_tokens|norm|layers\.\d+\.(input_layernorm|self_attn|post_attention_layernorm|mlp))"
    r"|lm_head"
)
_EXPERTS = re.compile(r"(model\.layers\.\d+\.mlp)\.experts")


@torch.no_grad()
def score(path: str, dtype: str, sequences: list[list[int]]) -> dict[str, list[list[Any]]]:
    """Fields of Scores: of all tokens but the first of each sequence."""
    model = _loaded(path, dtype)
    log_probs, top_ids = [], []
    for ids in sequences:
        tokens = torch.tensor(ids, device=model.device)
        logits = model(tokens[None], use_cache=False).logits[0, :-1]
        log_probs.append(_log_probs(logits, tokens[1:]).tolist())
        top_ids.append(logits.argmax(-1).tolist())
    return {"log_probs": log_probs, "top_ids": top_ids}


@torch.no_grad()
def trace(path: str, dtype: str, sequences: list[list[int]]) -> list[dict[str, torch.Tensor]]:
    """Of each sequence what the modules put out, float32 [tokens, dim] by name."""
    model = _loaded(path, dtype)
    found: list[dict[str, torch.Tensor]] = []
    for name, module in model.named_modules():
        if _TRACED.fullmatch(name):
            module.register_forward_hook(partial(_keep, found, name))
        elif experts := _EXPERTS.fullmatch(name):
            num_experts = model.get_submodule(f"{experts[1]}.gate").weight.shape[0]
            keep = partial(_keep_routing, found, f"{experts[1]}.gate", num_experts)
            module.register_forward_pre_hook(keep)
    for ids in sequences:
        found.append({})
        model(torch.tensor([ids], device=model.device), use_cache=False)
    return found


def _loaded(path: str, dtype: str) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=getattr(torch, dtype), local_files_only=True
    )
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()


def _log_probs(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """[tokens] float32 log-probs of the targets, from [tokens, vocabulary]."""
    parts = zip(logits.split(_TOKENS_AT_ONCE), targets.split(_TOKENS_AT_ONCE), strict=True)
    chosen = [part.float().log_softmax(-1).gather(-1, ids[:, None])[:, 0] for part, ids in parts]
    return torch.cat(chosen)


def _keep(found: list[dict[str, torch.Tensor]], name: str, _: Any, __: Any, output: Any) -> None:
    value = output[0] if isinstance(output, tuple) else output
    found[-1][name] = value.reshape(-1, value.shape[-1]).to("cpu", torch.float32, copy=True)


def _keep_routing(
    found: list[dict[str, torch.Tensor]], name: str, num_experts: int, _: Any, inputs: Any
) -> None:
    """Experts are called with (states, ids, weights); [tokens, experts] weights, 0 elsewhere.

    What routers return differs from family to family and from version to version.
    """
    _, ids, weights = inputs
    dense = torch.zeros(len(ids), num_experts, dtype=torch.float32, device=ids.device)
    found[-1][name] = dense.scatter_(1, ids, weights.float()).cpu()
