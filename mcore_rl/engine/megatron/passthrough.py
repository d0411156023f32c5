"""Fields of Megatron's classes that settings pass through: actor.megatron.

The classes are TransformerConfig (with latent attention MLATransformerConfig), the config of DDP
and that of the optimizer. A field that several have goes to each, as in Megatron-LM's arguments.
Upstream lines are those of megatron/core 0.19.2.
"""

from __future__ import annotations

import importlib.util
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.passthrough import FieldRules, check_refused, convert_fields, find_rule
from mcore_rl.config.schema import EngineConfig
from mcore_rl.engine.megatron import device
from mcore_rl.observability.process import exempt_imports_from_gc
from mcore_rl.reshard.rules import Shard, Weight

_MODEL = "config.json of the model"
_SPLIT = "it splits weights in a way that the rules of the model's weights do not have"
_PACKS = "it needs micro-batches of one length, and packs differ in length"
_NAMES = "it changes the names or the order of weights, which checkpoints and servers need"
_FLOAT8_WEIGHTS = "weights stay in model.dtype, as checkpoints and servers read them"
_OTHER_MODEL = "the trainer would compute another model than the servers"
_DROPS = "tokens would get other experts than on the servers, or none"
_LOOP = "Megatron-LM's training loop acts on it, which does not run here"
_GROUPS = "the process groups are made for {key}.layout alone"
_INFERENCE = "it is for Megatron's own inference, and servers generate here"
_HEAD = "the engine computes the output head and its loss itself, in tiles"
_DELAYED = "delayed weight gradients have not been checked with the engine's float32 buffers"
_DELAYED_SCALES = "it is of delayed scales, state that checkpoints do not have"
_FLOAT8_ATTENTION = "Transformer Engine has no float8 attention that trains on packs"
_FSDP = "{key}.backend=fsdp"

