"""What the ranks of the MoE tests run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import ranks
import torch

from mcore_rl.config.schema import Layout
from mcore_rl.data.batch import Batch, Jagged
from mcore_rl.engine.megatron.engine import MegatronEngine

Settings = Mapping[str, Any]  # of the engine, by dotted name


def started(path: Path, layout: Layout, settings: Settings) -> MegatronEngine:
    spec = ranks.engine_spec(path, layout)
    for key, value in settings.items():
        at: Any = spec.engine
        *groups, leaf = key.split(".")
        for group in groups:
            at = getattr(at, group)
        setattr(at, leaf, value)
    return ranks.started(spec)


def training(path: Path, layout: Layout, batch: Batch, settings: Settings) -> ranks.Result:
    """Two optimizer steps, and what they did to the experts; passes between them must not count."""
    engine = started(path, layout, settings)
    mine = batch.take(ranks.share_of(engine, batch))
    steps, loads, biases = [], [], [expert_biases(engine)]
    for _ in range(2):
        engine.infer_batch(mine)
        engine.forward_backward_batch(mine, ranks.LOSS, forward_only=True)
        steps.append(engine.train_batch(mine, ranks.LOSS))
        loads.append(engine.expert_load())
        biases.append(expert_biases(engine))
    return {"steps": steps, "loads": loads, "biases": biases}


def expert_biases(engine: MegatronEngine) -> dict[int, torch.Tensor]:
    """By decoder layer, those of this rank's stages."""
    from mcore_rl.engine.megatron.moe import routers

    return {
        layer: router.expert_bias.clone()
        for chunk in engine.chunks
        for layer, router in routers(chunk)
        if router.expert_bias is not None
    }


def balance_gradients(path: Path, layout: Layout, batch: Batch, settings: Settings) -> ranks.Result:
    """Gradients of the load-balancing loss alone: the weights of the policy loss are all zero."""
    engine = started(path, layout, settings)
    return gradients_of(engine, batch, ranks.share_of(engine, batch))


def balance_with_an_empty_rank(
    path: Path, layout: Layout, batch: Batch, settings: Settings
) -> ranks.Result:
    """The same when one data-parallel rank has all samples and the other packs of padding."""
    engine = started(path, layout, settings)
    has_samples = engine.mesh.coordinate(engine.world_rank).dp_rank == 0
    return gradients_of(engine, batch, list(range(len(batch))) if has_samples else [])


def gradients_of(engine: MegatronEngine, batch: Batch, rows: list[int]) -> ranks.Result:
    mine = batch.take(rows)
    weights = mine.jagged("loss_weights")
    mine = mine.with_columns(loss_weights=weights.with_values(np.zeros_like(weights.values)))
    engine.optimizer_zero_grad()
    engine.forward_backward_batch(mine, ranks.LOSS, forward_only=False)
    micros = engine._micro_batches(mine, training=True)
    return {
        "packs": [[rows[row] for row in micro.rows] for micro in micros],
        "padding": sum(int((micro.tokens < 0).sum()) for micro in micros),
        "metrics": engine._balance(),
        "gradients": router_gradients(engine),
    }


def router_gradients(engine: MegatronEngine) -> dict[int, torch.Tensor]:
    """By decoder layer, [experts, hidden], those of this rank's stages."""
    from mcore_rl.engine.megatron.moe import routers

    return {
        layer: router.weight.main_grad.clone()
        for chunk in engine.chunks
        for layer, router in routers(chunk)
    }


def replay_recorded(path: Path, layout: Layout, batch: Batch, settings: Settings) -> ranks.Result:
    """A log-prob pass that records, two steps that replay it, a log-prob pass on the same ids."""
    engine = started(path, layout, {**settings, "moe.router_replay": "record"})
    rows = ranks.share_of(engine, batch)
    mine = batch.take(rows)
    scored = engine.infer_batch(mine)
    mine = mine.with_columns(routed_experts=shared_over_stages(engine, scored))
    engine.spec.engine.moe.router_replay = "rollout"
    again = engine.infer_batch(mine)
    engine.spec.engine.moe.router_replay = "record"
    steps = [engine.train_batch(mine, ranks.LOSS) for _ in range(2)]
    found: ranks.Result = {"steps": steps, "held": held_by_slots(engine)}
    if scored is None or again is None:
        return found
    found |= {n: by_row(rows, scored.jagged(n)) for n in ("log_probs", "routed_experts")}
    micros = engine._micro_batches(mine, training=False)
    found["padding"] = sum(int((micro.tokens < 0).sum()) for micro in micros)
    return found | {"replayed_log_probs": by_row(rows, again.jagged("log_probs"))}


