"""The model of a rank: TransformerConfig from the engine's settings, and GPTModel chunks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer import MLATransformerConfig, TransformerConfig

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import EngineConfig
from mcore_rl.engine.megatron import device, passthrough
from mcore_rl.engine.megatron.attention import use_packed_attention
from mcore_rl.engine.megatron.indexer_replay import use_replayed_attention
from mcore_rl.engine.megatron.moe import (
    iter_routers,
    slice_sequence_parallel,
    use_packed_routers,
)
from mcore_rl.engine.megatron.qk_norm import use_all_heads_norms
from mcore_rl.engine.megatron.rope import scale_rope
from mcore_rl.models.base import Family, HFConfig
from mcore_rl.parallel.mesh import Chunk

_ACTIVATIONS = {"silu": F.silu, "quick_gelu": quick_gelu}
# Every weight is loaded or set to zero before it is read, so initialization does nothing.
_INIT_METHODS = dict.fromkeys(
    ("init_method", "output_layer_init_method", "embedding_init_method"), lambda weight: weight
)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Inputs of multi-token prediction layers (models/gpt/gpt_model.py:667).
_MTP_INPUTS = (
    "input_ids", "position_ids", "attention_mask", "inference_params", "rotary_pos_emb",
    "rotary_pos_cos", "rotary_pos_sin", "packed_seq_params", "sequence_len_offset",
)  # fmt: skip


class PolicyModel(GPTModel):
    """A GPTModel that returns its hidden states; heads.py applies the output head with the loss.

    `output_layer` keeps its parameters, so names and checkpoints are GPTModel's.

    Multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2): prediction layer k takes
    the state of token i at depth k - 1 and the embedding of token i + k, and predicts token
    i + k + 1 with the model's own embedding and head. The layers are built only if their loss is
    enabled, and run in training passes only, so log-probs are those of a model without them, bit
    for bit.
    """

    def _preprocess(self, *args: Any, padding_mask: Any = None, **kwargs: Any) -> Any:
        """Split the padding mask [1, tokens] over TP like the tokens, on every stage.

        Megatron splits it on the first stage only (models/gpt/gpt_model.py:352).
        """
        inputs = super()._preprocess(*args, **kwargs)
        if padding_mask is not None:
            padding_mask = slice_sequence_parallel(self.config, padding_mask, dim=1)
        if self.config.overlap_moe_expert_parallel_comm:
            for _, router in iter_routers(self):
                router.pack_padding = padding_mask
        return (*inputs[:5], padding_mask, *inputs[6:])

    def _postprocess(self, hidden_states: torch.Tensor, **inputs: Any) -> torch.Tensor:
        """Return [tokens / tp (sequence parallel), 1, hidden], on every stage.

        In training with multi-token prediction the states of each depth follow along dim 0.
        """
        if not (self.mtp_process and self.training):
            return hidden_states
        states: torch.Tensor = self.mtp(
            hidden_states=hidden_states,
            embedding=self.embedding,
            **{name: inputs.get(name) for name in _MTP_INPUTS},
        )
        return states

    @property
    def head_weight(self) -> torch.Tensor:
        """Weight of the output projection, tied or not: [vocabulary shard, hidden]."""
        # The head does not call output_layer, so the hook with which DDP waits for an overlapped
        # gather of its weight is called here (distributed/distributed_data_parallel.py:432).
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
    """Build the chunks of this pipeline rank; their weights are not initialised.

    The chunks of a rank share one config object, on which Megatron's schedule keeps its hooks.

    Args:
        stages: All chunks of the model.
    """
    config, arguments = build_transformer_config(family, hf_config, engine, dtype, stages)
    rope_parameters = arguments.pop("rope_parameters", None)
    norms_all_heads = arguments.pop("qk_norm_over_all_heads", False)
    chunks = []
    for stage in stages:
        if stage.pp_rank != pp_rank:
            continue
        vp_stage = stage.vpp_rank if engine.layout.vpp > 1 else None
        layer_spec = use_packed_routers(family.layer_spec(config, vp_stage))
        if engine.indexer_replay != "off":
            layer_spec = use_replayed_attention(layer_spec)
        if config.softmax_type != "vanilla":
            layer_spec = use_packed_attention(layer_spec)
        if norms_all_heads:
            layer_spec = use_all_heads_norms(layer_spec)
        mtp_spec = None
        if stage.num_mtp_layers:  # layers like the last decoder layer of the chunk
            mtp_spec = get_gpt_mtp_block_spec(
                config, layer_spec, use_transformer_engine=True, vp_stage=vp_stage
            )
        chunk = model_class(
            config=config,
            transformer_layer_spec=layer_spec,
            mtp_block_spec=mtp_spec,
            vocab_size=padded_vocab,
            max_sequence_length=hf_config.get("max_position_embeddings", 0),
            pre_process=stage.has_embedding,
            post_process=stage.has_head,
            parallel_output=True,
            share_embeddings_and_output_weights=hf_config.get("tie_word_embeddings", False),
            vp_stage=vp_stage,
            **arguments,
        )
        if rope_parameters is not None:
            scale_rope(chunk, rope_parameters)
        for name, parameter in chunk.named_parameters():
            if ".experts." in name:
                # transformer/moe/experts.py marks experts at EP > 1 only, and biases as what TP
                # ranks have copies of. Without the marks the gradient norm is wrong at TP2, ETP1.
                parameter.allreduce = False
                parameter.tensor_model_parallel = True
            if ".indexer." in name and not engine.indexer_loss_coef:
                # No gradient reaches it: without this, Adam would decay it all the same.
                parameter.requires_grad_(False)
            if name.endswith(".softmax_offset"):  # split over TP, which Megatron does not say
                set_tensor_model_parallel_attributes(parameter, True, 0, 1)
        fuse_weight_gradients(chunk)
        chunks.append(chunk.to(torch.cuda.current_device()))
    return chunks


def build_transformer_config(
    family: Family,
    hf_config: HFConfig,
    engine: EngineConfig,
    dtype: torch.dtype,
    stages: Sequence[Chunk],
) -> tuple[TransformerConfig, dict[str, Any]]:
    """Return Megatron's config of the model at this layout, and further arguments of GPTModel.

    A family returns both in one dict: entries that are no field of the config are GPTModel's, the
    rope_parameters of a scaled rotary embedding, and qk_norm_over_all_heads (qk_norm.py).
    """
    layout = engine.layout
    fields = family.config_map(hf_config)
    fields["activation_func"] = _ACTIVATIONS[fields.pop("activation")]
    config_class = MLATransformerConfig if "kv_lora_rank" in fields else TransformerConfig
    known = {field.name for field in dataclasses.fields(config_class)}
    arguments: dict[str, Any] = {"position_embedding_type": "rope"}
    arguments |= {name: fields.pop(name) for name in list(fields) if name not in known}
    if fields.get("num_moe_experts"):
        fields |= _build_moe_fields(engine)
        if fields.get("moe_router_enable_expert_bias"):
            fields["moe_router_bias_update_rate"] = engine.moe.bias_update_rate
    flags = device.build_config_flags()
    if fields.get("experimental_attention_variant") == "dsa":
        fields |= {
            "dsa_indexer_loss_coeff": engine.indexer_loss_coef,
            "dsa_indexer_use_sparse_loss": True,
        }
        flags |= {"apply_rope_fusion": False, "cp_comm_type": "allgather"}
    # The fused kernel of latent attention has YaRN only; that of others takes no factor of it.
    is_yarn = arguments.get("rope_parameters", {}).get("rope_type") == "yarn"
    if fields.get("rope_type") == "rope" or is_yarn or not _fits_latent_rope_kernel(fields):
        flags["apply_rope_fusion"] = False
    if fields.get("num_moe_experts") and fields.get("add_bias_linear", True):
        flags["bias_dropout_fusion"] = False  # refused with biases (transformer/moe/experts.py:204)
    passed = passthrough.read_engine_fields(engine).model
    if "cp_comm_type" in flags and passed.get("cp_comm_type", "allgather") != "allgather":
        raise ConfigError(
            f"megatron.cp_comm_type={passed['cp_comm_type']!r}: sparse attention needs 'allgather'"
        )
    engine_fields = dict(
        mtp_num_layers=sum(stage.num_mtp_layers for stage in stages) or None,
        **_build_recompute_fields(engine),
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
        overlap_moe_expert_parallel_comm=engine.moe.overlap,
        moe_hybridep_pad_uneven_dispatch_inputs=True,
        sequence_parallel=layout.tp > 1,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        # Packs differ in length, so stages exchange the shapes.
        variable_seq_lengths=layout.pp > 1,
        # With interleaved chunks the batched exchange gives wrong losses without an error
        # (pipeline_parallel/p2p_communication.py:374); the overlapped exchange is correct.
        batch_p2p_comm=layout.vpp == 1,
        overlap_p2p_comm=layout.vpp > 1,
        # Divide gradients by the number of tokens (see step.compute_training_loss).
        calculate_per_token_loss=True,
    )
    try:
        config = config_class(**fields, **engine_fields, **{**flags, **passed})
    except (ValueError, AssertionError) as error:
        reason = " ".join(str(error).split())
        settings = passthrough.describe_settings(engine, reason)
        message = f"{settings}: Megatron refuses it with this model and layout: {reason}"
        raise ConfigError(message) from error
    return config, arguments


def _fits_latent_rope_kernel(fields: dict[str, Any]) -> bool:
    """Say whether all sizes of heads are powers of 2 (fusions/fused_mla_yarn_rope_apply.py:440).

    True without latent attention, whose rotary kernel this is about.
    """
    sizes = [fields.get(f"{name}_head_dim", 1) for name in ("qk", "qk_pos_emb", "v")]
    return all(size & (size - 1) == 0 for size in sizes)


def _build_moe_fields(engine: EngineConfig) -> dict[str, Any]:
    """Return the TransformerConfig arguments of the settings of experts and routers."""
    coef = engine.moe.aux_loss_coef
    return {
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": engine.moe.aux_loss if coef else "none",
        "moe_aux_loss_coeff": coef,
        "moe_enable_routing_replay": engine.moe.router_replay != "off",
        "moe_grouped_gemm": True,
    }


def _build_recompute_fields(engine: EngineConfig) -> dict[str, Any]:
    """Return the TransformerConfig arguments of `recompute`."""
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
    """Make Transformer Engine's linears add weight gradients to DDP's float32 buffers.

    Otherwise the gradient of each micro-batch is rounded to bfloat16 before it is added. The flag
    of TransformerConfig does the same, but then Megatron requires Apex for the output layer
    (tensor_parallel/layers.py:1070), whose gradient logprob.py computes without it.
    """
    for module in model.modules():
        if hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = True  # type: ignore[assignment]
