"""What ranks run for test_roles.py: how much an engine holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import ranks
import torch
from live_bytes import LiveBytes

from mcore_rl.config.schema import EngineConfig
from mcore_rl.data.batch import Batch
from mcore_rl.engine.megatron.engine import MegatronEngine


def held(path: Path, settings: EngineConfig, dtype: str, batch: Batch) -> ranks.Result:
    """Parameters of this rank, and bytes by what they are for, after one step."""
    spec = ranks.engine_spec(path, settings.layout, dtype)
    engine = ranks.started(replace(spec, engine=replace(spec.engine, **vars(settings))))
    engine.train_batch(batch.take(ranks.share_of(engine, batch)), ranks.LOSS)
    weights = {id(p): p for chunk in engine.chunks for p in chunk.parameters()}
    buffers = [b for c in engine.chunks for n, b in c.named_buffers() if n.endswith("expert_bias")]
    return {
        "parameters": sum(t.numel() for t in (*weights.values(), *buffers)),
        "weight_bytes": sum(t.nbytes for t in (*weights.values(), *buffers)),
        "gradient_bytes": sum(p.main_grad.nbytes for p in weights.values() if p.requires_grad),
        "optimizer_bytes": sum(_state_bytes(engine, list(weights.values()))),
    }


def _state_bytes(engine: MegatronEngine, weights: list[torch.Tensor]) -> Iterator[int]:
    """Of moments, and of main parameters that are no view of the weights themselves."""
    own = {w.untyped_storage().data_ptr() for w in weights}
    for part in engine.optimizer.chained_optimizers:
        adam: Any = part.optimizer
        for group in adam.param_groups:
            for parameter in group["params"]:
                if parameter.untyped_storage().data_ptr() not in own:
                    yield parameter.nbytes
                state = adam.state[parameter]
                yield from (state[name].nbytes for name in ("exp_avg", "exp_avg_sq"))


def peak(path: Path, settings: EngineConfig, dtype: str, batch: Batch) -> ranks.Result:
    """Bytes of this rank at the peak of a training step: what stays, and storages of the step.

    With them the tokens and response tokens of its largest micro-batch, the number of micro-batches
    and by layer the tokens that its experts receive over those that it sends.
    """
    spec = ranks.engine_spec(path, settings.layout, dtype)
    engine = ranks.started(replace(spec, engine=replace(spec.engine, **vars(settings))))
    share = batch.take(ranks.share_of(engine, batch))
    engine.train_batch(share, ranks.LOSS)  # moments exist from the first step on
    report, packs = engine.memory_report(), engine._build_micro_batches(share, is_training=True)
    with LiveBytes() as live:
        engine.train_batch(share, ranks.LOSS)
    largest = max(packs, key=lambda pack: pack.input_ids.shape[1])
    layout, imbalances = engine.layout, [1.0]
    if load := engine.expert_load:
        ep_rank = engine.mesh.get_coordinate(engine.world_rank).ep_rank
        received = [float(counts.view(layout.ep, -1)[ep_rank].sum()) for counts in load.values()]
        sent = int(share.num_tokens.sum()) * engine.chunks[0].config.moe_router_topk / layout.tp
        imbalances = [num_tokens / sent for num_tokens in received]
    return {
        "held": report.on_device_bytes,
        "step": live.peak,
        "tokens": largest.input_ids.shape[1],
        "scored": len(largest.hidden_rows),
        "packs": len(packs),
        "longest": max(max(pack.lengths) for pack in packs),
        "imbalances": imbalances,
    }
