"""The old place of `Admission` and `Pacing`, which are in rollout/buffer.py."""

from mcore_rl.rollout.buffer import Admission, Pacing

__all__ = ["Admission", "Pacing"]
