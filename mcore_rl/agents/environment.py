"""Deprecated import path of `mcore_rl.agents.environments.base`; removed in the next release."""

import warnings

from mcore_rl.agents.environments.base import Environment, EnvironmentStep

__all__ = ["Environment", "EnvironmentStep"]

warnings.warn(
    "mcore_rl.agents.environment is now mcore_rl.agents.environments.base",
    FutureWarning,
    stacklevel=2,
)
