"""Jobs of test_meta_model.py: checkpoints of engines and of Megatron without engine."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import ranks
import torch

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import Layout
from mcore_rl.data.batch import Batch

MTP_COEF = 0.3
FOREIGN_ROWS = 256  # of the vocabulary's 131, padded as Megatron-LM pads: to a multiple of 128


def engine_for_inference(path: Path, layout: Layout, coef: float = 0.0) -> Any:
    spec = replace(ranks.build_engine_spec(path, layout), total_steps=0)
    spec.engine.mtp_loss_coef = coef
    return ranks.start_engine(spec)


def save(path: Path, layout: Layout, to: Path, coef: float = 0.0) -> ranks.Result:
    engine_for_inference(path, layout, coef).save_checkpoint(to)
    return {}


def load(path: Path, layout: Layout, source: Path, coef: float = 0.0) -> ranks.Result:
    """The weights of an engine that had none before it loaded, or what the load refused with."""
    engine = engine_for_inference(path, layout, coef)
    tensors = [t for chunk in engine.chunks for t in [*chunk.parameters(), *chunk.buffers()]]
    with torch.no_grad():
        for tensor in tensors:
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))
    try:
        engine.load_checkpoint(source)
    except ConfigError as error:
        return {"refusal": str(error)}
    finite = all(bool(p.isfinite().all()) for chunk in engine.chunks for p in chunk.parameters())
    return {"weights": dict(engine.get_per_tensor_param()), "is_finite": finite}


def refused_training(path: Path, source: Path) -> ranks.Result:
    engine = ranks.start_engine(ranks.build_engine_spec(path, Layout()))
    try:
        engine.load_checkpoint(source)
    except ConfigError as error:
        return {"refusal": str(error)}
    return {"refusal": ""}


def train_and_save(path: Path, batch: Batch, to: Path, distributed: bool) -> ranks.Result:
    """A checkpoint of a run that trains prediction layers, after two steps."""
    engine = _trained(path, batch, MTP_COEF, distributed=distributed)
    engine.save_checkpoint(to)
    return {"weights": dict(engine.get_per_tensor_param())}


def resume(path: Path, batch: Batch, source: Path, distributed: bool) -> ranks.Result:
    """The same run without prediction layers: Adam's moments of each parameter that it has."""
    engine = _trained(path, batch, 0.0, distributed=distributed)
    engine.load_checkpoint(source)
    return {"weights": dict(engine.get_per_tensor_param()), "moments": _moments(engine)}


def moments(path: Path, batch: Batch, source: Path, distributed: bool) -> ranks.Result:
    engine = _trained(path, batch, MTP_COEF, distributed=distributed)
    engine.load_checkpoint(source)
    return {"moments": _moments(engine)}


def _trained(path: Path, batch: Batch, coef: float, *, distributed: bool) -> Any:
    spec = ranks.build_engine_spec(path, Layout())
    spec.engine.mtp_loss_coef = coef
    spec.engine.optimizer.distributed = distributed
    engine = ranks.start_engine(spec)
    for _ in range(2):
        engine.train_batch(batch, ranks.LOSS)
    return engine


def _moments(engine: Any) -> dict[str, torch.Tensor]:
    """Adam's first moments by parameter, of an engine on one rank."""
    moments = {}
    for part in engine.optimizer.chained_optimizers:
        sharded = hasattr(part, "model_param_group_index_map")
        optimized = part.model_param_group_index_map if sharded else part.optimizer.state
        for name, parameter in engine.chunks[0].named_parameters():
            if parameter in optimized:
                state = (
                    part._get_main_param_and_optimizer_states(parameter)
                    if sharded
                    else part.optimizer.state[parameter]
                )
                moments[name] = state["exp_avg"].flatten().clone()
    return moments


def megatron_saves(path: Path, to: Path, stacked: bool) -> ranks.Result:
    """A checkpoint with what Megatron-LM's training writes, made by plain calls of Megatron.

    The settings are those of such a run: every layer has experts by `moe_layer_freq=1`, the
    vocabulary is padded to a multiple of 128, the optimizer and the state of the run come along.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_with_transformer_engine_spec,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    engine = engine_for_inference(path, Layout())
    [chunk] = engine.chunks
    config = replace(chunk.config, moe_layer_freq=1)
    spec = get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=True,
        qk_layernorm=config.qk_layernorm,
    )
    tied = chunk.share_embeddings_and_output_weights
    model = GPTModel(
        config, spec, FOREIGN_ROWS, 256, position_embedding_type="rope",
        share_embeddings_and_output_weights=tied,
    )  # fmt: skip
    model.load_state_dict({n: _padded(n, t) for n, t in chunk.state_dict().items()})
    wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-3, min_lr=0.0), [wrapped])
    metadata = {"non_homogeneous_layers": not stacked, "chained_optim_avoid_prefix": True}
    weights = model.sharded_state_dict(metadata=metadata)
    to.mkdir()
    state = {
        "args": argparse.Namespace(num_layers=config.num_layers, iteration=7),
        "checkpoint_version": 3.0,
        "iteration": 7,
        "model": weights,
        "optimizer": optimizer.sharded_state_dict({"model": weights}, metadata=metadata),
        "opt_param_scheduler": {"max_lr": 1e-3, "num_steps": 7},
        "rng_state": ShardedObject("rng_state", [{"np": 0}], (1, 1), (0, 0)),
    }
    dist_checkpointing.save(state, str(to))
    return {}


def _padded(name: str, tensor: Any) -> Any:
    if tensor is None or not name.startswith(("embedding.", "output_layer.")):
        return tensor
    rows = torch.full((FOREIGN_ROWS - tensor.shape[0], tensor.shape[1]), 7.0, dtype=tensor.dtype)
    return torch.cat([tensor, rows])
