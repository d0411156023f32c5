"""Arguments of vLLM's engine (EngineArgs) that settings pass through: rollout.engine.

Upstream lines are those of vLLM 0.32. vLLM is imported by `read_arguments` alone.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.passthrough import FieldRules, check_refused, convert_fields
from mcore_rl.config.schema import RolloutConfig
from mcore_rl.observability.process import exempt_imports_from_gc

# No telemetry, no look-ups on the hub.
QUIET_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}

_NODES = "{key}.nodes_per_server"
_CACHE_BYTES = "{key}.kv_cache_bytes"
_ADAPTERS = "{key}.lora, models.NAME.adapter"
_RULES = "weights of other modules or ranks would not be those that an update sends"
_SAMPLING = "log-probs would not be those of the distribution that a request samples from"
_PIXELS = "the trainer would compute other pixel values than the servers"
_OLD_CACHE = "keys and values of older weights would outlive an update"
_ON_DEVICE = "an update writes weights in place, on the device"
_TEXTS = "requests and responses are token ids"
_PROCESSES = "the server starts and watches its processes itself"

OWNED: Mapping[str, str] = {
    "model": "model.path",
    "model_weights": "model.path",
    "tokenizer": "model.path",
    "tokenizer_revision": "model.path",
    "skip_tokenizer_init": "model.path",
    "hf_config_path": "model.path",
    "revision": "model.path",
    "code_revision": "model.path",
    "hf_token": "model.path",
    "download_dir": "model.path",
    "ignore_patterns": "model.path",
    "dtype": "model.dtype",
    "seed": "seed",
    "max_model_len": "data.max_prompt_tokens, {key}.max_response_tokens",
    "load_format": "{key}.load_format",
    "quantization": "rollout.quantization",
    "quantization_config": "rollout.quantization",
    "allow_deprecated_quantization": "rollout.quantization",
    "tensor_parallel_size": "{key}.tp",
    "data_parallel_*": "{key}.dp",
    "dp_sync_interval": "{key}.dp",
    "disable_nccl_for_dp_synchronization": "{key}.dp",
    "enable_expert_parallel": "{key}.ep",
    "nnodes": _NODES,
    "node_rank": _NODES,
    "master_addr": _NODES,
    "master_port": _NODES,
    "distributed_executor_backend": _NODES,
    "numa_bind*": "{key}.cores",
    "max_num_seqs": "{key}.max_num_seqs",
    "max_num_batched_tokens": "{key}.max_num_batched_tokens",
    "kv_cache_memory_bytes": _CACHE_BYTES,
    "gpu_memory_utilization": _CACHE_BYTES,
    "num_gpu_blocks_override": _CACHE_BYTES,
    "*distributed_timeout_seconds": "timeouts.call_s",
    "enable_return_routed_experts": "actor.moe.router_replay",
    "aux_output_config": "actor.moe.router_replay",
    "enable_sleep_mode": "placement.rollout",
    "weight_transfer_config": "weight_sync.method",
    "enable_lora": _ADAPTERS,
    "*lora_*": _ADAPTERS,
    "*_lora": _ADAPTERS,
    "*_loras": _ADAPTERS,
    "limit_mm_per_prompt": "{key}.max_images",
    "speculative_config": "{key}.speculative",
    "spec_*": "{key}.speculative",
}

DENIED: Mapping[str, str] = {
    # Other log-probs than those of the trainer's model.
    "logprobs_mode": _SAMPLING,
    "max_logprobs": _SAMPLING,
    "return_sampling_mask": _SAMPLING,
    "generation_config": _SAMPLING,
    "override_generation_config": _SAMPLING,
    "logits_processors": _SAMPLING,
    "watermark_config": _SAMPLING,
    "diffusion_config": "the trainer has no such model",
    "enable_trace_replay": "responses are sampled, not given",
    "kv_sharing_fast_prefill": "log-probs of prompts would be wrong",
    "runner": "servers generate",
    "convert": "servers generate",
    "pooler_config": "servers generate",
    # Weights.
    "hf_overrides": _RULES,
    "model_class_overrides": _RULES,
    "model_impl": _RULES,
    "config_format": _RULES,
    "trust_remote_code": "code of a checkpoint is never run",
    "pipeline_parallel_size": _RULES,
    "prefill_context_parallel_size": _RULES,
    "enable_eplb": _RULES,
    "eplb_config": _RULES,
    "expert_placement_strategy": _RULES,
    "enable_ep_weight_filter": _RULES,
    "enable_elastic_ep": _RULES,
    "elastic_ep_max_dp_size": _RULES,
    "enable_hc_sp": _RULES,
    "kernel_config": "moe_backend and linear_backend say it",
    "model_loader_extra_config": "the server has a loader of its own",
    "pt_load_map_location": "the server has a loader of its own",
    "max_parallel_loading_workers": "the server has a loader of its own",
    "cpu_offload_*": _ON_DEVICE,
    "offload_*": _ON_DEVICE,
    "sleep_*": _ON_DEVICE,
    "enable_cumem_allocator": _ON_DEVICE,
    "enable_nccl_comm_suspend": _ON_DEVICE,
    # Keys and values.
    "kv_transfer_config": _OLD_CACHE,
    "kv_events_config": _OLD_CACHE,
    "kv_offloading_*": _OLD_CACHE,
    "ec_*": _OLD_CACHE,
    "prefix_cache_retention_interval": _OLD_CACHE,
    # Requests and their answers.
    "stream_interval": "each token has the version of the weights that sampled it",
    "max_num_queued_*": "the server would refuse requests, which the run sends itself",
    "tokens_only": _TEXTS,
    "tokenizer_mode": _TEXTS,
    "reasoning_*": _TEXTS,
    "structured_outputs_config": _TEXTS,
    "enable_prompt_embeds": _TEXTS,
    "io_processor_plugin": _TEXTS,
    "served_model_name": _TEXTS,
    "renderer_num_workers": _TEXTS,
    "media_io_kwargs": _PIXELS,
    "mm_processor_kwargs": _PIXELS,
    "mm_processor_device": _PIXELS,
    "mm_device_do_normalize": _PIXELS,
    "mm_encoder_*": _PIXELS,
    "video_*": _PIXELS,
    "enable_mm_embeds": _PIXELS,
    "interleave_mm_strings": _PIXELS,
    "language_model_only": _PIXELS,
    "allowed_*": _PIXELS,
    # Processes.
    "*api_process_*": _PROCESSES,
    "device_ids": _PROCESSES,
    "worker_cls": _PROCESSES,
    "worker_extension_cls": _PROCESSES,
    "scheduler_cls": _PROCESSES,
    "additional_config": _PROCESSES,
    "ray_workers_use_nsight": _PROCESSES,
    "shutdown_timeout": _PROCESSES,
    "*fault_tolerance*": _PROCESSES,
    "use_tqdm_on_load": _PROCESSES,
    "disable_log_stats": _PROCESSES,
    "aggregate_engine_logging": _PROCESSES,
    "enable_log_requests": _PROCESSES,
    "log_*": _PROCESSES,
    "logging_config": _PROCESSES,
}
# An update writes experts in the order of the checkpoint; others reorder or pad them as they load.
VALUES = {"moe_backend": (("triton", "batched_triton"), _RULES)}
RULES = FieldRules("vLLM", OWNED, DENIED, VALUES)
# Arguments that the server sets on a CPU: the reason is in worker.build_device_arguments.
CPU_OWNED = {
    "enforce_eager": "nothing is compiled",
    "attention_backend": "it is 'CPU_MLA' or vLLM's only one",
    "enable_chunked_prefill": "a chunked prompt ends the engine",
    "moe_backend": "there is one",
    "compilation_config": "nothing is compiled",
}


_POLICY_FIELDS = {"quantization", "quantization_config", "speculative_config"}
_VLLM_COMPILE = 3  # config/compilation.py, CompilationMode.VLLM_COMPILE


def prepare_import() -> None:
    """Set the environment that vLLM reads when it is imported, and the level of what it logs."""
    os.environ |= QUIET_ENVIRONMENT
    level = os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    logging.getLogger("vllm").setLevel(level)  # vLLM sets it after its import


def read_arguments(key: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of settings for vLLM's engine, with values of its types.

    Args:
        key: Name of the settings, such as "rollout.engine".
        values: By argument.

    Raises:
        ConfigError: An argument is refused or unknown, or its value has another type.
    """
    if not values:
        return {}
    check_refused(key, values, RULES)  # without vLLM, whose import takes seconds
    prepare_import()
    with exempt_imports_from_gc():
        from vllm import __version__
        from vllm.engine.arg_utils import EngineArgs

    rules = replace(RULES, library=f"vLLM {__version__}")
    return convert_fields(key, values, [EngineArgs], rules)[EngineArgs]


