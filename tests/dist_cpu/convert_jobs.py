"""What ranks run for test_convert.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import lora_jobs
import ranks
import tiny_models

from mcore_rl.config.schema import Layout


def loaded(model: Path, checkpoint: Path, layout: Layout) -> ranks.Result:
    """What an engine exports after it has read a checkpoint over other weights."""
    engine = ranks.started(replace(ranks.engine_spec(model, layout), total_steps=0))
    engine.load_checkpoint(checkpoint)
    return dict(engine.get_per_tensor_param())


def trained(model: Path, checkpoint: Path, layout: Layout, dtype: str) -> ranks.Result:
    """What an engine exports after a step; the checkpoint it saved there has optimizer state."""
    engine = ranks.started(ranks.engine_spec(model, layout, dtype))
    engine.train_batch(
        tiny_models.make_batch().take(ranks.share_of(engine, tiny_models.make_batch())), ranks.LOSS
    )
    engine.save_checkpoint(checkpoint)
    return dict(engine.get_per_tensor_param())


def adapted(model: Path, checkpoint: Path, layout: Layout, dtype: str) -> ranks.Result:
    """What an engine with adapters exports, merged; it has saved a checkpoint."""
    spec = replace(lora_jobs.lora_spec(model, layout, dtype), total_steps=0)
    engine = ranks.started(spec)
    lora_jobs.set_factors(engine)
    engine.save_checkpoint(checkpoint)
    return dict(engine.get_per_tensor_param())