def replay_forced(path: Path, layout: Layout, batch: Batch, settings: Settings) -> ranks.Result:
    """Log-probs and two steps with the experts that the batch brings along."""
    engine = started(path, layout, {**settings, "moe.router_replay": "rollout"})
    rows = ranks.share_of(engine, batch)
    mine = batch.take(rows)
    scored = engine.infer_batch(mine)
    steps = [engine.train_batch(mine, ranks.LOSS) for _ in range(2)]
    found: ranks.Result = {"steps": steps, "held": held_by_slots(engine)}
    if scored is None:
        return found
    return found | {"log_probs": by_row(rows, scored.jagged("log_probs"))}


def replay_errors(path: Path, layout: Layout, batch: Batch) -> ranks.Result:
    """What is said when routers do not do as they are told, and that the engine recovers."""
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

    engine = started(path, layout, {"moe.router_replay": "rollout"})
    bare = batch.select("prompt_ids", "response_ids")
    messages = {"missing": message_of(engine.infer_batch, bare)}
    before = engine.infer_batch(batch)
    assert before is not None
    router = engine.chunks[0].decoder.layers[2].mlp.router
    routing = router.routing

    def deaf(logits: torch.Tensor, padding_mask: torch.Tensor) -> Any:
        return topk_routing_with_score_function(logits.view(-1, logits.shape[-1]), router.topk)

    def twice(logits: torch.Tensor, padding_mask: torch.Tensor) -> Any:
        routing(logits, padding_mask)
        return routing(logits, padding_mask)

    for name, wrong in (("deaf", deaf), ("twice", twice)):
        router.routing = wrong
        messages[name] = message_of(engine.infer_batch, batch)
    router.routing = routing
    after = engine.infer_batch(batch)
    assert after is not None
    same = np.array_equal(before.jagged("log_probs").values, after.jagged("log_probs").values)
    return {"messages": messages, "recovers": same, "held": held_by_slots(engine)}


def message_of(function: Any, *args: Any) -> str:
    try:
        function(*args)
    except RuntimeError as error:
        return str(error)
    return "no error"


def router_precision(path: Path, layout: Layout, batch: Batch) -> ranks.Result:
    """A router of a bfloat16 model: types, and its logits against the product in float32."""
    spec = ranks.engine_spec(path, layout, "bfloat16")
    router = ranks.started(spec).chunks[0].decoder.layers[1].mlp.router
    hidden = torch.randn(7, 1, router.weight.shape[1]).bfloat16()
    logits = router.gating(hidden)
    return {
        "types": [str(router.weight.dtype), str(logits.dtype)],
        "equal": torch.equal(logits, hidden.float() @ router.weight.float().t()),
    }


def shared_over_stages(engine: MegatronEngine, scored: Batch | None) -> Jagged:
    """The recorded column on every stage, as a controller would send it."""
    from megatron.core import parallel_state

    box = [None if scored is None else scored.jagged("routed_experts")]
    last = parallel_state.get_pipeline_model_parallel_last_rank()
    group = parallel_state.get_pipeline_model_parallel_group()
    torch.distributed.broadcast_object_list(box, src=last, group=group)
    assert box[0] is not None
    return box[0]


def by_row(rows: list[int], column: Jagged) -> dict[int, torch.Tensor]:
    return {row: torch.from_numpy(column[place].copy()) for place, row in enumerate(rows)}


def held_by_slots(engine: MegatronEngine) -> int:
    """Tensors that the routers hold on to, and what Megatron's class-wide list holds."""
    from megatron.core.transformer.moe.router_replay import RouterReplay

    from mcore_rl.engine.megatron.moe import routers

    slots = [router.router_replay for chunk in engine.chunks for _, router in routers(chunk)]
    held = [
        value
        for slot in slots
        for value in (slot.target_topk_idx, slot.recorded_topk_idx, *slot.replay_backward_list)
        if value is not None
    ]
    return len(held) + len(RouterReplay.global_router_replay_instances)
