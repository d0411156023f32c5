"""Speculative decoding with a model's own prediction layers, which vLLM has in a draft model.

The draft model proposes tokens, and the served model accepts each with the probability that keeps
its own distribution (arXiv:2211.17192). Prediction layers may be older than the served model's
weights, or wrong, without an effect on that: fewer tokens would be accepted. Upstream lines are
those of vLLM 0.32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.metrics.loggers import StatLoggerBase

from mcore_rl.inference.protocol import DraftCounts
from mcore_rl.models.vllm_parts import DRAFT


def build_draft_arguments(num_tokens: int, engine_arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return vLLM's engine arguments for drafts of `num_tokens`; patch its sampler on a CPU.

    Args:
        engine_arguments: Those of the served model. vLLM's draft model does not inherit the
            backends among them (config/speculative.py, _DRAFT_VLLM_CONFIG_OVERRIDES).
    """
    if not num_tokens:
        return {}
    speculative: dict[str, Any] = {"method": "mtp", "num_speculative_tokens": num_tokens}
    if current_platform.is_cpu():
        from mcore_rl.inference.vllm.patches import cpu

        cpu.repeat_sampling_parameters()  # in this process, which forks the others
        speculative["attention_backend"] = engine_arguments["attention_backend"]
    else:
        speculative["moe_backend"] = engine_arguments.get("moe_backend")
    return {"speculative_config": speculative}


def join_models(model_runner: Any) -> torch.nn.Module:
    """Return the model of a runner; if it has a draft model, with that as the child `draft`.

    Modules that both share have the served model's names alone.
    """
    model: torch.nn.Module = model_runner.get_model()
    draft: torch.nn.Module | None = model_runner.get_draft_model()
    if draft is None:
        return model
    joined = torch.nn.Module()
    joined._modules = model._modules | {DRAFT.removesuffix("."): draft}
    joined.config = model.config
    return joined


class DraftCounter(StatLoggerBase):
    """Counts drafts of an engine. AsyncLLM makes loggers by calling a class or function."""

    def __init__(self, vllm_config: Any = None, engine_index: int = 0) -> None:
        self._counts = DraftCounts()

    @classmethod
    def build(cls) -> tuple[DraftCounter, Callable[..., DraftCounter]]:
        """Return a counter, and what an engine calls for it."""
        counter = cls()
        return counter, lambda *_: counter

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Add the drafts of a step of the engine."""
        stats = scheduler_stats and scheduler_stats.spec_decoding_stats
        if stats is not None:
            self._counts += DraftCounts(
                stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens
            )

    def log_engine_initialized(self) -> None:
        """Log nothing."""

    def take(self) -> DraftCounts:
        """Return the counts since the last call."""
        counts, self._counts = self._counts, DraftCounts()
        return counts
