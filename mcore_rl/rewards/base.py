"""Old import path of the decorators of rewards, for one release."""

import warnings

from mcore_rl.rewards.registry import in_process, in_thread, with_answers

__all__ = ["in_process", "in_thread", "with_answers"]

warnings.warn(
    "mcore_rl.rewards.base is deprecated; import from mcore_rl.rewards.registry",
    DeprecationWarning,
    stacklevel=2,
)
