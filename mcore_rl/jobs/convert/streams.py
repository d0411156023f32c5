"""Reading ahead of writing, in memory that is used again and again."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import torch

T = TypeVar("T")


class Buffer:
    """Bytes that hold one tensor after another."""

    def __init__(self, nbytes: int) -> None:
        self._memory = np.empty(nbytes, np.uint8)

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype, start: int = 0) -> torch.Tensor:
        """A tensor in the bytes from `start` on. Its storage is these bytes and no others."""
        end = start + math.prod(shape) * dtype.itemsize
        return torch.from_numpy(self._memory[start:end]).view(dtype).view(shape)


def one_ahead(items: Iterator[T]) -> Iterator[T]:
    """The same items; while one is used, the next is made in a thread.

    >>> list(one_ahead(iter([1, 2, 3])))
    [1, 2, 3]
    """
    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(lambda: next(items, None))
        while (item := coming.result()) is not None:
            coming = thread.submit(lambda: next(items, None))
            yield item