OWNED: Mapping[str, str] = {
    # Layout.
    "tensor_model_parallel_size": "{key}.layout.tp",
    "sequence_parallel": "{key}.layout.tp",
    "pipeline_model_parallel_size": "{key}.layout.pp",
    "pipeline_model_parallel_layout": "{key}.layout.pp",
    "virtual_pipeline_model_parallel_size": "{key}.layout.vpp",
    "overlap_p2p_comm": "{key}.layout.vpp",
    "batch_p2p_comm": "{key}.layout.vpp",
    "microbatch_group_size_per_vp_stage": "{key}.layout.pp",
    "num_layers_in_first_pipeline_stage": "{key}.layout.first_stage_layers",
    "account_for_embedding_in_pipeline_split": "{key}.layout.first_stage_layers",
    "num_layers_in_last_pipeline_stage": "{key}.layout.last_stage_layers",
    "account_for_loss_in_pipeline_split": "{key}.layout.last_stage_layers",
    "context_parallel_size": "{key}.layout.cp",
    "expert_model_parallel_size": "{key}.layout.ep",
    "expert_tensor_parallel_size": "{key}.layout.etp",
    # Precision and modules.
    "fp16": "model.dtype",
    "bf16": "model.dtype",
    "*params_dtype": "model.dtype",
    "pipeline_dtype": "model.dtype",
    "enable_autocast": "model.dtype",
    "autocast_dtype": "model.dtype",
    "transformer_impl": "{key}.modules",
    "apply_rope_fusion": "{key}.modules",
    # Memory.
    "recompute_granularity": "{key}.recompute.granularity",
    "recompute_method": "{key}.recompute.granularity",
    "recompute_num_layers": "{key}.recompute.num_layers",
    "recompute_modules": "{key}.recompute.modules",
    "moe_layer_recompute": "{key}.recompute.modules",
    "num_microbatches_with_partial_activation_checkpoints": "{key}.recompute.granularity",
    # Experts and multi-token prediction.
    "moe_token_dispatcher_type": "{key}.moe.dispatcher",
    "moe_enable_deepep": "{key}.moe.dispatcher",
    "overlap_moe_expert_parallel_comm": "{key}.moe.overlap",
    "moe_router_load_balancing_type": "{key}.moe.aux_loss",
    "moe_aux_loss_coeff": "{key}.moe.aux_loss_coef",
    "moe_router_bias_update_rate": "{key}.moe.bias_update_rate",
    "moe_enable_routing_replay": "{key}.moe.router_replay",
    "mtp_num_layers": "{key}.mtp_loss_coef",
    "mtp_loss_scaling_factor": "{key}.mtp_loss_coef",
    # Float8.
    "fp8": "{key}.fp8.recipe",
    "fp8_recipe": "{key}.fp8.recipe",
    "first_last_layers_bf16": "{key}.fp8.bf16_layers_at_start",
    "num_layers_at_start_in_bf16": "{key}.fp8.bf16_layers_at_start",
    "num_layers_at_end_in_bf16": "{key}.fp8.bf16_layers_at_end",
    # The optimizer.
    "optimizer": "{key}.optimizer.name",
    "lr": "{key}.optimizer.lr",
    "min_lr": "{key}.optimizer.min_lr",
    "adam_beta1": "{key}.optimizer.beta1",
    "adam_beta2": "{key}.optimizer.beta2",
    "adam_eps": "{key}.optimizer.eps",
    "weight_decay": "{key}.optimizer.weight_decay",
    "decoupled_weight_decay": "{key}.optimizer.weight_decay",
    "clip_grad": "{key}.optimizer.clip_grad",
    "grad_norm_skip_threshold": "{key}.optimizer.max_skipped_steps",
    "check_for_nan_in_grad": "{key}.optimizer.max_skipped_steps",
    "check_for_large_grads": "{key}.optimizer.max_skipped_steps",
    "use_distributed_optimizer": "{key}.optimizer.distributed",
    "use_layer_wise_distributed_optimizer": "{key}.optimizer.distributed",
    "overlap_grad_reduce": "{key}.optimizer.overlap",
    "overlap_param_gather": "{key}.optimizer.overlap",
    "optimizer_cpu_offload": "{key}.optimizer.cpu_offload",
    "use_megatron_fsdp": _FSDP,
    "use_custom_fsdp": _FSDP,
    "fsdp_*": _FSDP,
    "megatron_fsdp_*": _FSDP,
    "data_parallel_sharding_strategy": _FSDP,
    "outer_dp_sharding_strategy": _FSDP,
    "suggested_communication_unit_size": _FSDP,
    # The model.
    **dict.fromkeys(
        (
            "num_layers", "hidden_size", "num_attention_heads", "num_query_groups",
            "ffn_hidden_size", "kv_channels", "num_moe_experts", "moe_layer_freq",
            "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "moe_shared_expert_gate",
            "moe_latent_size", "moe_router_topk", "moe_router_topk_scaling_factor",
            "moe_router_num_groups", "moe_router_group_topk", "moe_router_topk_limited_devices",
            "moe_router_pre_softmax", "moe_router_score_function", "moe_router_enable_expert_bias",
            "normalization", "layernorm_*", "qk_layernorm", "qk_l2_norm", "add_bias_linear",
            "add_qkv_bias", "gated_linear_unit", "activation_func", "activation_func_clamp_value",
            "glu_linear_offset", "softmax_*", "window_*", "rotary_*", "rope_type", "no_rope_freq",
            "mrope_section", "attention_output_gate", "multi_latent_attention", "*_lora_rank",
            "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "beta_fast", "beta_slow",
            "mscale*", "original_max_position_embeddings", "experimental_attention_variant",
            "dsa_indexer_*", "linear_*", "mamba_*", "use_mamba_mem_eff_path", "is_hybrid_model",
            "heterogeneous_block_specs", "hetereogenous_dist_checkpoint", "quant_recipe",
        ),
        _MODEL,
    ),
}  # fmt: skip

