"""Jobs of test_optimizer.py: overlap, clipping, offload, checkpoints between layouts."""

from __future__ import annotations

import gc
import multiprocessing
import weakref
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import ranks
import tiny_models
import torch
import transformers

from mcore_rl.config.errors import ConfigError, StateError
from mcore_rl.config.schema import Layout
from mcore_rl.data.batch import Batch
from mcore_rl.engine.megatron.engine import MegatronEngine

Result = ranks.Result
BUCKET_NUMEL = 8_000  # elements: the head is a bucket of its own, and padded behind


def engine_of(
    path: Path,
    layout: Layout,
    dtype: str = "float32",
    lr: float = 1e-3,
    *,
    small_buckets: bool = False,
    **optimizer: Any,
) -> MegatronEngine:
    """An engine with other optimizer settings than ranks.build_engine_spec; several micro-batches.

    With small_buckets, gradient buffers of a tiny model have several buckets, as those of a large
    model do; Megatron's own buckets have at least 40 million elements.
    """
    spec = ranks.build_engine_spec(path, layout, dtype)
    spec.engine.optimizer.lr = lr
    for name, value in optimizer.items():
        setattr(spec.engine.optimizer, name, value)
    spec.engine.megatron = {"bucket_size": BUCKET_NUMEL} if small_buckets else {}
    return ranks.start_engine(spec)


def take_share(engine: MegatronEngine, batch: Batch) -> Batch:
    return batch.take(ranks.list_rows(engine, batch))


def scores(engine: MegatronEngine, batch: Batch) -> dict[int, torch.Tensor]:
    """Log-probs by row of the whole batch, on the last pipeline stage."""
    rows = ranks.list_rows(engine, batch)
    scored = engine.infer_batch(batch.take(rows))
    if scored is None:
        return {}
    return {
        row: torch.from_numpy(values.copy())
        for row, values in zip(rows, scored.jagged("log_probs"), strict=True)
    }


def steps_with_reads_between(path: Path, layout: Layout, batch: Batch, **optimizer: Any) -> Result:
    """Two steps; weights and scores read right after each, in either order."""
    engine = engine_of(path, layout, **optimizer)
    share = take_share(engine, batch)
    first = engine.train_batch(share, ranks.LOSS)
    exported = dict(engine.get_per_tensor_param())
    second = engine.train_batch(share, ranks.LOSS)
    scored = scores(engine, batch)
    third = engine.train_batch(share, ranks.LOSS)  # no read in between
    fourth = engine.train_batch(share, ranks.LOSS)
    last = engine.chunks[-1]
    head = last.head_weight.detach().clone() if last.post_process else None  # before all the others
    return {
        "head": head,
        "num_buckets": sum(len(chunk.bucket_groups) for chunk in engine.wrapped_chunks),
        "steps": [first, second, third, fourth],
        "exported": exported,
        "scored": scored,
        "trained": dict(engine.get_per_tensor_param()),
    }


def step_that_clips(path: Path, layout: Layout, batch: Batch, clip_grad: float) -> Result:
    """Two steps under a bound; beta1=beta2=0 and a large eps make Adam's update follow its size."""
    engine = engine_of(
        path, layout, clip_grad=clip_grad, beta1=0.0, beta2=0.0, eps=1.0, weight_decay=0.0, lr=1.0
    )
    before = dict(engine.get_per_tensor_param())
    step = engine.train_batch(take_share(engine, batch), ranks.LOSS)
    after = dict(engine.get_per_tensor_param())
    return {"step": step, "update": {name: after[name] - before[name] for name in after}}


