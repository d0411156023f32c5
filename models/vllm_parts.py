"""vLLM's layout of weights that families share. Names and shapes are those of vLLM 0.32.

Rules as in parts.py and moe_parts.py, for vLLM. Norms and routers are replicated on every
rank; attention and dense MLPs are split over tp; experts over tp, or unsplit over ep ("etp").
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from mcore_rl.models.base import HFConfig, field, head_dim
from mcore_rl.models.moe_parts import has_experts, shared_expert_size
from mcore_rl.models.parts import GATED_NAMES, LayerPlace, gated_mlp
from mcore_rl.reshard.boxes import LogicalTensor
from mcore_rl.reshard.rules import Axis, Rule, Split, StackedQKV, Stage, Weight, Whole

LayerRules = Callable[[HFConfig, LayerPlace], Iterator[Weight]]
_VOCAB_MULTIPLE = 64  # model_executor/layers/vocab_parallel_embedding.py:36


def vllm_weight(
    at: LayerPlace,
    name: str,
    rule: Rule,
    axis: Axis | None = None,
    *,
    expert: int | None = None,
    float32: bool = False,
) -> Weight:
    """A parameter of a decoder layer; vLLM numbers layers over the whole model on every rank."""
    name = f"model.layers.{at.layer}.{name}"
    return Weight(name, rule, axis, layer=at.layer, expert=expert, float32=float32)


def vllm_decoder(config: HFConfig, layer: LayerRules) -> tuple[Weight, ...]:
    """The rules of a whole model from those of one layer, without prediction layers."""
    vocab, hidden = field(config, "vocab_size"), field(config, "hidden_size")
    padded = -(-vocab // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE
    tied = bool(config.get("tie_word_embeddings", False))
    embed = Split(LogicalTensor("model.embed_tokens.weight", (vocab, hidden)), 0, padded)
    head = embed if tied else Split(LogicalTensor("lm_head.weight", (vocab, hidden)), 0, padded)
    norm = Whole(LogicalTensor("model.norm.weight", (hidden,)))

    def outside(name: str, rule: Rule, axis: Axis | None, stage: Stage) -> Weight:
        return Weight(name, rule, axis, stage=stage, replica=tied and stage == "head")

    return (
        outside("model.embed_tokens.weight", embed, "tp", "embedding"),
        *(
            w
            for n in range(field(config, "num_hidden_layers"))
            for w in layer(config, LayerPlace(n))
        ),
        outside("model.norm.weight", norm, None, "final_norm"),
        outside("lm_head.weight", head, "tp", "head"),
    )


def vllm_norms(config: HFConfig, at: LayerPlace) -> Iterator[Weight]:
    """The two norms of a layer."""
    for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
        yield vllm_weight(at, name, Whole(at.tensor(name, field(config, "hidden_size"))))


def vllm_attention(
    config: HFConfig, at: LayerPlace, *, qk_norm: bool = False, qkv_bias: bool = False
) -> Iterator[Weight]:
    """q/k/v and output projections of grouped-query attention."""
    hidden, dim = field(config, "hidden_size"), head_dim(config)
    heads, groups = field(config, "num_attention_heads"), field(config, "num_key_value_heads")

    def qkv(kind: str, *columns: int) -> Weight:
        sizes = {"q": heads * dim, "k": groups * dim, "v": groups * dim}
        q, k, v = (at.tensor(f"self_attn.{n}_proj.{kind}", s, *columns) for n, s in sizes.items())
        return vllm_weight(at, f"self_attn.qkv_proj.{kind}", StackedQKV(q, k, v, groups), "tp")

    yield qkv("weight", hidden)
    if qkv_bias:
        yield qkv("bias")
    out = Split(at.tensor("self_attn.o_proj.weight", hidden, heads * dim), 1)
    yield vllm_weight(at, "self_attn.o_proj.weight", out, "tp")
    for name in ("q_norm", "k_norm") if qk_norm else ():
        norm = Whole(at.tensor(f"self_attn.{name}.weight", dim))
        yield vllm_weight(at, f"self_attn.{name}.weight", norm)


def vllm_mlp(config: HFConfig, at: LayerPlace, hf: str, ffn: int) -> Iterator[Weight]:
    """A gated MLP, dense or of the shared experts, that the checkpoint has under `hf`."""
    gate_up, down = gated_mlp(config, at, hf, ffn)
    yield vllm_weight(at, f"{hf}.gate_up_proj.weight", gate_up, "tp")
    yield vllm_weight(at, f"{hf}.down_proj.weight", down, "tp")


def vllm_dense_mlp(config: HFConfig, at: LayerPlace) -> Iterator[Weight]:
    yield from vllm_mlp(config, at, "mlp", field(config, "intermediate_size"))


def vllm_router(config: HFConfig, at: LayerPlace, num_experts: int, hf: str = "mlp") -> Weight:
    gate = at.tensor(f"{hf}.gate.weight", num_experts, field(config, "hidden_size"))
    return vllm_weight(at, f"{hf}.gate.weight", Whole(gate))


def vllm_experts(
    config: HFConfig,
    at: LayerPlace,
    num_experts: int,
    ffn: int,
    hf: str = "mlp",
    names: tuple[str, str, str] = GATED_NAMES,
) -> Iterator[Weight]:
    """The experts of a layer, stacked into w13_weight [experts, gate and up, hidden] and w2_weight.

    `names` are the checkpoint's for gate, up and down.
    """
    stack = f"{hf}.experts.routed_experts."
    for expert in range(num_experts):
        w13, w2 = gated_mlp(config, at, f"{hf}.experts.{expert}", ffn, names)
        yield vllm_weight(at, stack + "w13_weight[{expert}]", w13, "etp", expert=expert)
        yield vllm_weight(at, stack + "w2_weight[{expert}]", w2, "etp", expert=expert)


def vllm_shared_expert_mlp(config: HFConfig, at: LayerPlace) -> Iterator[Weight]:
    """The MLP of models like DeepSeek-V3: dense in the first layers, then experts of both kinds."""
    if not has_experts(config, at.layer):
        yield from vllm_dense_mlp(config, at)
        return
    num_experts, ffn = field(config, "n_routed_experts"), field(config, "moe_intermediate_size")
    yield vllm_router(config, at, num_experts)
    name = "mlp.gate.e_score_correction_bias"
    yield vllm_weight(at, name, Whole(at.tensor(name, num_experts)), float32=True)
    yield from vllm_mlp(config, at, "mlp.shared_experts", shared_expert_size(config))
    yield from vllm_experts(config, at, num_experts, ffn)