DENIED: Mapping[str, str] = {
    # Log-probs and losses.
    "*_dropout": "two passes over a token would give different log-probs",
    **dict.fromkeys(
        (
            "apply_residual_connection_post_layernorm", "fp32_residual_connection",
            "apply_query_key_layer_scaling", "use_mup", "mup_*", "moe_apply_probs_on_input",
            "mtp_use_repeated_layer", "mtp_hybrid_override_pattern",
        ),
        _OTHER_MODEL,
    ),
    **dict.fromkeys(
        (
            "moe_input_jitter_eps", "moe_token_drop*", "moe_expert_capacity_factor",
            "moe_expert_rank_capacity_factor", "moe_pad_expert_input_to_capacity",
            "moe_router_force_*", "moe_router_quantile_balancing_ema",
        ),
        _DROPS,
    ),
    "moe_router_dtype": "routers choose in float32, as those of the servers",
    "moe_router_fusion": "its kernel knows neither replay nor the padding of packs",
    "moe_router_padding_for_*": "experts' products pad themselves, and the load counts tokens only",
    "moe_z_loss_coeff": "Megatron does not average this loss over packs of different length",
    "mtp_detach_heads": "{key}.mtp_loss_coef is of a loss that reaches the whole model",
    "mtp_standalone": "prediction layers belong to the last stage of {key}.layout",
    "calculate_per_token_loss": "the engine divides by the tokens of all ranks itself",
    "average_in_collective": "gradients of ranks are summed: loss weights have every mean",
    "cross_entropy_*": _HEAD,
    "defer_embedding_wgrad_compute": _HEAD,
    "wgrad_deferral_limit": _HEAD,
    "qk_clip*": _LOOP,
    "log_max_attention_logit": _LOOP,
    "log_num_zeros_in_grad": _LOOP,
    "moe_per_layer_logging": _LOOP,
    "decoupled_*lr": _LOOP,
    "apply_wd_to_qk_layernorm": _LOOP,
    "overlap_param_gather_with_optimizer_step": _LOOP,
    "*loss_scale*": "float16 needs it, and model.dtype has no float16",
    "hysteresis": "float16 needs it, and model.dtype has no float16",
    "grad_reduce_in_fp32": "gradients are summed in float32 over micro-batches and ranks",
    "main_grads_dtype": "gradients are summed in float32 over micro-batches and ranks",
    "gradient_accumulation_fusion": "the engine always fuses it with Transformer Engine's modules; "
    "Megatron's flag also changes the output head, which needs Apex",
    "disable_parameter_transpose_cache": "without it the first micro-batch of a step would "
    "overwrite gradients",
    # Packs.
    "*cuda_graph*": _PACKS,
    "variable_seq_lengths": _PACKS,
    "tp_comm_*": _PACKS,
    "moe_paged_stash*": _PACKS,
    "moe_ncclep_*": _PACKS,
    "moe_hybridep_pad_uneven_dispatch_inputs": "the engine sets it: packs differ in length",
    "hierarchical_context_parallel_sizes": "packs are split over cp as zigzag alone",
    "hybrid_context_parallel": "packs are split over cp as zigzag alone",
    "max_seqlen_per_dp_cp_rank": "packs are split over cp as zigzag alone",
    "delay_wgrad_compute": _DELAYED,
    "overlap_dispatch_backward_with_experts_wgrad": _DELAYED,
    # Weights.
    "*num_weight_shards": _SPLIT,
    "*gtp_weight_remat_size": _SPLIT,
    "moe_single_grouped_*": _NAMES,
    "moe_grouped_gemm": _NAMES,
    "*glu_interleave_size": _NAMES,
    "use_grouped_gemm_for_*": _NAMES,
    "mla_down_proj_fusion": _NAMES,
    "fused_residual_rmsnorm": _NAMES,
    "use_transformer_engine_op_fuser": _NAMES,
    "use_kitchen*": _NAMES,
    "kitchen_*": _NAMES,
    "fp8_param*": _FLOAT8_WEIGHTS,
    "fp4*": "float8 alone has its packs padded: set {key}.fp8.recipe",
    "fp8_margin": _DELAYED_SCALES,
    "fp8_interval": _DELAYED_SCALES,
    "fp8_amax_*": _DELAYED_SCALES,
    "tp_only_amax_red": _DELAYED_SCALES,
    "fp8_wgrad": "Megatron reads it with delayed scales alone (fp8_utils.py:737)",
    "fp8_dot_product_attention": _FLOAT8_ATTENTION,
    "fp8_multi_head_attention": _FLOAT8_ATTENTION,
    "reuse_grad_buf_for_mxfp8_param_ag": _FLOAT8_WEIGHTS,
    "keep_fp8_transpose_cache": _FLOAT8_WEIGHTS,
    "fp8_quantizer_factory": "a quantiser of your own has not been checked with the engine",
    "fp8_output_proj": _HEAD,
    "cpu_offloading_weights": "a colocated run moves weights to the host itself",
    "nccl_ub": "a colocated run moves gradients to the host itself",
    "disable_symmetric_registration": "a colocated run moves gradients to the host itself",
    "*init_method*": "weights come from the checkpoint",
    "perform_initialization": "weights come from the checkpoint",
    "use_cpu_initialization": "weights come from the checkpoint",
    "init_model_with_meta_device": "weights come from the checkpoint",
    # Processes and functions.
    "num_distributed_optimizer_instances": _GROUPS,
    "pipeline_model_parallel_comm_backend": _GROUPS,
    "use_ring_exchange_p2p": "it needs a torch that NVIDIA does not publish",
    "distribute_saved_activations": "with tp above 1 sequence parallelism has split them already",
    "*_func": "the engine sets this function",
    "_*": "Megatron sets it itself",
    "timers": _LOOP,
    "barrier_with_L1_time": _LOOP,
    "config_logger_dir": _LOOP,
    "test_mode": _OTHER_MODEL,
    **dict.fromkeys(
        (
            "inference_*", "flash_decode", "cache_mla_latents", "symmetric_ar_type",
            "nccl_all_reduce_for_prefill", "use_inference_optimized_layers",
            "mlp_chunks_for_prefill", "moe_pad_experts_*",
        ),
        _INFERENCE,
    ),
    # Optimizers other than adam and muon.
    **dict.fromkeys(
        ("sgd_*", "lion_*", "soap_*", "adaptive_muon_*"),
        "it is of an optimizer that {key}.optimizer.name does not have",
    ),
}  # fmt: skip

