"""Megatron objects from our settings: TransformerConfig, GPTModel, DDP, optimizer, schedule."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig

from mcore_rl.config.schema import EngineConfig, OptimizerConfig
from mcore_rl.engine.megatron import device
from mcore_rl.models.base import Family, HFConfig, padded_vocab_size

_ACTIVATIONS = {"silu": F.silu}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def transformer_config(
    family: Family, hf_config: HFConfig, engine: EngineConfig, dtype: torch.dtype
) -> tuple[TransformerConfig, int]:
    """Megatron's config of the model at this layout, and the rotary base that GPTModel wants."""
    layout = engine.layout
    fields = family.config_map(hf_config)
    rotary_base = fields.pop("rotary_base")
    fields["activation_func"] = _ACTIVATIONS[fields.pop("activation")]
    if fields.get("num_moe_experts"):
        coef = engine.moe_aux_loss_coef
        fields |= {
            "moe_router_dtype": "fp32",
            "moe_token_dispatcher_type": "alltoall",
            "moe_router_load_balancing_type": "aux_loss" if coef else "none",
            "moe_aux_loss_coeff": coef,
        }
    config = TransformerConfig(
        **fields,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        sequence_parallel=layout.tp > 1,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        # A loss is a weighted sum over tokens; see step.py for what it is divided by.
        calculate_per_token_loss=True,
        **device.config_flags(),
    )
    return config, rotary_base


def build_model(
    family: Family, hf_config: HFConfig, engine: EngineConfig, dtype: torch.dtype
) -> GPTModel:
    """The ranks' own part of the model, uninitialised as far as its weights matter."""
    config, rotary_base = transformer_config(family, hf_config, engine, dtype)
    tied = hf_config.get("tie_word_embeddings", False)
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_decoder_block_spec(config, use_transformer_engine=True),
        vocab_size=padded_vocab_size(hf_config, engine.layout.tp),
        max_sequence_length=hf_config.get("max_position_embeddings", 0),
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=True,
        share_embeddings_and_output_weights=tied,
        position_embedding_type="rope",
        rotary_base=rotary_base,
    )
    if model.post_process:
        # The model ends at the hidden states; the head is applied in chunks with the loss.
        model.output_layer.forward = _hidden_states
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            # Expert parameters belong to the expert groups at any EP and ETP; without the mark the
            # gradient norm is off at TP2, ETP1, EP1 (transformer/moe/experts.py marks EP > 1 only).
            parameter.allreduce = False
    return model.to(torch.cuda.current_device())


def _hidden_states(
    hidden: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: Any = None
) -> tuple[torch.Tensor, None]:
    return hidden, None


def head_weight(model: GPTModel) -> torch.Tensor:
    """[vocabulary shard, hidden] weight of the output projection, tied or not."""
    if model.share_embeddings_and_output_weights:
        weight: torch.Tensor = model.shared_embedding_or_output_weight()
    else:
        weight = model.output_layer.weight
    return weight


def wrap_for_training(model: GPTModel, distributed_optimizer: bool) -> DistributedDataParallel:
    config = model.config
    wrapped = DistributedDataParallel(
        config=config,
        ddp_config=DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=distributed_optimizer,
            overlap_grad_reduce=False,
        ),
        module=model,
    )
    config.no_sync_func = wrapped.no_sync
    config.finalize_model_grads_func = finalize_model_grads
    return wrapped


def build_optimizer(
    model: DistributedDataParallel, settings: OptimizerConfig, dtype: torch.dtype, total_steps: int
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
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
        ),
        [model],
    )
    model.config.grad_scale_func = optimizer.scale_loss
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