def check_arguments(settings: RolloutConfig, key: str, device: str) -> None:
    """Check the arguments of a server before anything starts.

    Args:
        key: Name of the server's settings, such as "rollout".
        device: "cpu" or "cuda".

    Raises:
        ConfigError: See read_arguments; or servers on a CPU cannot have one.
    """
    if key != "rollout":
        for name in sorted(settings.engine.keys() & _POLICY_FIELDS):
            raise ConfigError(
                f"{key}.engine.{name}={settings.engine[name]!r}: only servers of the policy have "
                "this; allowed: not to set it"
            )
    passed = read_arguments(f"{key}.engine", settings.engine)
    mode = getattr(passed.get("compilation_config"), "mode", None)
    for field, is_eager in (
        ("enforce_eager", passed.get("enforce_eager", False)),
        ("optimization_level", passed.get("optimization_level") == 0),
        ("compilation_config", mode not in (None, _VLLM_COMPILE)),
    ):
        if is_eager and min(settings.dp, settings.tp) > 1:
            raise ConfigError(
                f"{key}.engine.{field}={settings.engine[field]!r} with {key}.dp={settings.dp} and "
                f"{key}.tp={settings.tp}: without graphs vLLM loses a batch of one token "
                "(model_executor/models/deepseek_v2.py:1360); allowed: not to set it"
            )
    for name, reason in CPU_OWNED.items() if device == "cpu" else ():
        if name in settings.engine:
            raise ConfigError(
                f"{key}.engine.{name}={settings.engine[name]!r}: on a CPU {reason}; allowed: not "
                "to set it"
            )
