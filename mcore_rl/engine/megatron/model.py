"""The model of a rank: TransformerConfig from our settings, GPTModel chunks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import MLATransformerConfig, TransformerConfig

from mcore_rl.config.schema import EngineConfig
from mcore_rl.engine.megatron import device
from mcore_rl.engine.megatron.moe import sequence_share, use_packed_routers
from mcore_rl.engine.megatron.mtp import block_spec, states_with_predictions
from mcore_rl.models.base import Family, HFConfig
from mcore_rl.parallel.mesh import Chunk

_ACTIVATIONS = {"silu": F.silu}
# Every weight is loaded, or set to zero, before it is read.
_INIT_METHODS = dict.fromkeys(
    ("init_method", "output_layer_init_method", "embedding_init_method"), lambda weight: weight
)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class PolicyModel(GPTModel):
    """A GPTModel that ends at its hidden states; heads.py applies the output head with the loss.

    `output_layer` keeps its parameters, so names and checkpoints are GPTModel's.
    """

    def _preprocess(self, *args: Any, padding_mask: Any = None, **kwargs: Any) -> Any:
        """The padding mask [1, tokens], split over TP like the tokens, on every stage.

        Megatron splits it on the first stage only (models/gpt/gpt_model.py:314).
        """
        prepared = super()._preprocess(*args, **kwargs)
        if padding_mask is not None:
            padding_mask = sequence_share(self.config, padding_mask, dim=1)
        return (*prepared[:5], padding_mask, *prepared[6:])

    def _postprocess(self, hidden_states: torch.Tensor, **inputs: Any) -> torch.Tensor:
        """[tokens / tp (sequence parallel), 1, hidden], on every stage.

        In training with multi-token prediction the states of each depth follow.
        """
        if self.mtp_process and self.training:
            return states_with_predictions(self, hidden_states, inputs)
        return hidden_states

    @property
    def head_weight(self) -> torch.Tensor:
        """[vocabulary shard, hidden] weight of the output projection, tied or not."""
        # The head does not call output_layer, so the hook with which DDP waits for an overlapped
        # gather of its weight is called here (distributed/distributed_data_parallel.py:384).
        for hook in self.output_layer._forward_pre_hooks.values():
            hook(self.output_layer, ())
        if self.share_embeddings_and_output_weights:
            weight: torch.Tensor = self.shared_embedding_or_output_weight()
        else:
            weight = self.output_layer.weight
        return weight


def build_chunks(
    family: Family,
    hf_config: HFConfig,
    engine: EngineConfig,
    dtype: torch.dtype,
    stages: Sequence[Chunk],
    pp_rank: int,
    padded_vocab: int,
    model_class: Callable[..., PolicyModel] = PolicyModel,
) -> list[PolicyModel]:
    """The chunks of this pipeline rank, uninitialised as far as their weights matter.

    `stages` are all chunks of the model. The chunks of a rank share one config object, on which
    Megatron's schedule keeps its hooks.
    """
    config, arguments = _transformer_config(family, hf_config, engine, dtype, stages)
    chunks = []
    for stage in stages:
        if stage.pp_rank != pp_rank:
            continue
        vp_stage = stage.vpp_rank if engine.layout.vpp > 1 else None
        layer_spec = use_packed_routers(family.layer_spec(config, vp_stage))
        chunk = model_class(
            config=config,
            transformer_layer_spec=layer_spec,
            mtp_block_spec=(
                block_spec(config, layer_spec, vp_stage) if stage.num_mtp_layers else None
            ),
            vocab_size=padded_vocab,
            max_sequence_length=hf_config.get("max_position_embeddings", 0),
            pre_process=stage.has_embedding,
            post_process=stage.has_head,
            parallel_output=True,
            share_embeddings_and_output_weights=hf_config.get("tie_word_embeddings", False),
            vp_stage=vp_stage,
            **arguments,
        )
        _mark_experts(chunk)
        fuse_weight_gradients(chunk)
        chunks.append(chunk.to(torch.cuda.current_device()))
    return chunks


def _transformer_config(
    family: Family,
    hf_config: HFConfig,
    engine: EngineConfig,
    dtype: torch.dtype,
    stages: Sequence[Chunk],
) -> tuple[TransformerConfig, dict[str, Any]]:
    """Megatron's config of the model at this layout, and the arguments that GPTModel itself wants.

    A family names both in one dict; what the config class has no field for is GPTModel's.
    """
    layout = engine.layout
    fields = family.config_map(hf_config)
    fields["activation_func"] = _ACTIVATIONS[fields.pop("activation")]
    config_class = MLATransformerConfig if "kv_lora_rank" in fields else TransformerConfig
    known = {field.name for field in dataclasses.fields(config_class)}
    arguments = {"position_embedding_type": "rope"}
    arguments |= {name: fields.pop(name) for name in list(fields) if name not in known}
    if fields.get("num_moe_experts"):
        fields |= _moe_fields(engine)
        if fields.get("moe_router_enable_expert_bias"):
            fields["moe_router_bias_update_rate"] = engine.moe.bias_update_rate
    flags = device.config_flags()
    if fields.get("rope_type") == "rope":  # of latent attention: only its YaRN has a fused kernel
        flags["apply_rope_fusion"] = False
    config = config_class(
        **fields,
        mtp_num_layers=sum(stage.num_mtp_layers for stage in stages) or None,
        **_recompute_fields(engine),
        **_INIT_METHODS,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        pipeline_model_parallel_layout=(
            [stage.contents for stage in stages] if layout.pp > 1 else None
        ),
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        moe_token_dispatcher_type=engine.moe.dispatcher,
        sequence_parallel=layout.tp > 1,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        # Packs differ in length, so stages exchange the shapes.
        variable_seq_lengths=layout.pp > 1,
        # With interleaved chunks the batched exchange gives wrong losses without an error
        # (pipeline_parallel/p2p_communication.py:353); the overlapped one is right.
        batch_p2p_comm=layout.vpp == 1,
        overlap_p2p_comm=layout.vpp > 1,
        # A loss is a weighted sum over tokens; see step.py for what it is divided by.
        calculate_per_token_loss=True,
        **flags,
    )
    return config, arguments


def _moe_fields(engine: EngineConfig) -> dict[str, Any]:
    coef = engine.moe.aux_loss_coef
    return {
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": engine.moe.aux_loss if coef else "none",
        "moe_aux_loss_coeff": coef,
        "moe_enable_routing_replay": engine.moe.router_replay != "off",
        "moe_grouped_gemm": True,
    }


def _recompute_fields(engine: EngineConfig) -> dict[str, Any]:
    recompute = engine.recompute
    if recompute.granularity == "full":
        return {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": recompute.num_layers,
        }
    if recompute.granularity == "selective":
        modules = list(recompute.modules)
        return {"recompute_granularity": "selective", "recompute_modules": modules}
    return {}


def fuse_weight_gradients(model: torch.nn.Module) -> None:
    """Let Transformer Engine's products add weight gradients to DDP's float32 buffers.

    Otherwise the gradient of each micro-batch is rounded to bfloat16 before it is added. The flag
    of TransformerConfig does the same, but Megatron then demands Apex for the output layer
    (tensor_parallel/layers.py:924), whose gradient heads.py computes without it.
    """
    for module in model.modules():
        if hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = True  # type: ignore[assignment]


def _mark_experts(model: GPTModel) -> None:
    """Expert parameters belong to the expert groups at any EP and ETP.

    Without the mark the gradient norm is off at TP2, ETP1, EP1: transformer/moe/experts.py marks
    them at EP > 1 only.
    """
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            parameter.allreduce = False
