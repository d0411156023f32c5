"""Everything a run reads, read and checked before a process group or a server is started."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

import mcore_rl.models  # noqa: F401  (fills the family registry)
from mcore_rl.algorithms.advantages import ADVANTAGES
from mcore_rl.algorithms.aggregation import AGGREGATIONS
from mcore_rl.algorithms.kl import KL_ESTIMATORS
from mcore_rl.checkpoint.hf import CheckpointReader
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.resolve import resolve_rollout_model
from mcore_rl.config.resolve_engine import resolve_model_engine, resolve_model_layout
from mcore_rl.config.schema import RLConfig
from mcore_rl.data.batch import Batch
from mcore_rl.data.datasets import PromptDataset, load_prompts, load_supervised
from mcore_rl.data.tokenizer import check_tokenizer_matches, load_tokenizer
from mcore_rl.engine.lora_targets import check_targets
from mcore_rl.engine.megatron.device import chosen_modules, device_name
from mcore_rl.models.base import (
    HFConfig,
    family_of,
    field,
    kv_elements_per_token,
    model_sizes,
    padded_vocab_size,
    read_config,
)
from mcore_rl.reshard.rules import logical_tensors
from mcore_rl.rewards.base import get_reward
from mcore_rl.weight_sync.nixl import nixl_api
from mcore_rl.weight_sync.shared_memory import check_allocator

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Inputs:
    tokenizer: PreTrainedTokenizerBase
    train: PromptDataset
    test: PromptDataset
    examples: Batch | None  # of the warm start


def check_inputs(config: RLConfig) -> Inputs:
    """Load the data and check model, layouts and names; raises ConfigError for the first fault."""
    for registry, name in (
        (ADVANTAGES, config.algorithm.advantage),
        (AGGREGATIONS, config.algorithm.loss_aggregation),
        (KL_ESTIMATORS, config.algorithm.kl_estimator),
    ):
        registry[name]
    get_reward(config.reward.name)
    if config.weight_sync.method == "disaggregated" and config.weight_sync.transport == "nixl":
        nixl_api()
    chosen_modules(config.actor.modules)
    if device_name() == "cuda" and config.weight_sync.method == "colocated":
        check_allocator()
    _check_model(config)
    _check_lengths(config)
    tokenizer = load_tokenizer(config.model.path)
    check_tokenizer_matches(tokenizer, field(read_config(config.model.path), "vocab_size"))
    return Inputs(
        tokenizer=tokenizer,
        train=load_prompts(config.data.train_file, config.data, tokenizer),
        test=load_prompts(config.data.test_file, config.data, tokenizer, setting="data.test_file"),
        examples=_examples(config, tokenizer),
    )


def _check_model(config: RLConfig) -> None:
    found = read_config(config.model.path)
    family_of(found)
    reader = CheckpointReader(config.model.path)
    if reader.is_quantized or found.get("quantization_config"):
        raise ConfigError(
            f"model.path={config.model.path!r} is quantised, and its servers would be sent "
            "bfloat16; allowed: float32 or bfloat16. To convert it: mcore-rl convert hf-to-mcore, "
            "then mcore-rl convert mcore-to-hf --dtype bfloat16"
        )
    hf_config = reader.config()
    sizes = model_sizes(hf_config)
    resolve_model_layout("actor.layout", config.actor.layout, sizes)
    resolve_model_engine("actor", config.actor, sizes)
    if config.warm_start.num_steps:
        resolve_model_layout("warm_start.layout", config.warm_start.layout, sizes)
    resolve_rollout_model(config.rollout, sizes)
    _check_cache(config, hf_config)
    weights = family_of(hf_config).weights(hf_config, padded_vocab_size(hf_config, 1))
    reader.check(logical_tensors(weights))
    if config.actor.lora.rank:
        check_targets("actor.lora", weights, config.actor.lora)


def _check_cache(config: RLConfig, hf_config: HFConfig) -> None:
    """A bound from below: vLLM rounds up to blocks of tokens, and says so when it starts."""
    num_tokens = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    itemsize = getattr(torch, config.model.dtype).itemsize
    least = num_tokens * kv_elements_per_token(hf_config, config.rollout.tp) * itemsize
    if config.rollout.kv_cache_bytes < least:
        raise ConfigError(
            f"rollout.kv_cache_bytes={config.rollout.kv_cache_bytes}: one sequence of "
            f"data.max_prompt_tokens + rollout.max_response_tokens = {num_tokens} tokens takes "
            f"{least} bytes; allowed: at least as many"
        )


def _check_lengths(config: RLConfig) -> None:
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    positions = read_config(config.model.path).get("max_position_embeddings")
    if positions is not None and longest > positions:
        raise ConfigError(
            f"data.max_prompt_tokens={config.data.max_prompt_tokens} and "
            f"rollout.max_response_tokens={config.rollout.max_response_tokens} make {longest}; "
            f"allowed: together up to the model's max_position_embeddings={positions}"
        )


def _examples(config: RLConfig, tokenizer: PreTrainedTokenizerBase) -> Batch | None:
    warm = config.warm_start
    if not warm.num_steps:
        return None
    return load_supervised(
        warm.train_file, config.data.prompt_column, warm.response_column, tokenizer
    )
