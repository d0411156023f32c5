"""Bytes of a server's KV cache: those of a token, and the default, what its sequences need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from mcore_rl.config.schema import RolloutConfig
from mcore_rl.models.base import (
    HFConfig,
    count_attention_layers,
    count_kv_elements_per_token,
    get_family,
    get_model_sizes,
)
from mcore_rl.models.gated_delta_net import count_state_bytes

# Of `vllm serve` on GPUs of 70 GiB and more (vllm/engine/arg_utils.py:2935); on CPUs our own.
DEFAULT_MAX_SEQS: Mapping[str, int] = MappingProxyType({"cuda": 1024, "cpu": 256})
GPU_SHARE = 0.9  # of a GPU's memory, for weights, cache and work of servers: the rest is a margin
CPU_BYTES = 4 << 30  # the most that a default takes of a host's memory, for each worker
# Tokens of a block: 32 as on CPUs (vllm/worker.py), 16 on most GPUs. MLA's kernels have up to 128.
_BLOCK_TOKENS, _MLA_BLOCK_TOKENS = 32, 128


@dataclass(frozen=True, slots=True)
class CacheNeed:
    """Sequences of a worker at once, and the bytes that they take at their full length."""

    num_sequences: int
    sequence_tokens: int
    sequence_bytes: int  # whole blocks of tokens, and the state of recurrent layers
    spare_bytes: int  # a block that no sequence uses (vllm/v1/core/block_pool.py)

    @property
    def num_bytes(self) -> int:
        return self.num_sequences * self.sequence_bytes + self.spare_bytes

    def choose_bytes(self, most: int | None = None) -> int:
        """Return the default size: what all sequences need, up to `most`, but room for one."""
        size = self.num_bytes if most is None else min(self.num_bytes, most)
        return max(size, self.sequence_bytes + self.spare_bytes)

    def fill_settings(self, settings: RolloutConfig, most: int | None = None) -> RolloutConfig:
        """Return settings of servers with kv_cache_bytes, that of the user or the default."""
        if settings.kv_cache_bytes is not None:
            return settings
        return replace(settings, kv_cache_bytes=self.choose_bytes(most))


def count_token_bytes(model: HFConfig, settings: RolloutConfig, dtype: str) -> int:
    """Count the bytes of a token on each worker, with those of the layers that draft."""
    elements = count_kv_elements_per_token(model, settings.tp)
    if settings.speculative.num_tokens:
        num_drafting = get_family(model).num_mtp_layers(model)
        elements += elements * num_drafting // count_attention_layers(model)
    cache_dtype = str(settings.engine.get("kv_cache_dtype", "auto"))
    itemsize = 1 if cache_dtype.startswith("fp8") else getattr(torch, dtype).itemsize
    return int(elements * itemsize)


def count_need(
    model: HFConfig,
    settings: RolloutConfig,
    dtype: str,
    sequence_tokens: int,
    num_sequences: int | None = None,
    device_type: str = "cuda",
) -> CacheNeed:
    """Count what each worker of a server has to cache.

    Layers of a sliding window count as the others: a long prompt fills their blocks until its end.

    Args:
        sequence_tokens: Of the longest sequence.
        num_sequences: Most that the server gets at once. None: as many as it takes.
    """
    limit = settings.max_num_seqs or DEFAULT_MAX_SEQS[device_type]
    if num_sequences is not None:
        limit = min(limit, -(-num_sequences // settings.dp))
    token_bytes = count_token_bytes(model, settings, dtype)
    default = _MLA_BLOCK_TOKENS if model.get("kv_lora_rank") else _BLOCK_TOKENS
    block = int(settings.engine.get("block_size") or default)
    drafted = sequence_tokens + settings.speculative.num_tokens
    block_bytes = block * token_bytes
    size = -(-drafted // block) * block_bytes
    if state := count_state_bytes(model, settings.tp):
        # vLLM pads a block of attention to a layer's state, of which a sequence has two with a
        # prefix cache, and one more for each draft (vllm/v1/kv_cache_interface.py:1076).
        num_attention = count_attention_layers(model)
        page = state + block_bytes // num_attention
        block_bytes = num_attention * page
        num_states = 2 + settings.speculative.num_tokens
        num_recurrent = get_model_sizes(model).num_layers - num_attention
        size += block_bytes + num_states * num_recurrent * page
    return CacheNeed(limit, sequence_tokens, size, block_bytes)
