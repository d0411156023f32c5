"""The Megatron backend."""

from __future__ import annotations

from mcore_rl.engine.base import Backend
from mcore_rl.engine.megatron.device import build_rank_environment, choose_modules
from mcore_rl.engine.megatron.engine import MegatronEngine, RewardEngine, ValueEngine

BACKEND = Backend(
    engines={
        "language_model": MegatronEngine,
        "value_model": ValueEngine,
        "reward_model": RewardEngine,
    },
    rank_environment=build_rank_environment,
    check_modules=choose_modules,
)