# Requirement of a field, unless it is false or null: Transformer Engine's modules ("te"), a GPU
# ("cuda"), the flex dispatcher, or Muon.
NEEDS: Mapping[str, str] = {
    "moe_permute_fusion": "te",
    "fused_single_qkv_rope": "te",
    "use_te_*": "te",
    "attention_backend": "te",
    "flash_attention_version": "te",
    "cp_comm_type": "te",
    "cpu_offloading*": "te",
    "batch_invariant_mode": "te",
    "use_precision_aware_optimizer": "te",
    "exp_avg*": "te",
    "*fine_grained_*": "cuda",
    "*offload*": "cuda",
    "masked_softmax_fusion": "cuda",
    "persist_layer_norm": "cuda",
    "moe_flex_*": "flex",
    "moe_deepep_*": "flex",
    "moe_hybridep_*": "flex",
    "moe_permute_fusion_into_hybridep": "flex",
    "muon_*": "muon",
}
# Packages of the backends of the flex dispatcher (transformer/moe/fused_a2a.py:11 and :271).
_FLEX_PACKAGES = {"deepep": "deep_ep", "hybridep": "deep_ep"}
_MIN_CAPABILITY = {"tensorwise": (8, 9), "blockwise": (9, 0), "mxfp8": (10, 0)}  # of a GPU
# Transformer Engine has no mxfp8 from it on (pytorch/quantization.py, _compute_mxfp8_support).
_END_OF_CAPABILITY = {"mxfp8": (12, 0)}
# Both sides of a weight are the inner one of a product, forward or backward, whose length cuBLAS
# takes in multiples of 16; scales of mxfp8 are of 32 values.
_FLOAT8_MULTIPLES = {"tensorwise": 16, "blockwise": 16, "mxfp8": 32}
_FLOAT8_LINEAR = re.compile(r"\.(linear_\w+|in_proj|out_proj|eh_proj)\.weight(\{expert\})?$")
_MIN_CUDA = {"blockwise": (12, 9)}  # of cuBLAS, whose products take blocks from there on
VALUES = {
    "moe_flex_dispatcher_backend": (tuple(_FLEX_PACKAGES), "others take packs of one length alone"),
}

RULES = FieldRules(f"megatron-core {device.MEGATRON_CORE}", OWNED, DENIED, VALUES)


@dataclass(frozen=True, slots=True)
class PassedFields:
    """Fields of the settings, by the class that they are passed to, with values of its types."""

    model: Mapping[str, Any] = field(default_factory=dict)
    ddp: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] = field(default_factory=dict)


def read_fields(key: str, values: Mapping[str, Any]) -> PassedFields:
    """Return the fields of settings for Megatron's classes.

    Args:
        key: Name of the settings, such as "actor.megatron".
        values: By field.

    Raises:
        ConfigError: A field is refused or unknown, or its value has another type.
    """
    if not values:
        return PassedFields()
    check_refused(key, values, RULES)  # without Megatron, whose import takes seconds
    with warnings.catch_warnings(), exempt_imports_from_gc():
        device.silence_imports()
        warnings.simplefilter("ignore")  # of missing kernels
        from megatron.core.distributed import DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig
        from megatron.core.transformer import MLATransformerConfig

    classes = MLATransformerConfig, DistributedDataParallelConfig, OptimizerConfig
    return PassedFields(*convert_fields(key, values, classes, RULES).values())


