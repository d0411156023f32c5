"""One file a model family; importing this package fills the registry."""

from mcore_rl.models import qwen3, qwen3_moe

__all__ = ["qwen3", "qwen3_moe"]
