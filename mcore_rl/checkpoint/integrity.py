"""Detecting damage of a tensor without a checksum: by its values."""

from __future__ import annotations

import torch

from mcore_rl.config.errors import ConfigError


def require_finite(name: str, tensor: torch.Tensor) -> None:
    """Raise ConfigError if a value is NaN or infinite: no weight of a working model is.

    The smallest and the largest value tell, and aminmax runs at the speed of memory.
    """
    if not tensor.numel():
        return
    smallest, largest = torch.aminmax(tensor)
    if bool(torch.isfinite(smallest) & torch.isfinite(largest)):
        return
    index = tuple(torch.isfinite(tensor).logical_not_().nonzero()[0].tolist())
    raise ConfigError(f"tensor {name} is damaged: it has {tensor[index].item()} at {list(index)}")
