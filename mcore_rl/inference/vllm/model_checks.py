"""Check before anything starts what vLLM can serve of a model.

Upstream lines are those of vLLM 0.32, which is not imported.
"""

from __future__ import annotations

from mcore_rl.config.checks import check_divides
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import RolloutConfig
from mcore_rl.models.base import HFConfig, get_family, get_model_sizes


def check_model(
    settings: RolloutConfig,
    key: str,
    hf_config: HFConfig,
    device: str,
    *,
    records_experts: bool = False,
) -> None:
    """Check that vLLM can serve and split the model.

    It replicates key/value heads over more ranks.

    Args:
        key: Name of the server's settings, such as "rollout".
        device: "cpu" or "cuda".
        records_experts: Whether the trainer replays the experts of servers.

    Raises:
        ConfigError: it cannot.
    """
    sizes = get_model_sizes(hf_config)
    if settings.quantization is not None and device == "cpu":
        raise ConfigError(
            f"{key}.quantization={settings.quantization!r}: vLLM's CPU build loads float8 "
            "blocks, but multiplies them on CPUs with AMX alone "
            "(model_executor/kernels/linear/scaled_mm/cpu.py:241), on which no server has been "
            "tested; allowed on a CPU: null"
        )
    if records_experts and sizes.is_mla and device == "cpu":
        raise ConfigError(
            "actor.moe.router_replay='rollout': vLLM on a CPU records no experts of models "
            "with latent attention; allowed: 'off', 'record'"
        )
    if sizes.has_indexer and device == "cpu":
        raise ConfigError(
            f"{key}.backend='vllm' without a GPU: vLLM has no sparse attention on a CPU "
            f"(platforms/cpu.py:150), and {hf_config['architectures'][0]} has; allowed: GPUs"
        )
    check_divides(f"{key}.tp", settings.tp, "attention heads", sizes.num_attention_heads)
    if settings.dp > 1 and not sizes.num_experts:
        raise ConfigError(
            f"{key}.dp={settings.dp}: the model has no experts to split over data-parallel "
            f"ranks; allowed: 1, with more of {key}.num_servers"
        )
    if settings.dp > 1 and settings.num_workers > sizes.num_experts:
        raise ConfigError(
            f"{key}.dp={settings.dp} and {key}.tp={settings.tp} make {settings.num_workers} "
            f"workers; allowed: as many as the model has experts, {sizes.num_experts}"
        )
    if settings.dp > 1 and records_experts:
        raise ConfigError(
            f"actor.moe.router_replay='rollout' with {key}.dp={settings.dp}: vLLM gathers the "
            "experts of all data-parallel ranks' tokens in one call; allowed: 'off', 'record', "
            f"or {key}.dp=1"
        )
    if settings.ep and not sizes.num_experts:
        raise ConfigError(f"{key}.ep=true: the model has no experts; allowed: false")
    if settings.speculative.num_tokens:
        _check_drafts(settings, key, hf_config)


def _check_drafts(settings: RolloutConfig, key: str, hf_config: HFConfig) -> None:
    """Check that servers can draft tokens with the model's prediction layers.

    Raises:
        ConfigError: it has none, vLLM's draft model for its family has no rules, or the checkpoint
            is quantized.
    """
    setting = f"{key}.speculative.num_tokens={settings.speculative.num_tokens}"
    family = get_family(hf_config)
    if family.vllm_drafts is None:
        raise ConfigError(
            f"{setting}: the family {family.name!r} has no rules of vLLM's draft model "
            "(vllm_drafts); allowed: 0"
        )
    if not family.num_mtp_layers(hf_config):
        raise ConfigError(
            f"{setting}: the model has no layers for multi-token prediction; allowed: 0"
        )
    if hf_config.get("quantization_config") is not None:
        raise ConfigError(
            f"{setting}: the checkpoint is quantized, and so would be vLLM's draft model, whose "
            "weights an update sends in model.dtype; allowed: 0, or a checkpoint in bfloat16"
        )
