"""Training of a model: DDP, Megatron's optimizer, the learning-rate schedule."""

from __future__ import annotations

import math
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
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.rules_engine import validate_schedule
from mcore_rl.config.schema import OptimizerConfig
from mcore_rl.engine.megatron.device import get_device_type, is_transformer_engine_installed
from mcore_rl.engine.megatron.passthrough import PassedFields

_STYLES = {"constant": "constant", "linear": "linear", "cosine": "cosine", "wsd": "WSD"}


def check_optimizer(settings: OptimizerConfig, total_steps: int) -> None:
    """Check optimizer settings against the device type and the length of training.

    Raises:
        ConfigError: CPU-offloaded Adam without a GPU or without Transformer Engine; a warm-up and
            a decay that overlap.
    """
    if total_steps == 0:  # inference only
        return
    if settings.cpu_offload and get_device_type() == "cpu":
        # HybridDeviceOptimizer copies tensors with Tensor.is_cuda to the host. On CPUs none
        # are, so gradients have no copy to go to (optimizer/cpu_offloading/hybrid_optimizer.py:273
        # and :101).
        raise ConfigError(
            "optimizer.cpu_offload=true: without a GPU the optimizer is already on the CPU; "
            "allowed: false"
        )
    if settings.cpu_offload and not is_transformer_engine_installed():
        # Without it Megatron's config ends in a TypeError (optimizer/optimizer_config.py:438).
        raise ConfigError(
            "optimizer.cpu_offload=true needs transformer-engine 2.1 or newer, which is not "
            "installed; allowed: false"
        )
    validate_schedule("optimizer", settings, total_steps)


def wrap_chunks(
    chunks: Sequence[GPTModel], settings: OptimizerConfig, fields: PassedFields
) -> list[DistributedDataParallel]:
    """Wrap each chunk in DDP (gradient buffers, reductions), with hooks for Megatron's schedule.

    Args:
        fields: Further fields of the config of DDP.
    """
    config = chunks[0].config
    overlap_gather = settings.overlap and settings.distributed
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=settings.distributed,
        overlap_grad_reduce=settings.overlap,
        overlap_param_gather=overlap_gather,
        **fields.ddp,
    )
    # Buckets, whose reductions can overlap, are for the first chunk alone, as in Megatron-LM
    # (training/training.py): those of later chunks overlap with the computation of others anyway.
    wrapped = [
        DistributedDataParallel(
            config=config, ddp_config=ddp_config, module=chunk, disable_bucketing=index > 0
        )
        for index, chunk in enumerate(chunks)
    ]
    is_single = len(wrapped) == 1
    no_syncs = [chunk.no_sync for chunk in wrapped]
    config.no_sync_func = no_syncs[0] if is_single else no_syncs
    if settings.overlap and not is_single:
        config.grad_sync_func = [chunk.start_grad_sync for chunk in wrapped]
    config.finalize_model_grads_func = finalize_model_grads
    return wrapped


def unwrap_chunks(wrapped: Sequence[DistributedDataParallel]) -> None:
    """Break the references between DDP and models, so that their memory is freed.

    Dispatchers keep their last tensors, whose graph refers to DDP by its hooks, and DDP refers to
    the model: a cycle inside autograd, which the garbage collector does not see. Config and modules
    refer to it, too.
    """
    for chunk in wrapped:
        if chunk.remove_forward_pre_hook_handles:
            chunk.disable_forward_pre_hook(param_sync=False)
        for function in ("no_sync_func", "grad_sync_func", "grad_scale_func"):
            setattr(chunk.config, function, None)
        chunk.module = None


