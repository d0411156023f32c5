"""Megatron's parameters of a pack, its split over the ranks, and the cost of a sequence."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import MLATransformerConfig, TransformerConfig

from mcore_rl.engine.megatron.moe import list_moe_layers
from mcore_rl.engine.packing import MicroBatch, PackSplit
from mcore_rl.parallel.balance import SequenceCost, estimate_sequence_cost

_FLOAT8_TOKENS = 32  # a multiple that all float8 recipes take (fp8_utils.py:318)
# A multiple for ranks whose blocks are gathered. With another Transformer Engine dequantises the
# blocks, gathers bfloat16, and quantises again (pytorch/distributed.py, _all_gather_fp8_blockwise).
_GATHERED_BLOCK_TOKENS = 128


def read_pack_split(config: TransformerConfig | None = None) -> PackSplit:
    """Return the split of packs over Megatron's ranks.

    Args:
        config: Config of the model: float8 products take tokens in blocks. None: no float8.
    """
    tp, multiple = parallel_state.get_tensor_model_parallel_world_size(), 1
    if config is not None and config.fp8 is not None:
        is_gathered = tp > 1 and config.fp8_recipe == "blockwise"
        multiple = _GATHERED_BLOCK_TOKENS if is_gathered else _FLOAT8_TOKENS
    return PackSplit(
        tp=tp,
        cp=parallel_state.get_context_parallel_world_size(),
        cp_rank=parallel_state.get_context_parallel_rank(),
        rank_multiple=multiple,
    )


@dataclass
class PackedKeys:
    """Keys that sparse attention's indexers pick in a pack (indexer_replay.py)."""

    # [1, tokens, k] By layer from 0: positions in the pack; -1: none.
    by_layer: dict[int, torch.Tensor] = field(default_factory=dict)
    is_recording: bool = False


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's parameters of a pack, with the lengths on the host as well.

    Reading them back from the device would make the host wait in every layer.
    """

    lengths: tuple[int, ...] = ()  # with padding, over all CP ranks
    # [tokens of this CP rank] False for padding, which the loss of indexers leaves out
    # (transformer/experimental_attention_variant/dsa_masking.py:424)
    real_token_mask_q: torch.Tensor | None = None
    keys: PackedKeys | None = None  # recorded or replayed; None: indexers pick


def build_packed_seq_params(micro: MicroBatch, keys: PackedKeys | None = None) -> PackedSeqParams:
    """Return starts and lengths with padding, over all CP ranks: Megatron and TE divide by cp.

    Padding counts as tokens. Under CP, Transformer Engine needs the padded starts as well; equal to
    the others they say that there are no gaps between sequences, which its flash kernel requires.
    """
    is_split = parallel_state.get_context_parallel_world_size() > 1
    padded_starts = micro.starts if is_split else None
    longest = max(micro.lengths)
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=micro.starts,
        cu_seqlens_kv=micro.starts,
        cu_seqlens_q_padded=padded_starts,
        cu_seqlens_kv_padded=padded_starts,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        lengths=micro.lengths,
        real_token_mask_q=micro.token_indices >= 0,
        keys=keys,
    )


def estimate_model_cost(config: TransformerConfig, vocab_size: int) -> SequenceCost:
    """Return the cost of a sequence in a model of this config.

    The low-rank projections of multi-latent attention count as plain ones.
    """
    heads, groups = config.num_attention_heads, config.num_query_groups
    head_dim: float = config.kv_channels
    if isinstance(config, MLATransformerConfig):
        groups = heads
        head_dim = (config.qk_head_dim + config.qk_pos_emb_head_dim + config.v_head_dim) / 2
    ffn_size: float = config.ffn_hidden_size
    if config.num_moe_experts:  # columns of the MLP that a token uses, on average over the layers
        shared = config.moe_shared_expert_intermediate_size or 0
        active = config.moe_router_topk * config.moe_ffn_hidden_size + shared
        moe_layers = list_moe_layers(config)
        sizes = [active if i in moe_layers else ffn_size for i in range(config.num_layers)]
        ffn_size = sum(sizes) / len(sizes)
    linear_layers = config.linear_attention_freq or []
    return estimate_sequence_cost(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        attention_size=heads * head_dim,
        key_value_size=groups * head_dim,
        ffn_size=ffn_size,
        vocab_size=vocab_size,
        attention_share=1 - sum(linear_layers) / len(linear_layers) if linear_layers else 1.0,
    )
