"""Memory of a pass of the FSDP2 engine: activations, and weights that are gathered.

The modules are those of transformers. What they store is listed tensor by tensor; other layers than
those of `_HAS_HEAD_NORMS` are not counted. tests/dist_cpu/test_roles.py compares the counts with
measured peaks. Weights, gradients and moments are float32, divided over the ranks of a replica.
"""

from __future__ import annotations

from dataclasses import dataclass

from mcore_rl.config.schema import EngineConfig
from mcore_rl.engine.base import load_backend
from mcore_rl.models.base import HFConfig, get_model_sizes
from mcore_rl.planner.activations import DEFAULT_CHUNK_BYTES, PackSize, PassMemory

_FLOAT32 = 4
_NORM_TEMPORARIES = 5  # float32 tensors of the states' size in the backward pass of a norm
# Architectures whose layers are counted, and whether heads have norms.
_HAS_HEAD_NORMS = {
    "LlamaForCausalLM": False,
    "MistralForCausalLM": False,
    "Qwen2ForCausalLM": False,
    "Qwen3ForCausalLM": True,
    "Qwen3MoeForCausalLM": True,
}


def counts_fsdp_passes(engine: EngineConfig, model: HFConfig) -> bool:
    """Return whether compute_fsdp_pass counts an engine and model."""
    layout, fsdp = engine.layout, engine.fsdp
    return (
        load_backend(engine).shard_format == "rows"
        and model["architectures"][0] in _HAS_HEAD_NORMS
        and not model.get("mlp_only_layers")
        and model.get("decoder_sparse_step", 1) == 1
        and layout.cp == layout.ep == 1
        and not engine.lora.rank
        and not fsdp.cpu_offload
        and fsdp.packing
    )


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer: bytes per token, and elements of weights."""

    stored: float  # of all that the backward pass needs
    product: float  # the result of gate and up projection, the first to be free again
    gradients: float  # inside the MLP, at their peak
    weights: int
    first_gradient: int  # weights whose gradient is complete at that peak

    @classmethod
    def count(cls, model: HFConfig, itemsize: int) -> _Layer:
        hidden, num_heads = model["hidden_size"], model["num_attention_heads"]
        dim = model.get("head_dim") or hidden // num_heads
        query, key = num_heads * dim, model["num_key_value_heads"] * dim
        # Of a norm: the states in float32, normalised states, the result. In bfloat16 the first is
        # a copy; in float32 it is the residual stream itself.
        norm = hidden * (_FLOAT32 + 2 * itemsize) + _FLOAT32
        copies = 3  # queries with positions, the result of each run of sequences, and of all
        heads = (copies * query + 2 * key) * itemsize + num_heads * _FLOAT32
        if _HAS_HEAD_NORMS[model["architectures"][0]]:
            wide = _FLOAT32 if itemsize < _FLOAT32 else 0
            heads += (query + key) * (2 * itemsize + wide)
            heads += (num_heads + key // dim) * _FLOAT32
        attention_weights = hidden * (2 * query + 2 * key) + 2 * hidden
        experts = get_model_sizes(model).num_experts
        if not experts:
            columns = model["intermediate_size"]
            return cls(
                stored=2 * norm + heads + 4 * columns * itemsize,
                product=columns * itemsize,
                gradients=(3 * columns + hidden) * itemsize,
                weights=attention_weights + 3 * hidden * columns,
                first_gradient=hidden * columns,
            )
        columns = model["moe_intermediate_size"]
        chosen = model["num_experts_per_tok"]
        router = experts * _FLOAT32 + chosen * (4 * 8 + 2 * _FLOAT32) + _FLOAT32
        return cls(
            stored=2 * norm + heads + router + chosen * (2 * hidden + 4 * columns) * itemsize,
            product=0.0,
            gradients=(3 * chosen * hidden + hidden) * itemsize,
            weights=attention_weights + experts * (3 * columns + 1) * hidden,
            first_gradient=0,
        )


def compute_fsdp_pass(
    engine: EngineConfig,
    model: HFConfig,
    pack: PackSize,
    *,
    itemsize: int,
    device_type: str,
    head_rows: int,
    trains: bool,
) -> PassMemory:
    """Return the peak of a forward pass or, if the engine trains, of forward and backward passes.

    The root, which has embedding, head and last norm, is gathered during a pass. In the backward
    pass of a layer its weights are gathered, those of the next one are in a buffer, and the
    gradients of the one before are being reduced in float32.

    Args:
        model: config.json.
        itemsize: Bytes of an element in products.
        device_type: "cuda" or "cpu".
        head_rows: Rows of the output head; 1 of a value head.
    """
    layer = _Layer.count(model, itemsize)
    hidden, num_layers = model["hidden_size"], model["num_hidden_layers"]
    head = head_rows * hidden
    is_tied = model.get("tie_word_embeddings", False) and head_rows > 1
    root = model["vocab_size"] * hidden + head * (not is_tied) + hidden
    tile = (
        engine.logprob_chunk_bytes
        or DEFAULT_CHUNK_BYTES["te" if device_type == "cuda" else "torch"]
    )
    tile = min(tile, 2 * _FLOAT32 * pack.num_scored * head_rows)
    states = hidden * itemsize * (pack.num_scored + 2 * pack.tokens)
    if not trains:
        working = int((layer.stored + hidden * itemsize) * pack.tokens)
        return max(
            PassMemory(working, 0, 0, (root + 2 * layer.weights) * itemsize),
            PassMemory(states, 0, tile, root * itemsize),
            key=lambda memory: memory.total,
        )
    layer_input = hidden * itemsize
    is_full = engine.recompute.granularity == "full"
    stored = layer_input if is_full else layer.stored
    angles = 2 * itemsize * (model.get("head_dim") or hidden // model["num_attention_heads"])
    working = layer.stored - layer.product + layer.gradients + is_full * layer_input
    norm = (_NORM_TEMPORARIES + 1) * _FLOAT32 * hidden
    # The gradient of the head is there from the start of the backward pass.
    gathered = (root + head + layer.weights) * itemsize
    inside = gathered + (layer.weights + layer.first_gradient) * itemsize
    at_end = gathered + layer.weights * max(2 * itemsize, itemsize + _FLOAT32)
    scored = pack.num_scored * hidden * _FLOAT32
    # Bytes per token, of weights, and of logits.
    moments = {
        "last layer": ((num_layers - 1) * stored + working, inside, 0),
        "layer before": (
            (num_layers - 2) * stored + working, inside + layer.weights * _FLOAT32, 0
        ),
        "end of the last layer": ((num_layers - 1) * stored, at_end, 0),
        "last norm": (num_layers * stored + norm, gathered, 0),
        "head": (num_layers * stored + states / pack.tokens, gathered, tile + scored),
        "end of the root": (0.0, root * (itemsize + _FLOAT32), 0),
    }  # fmt: skip
    passes = [
        PassMemory(int((max(0.0, per_token) + angles) * pack.tokens), 0, int(logits), weights)
        for per_token, weights, logits in moments.values()
    ]
    return max(passes, key=lambda memory: memory.total)