def build_optimizer(
    chunks: Sequence[DistributedDataParallel],
    settings: OptimizerConfig,
    fields: PassedFields,
    dtype: torch.dtype,
    total_steps: int,
) -> tuple[ChainedOptimizer, OptimizerParamScheduler]:
    """Build the optimizer of this rank's chunks, and its schedule over `total_steps`.

    Muon updates the weight matrices of layers (Moonlight, arXiv:2502.16982, section 2), Adam the
    rest. With tensor parallelism each rank's part is orthogonalised, unless muon_tp_mode is set.

    For Adam Megatron uses FusedAdam of Transformer Engine or apex if one is importable, else
    torch's AdamW.
    It decays neither biases nor tensors of one dim (optimizer/__init__.py:14 and :103).
    """
    optimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer=settings.name,
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
            # Megatron's CPU-offloaded Adam has float32 weights only as a precision-aware optimizer.
            optimizer_cpu_offload=settings.cpu_offload,
            **{
                "optimizer_offload_fraction": 1.0 if settings.cpu_offload else 0.0,
                "use_precision_aware_optimizer": settings.cpu_offload,
                **fields.optimizer,
            },
        ),
        list(chunks),
    )
    chunks[0].config.grad_scale_func = optimizer.scale_loss  # all chunks have this config
    return optimizer, build_schedule(optimizer, settings, total_steps)


def build_schedule(
    optimizer: ChainedOptimizer, settings: OptimizerConfig, total_steps: int
) -> OptimizerParamScheduler:
    """Build the learning-rate schedule. It is advanced before each step, so step 1 is the first."""
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=settings.warmup_steps,
        # It asserts that the warm-up ends before the decay (optimizer_param_scheduler.py:160).
        lr_decay_steps=max(total_steps, settings.warmup_steps + 1),
        lr_decay_style=_STYLES[settings.schedule],
        wsd_decay_steps=settings.wsd_decay_steps,
        lr_wsd_decay_style="linear",
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )


class SkipCounter:
    """Consecutive updates that were skipped: their gradients were not finite.

    It is the same on all ranks, because the gradient norm is.
    """

    def __init__(self, settings: OptimizerConfig) -> None:
        self._max_skipped, self.num = settings.max_skipped_steps, 0

    def count(self, norm: float) -> None:
        """Count an update with this gradient norm, taken or skipped.

        Raises:
            FloatingPointError: More than optimizer.max_skipped_steps in a row were skipped.
        """
        self.num = 0 if math.isfinite(norm) else self.num + 1
        if self.num > self._max_skipped:
            raise FloatingPointError(
                f"the norm of the gradients is {norm}: the step was not taken; "
                f"optimizer.max_skipped_steps={self._max_skipped} in a row may be skipped"
            )

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the last update; none if no step may be skipped."""
        return {"num_skipped_steps": float(self.num > 0)} if self._max_skipped else {}


@torch.no_grad()
def clip_and_step(optimizer: ChainedOptimizer) -> float:
    """Clip gradients and take a step; return the gradient norm of all ranks before clipping.

    If the norm is not finite, weights and optimizer state do not change. ChainedOptimizer.step
    (optimizer/optimizer.py:1855) does the same without this check: without a loss scale it carries
    a NaN into the weights.
    """
    optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    if not math.isfinite(norm):
        return norm
    for part in optimizer.chained_optimizers:
        config, parameters = part.config, part.get_parameters()
        if config.clip_grad > 0 and parameters:
            clip_grad_by_total_norm_fp32(
                parameters,
                max_norm=config.clip_grad,
                total_norm=norm,
                use_decoupled_grad=config.use_precision_aware_optimizer_no_fp8_or_ds_fp8,
            )
    optimizer.step_with_ready_grads()
    return norm


def finish_weight_gather(chunks: Sequence[GPTModel | DistributedDataParallel]) -> None:
    """Wait until every rank has all updated weights. Collective over data-parallel ranks.

    With overlap each rank has only its own shard of the update after a step; the forward pre-hooks
    of modules wait for the others (distributed/distributed_data_parallel.py:432). Call this before
    reading weights without a forward pass.
    """
    for chunk in chunks:
        if not isinstance(chunk, DistributedDataParallel) or not chunk.use_forward_hook:
            continue
        for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
            if not group.param_gather_dispatched or group.param_gather_handle is not None:
                group.start_param_sync(force_sync=True)
