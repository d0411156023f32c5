"""Work of a model per token: matrix products, attention, activations in memory, KV cache.

Matrices come from the weight rules of the model's family and sizes of attention from its
TransformerConfig arguments, so a family of a user's own needs no code for it. No weights are read.

A token passes each matrix of the weight rules once, an expert's with probability k / E: 2 flops an
element. Attention has 2 (query dims + value dims) flops a head and pair.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import mcore_rl.models  # noqa: F401  (fills the family registry)
from mcore_rl.checkpoint.peft import get_adapted_linear
from mcore_rl.config.schema import LoRAConfig
from mcore_rl.models.base import HFConfig, count_kv_elements_per_token, get_family
from mcore_rl.models.heads import map_model_weights
from mcore_rl.reshard.rules import Shard, Weight

_MTP_LAYER = re.compile(r"mtp\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight matrix that multiplies tokens; of an expert, one of all of a layer's experts."""

    part: str  # of a layer, where recompute.modules names it, by that name
    rows: int
    columns: int
    is_sharded: bool  # over tp, or etp for an expert
    linear: str = ""  # that lora.targets may name; empty: has no adapter

    @property
    def numel(self) -> int:
        return self.rows * self.columns

    def build_factors(self, lora: LoRAConfig) -> Matrix | None:
        """Return both factors of the matrix's adapter as one matrix; None if it has none."""
        if not lora.rank or self.linear not in lora.targets:
            return None
        return Matrix(self.part, lora.rank, self.rows + self.columns, self.is_sharded)


@dataclass(frozen=True, slots=True)
class LayerWork:
    """Work of one decoder layer. Flops are of a forward pass; sums are over all ranks."""

    matrices: tuple[Matrix, ...]  # every token passes each of them
    experts: tuple[Matrix, ...]  # of one expert
    num_experts: int
    topk: int  # experts of a token
    group_topk: int  # groups of experts of a token; 0: any
    pair_flops: float  # of attention, per pair of query and key
    state_flops: float  # of linear attention, per token
    window: int  # keys that a query attends to at most; 0: all before it
    heads_elements: int  # queries, keys and values of a token
    key_value_elements: int  # that context parallelism exchanges, per token
    act_elements: int  # gate, up and product of the MLPs of a token
    parameters: int  # with norms and biases
    expert_parameters: int  # of them, in all experts
    num_groups: int = 1  # that group_topk are chosen of
    decode_pair_flops: float = (
        0.0  # of latent attention, whose servers compare latents; 0: as pairs
    )

    @property
    def is_moe(self) -> bool:
        return self.num_experts > 0

    def count_flops(self) -> float:
        """Return the flops of a token, without pairs of attention."""
        dense = sum(matrix.numel for matrix in self.matrices)
        routed = self.topk * sum(matrix.numel for matrix in self.experts)
        return 2.0 * (dense + routed) + self.state_flops

    def count_adapter_elements(self, lora: LoRAConfig) -> tuple[int, int]:
        """Return the elements of adapters: outside of experts, and of one expert."""
        dense, expert = (
            sum(factors.numel for m in matrices if (factors := m.build_factors(lora)))
            for matrices in (self.matrices, self.experts)
        )
        return dense, expert

    def count_keys(self, sequence: float) -> float:
        """Return the mean number of keys that a query of a causal sequence attends to.

        Of s tokens, the i-th attends to i, or to at most `window`: (s + 1) / 2 without a window.
        """
        if not self.window or sequence <= self.window:
            return (sequence + 1) / 2
        window = self.window
        return window - window * (window - 1) / (2 * sequence)


