"""What training adds to a model: DDP, Megatron's optimizer, the learning-rate schedule."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from mcore_rl.config.schema import OptimizerConfig


def wrap_for_training(
    chunks: Sequence[GPTModel], settings: OptimizerConfig
) -> list[DistributedDataParallel]:
    """Gradient buffers and reductions around each chunk; hooks for Megatron's schedule."""
    config = chunks[0].config
    overlap_gather = settings.overlap and settings.distributed
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=settings.distributed,
        overlap_grad_reduce=settings.overlap,
        overlap_param_gather=overlap_gather,
    )
    wrapped = [
        DistributedDataParallel(
            config=config, ddp_config=ddp_config, module=chunk, disable_bucketing=index > 0
        )
        for index, chunk in enumerate(chunks)
    ]
    single = len(wrapped) == 1
    no_syncs = [chunk.no_sync for chunk in wrapped]
    config.no_sync_func = no_syncs[0] if single else no_syncs
    if settings.overlap and not single:
        config.grad_sync_func = [chunk.start_grad_sync for chunk in wrapped]
    config.finalize_model_grads_func = finalize_model_grads
    return wrapped


def build_optimizer(
    chunks: Sequence[DistributedDataParallel],
    settings: OptimizerConfig,
    dtype: torch.dtype,
    total_steps: int,
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """Adam over the parameters of all chunks of this rank, and its schedule over `total_steps`."""
    optimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            lr=settings.lr,
            min_lr=settings.min_lr,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.beta1,
            adam_beta2=settings.beta2,
            adam_eps=settings.eps,
            clip_grad=settings.clip_grad,
            bf16=dtype is torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=settings.distributed,
            overlap_param_gather=settings.overlap and settings.distributed,
        ),
        list(chunks),
    )
    chunks[0].config.grad_scale_func = optimizer.scale_loss
    schedule = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=settings.warmup_steps,
        lr_decay_steps=max(total_steps, settings.warmup_steps + 1),
        lr_decay_style=settings.schedule,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
    )
    return optimizer, schedule