def save(path: Path, layout: Layout, batch: Batch, to: Path, **optimizer: Any) -> Result:
    """Two steps, a checkpoint (and how many children it leaves), two steps more."""
    engine = engine_of(path, layout, **optimizer)
    share = take_share(engine, batch)
    steps = [engine.train_batch(share, ranks.LOSS) for _ in range(2)]
    saved = dict(engine.get_per_tensor_param())
    before = multiprocessing.active_children()  # Megatron's own writer, in other tests, keeps one
    engine.save_checkpoint(to)
    stayed = len({*multiprocessing.active_children()} - {*before})
    steps += [engine.train_batch(share, ranks.LOSS) for _ in range(2)]
    trained = dict(engine.get_per_tensor_param())
    return {"steps": steps, "saved": saved, "trained": trained, "stayed": stayed}


def resume(path: Path, layout: Layout, batch: Batch, source: Path, **optimizer: Any) -> Result:
    """A new engine, a step that must be forgotten, the checkpoint, two steps."""
    engine = engine_of(path, layout, **optimizer)
    share = take_share(engine, batch)
    engine.train_batch(share, ranks.LOSS)
    engine.load_checkpoint(source)
    steps = [engine.train_batch(share, ranks.LOSS) for _ in range(2)]
    return {"steps": steps, "trained": dict(engine.get_per_tensor_param())}


def refused(path: Path, layout: Layout, source: Path, **optimizer: Any) -> Result:
    """The message with which a checkpoint is refused, and whether the weights stayed."""
    engine = engine_of(path, layout, **optimizer)
    before = dict(engine.get_per_tensor_param())
    message = ""
    try:
        engine.load_checkpoint(source)
    except ConfigError as error:
        message = str(error)
    after = dict(engine.get_per_tensor_param())
    return {"message": message, "kept": all(torch.equal(before[n], after[n]) for n in before)}


def save_model(folder: Path) -> Path:
    """A checkpoint of four layers, so that two ranks can hold two chunks each.

    The first layer is dense, so a first stage may have no expert at all; embeddings are tied.
    """
    settings = tiny_models.configs()["qwen3_moe_mixed"].to_dict() | {"num_hidden_layers": 4}
    settings.pop("layer_types", None)
    config = transformers.Qwen3MoeConfig(**settings)
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, 0.08)
    path = folder / "four_layers"
    model.save_pretrained(path)
    return path


def adam(path: Path, batch: Batch) -> Result:
    """Three steps of the engine and of torch.optim.AdamW on copies, given the same gradients."""
    settings = {"beta1": 0.8, "beta2": 0.9, "eps": 1e-3, "weight_decay": 0.1, "clip_grad": 0.5}
    engine = engine_of(path, Layout(), lr=1e-2, **settings)
    [chunk] = engine.chunks
    parameters = dict(chunk.named_parameters())
    copies = {name: p.detach().clone().requires_grad_() for name, p in parameters.items()}
    plain = torch.optim.AdamW(
        [
            {"params": [p for p in copies.values() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in copies.values() if p.dim() == 1], "weight_decay": 0.0},
        ],
        betas=(0.8, 0.9),
        eps=1e-3,
    )
    norms = []
    for _ in range(3):
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(batch, ranks.LOSS, forward_only=False)
        for name, parameter in parameters.items():
            copies[name].grad = parameter.main_grad.detach().clone()
        norm = torch.nn.utils.clip_grad_norm_(list(copies.values()), 0.5)
        lr = engine.lr_scheduler_step()
        for group in plain.param_groups:
            group["lr"] = lr
        plain.step()
        norms.append((engine.optimizer_step(), float(norm)))
    gaps = {name: float((p - copies[name]).abs().max()) for name, p in parameters.items()}
    decays = {
        name: group["weight_decay"]
        for group in engine.optimizer.param_groups
        for name, parameter in parameters.items()
        if any(parameter is member for member in group["params"])
    }
    kinds = [type(part.optimizer).__name__ for part in engine.optimizer.chained_optimizers]
    return {"norms": norms, "gaps": gaps, "decays": decays, "kinds": kinds}


