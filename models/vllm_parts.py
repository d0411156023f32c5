"""Rules of vLLM's parameters that families share. Names and shapes are those of vLLM 0.32.

Norms and routers are replicated; attention and dense MLPs are split over tp; experts over tp, or
unsplit over ep ("etp").
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from mcore_rl.models.base import HFConfig, get_field, get_head_dim
from mcore_rl.models.parts import (
    GATED_NAMES,
    Layer,
    build_gated_mlp_rules,
    count_mtp_layers,
    get_shared_expert_size,
    has_experts,
)
from mcore_rl.reshard.rules import (
    Axis,
    LogicalTensor,
    Replicated,
    Rule,
    Split,
    StackedQKV,
    Stage,
    Weight,
)

LayerRules = Callable[[HFConfig, Layer], Iterator[Weight]]
DRAFT = "draft."  # before names of vLLM's draft model (inference/vllm/drafts.py)
_VOCAB_MULTIPLE = 64  # model_executor/layers/vocab_parallel_embedding.py:36


def build_vllm_weight(
    layer: Layer,
    name: str,
    rule: Rule,
    axis: Axis | None = None,
    *,
    expert: int | None = None,
    float32: bool = False,
) -> Weight:
    """Return a parameter of a decoder layer; vLLM numbers layers over the whole model."""
    name = f"model.layers.{layer.index}.{name}"
    return Weight(name, rule, axis, layer=layer.index, expert=expert, float32=float32)


def map_vllm_decoder(
    config: HFConfig, map_layer: LayerRules, embedding: str = "embed_tokens"
) -> tuple[Weight, ...]:
    """Return the rules of a model without multi-token prediction.

    Args:
        map_layer: Gives the rules of a layer.
        embedding: Name of the module in vLLM's model.
    """
    vocab, hidden = get_field(config, "vocab_size"), get_field(config, "hidden_size")
    padded = -(-vocab // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE
    layers = [Layer(index) for index in range(get_field(config, "num_hidden_layers"))]
    tied = bool(config.get("tie_word_embeddings", False))
    embed = Split(LogicalTensor("model.embed_tokens.weight", (vocab, hidden)), 0, padded)
    head = embed if tied else Split(LogicalTensor("lm_head.weight", (vocab, hidden)), 0, padded)
    norm = Replicated(LogicalTensor("model.norm.weight", (hidden,)))

    def build_weight(name: str, rule: Rule, axis: Axis | None, stage: Stage) -> Weight:
        return Weight(name, rule, axis, stage=stage, replica=tied and stage == "head")

    return (
        build_weight(f"model.{embedding}.weight", embed, "tp", "embedding"),
        *(weight for layer in layers for weight in map_layer(config, layer)),
        build_weight("model.norm.weight", norm, None, "final_norm"),
        build_weight("lm_head.weight", head, "tp", "head"),
    )


def map_vllm_draft_layer(
    config: HFConfig, layer: Layer, map_layer: LayerRules, module: str
) -> Iterator[Weight]:
    """Map the decoder layer of a prediction layer.

    Args:
        map_layer: Gives the rules of a decoder layer.
        module: Name of the layer in vLLM's draft model.
    """
    decoder_layer = f"model.layers.{layer.index}"
    for weight in map_layer(config, layer):
        name = f"{DRAFT}{module}{weight.name.removeprefix(decoder_layer)}"
        yield weight._replace(name=name, layer=None, stage="mtp")


def map_vllm_drafts(config: HFConfig, map_layer: LayerRules) -> tuple[Weight, ...]:
    """Map the prediction layers of DeepSeek-V3 (model_executor/models/deepseek_mtp.py:73).

    The draft model shares embedding and head with the served model
    (v1/spec_decode/llm_base_proposer.py:1416).
    """
    hidden, weights = get_field(config, "hidden_size"), list[Weight]()
    for mtp_index in range(count_mtp_layers(config)):
        layer = Layer(get_field(config, "num_hidden_layers") + mtp_index, mtp_index)
        module = f"model.layers.{layer.index}"
        shapes = dict.fromkeys(("enorm", "hnorm", "shared_head.norm"), (hidden,))
        for name, shape in (shapes | {"eh_proj": (hidden, 2 * hidden)}).items():
            rule = Replicated(layer.build_tensor(f"{name}.weight", *shape))
            weights.append(Weight(f"{DRAFT}{module}.{name}.weight", rule, stage="mtp"))
        weights += map_vllm_draft_layer(config, layer, map_layer, f"{module}.mtp_block")
    return tuple(weights)


def map_vllm_norms(config: HFConfig, layer: Layer) -> Iterator[Weight]:
    """Map the two norms of a layer."""
    for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
        yield build_vllm_weight(
            layer, name, Replicated(layer.build_tensor(name, get_field(config, "hidden_size")))
        )


def map_vllm_attention(
    config: HFConfig,
    layer: Layer,
    *,
    qk_norm: bool = False,
    qkv_bias: bool = False,
    gated: bool = False,
    module: str = "self_attn",
) -> Iterator[Weight]:
    """Map q/k/v and output projections of grouped-query attention.

    Args:
        gated: See parts.map_attention_weights.
        module: The name in vLLM.
    """
    hidden, dim = get_field(config, "hidden_size"), get_head_dim(config)
    heads, groups = (
        get_field(config, "num_attention_heads"),
        get_field(config, "num_key_value_heads"),
    )

    def qkv(kind: str, *columns: int) -> Weight:
        sizes = {"q": (1 + gated) * heads * dim, "k": groups * dim, "v": groups * dim}
        q, k, v = (
            layer.build_tensor(f"self_attn.{n}_proj.{kind}", s, *columns) for n, s in sizes.items()
        )
        return build_vllm_weight(
            layer, f"{module}.qkv_proj.{kind}", StackedQKV(q, k, v, groups), "tp"
        )

    yield qkv("weight", hidden)
    if qkv_bias:
        yield qkv("bias")
    out = Split(layer.build_tensor("self_attn.o_proj.weight", hidden, heads * dim), 1)
    yield build_vllm_weight(layer, f"{module}.o_proj.weight", out, "tp")
    for name in ("q_norm", "k_norm") if qk_norm else ():
        norm = Replicated(layer.build_tensor(f"self_attn.{name}.weight", dim))
        yield build_vllm_weight(layer, f"{module}.{name}.weight", norm)


def map_vllm_mlp(
    config: HFConfig, layer: Layer, hf: str, ffn: int, axis: Axis = "tp"
) -> Iterator[Weight]:
    """Map a gated MLP, dense or of the shared experts; `hf`: its name in the checkpoint."""
    gate_up, down = build_gated_mlp_rules(config, layer, hf, ffn)
    yield build_vllm_weight(layer, f"{hf}.gate_up_proj.weight", gate_up, axis)
    yield build_vllm_weight(layer, f"{hf}.down_proj.weight", down, axis)


def map_vllm_dense_mlp(config: HFConfig, layer: Layer) -> Iterator[Weight]:
    yield from map_vllm_mlp(config, layer, "mlp", get_field(config, "intermediate_size"))


def map_vllm_router(
    config: HFConfig, layer: Layer, num_experts: int, hf: str = "mlp", *, float32: bool = False
) -> Weight:
    gate = layer.build_tensor(f"{hf}.gate.weight", num_experts, get_field(config, "hidden_size"))
    return build_vllm_weight(layer, f"{hf}.gate.weight", Replicated(gate), float32=float32)


def map_vllm_experts(
    config: HFConfig,
    layer: Layer,
    num_experts: int,
    ffn: int,
    hf: str = "mlp",
    names: tuple[str, str, str] = GATED_NAMES,
) -> Iterator[Weight]:
    """Map the experts of a layer, stacked: w13_weight [experts, gate and up, hidden], w2_weight.

    `hf`, `names`: as in build_gated_mlp_rules.
    """
    stack = f"{hf}.experts.routed_experts."
    for expert in range(num_experts):
        w13, w2 = build_gated_mlp_rules(config, layer, f"{hf}.experts.{expert}", ffn, names)
        yield build_vllm_weight(layer, stack + "w13_weight[{expert}]", w13, "etp", expert=expert)
        yield build_vllm_weight(layer, stack + "w2_weight[{expert}]", w2, "etp", expert=expert)


def map_vllm_shared_expert_mlp(
    config: HFConfig, layer: Layer, shared_axis: Axis = "tp", *, float32_router: bool = False
) -> Iterator[Weight]:
    """Map the MLP of DeepSeek-V3: dense in the first layers, then routed and shared experts.

    Args:
        shared_axis: Axis of the shared experts.
        float32_router: Whether vLLM has the router in float32 in any dtype of the model, as that of
            GLM (model_executor/models/glm4_moe.py:141).
    """
    if not has_experts(config, layer.index):
        yield from map_vllm_dense_mlp(config, layer)
        return
    num_experts, ffn = (
        get_field(config, "n_routed_experts"),
        get_field(config, "moe_intermediate_size"),
    )
    yield map_vllm_router(config, layer, num_experts, float32=float32_router)
    name = "mlp.gate.e_score_correction_bias"
    yield build_vllm_weight(
        layer, name, Replicated(layer.build_tensor(name, num_experts)), float32=True
    )
    size = get_shared_expert_size(config)
    yield from map_vllm_mlp(config, layer, "mlp.shared_experts", size, shared_axis)
    yield from map_vllm_experts(config, layer, num_experts, ffn)