def read_engine_fields(engine: EngineConfig) -> PassedFields:
    """Return the fields of an engine's settings, float8 products included."""
    passed, fp8 = read_fields("megatron", engine.megatron), engine.fp8
    if fp8.recipe == "off":
        return passed
    fields = {
        "fp8": fp8.format,
        "fp8_recipe": fp8.recipe,
        "first_last_layers_bf16": fp8.bf16_layers_at_start + fp8.bf16_layers_at_end > 0,
        "num_layers_at_start_in_bf16": fp8.bf16_layers_at_start,
        "num_layers_at_end_in_bf16": fp8.bf16_layers_at_end,
    }
    optimizer = {**passed.optimizer, "fp8_recipe": fp8.recipe}
    return PassedFields({**passed.model, **fields}, passed.ddp, optimizer)


def describe_settings(engine: EngineConfig, reason: str) -> str:
    """Return the settings that a refusal of Megatron is about, by the fields that it names."""
    words = set(re.findall(r"\w+", reason))
    owners = (setting for name, setting in OWNED.items() if name in words and setting != _MODEL)
    names = {owner.removeprefix("{key}.") for owner in owners} - {"model.dtype", "{key}"}
    settings = {f"megatron.{name}": engine.megatron[name] for name in words & set(engine.megatron)}
    settings |= {name: reduce(getattr, name.split("."), engine) for name in names}
    if not settings:
        settings = {f"megatron.{name}": value for name, value in engine.megatron.items()}
    if not settings:
        settings = {f"layout.{name}": size for name, size in vars(engine.layout).items() if size}
    return ", ".join(f"{name}={settings[name]!r}" for name in sorted(settings))


def check_fields(key: str, engine: EngineConfig, device_type: str) -> None:
    """Check the fields of an engine, and that its settings and ranks have what they need.

    Args:
        key: Name of the settings of the engine, such as "actor".
        device_type: "cuda" or "cpu" of the ranks, which check their own packages if they are on
            other nodes than this process (device.choose_modules).

    Raises:
        ConfigError: See read_fields; or something is missing.
    """
    fields, where = engine.megatron, f"{key}.megatron"
    read_fields(where, fields)
    for name, value in fields.items():
        need = "" if value is None or value is False else find_rule(NEEDS, name)
        if need:
            _check_need(need, f"{where}.{name}={value!r}", key, engine, device_type)
    _check_precision(key, engine)
    is_local = device_type == device.get_device_type()
    if engine.moe.dispatcher == "flex":
        _check_flex(key, engine, device_type, is_local=is_local)
    if engine.optimizer.name == "muon":
        _check_muon(key, engine)
    if engine.fp8.recipe != "off":
        _check_float8(key, engine, device_type, is_local=is_local)


def _check_precision(key: str, engine: EngineConfig) -> None:
    """Check what Megatron asserts of the optimizer's dtypes (optimizer/optimizer_config.py:430)."""
    fields, name = engine.megatron, "use_precision_aware_optimizer"
    is_aware = fields.get(name, engine.optimizer.cpu_offload)
    if is_aware and not engine.optimizer.distributed:
        raise ConfigError(
            f"{key}.megatron.{name}=True needs {key}.optimizer.distributed=true; "
            f"{key}.optimizer.distributed=False"
        )
    for moment in ("exp_avg_dtype", "exp_avg_sq_dtype"):
        if fields.get(moment, "float32") != "float32" and not is_aware:
            raise ConfigError(
                f"{key}.megatron.{moment}={fields[moment]!r} needs {key}.megatron.{name}=true; "
                "allowed: 'float32' without it"
            )


def _check_float8(key: str, engine: EngineConfig, device_type: str, *, is_local: bool) -> None:
    """Check the requirements of a float8 recipe: modules, a GPU, and CUDA."""
    recipe = engine.fp8.recipe
    setting = f"{key}.fp8.recipe={recipe!r}"
    _check_need("te", setting, key, engine, device_type)
    if not is_local:
        return
    capability, end = torch.cuda.get_device_capability(), _END_OF_CAPABILITY.get(recipe)
    if not _has_products(capability, recipe):
        allowed = ["off", *(name for name in _MIN_CAPABILITY if _has_products(capability, name))]
        needed = _join(_MIN_CAPABILITY[recipe]) + (f" and below {_join(end)}" if end else "")
        raise ConfigError(
            f"{setting} needs a GPU of compute capability {needed}; this one has "
            f"{_join(capability)}; allowed: {', '.join(map(repr, allowed))}"
        )
    cuda = tuple(map(int, (torch.version.cuda or "0.0").split(".")[:2]))
    if cuda < _MIN_CUDA.get(recipe, cuda):
        raise ConfigError(
            f"{setting} needs CUDA {_join(_MIN_CUDA[recipe])}; torch {torch.__version__} has "
            f"{_join(cuda)}; allowed: 'off', or a torch of a later CUDA"
        )