def not_a_number(path: Path, layout: Layout, batch: Batch, **optimizer: Any) -> Result:
    """A step whose gradients are NaN on the last data-parallel rank only."""
    engine = engine_of(path, layout, **optimizer)
    share = take_share(engine, batch)
    engine.train_batch(share, ranks.LOSS)
    before = dict(engine.get_per_tensor_param())
    if engine.mesh.get_coordinate(engine.world_rank).dp_rank == layout.dp - 1:
        advantages = share.jagged("advantages")
        poison = advantages.with_values(np.full_like(advantages.values, np.nan))
        bad = share.with_columns(advantages=poison)
    else:
        bad = share
    message, skipped, steps = "", [], engine.schedule.num_steps
    try:
        skipped.extend(engine.train_batch(bad, ranks.LOSS) for _ in range(3))
    except FloatingPointError as error:
        message = str(error)
    after, advanced = dict(engine.get_per_tensor_param()), engine.schedule.num_steps - steps
    following = engine.train_batch(share, ranks.LOSS)
    return {
        "message": message,
        "skipped": [(metrics["num_skipped_steps"], metrics["grad_norm"]) for metrics in skipped],
        "advanced": advanced,
        "kept": all(torch.equal(before[name], after[name]) for name in before),
        "following": following,
    }


def memory(path: Path, layout: Layout, batch: Batch, dtype: str, **optimizer: Any) -> Result:
    """The report at the start, after a step, and after a trip to the host and back."""
    engine = engine_of(path, layout, dtype, **optimizer)
    start = asdict(engine.memory_report())
    buffers = [b for chunk in engine.chunks for b in chunk.buffers()]  # counters of routers
    share = take_share(engine, batch)
    engine.train_batch(share, ranks.LOSS)
    engine.optimizer_zero_grad()
    stepped = asdict(engine.memory_report())
    engine.to("host")
    away = asdict(engine.memory_report())
    refusal = ""
    try:
        engine.train_batch(share, ranks.LOSS)
    except StateError as error:
        refusal = str(error)
    engine.to("device")
    back = asdict(engine.memory_report())
    engine.train_batch(share, ranks.LOSS)
    start["buffers_bytes"] = sum(b.numel() * b.element_size() for b in buffers)
    return {"start": start, "stepped": stepped, "away": away, "back": back, "refusal": refusal}


def closed(path: Path, layout: Layout, batch: Batch, **optimizer: Any) -> Result:
    """Return what is left of a closed engine that has trained."""
    engine = engine_of(path, layout, **optimizer)
    engine.train_batch(take_share(engine, batch), ranks.LOSS)
    watched = {
        "parameter": weakref.ref(next(engine.chunks[0].parameters())),
        "gradient buffers": weakref.ref(engine.wrapped_chunks[0]),
        "optimizer": weakref.ref(engine.optimizer),
    }
    engine.close()
    gc.collect()
    return {"left": [name for name, reference in watched.items() if reference() is not None]}


def saved_before_the_first_step(path: Path, layout: Layout, batch: Batch, to: Path) -> Result:
    """Two steps of the engine that saved, and of one that resumed from there."""
    engine = engine_of(path, layout, distributed=True)
    engine.save_checkpoint(to)
    share = take_share(engine, batch)
    steps = [engine.train_batch(share, ranks.LOSS) for _ in range(2)]
    other = engine_of(path, layout, distributed=True)
    other.train_batch(share, ranks.LOSS)
    other.load_checkpoint(to)
    return {"steps": steps, "resumed": [other.train_batch(share, ranks.LOSS) for _ in range(2)]}


def inference_reads(path: Path, layout: Layout, batch: Batch, source: Path) -> Result:
    """Weights that an engine without an optimizer took from a training checkpoint."""
    spec = replace(ranks.build_engine_spec(path, layout), total_steps=0)
    engine = ranks.start_engine(spec)
    engine.load_checkpoint(source)
    return {"weights": dict(engine.get_per_tensor_param()), "scores": scores(engine, batch)}


def weights_only(path: Path, to: Path) -> Result:
    engine = ranks.start_engine(replace(ranks.build_engine_spec(path, Layout()), total_steps=0))
    engine.save_checkpoint(to)
    return {"scheduled": engine.schedule is not None}