@dataclass(frozen=True)
class ModelWork:
    """Work of a model."""

    hidden_size: int
    layers: tuple[LayerWork, ...]
    embedding_parameters: int
    norm_parameters: int  # of the last norm
    head: Matrix  # the output layer
    is_tied: bool
    kv_elements: int  # of the cache, per token, over all layers, for one worker
    mtp_layers: tuple[LayerWork, ...] = ()  # for multi-token prediction, with their projection

    @cached_property
    def parameters(self) -> int:
        """Parameters of the decoder, embedding and output layer; no prediction layers."""
        head = 0 if self.is_tied else self.head.numel
        layers = sum(work.parameters for work in self.layers)
        return layers + self.embedding_parameters + self.norm_parameters + head

    @cached_property
    def active_parameters(self) -> float:
        """Elements of matrices that a token passes, the output layer included."""
        return sum(w.count_flops() / 2 for w in self.layers) + self.head.numel

    def with_value_head(self) -> ModelWork:
        """Return the work of a value or reward model: one output, no prediction layers."""
        head = Matrix("head", 1, self.hidden_size, False)
        return replace(self, head=head, is_tied=False, mtp_layers=())

    def count_forward_flops(
        self, num_tokens: float, sequence: float, *, causal: bool = True, has_mtp: bool = False
    ) -> float:
        """Return the flops of a forward pass.

        Args:
            sequence: Tokens of a sequence; of different lengths, sum of squares over their sum.
            causal: Count each pair of tokens once, as fused kernels do; else twice, as
                torch.utils.flop_counter does.
            has_mtp: Count prediction layers; each multiplies by the output layer again.
        """
        mtp_layers = self.mtp_layers if has_mtp else ()
        flops = 2.0 * self.head.numel * num_tokens * (1 + len(mtp_layers))
        for work in (*self.layers, *mtp_layers):
            keys = work.count_keys(sequence) if causal else sequence
            flops += num_tokens * (work.count_flops() + work.pair_flops * keys)
        return flops

    def count_training_flops(
        self,
        num_tokens: float,
        sequence: float,
        lora: LoRAConfig | None = None,
        *,
        causal: bool = True,
        has_mtp: bool = False,
    ) -> float:
        """Return model flops of forward and backward pass, three times those of a forward pass.

        Without recomputed activations, as in arXiv:2205.05198, appendix A. A frozen matrix has no
        gradient of the weight: its backward pass is one product. Factors of adapters have three.
        """
        flops = 3.0 * self.count_forward_flops(num_tokens, sequence, causal=causal, has_mtp=has_mtp)
        if lora is None or not lora.rank:
            return flops
        flops -= 2.0 * self.head.numel * num_tokens
        for work in self.layers:
            dense, expert = work.count_adapter_elements(lora)
            frozen = work.count_flops() - work.state_flops
            flops += num_tokens * (6.0 * (dense + work.topk * expert) - frozen)
        return flops


def count_work(config: HFConfig) -> ModelWork:
    """Return the work of a model from its config.json."""
    family = get_family(config)
    fields = family.config_map(config)
    by_layer: list[list[Weight]] = [[] for _ in range(fields["num_layers"])]
    mtp: dict[str, list[Weight]] = {}
    embedding, norm, head = 0, 0, None
    for weight in map_model_weights(config, config["vocab_size"]):
        if weight.stage == "mtp":
            if match := _MTP_LAYER.match(weight.name):  # else a copy of the embedding
                mtp.setdefault(match[1], []).append(weight)
        elif weight.layer is not None:
            by_layer[weight.layer].append(weight)
        elif weight.stage == "embedding":
            embedding += math.prod(_get_shape(weight))
        elif weight.stage == "final_norm":
            norm += math.prod(_get_shape(weight))
        elif weight.stage == "head":
            rows, columns = _get_shape(weight)
            head = Matrix("head", rows, columns, weight.axis is not None)
    assert head is not None  # every family has an output layer
    layers: dict[tuple[Any, ...], LayerWork] = {}  # equal layers share one
    works = []
    for index, rules in enumerate(by_layer):
        work = _build_layer(index, rules, fields)
        works.append(layers.setdefault((work,), work))
    return ModelWork(
        hidden_size=fields["hidden_size"],
        layers=tuple(works),
        embedding_parameters=embedding,
        norm_parameters=norm,
        head=head,
        is_tied=bool(config.get("tie_word_embeddings", False)),
        kv_elements=count_kv_elements_per_token(config),
        mtp_layers=tuple(
            _build_layer(fields["num_layers"] - 1, rules, fields) for rules in mtp.values()
        ),
    )


def _get_shape(weight: Weight) -> tuple[int, ...]:
    return weight.rule.get_local_shape(Shard(0, 1))


