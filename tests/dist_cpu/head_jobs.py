"""What ranks run to test the heads: scores over a split vocabulary, and value models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import ranks
import torch
import torch.distributed as dist

from mcore_rl.algorithms.losses import value_clip
from mcore_rl.checkpoint.hf_writer import write_checkpoint
from mcore_rl.config.schema import Layout
from mcore_rl.data.batch import Batch
from mcore_rl.engine.base import Columns
from mcore_rl.engine.megatron.value_engine import ValueEngine
from mcore_rl.parallel.store import join_world


def split_problem(tokens: int, vocab: int, hidden: int = 7) -> tuple[torch.Tensor, ...]:
    """(hidden states, whole head, targets, weights of log-probs and entropies), in float64."""
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(tokens, hidden, generator=generator, dtype=torch.float64)
    w = torch.randn(vocab, hidden, generator=generator, dtype=torch.float64)
    targets = torch.randint(vocab, (tokens,), generator=generator)
    weights = torch.randn(2, tokens, generator=generator, dtype=torch.float64)
    return h, w, targets, weights


def split_scores(tokens: int, vocab: int, rows: int, chunk_bytes: int) -> ranks.Result:
    """token_scores with `rows` rows of the head on each rank, and its gradients put together."""
    from mcore_rl.engine.megatron.logprob import VocabShard, token_scores

    if not dist.is_initialized():
        join_world("gloo", timeout_s=60.0)
    h, w, targets, weights = split_problem(tokens, vocab)
    start = dist.get_rank() * rows
    shard = torch.full((rows, w.shape[1]), 1e3, dtype=w.dtype)  # padding that must not be seen
    mine = w[start : start + rows]
    shard[: len(mine)] = mine
    h.requires_grad_()
    shard.requires_grad_()
    scores = token_scores(
        h, shard, targets, VocabShard(start, vocab, dist.group.WORLD),
        temperature=0.7, chunk_bytes=chunk_bytes, with_entropy=True, num_top=min(3, vocab),
    )  # fmt: skip
    loss = (scores.log_probs * weights[0] + scores.entropy * weights[1]).sum()
    grad_h, grad_shard = torch.autograd.grad(loss, (h, shard))
    dist.all_reduce(grad_h)
    shards = [torch.empty_like(grad_shard) for _ in range(dist.get_world_size())]
    dist.all_gather(shards, grad_shard)
    return {
        "log_probs": scores.log_probs.detach(),
        "entropy": scores.entropy.detach(),
        "top_log_probs": scores.top_log_probs,
        "top_ids": scores.top_ids,
        "grad_hidden": grad_h,
        "grad_head": torch.cat(shards),
    }


def top_log_probs(path: Path, layout: Layout, batch: Batch) -> ranks.Result:
    """The three likeliest ids of each response token, by row of the batch; and their log-probs."""
    engine = ranks.started(replace(ranks.engine_spec(path, layout), num_top_log_probs=3))
    rows = ranks.share_of(engine, batch)
    scored = engine.infer_batch(batch.take(rows))
    if scored is None:
        return {}
    columns = {name: scored.jagged(name) for name in ("top_log_probs", "top_ids")}
    return {
        name: {row: torch.from_numpy(c[place].copy()) for place, row in enumerate(rows)}
        for name, c in columns.items()
    }


def value_loss(scores: Columns, columns: Columns) -> tuple[torch.Tensor, Columns]:
    return value_clip(scores["values"], columns["values"], columns["returns"], clip_range=0.3)


def value_engine(path: Path, layout: Layout, dtype: str = "float32", lora: int = 0) -> ValueEngine:
    spec = ranks.engine_spec(path, layout, dtype)
    spec.engine.lora.rank = lora
    # Adam divides by the size of a gradient: without a floor it blows the rounding of one that is
    # nearly zero up to a whole step, and the loss of the second step shows it.
    spec.engine.optimizer.eps = 1e-5
    return ranks.started(spec, ValueEngine)


def values_of(engine: ValueEngine, batch: Batch, rows: list[int]) -> dict[int, torch.Tensor]:
    """By row of the batch; empty on pipeline stages without the head."""
    scored = engine.infer_batch(batch.take(rows).select("prompt_ids", "response_ids"))
    if scored is None:
        return {}
    assert scored.jagged("values").values.dtype == np.float32
    columns = scored.jagged("values")
    return {row: torch.from_numpy(columns[place].copy()) for place, row in enumerate(rows)}


def value_training(
    path: Path, layout: Layout, batch: Batch, dtype: str = "float32", lora: int = 0
) -> ranks.Result:
    """Values and export before, and both after two optimizer steps on the batch."""
    engine = value_engine(path, layout, dtype, lora)
    rows = ranks.share_of(engine, batch)
    mine = batch.take(rows)
    return {
        "values": values_of(engine, batch, rows),
        "exported": dict(engine.get_per_tensor_param()),
        "steps": [engine.train_batch(mine, value_loss) for _ in range(2)],
        "values_after": values_of(engine, batch, rows),
        "trained": dict(engine.get_per_tensor_param()),
    }


def value_export(path: Path, layout: Layout, batch: Batch, folder: Path) -> ranks.Result:
    """Two steps from a language model's checkpoint, then an export and a training checkpoint."""
    engine = value_engine(path, layout)
    rows = ranks.share_of(engine, batch)
    before = values_of(engine, batch, rows)
    for _ in range(2):
        engine.train_batch(batch.take(rows), value_loss)
    after = values_of(engine, batch, rows)
    tensors = engine.get_per_tensor_param()
    if engine.is_main_rank:
        write_checkpoint(
            folder / "export", tensors, reference=path, config_changes=engine.config_changes
        )
    else:
        list(tensors)
    engine.save_checkpoint(folder / "training")
    other = value_engine(path, layout)
    other.load_checkpoint(folder / "training")
    dist.barrier()
    again = value_engine(folder / "export", layout)
    return {
        "before": before,
        "after": after,
        "resumed": values_of(other, batch, rows),
        "loaded": values_of(again, batch, rows),
        "next": [e.train_batch(batch.take(rows), value_loss) for e in (engine, other)],
    }
