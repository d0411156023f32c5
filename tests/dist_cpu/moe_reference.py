"""Routing by transformers: what its routers choose, other choices forced on them, their balance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from mcore_rl.config.schema import Layout
from mcore_rl.data.batch import Batch

# Of one sample and one layer: router logits [tokens, experts] and chosen experts [tokens, topk].
Routing = tuple[torch.Tensor, torch.Tensor]


def gates(model: Any) -> dict[int, Any]:
    """The router of each decoder layer that has one."""
    layers = enumerate(model.model.layers)
    return {i: layer.mlp.gate for i, layer in layers if hasattr(layer.mlp, "gate")}


@contextmanager
def routed(model: Any, forced: np.ndarray | None) -> Iterator[dict[int, Routing]]:
    """Record what routers see and choose; `forced` [tokens, layers, topk] replaces the choice."""
    seen: dict[int, Routing] = {}

    def hook(place: int, layer: int) -> Any:
        def replace(gate: Any, _: Any, output: Any) -> Any:
            logits, weights, chosen = output
            if forced is not None:
                chosen = torch.from_numpy(forced[:, place].astype(np.int64))
                weights = expert_weights(model.config, logits, chosen)
            seen[layer] = (logits, chosen)
            return logits, weights, chosen

        return replace

    handles = [
        gate.register_forward_hook(hook(place, layer))
        for place, (layer, gate) in enumerate(gates(model).items())
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def expert_weights(config: Any, logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """[tokens, topk] weights of the chosen experts' outputs."""
    if config.model_type == "deepseek_v3":
        weights = logits.sigmoid().gather(1, chosen)
        return weights / weights.sum(-1, keepdim=True) * config.routed_scaling_factor
    weights = logits.softmax(-1).gather(1, chosen)
    return weights / weights.sum(-1, keepdim=True) if config.norm_topk_prob else weights


def run(
    model: Any, batch: Batch, row: int, forced: np.ndarray | None = None
) -> tuple[torch.Tensor, dict[int, Routing]]:
    """(log-probs of the response, routing by layer) of one sample."""
    prompt, response = batch.jagged("prompt_ids")[row], batch.jagged("response_ids")[row]
    ids = torch.from_numpy(np.concatenate([prompt, response]))[None]
    with routed(model, forced) as seen:
        logits = model(ids).logits[0, len(prompt) - 1 : -1]
    targets = torch.from_numpy(response.copy())[:, None]
    return logits.log_softmax(-1).gather(1, targets)[:, 0], seen


def loads(model: Any, batch: Batch) -> dict[int, torch.Tensor]:
    """By layer, [experts]: how often the tokens of the batch chose each."""
    num_experts = next(iter(gates(model).values())).weight.shape[0]
    loads_by_layer = {
        layer: torch.zeros(num_experts, dtype=torch.float64) for layer in gates(model)
    }
    for row in range(len(batch)):
        with torch.no_grad():
            _, seen = run(model, batch, row)
        for layer, (_, chosen) in seen.items():
            loads_by_layer[layer] += torch.bincount(chosen.flatten(), minlength=num_experts)
    return loads_by_layer


def balance(
    model: Any, batch: Batch, packs: Sequence[Sequence[Sequence[int]]], *, is_global: bool
) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """(mean over tokens of the load-balancing loss, summed over layers; router gradients of it).

    `packs` lists rows by micro-batch and data-parallel rank. Shares are taken over one pack, or
    (`is_global`) over all packs up to and with those of the same micro-batch.
    """
    every = {row: run(model, batch, row)[1] for row in range(len(batch))}
    total = torch.zeros(())
    for layer, gate in gates(model).items():
        so_far = torch.zeros(gate.weight.shape[0])
        for of_ranks in packs:
            seen = [torch.cat([every[r][layer][0] for r in rows]) for rows in of_ranks if rows]
            chosen = [counts(logits, gate.top_k) for logits in seen]
            so_far = so_far + sum(chosen)
            for logits, count in zip(seen, chosen, strict=True):
                taken = so_far if is_global else count
                shares = taken / taken.sum()
                total = total + len(shares) * (scores(model, logits) * shares).sum()
    mean = total / int(batch.num_tokens.sum())
    weights = {layer: gate.weight for layer, gate in gates(model).items()}
    gradients = torch.autograd.grad(mean, list(weights.values()))
    return mean.detach(), dict(zip(weights, gradients, strict=True))


def scores(model: Any, logits: torch.Tensor) -> torch.Tensor:
    """[tokens, experts], each row a distribution."""
    if model.config.model_type == "deepseek_v3":
        values = logits.sigmoid()
        return values / values.sum(-1, keepdim=True)
    return logits.softmax(-1)


def counts(logits: torch.Tensor, topk: int) -> torch.Tensor:
    """[experts] how often each is among the best."""
    chosen = logits.topk(topk, dim=-1).indices.flatten()
    return torch.bincount(chosen, minlength=logits.shape[-1]).float()


def last_stages(by_rank: list[dict[str, Any]], layout: Layout) -> list[dict[str, Any]]:
    results = [result for result in by_rank if "loss" in result["steps"][0]]
    assert len(results) == layout.world_size // layout.pp
    return results


def same_steps(by_rank: list[dict[str, Any]], reference: dict[str, Any], layout: Layout) -> None:
    for result in by_rank:
        for step, expected in zip(result["steps"], reference["steps"], strict=True):
            assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    for result in last_stages(by_rank, layout):
        for step, expected in zip(result["steps"], reference["steps"], strict=True):
            assert step["loss"] == pytest.approx(expected["loss"], rel=2e-6)
