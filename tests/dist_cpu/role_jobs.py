"""Jobs of test_roles.py: the memory of an engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import ranks
import torch
from live_bytes import LiveBytes
from torch.distributed.fsdp import FSDPModule

from mcore_rl.config.schema import EngineConfig
from mcore_rl.data.batch import Batch
from mcore_rl.engine.fsdp.engine import FSDPEngine
from mcore_rl.engine.megatron.engine import MegatronEngine


def held(path: Path, settings: EngineConfig, dtype: str, batch: Batch) -> ranks.Result:
    """Parameters of this rank, and bytes by what they are for, after one step."""
    spec = ranks.build_engine_spec(path, settings.layout, dtype)
    engine = ranks.start_engine(replace(spec, engine=replace(spec.engine, **vars(settings))))
    engine.train_batch(batch.take(ranks.list_rows(engine, batch)), ranks.LOSS)
    weights = {id(p): p for chunk in engine.chunks for p in chunk.parameters()}
    buffers = [b for c in engine.chunks for n, b in c.named_buffers() if n.endswith("expert_bias")]
    return {
        "parameters": sum(t.numel() for t in (*weights.values(), *buffers)),
        "weight_bytes": sum(t.nbytes for t in (*weights.values(), *buffers)),
        "gradient_bytes": sum(p.main_grad.nbytes for p in weights.values() if p.requires_grad),
        "optimizer_bytes": sum(_state_bytes(engine, list(weights.values()))),
    }


def _state_bytes(engine: MegatronEngine, weights: list[torch.Tensor]) -> Iterator[int]:
    """Yield the bytes of moments, and of main parameters that are no view of the weights."""
    weight_storages = {w.untyped_storage().data_ptr() for w in weights}
    for part in engine.optimizer.chained_optimizers:
        adam: Any = part.optimizer
        for group in adam.param_groups:
            for parameter in group["params"]:
                if parameter.untyped_storage().data_ptr() not in weight_storages:
                    yield parameter.nbytes
                state = adam.state[parameter]
                yield from (state[name].nbytes for name in ("exp_avg", "exp_avg_sq"))


def peak(path: Path, settings: EngineConfig, dtype: str, batch: Batch) -> ranks.Result:
    """Bytes of this rank at the peak of a training step: what stays, and storages of the step.

    With them the tokens and response tokens of its largest micro-batch, the number of micro-batches
    and by layer the tokens that its experts receive over those that it sends.
    """
    spec = ranks.build_engine_spec(path, settings.layout, dtype)
    engine = ranks.start_engine(replace(spec, engine=replace(spec.engine, **vars(settings))))
    share = batch.take(ranks.list_rows(engine, batch))
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


class _GatheredBytes(LiveBytes):
    """Also counts the storages that FSDP2 resizes instead of making them: gathered weights."""

    def __init__(self, root: torch.nn.Module) -> None:
        super().__init__()
        states = [m._get_fsdp_state() for m in root.modules() if isinstance(m, FSDPModule)]
        groups = [s._fsdp_param_group for s in states if s._fsdp_param_group is not None]
        parameters = [parameter for group in groups for parameter in group.fsdp_params]
        self._gathered = {
            tensor.untyped_storage()._cdata: tensor.untyped_storage()
            for parameter in parameters
            for tensor in parameter.all_gather_outputs
        }

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = super().__torch_dispatch__(func, types, args, kwargs)
        gathered = sum(storage.nbytes() for storage in self._gathered.values())
        self.peak = max(self.peak, self.live + gathered)
        return out


def fsdp_peak(path: Path, settings: EngineConfig, dtype: str, batch: Batch) -> ranks.Result:
    """Bytes of this rank at the peak of a training step of FSDP2, as `peak` returns them."""
    spec = ranks.build_engine_spec(path, settings.layout, dtype)
    spec = replace(spec, engine=replace(spec.engine, **vars(settings)))
    engine = ranks.start_engine(spec, FSDPEngine)
    share = batch.take(list(range(engine.world_rank, len(batch), settings.layout.dp)))
    engine.train_batch(share, ranks.LOSS)
    held = [t for part in ("parameters", "optimizer state") for t in engine.list_tensors(part)]
    packs = engine._build_micro_batches(share)
    with _GatheredBytes(engine.root) as live:
        engine.train_batch(share, ranks.LOSS)
    largest = max(packs, key=lambda pack: pack.input_ids.numel())
    return {
        "held": sum(tensor.nbytes for tensor in held),
        "step": live.peak,
        "tokens": largest.input_ids.numel(),
        "scored": len(largest.hidden_rows),
        "longest": max(max(pack.lengths) for pack in packs),
    }