def check_float8_sizes(
    key: str, engine: EngineConfig, weights: Sequence[Weight], num_layers: int
) -> None:
    """Check that each rank's part of every weight of a float8 product fits the product.

    Args:
        key: Name of the settings of the engine, such as "actor".
        engine: With a recipe of float8.
        weights: Of the model, under Megatron's names.
        num_layers: Decoder layers of the model.

    Raises:
        ConfigError: A side of a part is no multiple of what the recipe takes.
    """
    fp8, layout = engine.fp8, engine.layout
    multiple = _FLOAT8_MULTIPLES[fp8.recipe]
    layers = range(fp8.bf16_layers_at_start, num_layers - fp8.bf16_layers_at_end)
    for weight in weights:
        is_built = weight.stage != "mtp" or engine.mtp_loss_coef
        is_product = weight.layer in layers if weight.layer is not None else is_built
        if weight.expert or not is_product or not _FLOAT8_LINEAR.search(weight.name):
            continue
        count = getattr(layout, weight.axis) if weight.axis else 1
        rows, columns = weight.rule.get_local_shape(Shard(0, count))
        if rows % multiple or columns % multiple:
            split = f" with {key}.layout.{weight.axis}={count}" if weight.axis else ""
            other = f", or another {key}.layout.{weight.axis}" if weight.axis else ""
            raise ConfigError(
                f"{key}.fp8.recipe={fp8.recipe!r}{split}: float8 products take sides that are "
                f"multiples of {multiple}, and a rank's {weight.get_local_name()} has {rows} x "
                f"{columns}; allowed: 'off'{other}"
            )


def _has_products(capability: tuple[int, int], recipe: str) -> bool:
    """Return whether GPUs of a compute capability have the products of a recipe."""
    end = _END_OF_CAPABILITY.get(recipe)
    return capability >= _MIN_CAPABILITY[recipe] and (end is None or capability < end)


def _join(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _check_need(need: str, setting: str, key: str, engine: EngineConfig, device_type: str) -> None:
    if need == "te" and device.choose_modules(engine.modules, device_type, key) != "te":
        raise ConfigError(
            f"{setting} needs Transformer Engine's modules, and {key}.modules={engine.modules!r} "
            f"has torch's on {device_type!r}; allowed: GPUs with transformer-engine[pytorch]"
        )
    if need == "cuda" and device_type != "cuda":
        raise ConfigError(f"{setting} needs GPUs; allowed: not to set it on a CPU")
    if need == "flex" and engine.moe.dispatcher != "flex":
        raise ConfigError(
            f"{setting} needs {key}.moe.dispatcher='flex'; {key}.moe.dispatcher="
            f"{engine.moe.dispatcher!r}"
        )
    if need == "muon" and engine.optimizer.name != "muon":
        raise ConfigError(
            f"{setting} needs {key}.optimizer.name='muon'; {key}.optimizer.name="
            f"{engine.optimizer.name!r}"
        )


def _check_muon(key: str, engine: EngineConfig) -> None:
    setting = f"{key}.optimizer.name='muon'"
    for name in ("distributed", "cpu_offload"):
        if getattr(engine.optimizer, name):
            raise ConfigError(
                f"{setting} with {key}.optimizer.{name}=true: it needs whole matrices, on the "
                "device; allowed: false"
            )


def _check_flex(key: str, engine: EngineConfig, device_type: str, *, is_local: bool) -> None:
    """Check what the flex dispatcher needs: GPUs, a package, and several ranks of experts."""
    setting, layout = f"{key}.moe.dispatcher='flex'", engine.layout
    if device_type != "cuda":
        raise ConfigError(f"{setting} needs GPUs; allowed on a CPU: 'alltoall', 'allgather'")
    backend = engine.megatron.get("moe_flex_dispatcher_backend", "deepep")
    if is_local and importlib.util.find_spec(_FLEX_PACKAGES[backend]) is None:
        raise ConfigError(
            f"{setting} with the backend {backend!r} needs the package {_FLEX_PACKAGES[backend]}, "
            "which is not installed; allowed: 'alltoall', or another "
            f"{key}.megatron.moe_flex_dispatcher_backend"
        )
    if layout.ep * layout.etp == 1:
        raise ConfigError(
            f"{setting} with {key}.layout.ep=1 and {key}.layout.etp=1 has nothing to exchange; "
            "allowed: 'alltoall'"
        )
