"""The Megatron backend."""

from __future__ import annotations

from mcore_rl.engine.base import Backend
from mcore_rl.engine.megatron.device import chosen_modules, rank_environment
from mcore_rl.engine.megatron.engine import MegatronEngine
from mcore_rl.engine.megatron.value_engine import RewardEngine, ValueEngine

BACKEND = Backend(
    engines={
        "language_model": MegatronEngine,
        "value_model": ValueEngine,
        "reward_model": RewardEngine,
    },
    rank_environment=rank_environment,
    check_modules=chosen_modules,
)
