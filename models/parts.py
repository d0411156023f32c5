"""Rules that several families share: embeddings, attention, dense and expert MLPs.

Parameter names are those of Megatron-core's Transformer Engine layer spec, on both lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from mcore_rl.config.errors import ConfigError
from mcore_rl.models.base import HFConfig, field, head_dim, require, rope_theta
from mcore_rl.reshard.boxes import LogicalTensor
from mcore_rl.reshard.rules import Axis, GateUp, InterleavedQKV, Rule, Split, Weight, Whole

GATED_NAMES = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """Where one decoder layer is: in the checkpoint, and in Megatron's model.

    A layer of multi-token prediction (`mtp`, its number among those) is numbered behind the others
    in the checkpoint and is with the output head in Megatron.
    """

    layer: int  # in the checkpoint
    mtp: int | None = None

    def tensor(self, name: str, *shape: int) -> LogicalTensor:
        return LogicalTensor(f"model.layers.{self.layer}.{name}", shape)

    def weight(
        self,
        name: str,
        rule: Rule,
        axis: Axis | None = None,
        *,
        expert: int | None = None,
        float32: bool = False,
    ) -> Weight:
        if self.mtp is None:
            name = "decoder.layers.{layer}." + name
            return Weight(name, rule, axis, layer=self.layer, expert=expert, float32=float32)
        name = f"mtp.layers.{self.mtp}.transformer_layer.{name}"
        return Weight(name, rule, axis, expert=expert, stage="mtp", float32=float32)


def common_config(config: HFConfig) -> dict[str, Any]:
    """TransformerConfig arguments of every pre-norm, gated decoder; attention comes on top."""
    if config.get("use_sliding_window"):
        raise ConfigError("config.json: use_sliding_window=true is not supported; allowed: false")
    kinds = sorted(set(config.get("layer_types") or []) - {"full_attention"})
    if kinds:
        raise ConfigError(
            f"config.json: layer_types with {kinds[0]!r} is not supported; allowed: "
            "'full_attention'"
        )
    require(config, {"hidden_act": "silu"})
    return {
        "num_layers": field(config, "num_hidden_layers"),
        "hidden_size": field(config, "hidden_size"),
        "num_attention_heads": field(config, "num_attention_heads"),
        "ffn_hidden_size": field(config, "intermediate_size"),
        "layernorm_epsilon": field(config, "rms_norm_eps"),
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation": field(config, "hidden_act"),
        "add_bias_linear": False,
    }


def grouped_query_config(config: HFConfig) -> dict[str, Any]:
    """TransformerConfig arguments of rotary attention with grouped queries."""
    return {
        "num_query_groups": field(config, "num_key_value_heads"),
        "kv_channels": head_dim(config),
    }


def decoder_config(config: HFConfig) -> dict[str, Any]:
    """TransformerConfig arguments of a decoder with grouped queries and rotary embeddings."""
    base = {"rotary_base": rope_theta(config)}
    return {**common_config(config), **grouped_query_config(config), **base}


def decoder_layers(config: Any, vp_stage: int | None) -> Any:
    """Megatron's layer spec of a decoder, dense or expert layers as the config says.

    Transformer Engine's in any case: without it engine/megatron/layers.py answers it.
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)


LayerRules = Callable[[HFConfig, LayerPlace], Iterator[Weight]]


def decoder_weights(
    config: HFConfig, padded_vocab: int, layer: LayerRules, num_mtp_layers: int = 0
) -> tuple[Weight, ...]:
    """The rules of a whole model from those of one layer."""
    num_layers = field(config, "num_hidden_layers")
    mtp = [LayerPlace(num_layers + index, index) for index in range(num_mtp_layers)]
    places = [LayerPlace(number) for number in range(num_layers)]
    return (
        *embedding_weights(config, padded_vocab, mtp),
        *(weight for place in places for weight in layer(config, place)),
        *head_weights(config, padded_vocab, mtp),
        *(weight for place in mtp for weight in mtp_weights(config, place)),
        *(weight for place in mtp for weight in layer(config, place)),
    )


def embedding_weights(
    config: HFConfig, padded_vocab: int, mtp: list[LayerPlace]
) -> Iterator[Weight]:
    """The embedding, and its second copy where Megatron's prediction layers stand without it.

    A checkpoint repeats it, and the head, in each of those layers.
    """
    repeats = ["embed_tokens", *(["shared_head.head"] if _is_tied(config) else [])]
    embed = _vocabulary_tensor(config, "model.embed_tokens.weight", repeats, mtp)
    name, rule = "embedding.word_embeddings.weight", Split(embed, 0, padded_vocab)
    yield Weight(name, rule, axis="tp", stage="embedding")
    if mtp:
        yield Weight(name, rule, axis="tp", stage="mtp", replica=True)


