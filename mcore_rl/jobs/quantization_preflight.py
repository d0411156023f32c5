"""Checks of rollout.quantization against a model, before any process starts."""

from __future__ import annotations

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import RLConfig
from mcore_rl.engine.backends import load_backend
from mcore_rl.models.base import HFConfig, get_family
from mcore_rl.reshard.float8 import BlockScales
from mcore_rl.reshard.planner import Side
from mcore_rl.reshard.rules import Shard
