"""The Megatron backend, and the checks of settings that are its own."""

from __future__ import annotations

from mcore_rl.checkpoint.peft import check_targets
from mcore_rl.config.resolve_engine import resolve_model_engine, resolve_model_layout
from mcore_rl.config.schema import EngineConfig
from mcore_rl.engine.base import Backend
from mcore_rl.engine.megatron.device import build_rank_environment, choose_modules
from mcore_rl.engine.megatron.engine import MegatronEngine, RewardEngine, ValueEngine
from mcore_rl.models.base import HFConfig, get_model_sizes, pad_vocab_size
from mcore_rl.models.heads import map_model_weights


def _check_settings(key: str, engine: EngineConfig, device: str) -> None:
    """Check that ranks on "cuda" or "cpu" can have the modules of the settings."""
    choose_modules(engine.modules, device, key)


def _check_model(key: str, engine: EngineConfig, hf_config: HFConfig) -> None:
    """Check that the layout divides the model, and that it has the parts that settings name."""
    sizes = get_model_sizes(hf_config)
    resolve_model_layout(f"{key}.layout", engine.layout, sizes)
    resolve_model_engine(key, engine, sizes)
    if engine.lora.rank:
        weights = map_model_weights(hf_config, pad_vocab_size(hf_config, 1))
        check_targets(f"{key}.lora", weights, engine.lora)


BACKEND = Backend(
    engines={
        "language_model": MegatronEngine,
        "value_model": ValueEngine,
        "reward_model": RewardEngine,
    },
    check_settings=_check_settings,
    check_model=_check_model,
    rank_environment=build_rank_environment,
)