def head_weights(config: HFConfig, padded_vocab: int, mtp: list[LayerPlace]) -> Iterator[Weight]:
    """The last norm, and the output head or the second copy of the embedding in its place."""
    norm = LogicalTensor("model.norm.weight", (field(config, "hidden_size"),))
    yield Weight("decoder.final_layernorm.weight", Whole(norm), stage="final_norm")
    tied = _is_tied(config)
    name = "model.embed_tokens.weight" if tied else "lm_head.weight"
    head = _vocabulary_tensor(config, name, ["shared_head.head"], mtp)
    yield Weight(
        "output_layer.weight", Split(head, 0, padded_vocab), axis="tp", stage="head", replica=tied
    )


def _is_tied(config: HFConfig) -> bool:
    return bool(config.get("tie_word_embeddings", False))


def _vocabulary_tensor(
    config: HFConfig, name: str, repeats: list[str], mtp: list[LayerPlace]
) -> LogicalTensor:
    shape = (field(config, "vocab_size"), field(config, "hidden_size"))
    also = tuple(place.tensor(f"{repeat}.weight").name for place in mtp for repeat in repeats)
    return LogicalTensor(name, shape, also)


def mtp_weights(config: HFConfig, at: LayerPlace) -> Iterator[Weight]:
    """What a layer of multi-token prediction has around its decoder layer.

    Both Megatron and the checkpoint project [embedding; hidden state], in this order
    (transformer/multi_token_prediction.py:768, transformers/modeling_layers.py:344).
    """
    hidden = field(config, "hidden_size")
    name = f"mtp.layers.{at.mtp}."
    for mcore, hf in (("enorm",) * 2, ("hnorm",) * 2, ("final_layernorm", "shared_head.norm")):
        norm = at.tensor(f"{hf}.weight", hidden)
        yield Weight(f"{name}{mcore}.weight", Whole(norm), stage="mtp")
    project = Split(at.tensor("eh_proj.weight", hidden, 2 * hidden), 0)
    yield Weight(f"{name}eh_proj.weight", project, axis="tp", stage="mtp")


def attention_weights(
    config: HFConfig, at: LayerPlace, *, qk_norm: bool = False, qkv_bias: bool = False
) -> Iterator[Weight]:
    """Input norm, q/k/v and output projections of grouped-query attention."""
    hidden, dim = field(config, "hidden_size"), head_dim(config)
    heads, groups = field(config, "num_attention_heads"), field(config, "num_key_value_heads")

    def qkv(kind: str, *columns: int) -> InterleavedQKV:
        return InterleavedQKV(
            at.tensor(f"self_attn.q_proj.{kind}", heads * dim, *columns),
            at.tensor(f"self_attn.k_proj.{kind}", groups * dim, *columns),
            at.tensor(f"self_attn.v_proj.{kind}", groups * dim, *columns),
            groups,
        )

    norm = Whole(at.tensor("input_layernorm.weight", hidden))
    yield at.weight("self_attention.linear_qkv.layer_norm_weight", norm)
    yield at.weight("self_attention.linear_qkv.weight", qkv("weight", hidden), "tp")
    if qkv_bias:
        yield at.weight("self_attention.linear_qkv.bias", qkv("bias"), "tp")
    if qk_norm:
        for name in ("q", "k"):
            norm = Whole(at.tensor(f"self_attn.{name}_norm.weight", dim))
            yield at.weight(f"self_attention.{name}_layernorm.weight", norm)
    out = Split(at.tensor("self_attn.o_proj.weight", hidden, heads * dim), 1)
    yield at.weight("self_attention.linear_proj.weight", out, "tp")


def gated_mlp(
    config: HFConfig, at: LayerPlace, hf: str, ffn: int, names: tuple[str, str, str] = GATED_NAMES
) -> tuple[GateUp, Split]:
    """(linear_fc1, linear_fc2) of the gated MLP that the checkpoint has under `hf`.

    `names` are the checkpoint's for gate, up and down.
    """
    hidden, (gate, up, down) = field(config, "hidden_size"), names
    fc1 = GateUp(
        at.tensor(f"{hf}.{gate}.weight", ffn, hidden), at.tensor(f"{hf}.{up}.weight", ffn, hidden)
    )
    return fc1, Split(at.tensor(f"{hf}.{down}.weight", hidden, ffn), 1)


def dense_mlp_weights(config: HFConfig, at: LayerPlace) -> Iterator[Weight]:
    """Post-attention norm and gated MLP of a dense layer."""
    norm = Whole(at.tensor("post_attention_layernorm.weight", field(config, "hidden_size")))
    fc1, fc2 = gated_mlp(config, at, "mlp", field(config, "intermediate_size"))
    yield at.weight("mlp.linear_fc1.layer_norm_weight", norm)
    yield at.weight("mlp.linear_fc1.weight", fc1, "tp")
    yield at.weight("mlp.linear_fc2.weight", fc2, "tp")
