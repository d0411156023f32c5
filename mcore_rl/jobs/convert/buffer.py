"""Memory that holds one tensor after another: filling new memory takes as long as copying."""

from __future__ import annotations

import math

import numpy as np
import torch


class Buffer:
    """Bytes for one tensor at a time."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def reserve(self, nbytes: int) -> None:
        """Room for that many bytes. What a smaller buffer held is lost."""
        if nbytes > len(self._memory):
            self._memory = np.empty(0, np.uint8)  # given back before more is taken
            self._memory = np.empty(nbytes, np.uint8)

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype, start: int = 0) -> torch.Tensor:
        """A tensor in the bytes from `start` on. Its storage is these bytes and no others."""
        end = start + math.prod(shape) * dtype.itemsize
        return torch.from_numpy(self._memory[start:end]).view(dtype).view(shape)