def _build_layer(index: int, rules: Sequence[Weight], fields: dict[str, Any]) -> LayerWork:
    matrices: list[Matrix] = []
    experts: list[Matrix] = []
    parameters = expert_parameters = 0
    for weight in rules:
        shape = _get_shape(weight)
        size = math.prod(shape)
        parameters += size
        expert_parameters += size if weight.expert is not None else 0
        if len(shape) != 2 or weight.expert:  # the first expert stands for all
            continue
        linear = get_adapted_linear(weight) or ""
        matrix = Matrix(_name_part(weight), *shape, weight.axis is not None, linear)
        (matrices if weight.expert is None else experts).append(matrix)
    is_moe = bool(experts)
    topk = fields["moe_router_topk"] if is_moe else 0
    # fc1 has gate and up, fc2 has as many rows as the hidden size.
    act = sum(3 * m.columns for m in matrices if _is_second(m, fields))
    act += topk * sum(3 * m.columns for m in experts if _is_second(m, fields))
    return LayerWork(
        matrices=tuple(matrices),
        experts=tuple(experts),
        num_experts=fields["num_moe_experts"] if is_moe else 0,
        topk=topk,
        group_topk=(fields.get("moe_router_group_topk") or 0) if is_moe else 0,
        num_groups=(fields.get("moe_router_num_groups") or 1) if is_moe else 1,
        act_elements=act,
        parameters=parameters,
        expert_parameters=expert_parameters,
        **_map_attention(index, fields),
    )


def _is_second(matrix: Matrix, fields: dict[str, Any]) -> bool:
    """Return whether a matrix is the second of an MLP, from its columns to the hidden size."""
    is_mlp = matrix.part in ("mlp", "shared_experts", "experts")
    return is_mlp and matrix.rows == fields["hidden_size"] and matrix.rows != matrix.columns


def _name_part(weight: Weight) -> str:
    name = weight.name
    if weight.expert is not None:
        return "experts"
    if "self_attention" in name:
        return "mla_up_proj" if "_up_proj" in name else "attention"
    if "router" in name:
        return "router"
    if "eh_proj" in name:
        return "eh_proj"
    return "shared_experts" if "shared_expert" in name else "mlp"


def _map_attention(index: int, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of LayerWork on attention, from arguments of TransformerConfig.

    A pair of query and key costs a product over the dims of a key and one over those of a value,
    for each head. Linear attention decays, corrects, writes and reads a state of [key, value] dims
    for each token and head (arXiv:2412.06464, equation 10): four products.
    """
    heads = fields["num_attention_heads"]
    linear = fields.get("linear_attention_freq", ())
    if linear and linear[index]:
        keys, values = fields["linear_num_key_heads"], fields["linear_num_value_heads"]
        key_dim, value_dim = fields["linear_key_head_dim"], fields["linear_value_head_dim"]
        return {
            "pair_flops": 0.0,
            "state_flops": 8.0 * values * key_dim * value_dim,
            "window": 0,
            "heads_elements": 2 * keys * key_dim + values * value_dim,
            "key_value_elements": 0,
        }
    if "kv_lora_rank" in fields:
        query = heads * (fields["qk_head_dim"] + fields["qk_pos_emb_head_dim"])
        key, value = query, heads * fields["v_head_dim"]
        result = value
        # Keys are latents with positions, values are latents (arXiv:2405.04434, section 2.1.2).
        decode_pair_flops = (
            2.0 * heads * (2 * fields["kv_lora_rank"] + fields["qk_pos_emb_head_dim"])
        )
    else:
        query = result = heads * fields["kv_channels"]
        key = value = fields.get("num_query_groups", heads) * fields["kv_channels"]
        decode_pair_flops = 0.0
    window, pair_flops = 0, 2.0 * (query + result)
    if "window_size" in fields and fields["window_attn_skip_freq"][index]:
        window = fields["window_size"][0] + 1
    return {
        "pair_flops": pair_flops,
        "decode_pair_flops": decode_pair_flops,
        "state_flops": 0.0,
        "window": window or fields.get("dsa_indexer_topk", 0),
        "heads_elements": query + key + value,
        "key_value_elements": key + value,
    }
