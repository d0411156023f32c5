"""The experts of each token, as vLLM returns them with a completion.

vLLM's scheduler asks its workers for them when `aux_output_config` says so, keeps those of cached
prefixes by the hashes of their blocks, and forgets them with the prefix cache
(distributed/aux_output_connector of vLLM 0.32). The workers' side of it is called by the model
runner of GPUs only (v1/worker/gpu/model_runner.py:802, 1740 and 2181). `install` has that of the
CPU call it, too.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm import envs
from vllm.platforms import current_platform

from mcore_rl.config.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_CONNECTOR = "mcore_rl_experts"  # where a model runner has its side


def arguments(records_experts: bool) -> dict[str, Any]:
    """The engine arguments. What they need on a CPU is there in processes forked from this one.

    Raises:
        ConfigError: VLLM_USE_V2_MODEL_RUNNER chooses the runner of GPUs that records none.
    """
    if records_experts and current_platform.is_cpu():
        install()
    elif records_experts and envs.VLLM_USE_V2_MODEL_RUNNER is False:
        raise ConfigError(
            "actor.moe.router_replay='rollout': vLLM's model runner V1 records no experts, and "
            "VLLM_USE_V2_MODEL_RUNNER=0 asks for it; allowed: 1, or unset"
        )
    return {"enable_return_routed_experts": records_experts}


def check(config: VllmConfig) -> None:
    """Of vLLM's own rules (config/vllm.py:1135) the one that our settings can break on a CPU.

    Raises:
        ConfigError: there is no prefix cache.
    """
    if config.aux_output_config.enabled and not config.cache_config.enable_prefix_caching:
        raise ConfigError(
            "the experts of a token cannot be recorded: vLLM keeps them by the blocks of its "
            "prefix cache, and has none for latent attention on a CPU (platforms/cpu.py:526)"
        )


@functools.cache
def install() -> None:
    """Give the CPU's model runner the calls that the GPU's has, and vLLM's config leave to ask."""
    from vllm.config import VllmConfig
    from vllm.distributed.aux_output_connector.worker import get_aux_output_connector
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    VllmConfig._verify_aux_output_compatibility = lambda config: None  # `check` comes later
    initialize_kv_cache = CPUModelRunner.initialize_kv_cache
    execute_model, sample_tokens = CPUModelRunner.execute_model, CPUModelRunner.sample_tokens

    def initialize(runner: Any, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        initialize_kv_cache(runner, kv_cache_config, *args, **kwargs)
        if runner.vllm_config.aux_output_config.enabled:
            made = get_aux_output_connector(runner.model, runner.vllm_config, kv_cache_config)
            setattr(runner, _CONNECTOR, made)

    def execute(runner: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if connector := getattr(runner, _CONNECTOR, None):
            connector.begin_step(scheduler_output.aux_output_connector_metadata)
        return execute_model(runner, scheduler_output, *args, **kwargs)

    def sample(runner: Any, *args: Any, **kwargs: Any) -> Any:
        output = sample_tokens(runner, *args, **kwargs)
        if (connector := getattr(runner, _CONNECTOR, None)) and output.req_ids:
            output.aux_output_connector_output = _experts_of_step(runner, connector, output)
        return output

    CPUModelRunner.initialize_kv_cache = initialize
    CPUModelRunner.execute_model, CPUModelRunner.sample_tokens = execute, sample


def _experts_of_step(runner: Any, connector: Any, output: Any) -> Any:
    """By request; None on a worker that answers nothing. No step of the CPU runs beside another."""
    batch, num = runner.input_batch, len(output.req_ids)
    ran = SimpleNamespace(
        req_ids=output.req_ids,
        query_start_loc_np=runner.query_start_loc.np[: num + 1],
        num_computed_tokens_np=batch.num_computed_tokens_cpu[:num],
    )
    pending = connector.prepare_output(ran)
    if pending is None:
        return None
    num_sampled = np.array([len(ids) for ids in output.sampled_token_ids])
    pending.enqueue_cpu_copy(num_sampled, np.zeros(num, np.int64))
    return pending.process_output()
