"""The frozen models of `models`, checked before a run starts."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from mcore_rl.checkpoint.hf import CheckpointReader, read_checkpoint_config
from mcore_rl.config.checks import divides
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.resolve_models import served_models
from mcore_rl.config.schema import RLConfig
from mcore_rl.data.tokenizer import (
    check_tokenizer_matches,
    has_tokenizer,
    load_tokenizer,
    stop_ids_of,
)
from mcore_rl.jobs.placement import models_with_paths
from mcore_rl.models.base import (
    family_of,
    field,
    kv_elements_per_token,
    model_sizes,
    padded_vocab_size,
    read_config,
)
from mcore_rl.models.heads import model_weights, value_head_of
from mcore_rl.reshard.rules import logical_tensors

if TYPE_CHECKING:
    from mcore_rl.agents.choose import CodecKind


def check_model_layouts(config: RLConfig) -> None:
    """All that depends on each config.json alone; raises ConfigError for the first fault."""
    for name, model in models_with_paths(config).items():
        key, servers = f"models.{name}", model.servers
        found = read_checkpoint_config(model.path, f"{key}.path")
        if value_head_of(found):
            raise ConfigError(
                f"{key}.path={model.path!r} is of {found['architectures']}; allowed: a language "
                "model"
            )
        family_of(found)
        sizes = model_sizes(found)
        divides(f"{key}.tp", servers.tp, "attention heads", sizes.num_attention_heads)
        if servers.ep and not sizes.num_experts:
            raise ConfigError(f"{key}.ep=true: the model has no experts; allowed: false")
        positions = found.get("max_position_embeddings")
        if positions is not None and model.max_context > positions:
            raise ConfigError(
                f"{key}.max_context={model.max_context}; allowed: up to the model's "
                f"max_position_embeddings={positions}"
            )
        itemsize = getattr(torch, config.model.dtype).itemsize
        least = model.max_context * kv_elements_per_token(found, servers.tp) * itemsize
        if servers.kv_cache_bytes < least:
            raise ConfigError(
                f"{key}.kv_cache_bytes={servers.kv_cache_bytes}: one conversation of "
                f"max_context={model.max_context} tokens takes {least} bytes; allowed: at least as "
                "many"
            )


def check_models(config: RLConfig) -> None:
    """Weights, tokenizers and chat templates, too; of one without a path those of the policy are.

    After the warm start that one is the policy's, with its tokenizer.
    """
    for name, model in models_with_paths(config).items():
        key, found = f"models.{name}", read_config(model.path)
        if served_models(config)[name].path:
            reader = CheckpointReader(model.path, f"{key}.path")
            reader.check(logical_tensors(model_weights(found, padded_vocab_size(found, 1))))
        if not has_tokenizer(model.path):
            raise ConfigError(f"{key}.path={model.path!r} has no tokenizer")
        tokenizer = load_tokenizer(model.path, config.model.chat_date)
        check_tokenizer_matches(tokenizer, field(found, "vocab_size"))
        try:
            from mcore_rl.agents.choose import codec_for

            kind = cast("CodecKind", model.codec)
            codec_for(tokenizer, kind, stop_ids=stop_ids_of(model.path, f"{key}.path"))
        except ConfigError as error:
            raise ConfigError(f"{key}.path={model.path!r}: {error}") from error
