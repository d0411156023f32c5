"""Lengths of sequences that the user has not set: the usual ones, or fewer tokens for a model with
fewer positions. A line says so. What the user has set is checked later, and never changed."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from mcore_rl.checkpoint.hf import read_checkpoint_config
from mcore_rl.config.rules_train import get_data_config
from mcore_rl.config.schema import (
    EXAMPLE_TOKENS,
    PROMPT_TOKENS,
    RESPONSE_TOKENS,
    EvalConfig,
    RLConfig,
    TrainConfig,
)
from mcore_rl.controller import torchrun
from mcore_rl.examples.tasks.tiny_model import MAX_POSITIONS
from mcore_rl.models.rope import count_positions


def fill_lengths(config: RLConfig) -> RLConfig:
    """Return the settings of a run with the lengths of its prompts, responses and frozen models.

    Where the positions of the policy are too few for both, a prompt and its response have half
    each, or what the one that is set leaves.

    Raises:
        ConfigError: A config.json cannot be read.
    """
    is_task = bool(config.task.name)  # whose model is not there yet
    positions = MAX_POSITIONS if is_task else _count_positions("model.path", config.model.path)
    data, rollout = config.data, config.rollout
    eval_tokens = config.evaluation.max_response_tokens or 0
    prompt, response = _share_positions(
        positions, data.max_prompt_tokens, rollout.max_response_tokens, eval_tokens
    )
    config = replace(
        config,
        data=replace(data, max_prompt_tokens=prompt),
        rollout=replace(rollout, max_response_tokens=response),
    )
    return replace(config, models=_fill_contexts(config, prompt + response))


def _share_positions(
    positions: int | None, prompt: int | None, response: int | None, eval_tokens: int = 0
) -> tuple[int, int]:
    """Return the most tokens of a prompt and of a response, which are None where not set.

    Args:
        eval_tokens: Most of a response in evaluations, where they are longer.
    """
    is_set = prompt is not None, response is not None
    if positions is None:
        return prompt or PROMPT_TOKENS, response or RESPONSE_TOKENS
    if prompt is None:
        longest = max(response or min(RESPONSE_TOKENS, positions // 2), eval_tokens)
        prompt = max(1, min(PROMPT_TOKENS, positions - longest))
    if response is None:
        response = max(1, min(RESPONSE_TOKENS, positions - prompt))
    if not is_set[0] and prompt < PROMPT_TOKENS:
        _report("data.max_prompt_tokens", prompt, positions)
    if not is_set[1] and response < RESPONSE_TOKENS:
        _report("rollout.max_response_tokens", response, positions)
    return prompt, response


def _fill_contexts(config: RLConfig, context: int) -> dict[str, dict[str, Any]]:
    """Return `models` with max_context where a model has fewer positions than the `context`."""
    models = dict(config.models)
    for name, settings in models.items():
        path = settings.get("path")
        if not path or settings.get("max_context") is not None:
            continue
        positions = _count_positions(f"models.{name}.path", path)
        if positions is not None and positions < context:
            _report(f"models.{name}.max_context", positions, positions)
            models[name] = {**settings, "max_context": positions}
    return models


def fill_train_length(config: TrainConfig) -> TrainConfig:
    """Return the settings of a supervised job with the length of its rows.

    Raises:
        ConfigError: config.json cannot be read.
    """
    data = get_data_config(config)
    if data.max_tokens is not None:
        return config
    positions = _count_positions("model.path", config.model.path)
    length = min(EXAMPLE_TOKENS, positions or EXAMPLE_TOKENS)
    if length < EXAMPLE_TOKENS:
        _report("data.max_tokens", length, length)
    changes: dict[str, Any] = {"data": replace(data, max_tokens=length)}
    return replace(config, **changes)


def fill_evaluation_lengths(config: EvalConfig, model: str | Path) -> EvalConfig:
    """Return the settings of an evaluation with the lengths of its prompts and responses.

    Args:
        model: Folder of the evaluated model.

    Raises:
        ConfigError: config.json cannot be read.
    """
    data, rollout = config.data, config.rollout
    positions = _count_positions("model.path", model)
    lengths = data.max_prompt_tokens, rollout.max_response_tokens
    prompt, response = _share_positions(positions, *lengths)
    return replace(
        config,
        data=replace(data, max_prompt_tokens=prompt),
        rollout=replace(rollout, max_response_tokens=response),
    )


def _count_positions(setting: str, path: str | Path) -> int | None:
    return count_positions(read_checkpoint_config(path, setting))


def _report(setting: str, tokens: int, positions: int) -> None:
    """Print that a length is not the usual one; of the ranks of torchrun, the first does."""
    if not torchrun.is_launched() or torchrun.get_rank() == 0:
        print(f"{setting}={tokens}: the model has {positions} positions", file=sys.stderr)
