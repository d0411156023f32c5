"""What the fullest GPU of each turn has to hold, from config.json and settings alone. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcore_rl.config.resolve import takes_turns
from mcore_rl.config.schema import EngineConfig, RLConfig
from mcore_rl.jobs.roles import ITEMSIZES, Role, Stage
from mcore_rl.models.base import HFConfig, get_family
from mcore_rl.parallel.mesh import split_into_chunks


@dataclass(frozen=True, slots=True)
class MemoryTurn:
    """Bytes on one GPU, that of the role's ranks which needs most."""

    name: str
    weights: int
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0  # estimated
    cache: int = 0  # key/value cache
    buffers: int = 0  # of weights on their way

    @property
    def total(self) -> int:
        parts = self.weights, self.gradients, self.optimizer, self.activations, self.cache
        return sum(parts) + self.buffers


def turns(config: RLConfig, model: HFConfig, roles: Sequence[Role]) -> list[MemoryTurn]:
    """A turn of each role, and the push of new weights where actor and servers share GPUs.

    Roles on GPUs of their own have them to themselves in every turn.
    """
    found = [_turn(config, model, role) for role in roles]
    if takes_turns(config.placement, "actor", "rollout"):
        weights = {turn.name: turn.weights for turn in found}
        both = weights["actor"] + weights["rollout"]
        found.append(MemoryTurn("push", both, buffers=2 * config.weight_sync.bucket_bytes))
    return found


def _turn(config: RLConfig, model: HFConfig, role: Role) -> MemoryTurn:
    if role.stages[0].cache_bytes:  # of servers
        [stage] = role.stages
        return MemoryTurn(role.name, stage.weight_bytes, cache=stage.cache_bytes)
    trained = config.warm_start if role.name == "warm_start" else config.actor
    offloads = trained.optimizer.cpu_offload
    stage = max(role.stages, key=lambda stage: _trained_bytes(stage, offloads))
    return MemoryTurn(
        role.name,
        stage.weight_bytes,
        stage.gradient_bytes,
        0 if offloads else stage.optimizer_bytes,
        activation_bytes(config, model) if role.name == "actor" else 0,
    )


def _trained_bytes(stage: Stage, offloads: bool) -> int:
    return stage.weight_bytes + stage.gradient_bytes + stage.optimizer_bytes * (not offloads)


def activation_bytes(config: RLConfig, model: HFConfig) -> int:
    """An estimate of what the actor's fullest GPU keeps of its micro-batches, at even expert load.

    Per token and layer, in elements of model.dtype: five times the hidden size (the layer's input,
    what both norms give, attention's output, the sum behind it); queries and keys before and after
    rotation (and a norm), values, attention's result; gate, up and product of each MLP that the
    token goes through; what goes into and comes out of its experts. A pipeline rank keeps that of
    each micro-batch under way; with full recompute, the inputs of its units of layers instead, and
    what one unit makes again. The backward pass works on one layer more, of gradients. The output
    head is not counted: actor.logprob_chunk_bytes bounds it. (arXiv 2205.05198 counts like that.)
    Kernels that are not fused keep up to half as much again (tests/dist_cpu/test_roles.py).
    """
    engine = config.actor
    layout, family = engine.layout, get_family(model)
    parts = _layer_elements(family.config_map(model), layout.etp)
    kept = {name: size for name, size in parts.items() if name not in _recomputed(engine)}
    hidden, layer = parts["input"], sum(parts.values())
    chunks = split_into_chunks(layout, family.config_map(model)["num_layers"])
    most = 0
    for pp_rank in range(layout.pp):
        for chunk in chunks:
            if chunk.pp_rank == pp_rank:
                units = -(-len(chunk.layers) // engine.recompute.num_layers)
                of_chunk = len(chunk.layers) * sum(kept.values())
                if engine.recompute.granularity == "full":
                    of_chunk = units * hidden
                most = max(most, of_chunk * _under_way(layout.pp, layout.vpp, pp_rank))
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    tokens = max(engine.max_tokens_per_micro_batch, -(-longest // layout.cp)) / layout.tp
    unit = engine.recompute.num_layers if engine.recompute.granularity == "full" else 1
    return int((most + (unit + 1) * layer) * tokens * ITEMSIZES[config.model.dtype])


def _under_way(pp: int, vpp: int, pp_rank: int) -> int:
    """Micro-batches of a chunk that a rank keeps at most (1F1B, interleaved with vpp above 1)."""
    if vpp == 1:
        return pp - pp_rank
    return (pp - pp_rank - 1) * 2 + (vpp - 1) * pp + 1


def _recomputed(engine: EngineConfig) -> set[str]:
    """Parts of a layer that are made again, one by one."""
    if engine.recompute.granularity != "selective":
        return set()
    parts = {
        "layernorm": {"norms"},
        "mla_up_proj": {"heads"},
        "moe": {"moe", "moe_act", "shared_experts"},
        "core_attn": set(),  # kernels keep none of it
    }
    return set().union(*(parts.get(module, {module}) for module in engine.recompute.modules))


def _layer_elements(fields: Mapping[str, Any], etp: int) -> dict[str, int]:
    """Of a layer (with experts, if the model has any), for a token, on all ranks together."""
    hidden, heads, copies = fields["hidden_size"], fields["num_attention_heads"], 2
    if "kv_lora_rank" in fields:  # latents become keys and values of all heads
        query = key = heads * (fields["qk_head_dim"] + fields["qk_pos_emb_head_dim"])
        value = result = heads * fields["v_head_dim"]
    else:
        query = result = heads * fields["kv_channels"]
        key = value = fields["num_query_groups"] * fields["kv_channels"]
        copies += fields.get("qk_layernorm", False)
    found = {
        "input": hidden,
        "norms": 2 * hidden,
        "heads": copies * (query + key) + value,
        "result": result + 2 * hidden,
    }
    if not fields.get("num_moe_experts"):
        return found | {"mlp": 3 * fields["ffn_hidden_size"]}
    chosen, columns = fields["moe_router_topk"], fields["moe_ffn_hidden_size"]
    shared = fields.get("moe_shared_expert_intermediate_size") or 0
    return found | {
        "moe_act": chosen * columns,
        "moe": chosen * (2 * hidden * etp + 2 * columns),
        "shared_experts": 3 * shared,
    }
