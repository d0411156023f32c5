"""Activations of a training engine's passes: what layers store for the backward pass, and peaks.

Two sets of modules are counted. "te" are the fused modules of Transformer Engine, counted as in
arXiv:2205.05198 (section 4). "torch" are the modules of engine/megatron/layers.py, whose stored
tensors are listed one by one; tests/dist_cpu/test_roles.py compares them with measured peaks.

Everything but rotary angles is divided by tp, since sequence parallelism splits the rest. Kernels
store no attention weights; of a token sent to an expert the products store inputs and the
activation its own (Megatron-core, TEGroupedMLP and WeightedSwiGLUFunction). A pass of log-probs
stores nothing, and has one layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcore_rl.config.schema import EngineConfig, Layout
from mcore_rl.parallel.mesh import Chunk

_FLOAT32 = 4
_DELTA_CHUNK = 64  # tokens between the states that the kernels of gated delta nets store
_QUERIES_PER_BLOCK = 256  # of attention with sinks: engine/attention.py
_ATTENTION_PARTS = ("input", "norms", "heads", "result")
DEFAULT_CHUNK_BYTES = {"te": 512 << 20, "torch": 32 << 20}  # engine/logprob.py

Parts = dict[str, float]  # bytes per token of a pack on one rank, by part of a layer


@dataclass(frozen=True, slots=True)
class PackSize:
    """A micro-batch on one rank of the pipeline and of context parallelism."""

    tokens: int
    num_scored: int  # response tokens
    num_micro_batches: int  # of an optimizer step
    longest: int  # tokens of the longest sequence, over all cp ranks
    imbalance: float = 1.0  # tokens of the fullest rank's experts in a layer, over the mean
    mean_imbalance: float = 1.0  # likewise in all layers of a rank together


@dataclass(frozen=True, slots=True)
class PassMemory:
    """Bytes on one rank at the peak of a pass."""

    activations: int
    dispatch: int  # tokens sent to experts, and their results
    logits: int  # tile of logits, gradients of hidden states and of the output head
    gathered: int = 0  # of FSDP2: weights of layers, their gradients, and buffers of both

    @property
    def total(self) -> int:
        return self.activations + self.dispatch + self.logits + self.gathered


def count_layer_bytes(
    fields: Mapping[str, Any],
    layer: int,
    layout: Layout,
    itemsize: int,
    modules: str,
    imbalance: float = 1.0,
    *,
    is_frozen: bool = False,
) -> Parts:
    """Count the bytes per token that a decoder layer stores, by part.

    Args:
        fields: Family.config_map of the model.
        layer: Index in the model.
        modules: "te" or "torch".
        is_frozen: Norms have no gradients, as with adapters.
    """
    hidden, tp = fields["hidden_size"] * itemsize, layout.tp
    is_torch = modules == "torch"
    norm = hidden  # the input of the next linear layer
    if is_torch:  # normalised but not scaled, without which a scale has no gradient; and factors
        norm += (0 if is_frozen else hidden) + _FLOAT32
    parts: Parts = {"input": hidden / tp, "norms": norm / tp}
    parts |= _count_attention_bytes(fields, layer, layout, itemsize, is_torch, is_frozen)
    if not is_sparse(fields, layer):
        columns = fields["ffn_hidden_size"] * itemsize
        mlp = (5 if is_torch else 3) * columns  # gate, up, their product, and torch's steps to it
        return parts | {"mlp_norm": norm / tp, "mlp": mlp / tp}
    parts["norms"] += norm / tp
    return parts | _count_expert_bytes(fields, layout, itemsize, is_torch, imbalance)


def is_sparse(fields: Mapping[str, Any], layer: int) -> bool:
    """Return whether a layer has experts."""
    if not fields.get("num_moe_experts"):
        return False
    frequency = fields.get("moe_layer_freq", 1)
    return bool(frequency[layer] if isinstance(frequency, list) else layer % frequency == 0)


def _count_attention_bytes(
    fields: Mapping[str, Any],
    layer: int,
    layout: Layout,
    itemsize: int,
    is_torch: bool,
    is_frozen: bool,
) -> Parts:
    """Count projections, rotated queries and keys, and the result of attention."""
    tp, cp = layout.tp, layout.cp
    hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
    linear = fields.get("linear_attention_freq")
    if linear and linear[layer]:
        return _count_delta_net_bytes(fields, tp, itemsize)
    if "kv_lora_rank" in fields:
        return _count_latent_bytes(fields, layout, itemsize, is_torch)
    dim = fields["kv_channels"]
    groups = max(fields["num_query_groups"], tp)  # each rank has a key head at least
    query, key = heads * dim, groups * dim
    has_norm = fields.get("qk_layernorm", False)
    if not is_torch:
        copies = 2 + has_norm
        stored = (copies * (query + key) + key) * itemsize
        return {"heads": stored / tp, "result": (query + 2 * hidden) * itemsize / tp}
    # The projection, rotated queries and keys, each run's result; maxima of the softmax. Context
    # parallelism stores gathered keys and values in place of its rank's.
    projected = query + 3 * key if cp == 1 else 2 * cp * key
    stored = (projected + 2 * query) * itemsize + heads * _FLOAT32
    if has_norm:  # normalised queries and keys, and contiguous queries
        normalised = 0 if is_frozen else query + key
        stored += (query + normalised) * itemsize + (heads + groups) * _FLOAT32
    rotated = int(dim * fields.get("rotary_percent", 1.0))
    angles = 4 * rotated * itemsize  # cosines and sines of queries and of keys
    return {"heads": stored / tp + angles, "result": (query + hidden) * itemsize / tp}


def _count_latent_bytes(
    fields: Mapping[str, Any], layout: Layout, itemsize: int, is_torch: bool
) -> Parts:
    """Count latent attention: latents are expanded to keys and values of all heads."""
    tp, cp = layout.tp, layout.cp
    hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
    key_dim = fields["qk_head_dim"] + fields["qk_pos_emb_head_dim"]
    value_dim, rotary = fields["v_head_dim"], fields["qk_pos_emb_head_dim"]
    query, value = heads * key_dim, heads * value_dim
    rank, query_rank = fields["kv_lora_rank"], fields.get("q_lora_rank") or 0
    if not is_torch:
        latents = 2 * (query_rank + rank) + rotary
        stored = 4 * query + value + latents
        return {"heads": stored * itemsize / tp, "result": (value + 2 * hidden) * itemsize / tp}
    latents = 3 * query_rank + 3 * rank + rotary
    # Queries and result, and keys and values of the rank, or gathered ones. Megatron pads values to
    # the size of keys before attention (multi_latent_attention.py), and so is the result.
    widest = heads * max(key_dim, value_dim)
    attended = (cp + 1) * (query + widest)
    stored = (latents + attended) * itemsize + heads * _FLOAT32
    angles = 4 * rotary * itemsize
    return {"heads": stored / tp + angles, "result": (value + hidden) * itemsize / tp}


def _count_delta_net_bytes(fields: Mapping[str, Any], tp: int, itemsize: int) -> Parts:
    """Count a gated delta net: projections, convolutions, gates, and states between chunks."""
    key_dim, value_dim = fields["linear_key_head_dim"], fields["linear_value_head_dim"]
    keys = fields["linear_num_key_heads"] * key_dim
    heads = fields["linear_num_value_heads"]
    values = heads * value_dim
    stored = (3 * (2 * keys + values) + 3 * values) * itemsize
    states = heads * key_dim * value_dim * _FLOAT32 / _DELTA_CHUNK
    result = (values + 2 * fields["hidden_size"]) * itemsize
    return {"heads": (stored + states) / tp, "result": result / tp}


def _count_expert_bytes(
    fields: Mapping[str, Any], layout: Layout, itemsize: int, is_torch: bool, imbalance: float
) -> Parts:
    """Count routing, tokens that experts receive, and the experts' activations.

    A token is routed on one tp rank. Expert tensor parallelism gathers the tokens of its ranks.
    """
    hidden, tp = fields["hidden_size"] * itemsize, layout.tp
    num_experts, chosen = fields["num_moe_experts"], fields["moe_router_topk"]
    columns = fields["moe_ffn_hidden_size"] * itemsize
    shared = (fields.get("moe_shared_expert_intermediate_size") or 0) * itemsize
    routed = chosen * imbalance / tp
    router = num_experts * (2 * _FLOAT32) + chosen * 24
    if is_torch:
        router = num_experts * 13 + chosen * 24 + 8
        if fields.get("moe_router_score_function") == "sigmoid":
            router += num_experts * _FLOAT32 + chosen * _FLOAT32
    return {
        "router": router / tp,
        "dispatch": routed * hidden * layout.etp,
        "experts": routed * (3 if is_torch else 2) * columns,
        "moe_act": routed * (3 if is_torch else 1) * columns,
        "shared_experts": (5 if is_torch else 3) * shared / tp,
    }


def compute_pass_memory(
    engine: EngineConfig,
    fields: Mapping[str, Any],
    pack: PackSize,
    chunks: Sequence[Chunk],
    *,
    itemsize: int,
    modules: str,
    head_rows: int,
    trains: bool = True,
) -> PassMemory:
    """Return the peak of a forward pass or, if the engine trains, of forward and backward passes.

    Args:
        fields: Family.config_map of the model.
        chunks: Those of one pipeline rank.
        head_rows: Rows of the output head on a rank; 1 of a value head.
    """
    layout = engine.layout
    layers: list[list[Parts]] = []
    largest: Parts = {}
    for chunk in chunks:
        indices = (*chunk.layers, *[fields["num_layers"] - 1] * chunk.num_mtp_layers)
        counts = [
            [
                count_layer_bytes(
                    fields,
                    layer,
                    layout,
                    itemsize,
                    modules,
                    imbalance,
                    is_frozen=bool(engine.lora.rank),
                )
                for layer in indices
            ]
            for imbalance in (pack.mean_imbalance, pack.imbalance)
        ]
        layers.append(counts[0])
        largest = max([largest, *counts[1]], key=lambda parts: sum(parts.values()))
    stored = {"activations": 0.0, "dispatch": 0.0}
    if trains:
        stored = _count_stored_bytes(engine, layers, pack, chunks[0].pp_rank)
    working = _count_working_bytes(engine, fields, largest, itemsize, modules, trains=trains)
    passing = fields["hidden_size"] * itemsize / layout.tp * (layout.pp > 1)  # between stages
    inside = PassMemory(
        activations=int(
            (stored["activations"] + working["activations"] + passing) * pack.tokens
            + _count_block_bytes(fields, pack, layout, itemsize)
        ),
        dispatch=int((stored["dispatch"] + working["dispatch"]) * pack.tokens),
        logits=0,
    )
    if not any(chunk.has_head for chunk in chunks):
        return inside
    # At the head the working memory of layers is free. States: normalised, gathered, scored.
    hidden = fields["hidden_size"] * itemsize
    states = (2 * hidden / layout.tp + hidden * (layout.tp > 1) + passing) * pack.tokens
    at_head = PassMemory(
        activations=int(stored["activations"] * pack.tokens + states + hidden * pack.num_scored),
        dispatch=int(stored["dispatch"] * pack.tokens),
        logits=_count_logit_bytes(
            engine, fields, pack, itemsize, modules, head_rows, trains=trains
        ),
    )
    return max(inside, at_head, key=lambda memory: memory.total)


def _count_stored_bytes(
    engine: EngineConfig, layers: Sequence[Sequence[Parts]], pack: PackSize, pp_rank: int
) -> Parts:
    """Count the bytes per token that a rank stores of all micro-batches in flight.

    Args:
        layers: Of each chunk of the rank.
    """
    recomputed, unit = list_recomputed_parts(engine), engine.recompute.num_layers
    is_full = engine.recompute.granularity == "full"
    stored = {"activations": 0.0, "dispatch": 0.0}
    for chunk_layers, copies in zip(
        layers, count_copies(engine.layout, pp_rank, pack.num_micro_batches), strict=True
    ):
        if is_full:
            inputs = [parts["input"] for parts in chunk_layers[::unit]]
            stored["activations"] += copies * sum(inputs)
            continue
        for parts in chunk_layers:
            for part, size in parts.items():
                if part not in recomputed:
                    stored[_get_kind(part)] += copies * size
    return stored


def _get_kind(part: str) -> str:
    return "dispatch" if part == "dispatch" else "activations"


def list_recomputed_parts(engine: EngineConfig) -> set[str]:
    """Return the parts of a layer that selective recompute does not store."""
    if engine.recompute.granularity != "selective":
        return set()
    parts = {
        "layernorm": {"norms", "mlp_norm"},
        "mlp": {"mlp", "mlp_norm"},  # the norm is fused into the first linear layer
        "mla_up_proj": {"heads"},
        "moe": {"router", "dispatch", "experts", "moe_act", "shared_experts"},
        "core_attn": set[str](),  # kernels store nothing of it
    }
    return set().union(*(parts.get(module, {module}) for module in engine.recompute.modules))


def count_copies(layout: Layout, pp_rank: int, num_micro_batches: int) -> list[int]:
    """Return the most micro-batches in flight of each chunk of a pipeline rank.

    1F1B, or interleaved: micro-batches pass a chunk in groups of pp (arXiv:2104.04473, 2.2).

    >>> count_copies(Layout(pp=2, vpp=2), 0, 8)
    [3, 2]
    """
    if layout.vpp == 1:
        return [min(layout.pp - pp_rank, num_micro_batches)]
    most = (layout.pp - pp_rank - 1) * 2 + (layout.vpp - 1) * layout.pp + 1
    copies = [0] * layout.vpp
    for index in range(min(most, num_micro_batches * layout.vpp)):
        copies[index // layout.pp % layout.vpp] += 1
    return copies


def _count_working_bytes(
    engine: EngineConfig,
    fields: Mapping[str, Any],
    largest: Parts,
    itemsize: int,
    modules: str,
    *,
    trains: bool,
) -> Parts:
    """Count the bytes per token that are live beside the stored ones, in the largest layer.

    With recompute that is a unit of layers, and in each case the gradients inside a layer.
    """
    hidden, tp = fields["hidden_size"] * itemsize, engine.layout.tp
    working = {"activations": 0.0, "dispatch": 0.0}
    if not largest:
        return working
    recompute = engine.recompute
    again: Parts = {}
    if not trains:
        working["activations"] += largest["input"] + largest["heads"] + hidden
        again = {part: size for part, size in largest.items() if part in ("dispatch", "moe_act")}
    elif recompute.granularity == "full":
        again = {part: recompute.num_layers * size for part, size in largest.items()}
        again["input"] = (recompute.num_layers - 1) * largest["input"] + hidden / tp
    elif recompute.granularity == "selective":
        recomputed = list_recomputed_parts(engine)
        again = {part: size for part, size in largest.items() if part in recomputed}
        again["input"] = hidden / tp if again else 0.0
    for part, size in again.items():
        working[_get_kind(part)] += size
    if not trains:
        return working
    if modules == "te":
        for part, size in _count_fused_gradients(largest).items():
            working[_get_kind(part)] += size
        return working
    if "dispatch" in largest:  # tokens before they are sent, results before and after, and received
        working["dispatch"] += (3 + (engine.layout.ep > 1)) * largest["dispatch"]
        working["activations"] += (bool(again) + bool(largest["shared_experts"])) * hidden / tp
    else:
        working["activations"] += hidden / tp + 2 * fields["ffn_hidden_size"] * itemsize / tp
    return working


def _count_fused_gradients(largest: Parts) -> Parts:
    """Count the gradients inside a layer of fused modules, at their peak.

    They are in its MLP, while the layer stores all its parts; or in its attention, when what the
    MLP stored is free. Sparse layers have tokens twice, before and after their exchange, and the
    gradient of the first product.
    """
    attention = {part: size for part, size in largest.items() if part in _ATTENTION_PARTS}
    mlp = {part: size for part, size in largest.items() if part not in _ATTENTION_PARTS}
    gradients = dict(mlp)
    if "dispatch" in mlp:
        gradients |= {"dispatch": 2 * mlp["dispatch"], "moe_act": 0.0}
    rest = sum(attention.values()) - sum(mlp.values())
    return gradients if sum(gradients.values()) >= rest else {"heads": rest}


def _count_block_bytes(
    fields: Mapping[str, Any], pack: PackSize, layout: Layout, itemsize: int
) -> float:
    """Count the weights of a block of queries, of attention with sinks (engine/attention.py)."""
    if fields.get("softmax_type", "vanilla") == "vanilla":
        return 0.0
    heads = fields["num_attention_heads"] / layout.tp
    queries = min(_QUERIES_PER_BLOCK, pack.longest)
    return float(heads * queries * pack.longest * (2 * itemsize + _FLOAT32))


def _count_logit_bytes(
    engine: EngineConfig,
    fields: Mapping[str, Any],
    pack: PackSize,
    itemsize: int,
    modules: str,
    head_rows: int,
    *,
    trains: bool,
) -> int:
    """Count a tile of logits and probabilities, and gradients of states and of the head."""
    hidden: int = fields["hidden_size"]
    if head_rows == 1:
        return int(pack.tokens * _FLOAT32)
    chunk = engine.logprob_chunk_bytes or DEFAULT_CHUNK_BYTES[modules]
    tile = min(chunk, 2 * _FLOAT32 * pack.num_scored * head_rows)
    if not trains:
        return tile
    gradients = pack.num_scored * hidden * _FLOAT32
    if not engine.lora.rank:
        gradients += head_rows * hidden * itemsize
    return tile + gradients
